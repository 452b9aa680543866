"""Ratios between policies, per token or per sequence, from log-probabilities; never NaN, never infinite.

π_θ is the policy being trained, π_prox the trainer's policy at the start of the claim, π_b the one that sampled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxroll.math import segments as packed

LOG_RATIO_BOUND = 20.0  # e²⁰ ≈ 5e8: a finite stand-in for "impossible", so that 0 · ratio stays 0


def log_ratio(numerator: Float[Array, "*T"], denominator: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """log(p/q) from log p and log q, bounded to ±LOG_RATIO_BOUND; 0 where either is not a number."""
    difference = numerator - denominator
    difference = jnp.where(jnp.isnan(difference), 0.0, difference)
    return jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(numerator: Float[Array, "*T"], denominator: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """p/q from log p and log q; its gradient flows through `numerator`."""
    return jnp.exp(log_ratio(numerator, jax.lax.stop_gradient(denominator)))


def sequence_ratio(
    numerator: Float[Array, "*R T"],
    denominator: Float[Array, "*R T"],
    mask: Bool[Array, "*R T"],
    segments: Int[Array, "*R T"],
) -> Float[Array, "*R T"]:
    """At every token Πₜ pₜ/qₜ over the trained tokens of its sequence: the weight of the sequence as one action."""
    each = jnp.where(mask, log_ratio(numerator, jax.lax.stop_gradient(denominator)), 0.0)
    return jnp.exp(jnp.clip(packed.totals(each, segments), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def mean_sequence_ratio(
    numerator: Float[Array, "*R T"],
    denominator: Float[Array, "*R T"],
    mask: Bool[Array, "*R T"],
    segments: Int[Array, "*R T"],
) -> Float[Array, "*R T"]:
    """At every token exp(meanₜ log(pₜ/qₜ)) over the trained tokens of its sequence, of any length alike (GSPO's)."""
    return jnp.exp(packed.means(log_ratio(numerator, jax.lax.stop_gradient(denominator)), mask, segments))


def truncated(weight: Float[Array, "*T"], cap: float) -> Float[Array, "*T"]:
    """min(w, cap): a constant of the loss (no gradient)."""
    return jnp.minimum(jax.lax.stop_gradient(weight), cap)


def masked_above(weight: Float[Array, "*T"], cap: float) -> Float[Array, "*T"]:
    """w where w ≤ cap, else 0: tokens that drifted too far are dropped (AReaL); a constant of the loss."""
    return masked_outside(weight, 0.0, cap)


def masked_outside(weight: Float[Array, "*T"], floor: float, cap: float) -> Float[Array, "*T"]:
    """w where floor ≤ w ≤ cap, else 0 (IcePop); a constant of the loss."""
    weight = jax.lax.stop_gradient(weight)
    return jnp.where((weight >= floor) & (weight <= cap), weight, 0.0)


def beyond(weight: Float[Array, "*T"], cap: float, floor: float = 0.0) -> Bool[Array, "*T"]:
    """Where one of the bounds above changes the weight."""
    return (weight > cap) | (weight < floor)
