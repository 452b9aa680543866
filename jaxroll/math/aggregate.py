"""From per-token losses to one number: the weight of every token, with denominators counted over the whole batch.

The loss of an optimizer step is Σₜ weightₜ · lossₜ. All denominators are inside the weights, counted once over every
sequence of the step, so the sum may be split over micro-batches, rows and hosts in any way.
N sequences with at least one trained token, |i| trained tokens of sequence i:

    token_mean           1 / Σᵢ|i|
    seq_mean_token_mean  1 / (N · |i|)
    seq_mean_token_sum   1 / N
    constant_length      1 / (N · L), L the same for every step (Dr. GRPO, arXiv 2503.20783)
"""

from __future__ import annotations

import numpy as np

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
