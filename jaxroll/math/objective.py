"""Per-token losses to minimise: pure functions of log-probabilities and advantages.

A is the advantage, r = π_θ/π_prox, ρ = π_θ/π_b, w = sg[π_prox/π_b] bounded by a cap. Gradients flow through
`logprob` = log π_θ only. Each function returns the loss and where one of its bounds is active.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxroll.config import LearnerConfig
from jaxroll.math import ratio as ratios


class TokenLoss(NamedTuple):
    """`loss` to minimise, and where a clip of the policy ratio or a cap of the importance weight is active."""

    loss: Float[Array, "*T"]
    bounded: Bool[Array, "*T"]


Objective = Callable[
    [Float[Array, "*T"], Float[Array, "*T"], Float[Array, "*T"], Float[Array, "*T"]],  # log π_θ, π_prox, π_b, A
    TokenLoss,
]


def policy_gradient(logprob: Float[Array, "*T"], advantage: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """−A · log π_θ (REINFORCE). With A = 1 it is cross-entropy."""
    return -advantage * logprob


def clipped_surrogate(
    logprob: Float[Array, "*T"],
    proximal: Float[Array, "*T"],
    advantage: Float[Array, "*T"],
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """−min(r·A, clip(r, 1−ε_l, 1+ε_h)·A) (PPO, arXiv 1707.06347; ε_h > ε_l is DAPO's clip-higher, 2503.14476)."""
    r = ratios.ratio(logprob, proximal)
    free, clipped = r * advantage, jnp.clip(r, 1.0 - clip_low, 1.0 + clip_high) * advantage
    return TokenLoss(-jnp.minimum(free, clipped), clipped < free)


def decoupled(
    logprob: Float[Array, "*T"],
    proximal: Float[Array, "*T"],
    behaviour: Float[Array, "*T"],
    advantage: Float[Array, "*T"],
    *,
    clip_low: float,
    clip_high: float,
    cap: float,
    mode: str,
) -> TokenLoss:
    """−w · min(r·A, clip(r, 1−ε_l, 1+ε_h)·A), w = sg[π_prox/π_b] (decoupled PPO, arXiv 2110.00641).

    w is bounded by `cap`: `mode` "truncate" takes min(w, cap), "mask" drops the tokens above it.
    """
    clipped = clipped_surrogate(logprob, proximal, advantage, clip_low, clip_high)
    raw = ratios.ratio(proximal, behaviour)
    weight = {"truncate": ratios.truncated, "mask": ratios.masked_above}[mode](raw, cap)
    return TokenLoss(weight * clipped.loss, clipped.bounded | ratios.beyond(raw, cap))


def truncated_importance(
    logprob: Float[Array, "*T"], behaviour: Float[Array, "*T"], advantage: Float[Array, "*T"], cap: float
) -> TokenLoss:
    """−sg[min(ρ, c)] · A · log π_θ (TIS): the ratio to the behaviour policy takes the place of the clip."""
    rho = jax.lax.stop_gradient(ratios.ratio(logprob, behaviour))
    return TokenLoss(ratios.truncated(rho, cap) * policy_gradient(logprob, advantage), ratios.beyond(rho, cap))


def cross_entropy() -> Objective:
    """The objective −A · log π_θ, blind to who sampled: supervised training when every A is 1."""

    def token_loss(logprob, proximal, behaviour, advantage):
        del proximal, behaviour
        return TokenLoss(policy_gradient(logprob, advantage), jnp.zeros(logprob.shape, bool))

    return token_loss


def build(config: LearnerConfig) -> Objective:
    """The per-token objective (log π_θ, log π_prox, log π_b, A) → TokenLoss that the config describes."""
    return _ALGORITHMS[config.algorithm](config)


def _grpo(config: LearnerConfig) -> Objective:
    def token_loss(logprob, proximal, behaviour, advantage):
        if config.correction == "tis":
            return truncated_importance(logprob, behaviour, advantage, config.correction_cap)
        if config.correction == "none":
            return clipped_surrogate(logprob, proximal, advantage, config.clip_low, config.clip_high)
        return decoupled(
            logprob,
            proximal,
            behaviour,
            advantage,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            cap=config.correction_cap,
            mode=config.correction_mode,
        )

    return token_loss


_ALGORITHMS = {"grpo": _grpo}
