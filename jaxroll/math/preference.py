"""Losses that compare two answers to one question."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxroll.config import LearnerConfig
from jaxroll.math import ratio as ratios
from jaxroll.math import segments as packed
from jaxroll.math.tokens import Objective, TokenLoss, Tokens


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
