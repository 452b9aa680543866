"""Losses that are −weight · A · log π_θ, the weight a constant made of ρ = π_θ/π_b.

The gradient is the policy gradient of every token, however far the policy has moved; the bound is on its size. With
r = π_θ/π_prox in place of ρ these losses would be uncorrected on the first step of a claim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxroll.config import LearnerConfig
from jaxroll.math import ratio as ratios
from jaxroll.math.tokens import Objective, TokenLoss, Tokens


def policy_gradient(logprob: Float[Array, "*T"], advantage: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """−A · log π_θ (REINFORCE). With A = 1 it is cross-entropy."""
    return -advantage * logprob


def likelihood(learner: LearnerConfig | None = None) -> Objective:
    """−A · log π_θ, blind to who sampled: supervised training when every A is 1, RAFT when the best alone have 1."""
    del learner

    def token_loss(tokens: Tokens) -> TokenLoss:
        return TokenLoss(policy_gradient(tokens.logprob, tokens.advantage), jnp.zeros(tokens.logprob.shape, bool))

    return token_loss


def tis(learner: LearnerConfig) -> Objective:
    """−sg[min(ρ, c)] · A · log π_θ (TIS); with level "sequence" ρ is that of the whole sequence."""

    def token_loss(tokens: Tokens) -> TokenLoss:
        rho, cap = behaviour_ratio(tokens, learner.level), learner.correction_cap
        loss = ratios.truncated(rho, cap) * policy_gradient(tokens.logprob, tokens.advantage)
        return TokenLoss(loss, ratios.beyond(rho, cap))

    return token_loss


def cispo(learner: LearnerConfig) -> Objective:
    """−sg[clip(ρ, 1−ε_l, 1+ε_h)] · A · log π_θ (CISPO, arXiv 2506.13585).

    With mode "mask" tokens that PPO would clip have no loss: A > 0 and ρ > 1+ε_h, or A < 0 and ρ < 1−ε_l.
    """

    def token_loss(tokens: Tokens) -> TokenLoss:
        rho, advantage = behaviour_ratio(tokens, "token"), tokens.advantage
        low, high = 1.0 - learner.clip_low, 1.0 + learner.clip_high
        weight = jnp.clip(rho, low, high)
        if learner.correction_mode == "mask":
            weight = jnp.where(jnp.where(advantage > 0, rho > high, (advantage < 0) & (rho < low)), 0.0, weight)
        loss = weight * policy_gradient(tokens.logprob, advantage)
        return TokenLoss(loss, (rho < low) | (rho > high))

    return token_loss


def topr(learner: LearnerConfig) -> Objective:
    """A > 0: −w₊·A·log π_θ; A ≤ 0: −w₋·sg[clip(ρ, 0, 1)]·A·log π_θ (TOPR, arXiv 2503.14286), ρ of the sequence.

    Good answers pull whoever gave them; bad ones push only as far as the policy still gives them.
    """

    def token_loss(tokens: Tokens) -> TokenLoss:
        rho, good = behaviour_ratio(tokens, learner.level), tokens.advantage > 0
        weight = jnp.where(good, learner.positive_weight, learner.negative_weight * jnp.minimum(rho, 1.0))
        loss = weight * policy_gradient(tokens.logprob, tokens.advantage)
        return TokenLoss(loss, ~good & (rho > 1.0))

    return token_loss


def behaviour_ratio(tokens: Tokens, level: str) -> Float[Array, "*R T"]:
    """sg[ρ] of each token, or with `level` "sequence" of the sequence it belongs to."""
    if level == "sequence":
        rho = ratios.sequence_ratio(tokens.logprob, tokens.behaviour, tokens.mask, tokens.segments)
    else:
        rho = ratios.ratio(tokens.logprob, tokens.behaviour)
    return jax.lax.stop_gradient(rho)
