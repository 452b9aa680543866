"""Sums over the samples of a packed row: what losses on whole sequences need. T tokens of a row, leading axes free.

A segment is a run of equal numbers. No scatter and no T×T array: log₂ T shifts of the row, the same bits every time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
