"""Per-token inputs of a loss, and their reduction to one number with denominators over the whole batch.

The loss of an optimizer step is Σₜ weightₜ · lossₜ. All denominators are inside the weights, counted once over every
sequence of the step, so the sum may be split over micro-batches, rows and hosts in any way.
N sequences with at least one trained token, |i| trained tokens of sequence i:

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
    """float32 [N]: the weight of one trained token of each sequence; `trained_tokens` int [N] counts them.

    `length` is the L of `constant_length`; the others do not read it. A sequence without trained tokens
    gets 0 and is not counted. Counted on the host in float64: denominators are data.
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


# --- sums over the samples of a packed row, for losses on whole sequences; T tokens of a row, leading axes free
#
# A segment is a run of equal numbers. No scatter and no T×T array: log₂ T shifts of the row, the same bits every time.


def totals(values: Float[Array, "*R T"], segments: Int[Array, "*R T"]) -> Float[Array, "*R T"]:
    """At every token the sum of `values` over its segment; gradients flow through it."""
    until = _running(values, segments)
    since = jnp.flip(_running(jnp.flip(values, -1), jnp.flip(segments, -1)), -1)
    return until + since - values


def means(
    values: Float[Array, "*R T"], mask: Bool[Array, "*R T"], segments: Int[Array, "*R T"]
) -> Float[Array, "*R T"]:
    """At every token the mean of `values` over the tokens of its segment where `mask` is set; 0 where none is."""
    count = totals(mask.astype(jnp.float32), segments)
    return totals(jnp.where(mask, values, 0.0), segments) / jnp.maximum(count, 1.0)


def _running(values: Float[Array, "*R T"], segments: Int[Array, "*R T"]) -> Float[Array, "*R T"]:
    """The sum of `values` from the segment's first token on, by doubling how far back every token looks."""
    reach, tokens = 1, values.shape[-1]
    while reach < tokens:
        ahead = [(0, 0)] * (values.ndim - 1) + [(reach, 0)]
        same = jnp.pad(segments[..., :-reach], ahead, constant_values=-1) == segments
        values = values + jnp.where(same, jnp.pad(values[..., :-reach], ahead), 0.0)
        reach *= 2
    return values


# --- per-token streams of a packed micro-batch
#
# π_θ is the policy being trained, π_prox the trainer's at the start of the claim, π_b the one that sampled, π_ref a
# frozen one. Tokens outside `mask` have numbers of no meaning; what a loss says about them is not used.


class Tokens(NamedTuple):
    """The streams. Gradients flow through `logprob` only; `reference` is 0 in a run without a reference model."""

    logprob: Float[Array, "*R T"]  # log π_θ
    proximal: Float[Array, "*R T"]  # log π_prox
    behaviour: Float[Array, "*R T"]  # log π_b
    reference: Float[Array, "*R T"]  # log π_ref
    advantage: Float[Array, "*R T"]
    mask: Bool[Array, "*R T"]  # trained on
    segments: Int[Array, "*R T"]  # which sample of the row, from 1; 0 is padding
    ages: Int[Array, "*R T"] | int = 0  # steps from the version that sampled a token to the one that is trained


class TokenLoss(NamedTuple):
    """`loss` to minimise, and where a clip of the policy ratio or a cap of an importance weight is active."""

    loss: Float[Array, "*R T"]
    bounded: Bool[Array, "*R T"]


Objective = Callable[[Tokens], TokenLoss]
