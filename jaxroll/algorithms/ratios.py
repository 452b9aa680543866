"""Ratios between policies and KL estimators, per token or per sequence, from log-probabilities; always finite.

π_θ is the policy being trained, π_prox the trainer's policy at the start of the claim, π_b the one that sampled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxroll.algorithms import tokens as packed
from jaxroll.errors import ConfigError

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


# --- per-token estimators of KL(p‖q) from samples of p (J. Schulman, "Approximating KL divergence", 2020)
#
# With x ~ p and log-probabilities log p(x), log q(x). k1 and k3 are unbiased as values, k2 is biased. As *losses*
# differentiated through log p, the samples held fixed, their expected gradients are
#
#     k1  0                 k2  ∇KL(p‖q)                 k3  ∇KL(q‖p), the other way round (the one GRPO was given)
#
# so a loss may have k2, or k3 by those who want that divergence. As *rewards*, where nothing is differentiated through
# them, only k1 has the gradient of KL(p‖q); k2 and k3 vanish with the square of log p/q and would hold nobody.


def k1(logp: Float[Array, "*T"], logq: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """log p − log q: unbiased, may be negative."""
    return log_ratio(logp, logq)


def k2(logp: Float[Array, "*T"], logq: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """(log p − log q)²/2: its gradient through log p is KL's gradient in expectation."""
    return 0.5 * jnp.square(log_ratio(logp, logq))


def k3(logp: Float[Array, "*T"], logq: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """q/p − 1 − log(q/p): unbiased and never negative; its gradient through log p is KL(q‖p)'s in expectation."""
    difference = log_ratio(logq, logp)
    return jnp.expm1(difference) - difference


def loss(
    estimator: str, logp: Float[Array, "*T"], logq: Float[Array, "*T"], weight: Float[Array, "*T"] | float = 1.0
) -> Float[Array, "*T"]:
    """The per-token KL penalty to minimise, times sg[weight] (off-policy tokens carry their importance weight).

    `k2` follows the gradient of KL(p‖q), `k3` that of KL(q‖p); the others raise ConfigError with the reason.
    """
    estimators = {"k2": k2, "k3": k3}
    if estimator not in estimators:
        reason = "its gradient is zero in expectation, so it would only add noise" if estimator == "k1" else "unknown"
        raise ConfigError("kl.estimator", estimator, reason, "Use k2 or k3 in the loss.")
    return jax.lax.stop_gradient(jnp.asarray(weight)) * estimators[estimator](logp, logq)
