"""Losses that hold the policy near the one of the claim's start: PPO's clip and what corrects it for stale samples.

A is the advantage, r = π_θ/π_prox, w = sg[π_prox/π_b] bounded. Gradients flow through r only.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxroll.config import LearnerConfig
from jaxroll.math import importance
from jaxroll.math import ratio as ratios
from jaxroll.math.tokens import Objective, TokenLoss, Tokens


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
        weight, beyond = ratios.masked_outside(raw, floor, cap), ratios.beyond(raw, cap, floor)
    else:
        weight = (ratios.masked_above if mode == "mask" else ratios.truncated)(raw, cap)
        beyond = ratios.beyond(raw, cap)
    return TokenLoss(weight * token.loss, token.bounded | beyond)


def clipped(learner: LearnerConfig) -> Objective:
    """PPO's clip per token, corrected as `learner.correction` says; "tis" puts its own loss in the clip's place."""
    if learner.correction == "tis":
        return importance.tis(learner)

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
