"""Policy-gradient losses: clipped ratios with corrections for stale samples, importance weights, preferences.

A is the advantage, r = π_θ/π_prox, w = sg[π_prox/π_b] bounded. Gradients flow through r only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxroll.algorithms import ratios
from jaxroll.algorithms import tokens as packed
from jaxroll.algorithms.tokens import Objective, TokenLoss, Tokens
from jaxroll.config import LearnerConfig


def surrogate(
    r: Float[Array, "*T"], advantage: Float[Array, "*T"], clip_low: float, clip_high: float, dual: float = 0.0
) -> TokenLoss:
    """−min(r·A, clip(r, 1−ε_l, 1+ε_h)·A) (PPO, arXiv 1707.06347; ε_h > ε_l is DAPO's clip-higher, 2503.14476).

    With `dual` = c > 1 the loss of A < 0 is at most c·|A| (dual clip, arXiv 1912.09729): −max(min(…), c·A).
    """
    free, clipped = r * advantage, jnp.clip(r, 1.0 - clip_low, 1.0 + clip_high) * advantage
    gain, bounded = jnp.minimum(free, clipped), clipped < free
    if dual:
        floor = jnp.where(advantage < 0, dual * advantage, -jnp.inf)
        gain, bounded = jnp.maximum(gain, floor), bounded | (floor > gain)
    return TokenLoss(-gain, bounded)


def weighted(token: TokenLoss, raw: Float[Array, "*T"], correction: str, mode: str, cap: float, floor: float):
    """`token` times what `correction` makes of the raw weight π_prox/π_b, as a constant.

    decoupled   min(w, cap), or with mode "mask" w where w ≤ cap, else 0 (decoupled PPO, arXiv 2110.00641; AReaL)
    icepop      w where floor ≤ w ≤ cap, else 0: both tails are dropped
    """
    if correction == "icepop":
        weight, outside = ratios.masked_outside(raw, floor, cap), ratios.beyond(raw, cap, floor)
    else:
        weight = (ratios.masked_above if mode == "mask" else ratios.truncated)(raw, cap)
        outside = ratios.beyond(raw, cap)
    return TokenLoss(weight * token.loss, token.bounded | outside)


def clipped(learner: LearnerConfig) -> Objective:
    """PPO's clip per token, corrected as `learner.correction` says; "tis" puts its own loss in the clip's place."""
    if learner.correction == "tis":
        return tis(learner)

    def token_loss(tokens: Tokens) -> TokenLoss:
        r = ratios.ratio(tokens.logprob, tokens.proximal)
        token = surrogate(r, tokens.advantage, learner.clip_low, learner.clip_high, learner.dual_clip)
        return _corrected(token, ratios.ratio(tokens.proximal, tokens.behaviour), learner)

    return token_loss


def gspo(learner: LearnerConfig) -> Objective:
    """PPO's clip of s = exp(meanₜ log r) (GSPO, arXiv 2507.18071), times the sequence's w = Πₜ π_prox/π_b.

    s is never taken against π_b: its clip range of some 10⁻⁴ would drop every stale sequence.
    """

    def token_loss(tokens: Tokens) -> TokenLoss:
        s = ratios.mean_sequence_ratio(tokens.logprob, tokens.proximal, tokens.mask, tokens.segments)
        token = surrogate(s, tokens.advantage, learner.clip_low, learner.clip_high, learner.dual_clip)
        raw = ratios.sequence_ratio(tokens.proximal, tokens.behaviour, tokens.mask, tokens.segments)
        return _corrected(token, raw, learner)

    return token_loss


def _corrected(token: TokenLoss, raw: Float[Array, "*T"], learner: LearnerConfig) -> TokenLoss:
    if learner.correction == "none":
        return token
    bounds = learner.correction_mode, learner.correction_cap, learner.correction_floor
    return weighted(token, raw, learner.correction, *bounds)


# --- importance-weighted losses: −weight · A · log π_θ, where the weight is a constant function of ρ = π_θ/π_b
#
# The gradient is the policy gradient of every token, however far the policy has moved; the bound is on its size. With
# r = π_θ/π_prox in place of ρ these losses would be uncorrected on the first step of a claim.


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


# --- preference losses: two answers to one question


def dpo(learner: LearnerConfig) -> Objective:
    """−log σ(β·[log π_θ/π_ref (y⁺) − log π_θ/π_ref (y⁻)]) at every token of both answers (DPO, arXiv 2305.18290).

    The two answers are samples 2k−1 and 2k of a row; the sign of the advantage says which is the better one. With
    sequence-mean-token-mean the sum over tokens is the mean over pairs.
    """

    def token_loss(tokens: Tokens) -> TokenLoss:
        gain = jnp.sign(tokens.advantage) * ratios.log_ratio(tokens.logprob, jax.lax.stop_gradient(tokens.reference))
        pairs = (tokens.segments + 1) // 2
        margin = packed.totals(jnp.where(tokens.mask, gain, 0.0), pairs)
        return TokenLoss(jax.nn.softplus(-learner.dpo_beta * margin), jnp.zeros(margin.shape, bool))

    return token_loss
