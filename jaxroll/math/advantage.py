"""Advantages: how much better a rollout was than what was to be expected.

Functions take one group or one sequence; the caller vmaps them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

STD_FLOOR = 1e-6  # below it a group's rewards are equal up to rounding and say nothing


def group_centred(rewards: Float[Array, " G"], mask: Float[Array, " G"], divide_by_std: bool) -> Float[Array, " G"]:
    """float32 [G]: Aᵢ = rᵢ − mean(r), over the members whose mask is 1; 0 elsewhere.

    With `divide_by_std`, Aᵢ = (rᵢ − mean(r)) / std(r), where std has the divisor n − 1 (DeepSeekMath, arXiv 2402.03300;
    the divisor of TRL and verl). Without it this is Dr. GRPO's advantage (arXiv 2503.20783). Equal rewards, a single
    member or none give 0: such a group holds no preference.
    """
    mask = mask.astype(jnp.float32)
    rewards = jnp.where(mask > 0, rewards.astype(jnp.float32), 0.0)
    count = mask.sum()
    mean = rewards.sum() / jnp.maximum(count, 1.0)
    centred = mask * (rewards - mean)
    if not divide_by_std:
        return centred
    variance = jnp.square(centred).sum() / jnp.maximum(count - 1.0, 1.0)
    std = jnp.sqrt(variance)
    # The floor is relative too: rewards of 1e6 are equal when they differ by rounding.
    floor = STD_FLOOR * jnp.maximum(1.0, jnp.abs(mean))
    return jnp.where(std > floor, centred / jnp.where(std > floor, std, 1.0), 0.0)


def leave_one_out(rewards: Float[Array, " G"], mask: Float[Array, " G"]) -> Float[Array, " G"]:
    """float32 [G]: Aᵢ = rᵢ − mean of the other members' rewards (RLOO, arXiv 2402.14740); 0 for a single member."""
    mask = mask.astype(jnp.float32)
    count = mask.sum()
    scale = jnp.where(count > 1, count / jnp.maximum(count - 1.0, 1.0), 0.0)
    return scale * group_centred(rewards, mask, divide_by_std=False)


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
