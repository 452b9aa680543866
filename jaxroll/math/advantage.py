"""Advantages: how much better a rollout was than what was to be expected.

Functions take one group; the caller vmaps them over groups.
"""

from __future__ import annotations

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
