"""Ratios between policies, per token, from log-probabilities; never NaN, never infinite.

π_θ is the policy being trained, π_prox the trainer's policy at the start of the claim, π_b the one that sampled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LOG_RATIO_BOUND = 20.0  # e²⁰ ≈ 5e8: a finite stand-in for "impossible", so that 0 · ratio stays 0


def log_ratio(numerator: Float[Array, "*T"], denominator: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """log(p/q) from log p and log q, bounded to ±LOG_RATIO_BOUND; 0 where either is not a number."""
    difference = numerator - denominator
    difference = jnp.where(jnp.isnan(difference), 0.0, difference)
    return jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(numerator: Float[Array, "*T"], denominator: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """p/q from log p and log q; its gradient flows through `numerator`."""
    return jnp.exp(log_ratio(numerator, jax.lax.stop_gradient(denominator)))


def truncated(weight: Float[Array, "*T"], cap: float) -> Float[Array, "*T"]:
    """min(w, cap): a constant of the loss (no gradient)."""
    return jnp.minimum(jax.lax.stop_gradient(weight), cap)


def masked_above(weight: Float[Array, "*T"], cap: float) -> Float[Array, "*T"]:
    """w where w ≤ cap, else 0: tokens that drifted too far are dropped (AReaL); a constant of the loss."""
    weight = jax.lax.stop_gradient(weight)
    return jnp.where(weight <= cap, weight, 0.0)


def beyond(weight: Float[Array, "*T"], cap: float) -> Bool[Array, "*T"]:
    """Where `truncated` or `masked_above` changes the weight."""
    return weight > cap
