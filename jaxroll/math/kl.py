"""Per-token estimators of KL(p‖q) from samples of p (J. Schulman, "Approximating KL divergence", 2020).

With x ~ p and log-probabilities log p(x), log q(x). k1 and k3 are unbiased as values, k2 is biased; as *losses*
differentiated through log p, k2 alone has the gradient of KL(p‖q): the expected gradient of k1 is 0, that of k3 is
KL(q‖p)'s direction. So k1 belongs into rewards, k2 into losses, and k3 into metrics.
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
    """q/p − 1 − log(q/p): unbiased and never negative."""
    difference = log_ratio(logq, logp)
    return jnp.expm1(difference) - difference


def loss(
    estimator: str, logp: Float[Array, "*T"], logq: Float[Array, "*T"], weight: Float[Array, "*T"] | float = 1.0
) -> Float[Array, "*T"]:
    """The per-token KL penalty to minimise, times sg[weight] (off-policy tokens carry their importance weight).

    Only `k2` is accepted; the others raise ConfigError with the reason.
    """
    reasons = {
        "k1": "its gradient is zero in expectation, so it would only add noise",
        "k3": "its gradient is that of another divergence, so it is biased",
    }
    if estimator != "k2":
        raise ConfigError("kl.estimator", estimator, reasons.get(estimator, "unknown"), "Use k2 in the loss.")
    return jax.lax.stop_gradient(jnp.asarray(weight)) * k2(logp, logq)
