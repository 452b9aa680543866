"""Per-token estimators of KL(p‖q) from samples of p (J. Schulman, "Approximating KL divergence", 2020).

With x ~ p and log-probabilities log p(x), log q(x). k1 and k3 are unbiased as values, k2 is biased. As *losses*
differentiated through log p, the samples held fixed, their expected gradients are

    k1  0                 k2  ∇KL(p‖q)                 k3  ∇KL(q‖p), the other way round (the one GRPO was given)

so a loss may have k2, or k3 by those who want that divergence. As *rewards*, where nothing is differentiated through
them, only k1 has the gradient of KL(p‖q); k2 and k3 vanish with the square of log p/q and would hold nobody.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxroll.errors import ConfigError
from jaxroll.math.ratio import log_ratio


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
