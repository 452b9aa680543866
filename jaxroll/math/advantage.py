"""The advantage that a critic makes, and the critic's own loss. Functions take one sequence; the caller vmaps them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    mask: Float[Array, " T"],
    discount: float = 1.0,
    decay: float = 0.95,
) -> Float[Array, " T"]:
    """float32 [T]: Aₜ = δₜ + γλ·Aₜ₊₁, δₜ = rₜ + γ·V(sₜ₊₁) − V(sₜ) (GAE, arXiv 1506.02438); 0 where `mask` is 0.

    Steps are the tokens whose mask is 1, next to one another or not; after the last the value is 0. What stands at
    other tokens, padding and other speakers alike, is never read. The critic's target is A + V.
    """

    def back(later, now):
        advantage_after, value_after = later
        reward, value, acted = now
        delta = reward + discount * value_after - value
        advantage = jnp.where(acted, delta + discount * decay * advantage_after, advantage_after)
        return (advantage, jnp.where(acted, value, value_after)), jnp.where(acted, advantage, 0.0)

    acted = mask > 0
    streams = (jnp.where(acted, rewards, 0.0), jnp.where(acted, values, 0.0), acted)
    zero = jnp.zeros((), jnp.float32)
    _, advantages = jax.lax.scan(back, (zero, zero), streams, reverse=True)
    return advantages


def clipped_value_loss(
    value: Float[Array, "*T"], before: Float[Array, "*T"], target: Float[Array, "*T"], clip: float
) -> Float[Array, "*T"]:
    """½·max((V − R)², (clip(V, V₀ ± ε) − R)²): the critic's loss of PPO, held near V₀ of the claim's start.

    With ε = 0 it is not held: ½·(V − R)².
    """
    if not clip:
        return 0.5 * jnp.square(value - target)
    near = before + jnp.clip(value - before, -clip, clip)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(near - target))
