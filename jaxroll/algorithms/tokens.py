"""Per-token inputs of a loss, and the weights that reduce per-token losses to one number.

The loss of an optimizer step is Σₜ weightₜ · lossₜ. The weights contain all denominators, which are counted once over
all sequences of the step, so the sum may be split over micro-batches, rows and hosts in any way.
With N sequences that have a trained token, and |i| trained tokens of sequence i, the weights are:

    token_mean           1 / Σᵢ|i|
    seq_mean_token_mean  1 / (N · |i|)
    seq_mean_token_sum   1 / N
    constant_length      1 / (N · L), L the same for every step (Dr. GRPO, arXiv 2503.20783)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

KINDS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length")


def sequence_weights(trained_tokens: np.ndarray, kind: str, length: int = 1) -> np.ndarray:
    """float32 [N]: the weight of each trained token of a sequence; `trained_tokens` (int [N]) counts them.

    `length` is the L of `constant_length`; other kinds ignore it. A sequence without trained tokens gets 0 and does not
    count. ValueError for an unknown kind.
    """
    counts = np.asarray(trained_tokens, np.float64)
    trained = counts > 0
    sequences, tokens = max(int(trained.sum()), 1), max(counts.sum(), 1.0)
    if kind == "token_mean":
        weights = np.full_like(counts, 1.0 / tokens)
    elif kind == "seq_mean_token_mean":
        weights = 1.0 / (sequences * np.maximum(counts, 1.0))
    elif kind == "seq_mean_token_sum":
        weights = np.full_like(counts, 1.0 / sequences)
    elif kind == "constant_length":
        weights = np.full_like(counts, 1.0 / (sequences * length))
    else:
        raise ValueError(f"aggregation {kind!r} is not one of {', '.join(KINDS)}")
    return np.where(trained, weights, 0.0).astype(np.float32)


# --- sums over the samples of a packed row, for losses on whole sequences; T tokens of a row, any leading axes
#
# A segment is a run of equal numbers. The sums take log₂ T shifts of the row instead of a scatter or a T×T array, and
# are deterministic.


def totals(values: Float[Array, "*R T"], segments: Int[Array, "*R T"]) -> Float[Array, "*R T"]:
    """At every token: the sum of `values` over its segment. Gradients flow through it."""
    until = _running(values, segments)
    since = jnp.flip(_running(jnp.flip(values, -1), jnp.flip(segments, -1)), -1)
    return until + since - values


def means(
    values: Float[Array, "*R T"], mask: Bool[Array, "*R T"], segments: Int[Array, "*R T"]
) -> Float[Array, "*R T"]:
    """At every token: the mean of `values` over the tokens of its segment in `mask`; 0 if there are none."""
    count = totals(mask.astype(jnp.float32), segments)
    return totals(jnp.where(mask, values, 0.0), segments) / jnp.maximum(count, 1.0)


def _running(values: Float[Array, "*R T"], segments: Int[Array, "*R T"]) -> Float[Array, "*R T"]:
    """The running sum of `values` from the segment's first token, by doubling the reach in each iteration."""
    reach, tokens = 1, values.shape[-1]
    while reach < tokens:
        ahead = [(0, 0)] * (values.ndim - 1) + [(reach, 0)]
        same = jnp.pad(segments[..., :-reach], ahead, constant_values=-1) == segments
        values = values + jnp.where(same, jnp.pad(values[..., :-reach], ahead), 0.0)
        reach *= 2
    return values


# --- per-token streams of a packed micro-batch
#
# π_θ is the policy being trained, π_prox the trainer's at the start of the claim, π_b the behaviour policy, π_ref a
# frozen reference. Values of tokens outside `mask` are undefined, and their losses are ignored.


class Tokens(NamedTuple):
    """The inputs of a loss. Gradients flow through `logprob` only; `reference` is 0 without a reference model."""

    logprob: Float[Array, "*R T"]  # log π_θ
    proximal: Float[Array, "*R T"]  # log π_prox
    behaviour: Float[Array, "*R T"]  # log π_b
    reference: Float[Array, "*R T"]  # log π_ref
    advantage: Float[Array, "*R T"]
    mask: Bool[Array, "*R T"]  # trained on
    segments: Int[Array, "*R T"]  # number of the sample in its row, from 1; 0 is padding
    ages: Int[Array, "*R T"] | int = 0  # steps between the version that sampled a token and the trained version


class TokenLoss(NamedTuple):
    """The `loss` to minimise, and in `bounded` True where a clip of the ratio or a cap of the weight is active."""

    loss: Float[Array, "*R T"]
    bounded: Bool[Array, "*R T"]


Objective = Callable[[Tokens], TokenLoss]
