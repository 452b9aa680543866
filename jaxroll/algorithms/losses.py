"""Policy ratios, KL estimators and policy-gradient losses, per token or per sequence, from log-probs; always finite.

π_θ is the policy being trained, π_prox the trainer's policy at the start of the claim, π_b the behavior policy, which
sampled the tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxroll.algorithms import advantages
from jaxroll.algorithms.advantages import Objective, TokenLoss, Tokens
from jaxroll.config import LearnerConfig
from jaxroll.errors import ConfigError

LOG_RATIO_BOUND = 20.0  # e²⁰ ≈ 5e8: finite, so that 0 · ratio is 0 also for tokens with probability 0


def log_ratio(numerator: Float[Array, "*T"], denominator: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """log(p/q) from log p and log q, clipped to ±LOG_RATIO_BOUND; 0 where the difference is NaN."""
    difference = numerator - denominator
    difference = jnp.where(jnp.isnan(difference), 0.0, difference)
    return jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(numerator: Float[Array, "*T"], denominator: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """p/q from log p and log q; gradients flow through `numerator` only."""
    return jnp.exp(log_ratio(numerator, jax.lax.stop_gradient(denominator)))


def sequence_ratio(
    numerator: Float[Array, "*R T"],
    denominator: Float[Array, "*R T"],
    mask: Bool[Array, "*R T"],
    segments: Int[Array, "*R T"],
) -> Float[Array, "*R T"]:
    """At every token: Πₜ pₜ/qₜ over the trained tokens of its sequence, the importance weight of the sequence."""
    each = jnp.where(mask, log_ratio(numerator, jax.lax.stop_gradient(denominator)), 0.0)
    return jnp.exp(jnp.clip(advantages.totals(each, segments), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def mean_sequence_ratio(
    numerator: Float[Array, "*R T"],
    denominator: Float[Array, "*R T"],
    mask: Bool[Array, "*R T"],
    segments: Int[Array, "*R T"],
) -> Float[Array, "*R T"]:
    """At every token: exp(meanₜ log(pₜ/qₜ)) over the trained tokens of its sequence (the ratio of GSPO)."""
    return jnp.exp(advantages.means(log_ratio(numerator, jax.lax.stop_gradient(denominator)), mask, segments))


def truncated(weight: Float[Array, "*T"], cap: float) -> Float[Array, "*T"]:
    """min(w, cap), without gradient."""
    return jnp.minimum(jax.lax.stop_gradient(weight), cap)


def masked_above(weight: Float[Array, "*T"], cap: float) -> Float[Array, "*T"]:
    """w where w ≤ cap, else 0, without gradient: drops tokens whose policy has changed too much (AReaL)."""
    return masked_outside(weight, 0.0, cap)


def masked_outside(weight: Float[Array, "*T"], floor: float, cap: float) -> Float[Array, "*T"]:
    """w where floor ≤ w ≤ cap, else 0, without gradient (IcePop)."""
    weight = jax.lax.stop_gradient(weight)
    return jnp.where((weight >= floor) & (weight <= cap), weight, 0.0)


def beyond(weight: Float[Array, "*T"], cap: float, floor: float = 0.0) -> Bool[Array, "*T"]:
    """True where w > cap or w < floor, so that a function above changes it."""
    return (weight > cap) | (weight < floor)


# --- per-token estimators of KL(p‖q) from samples of p (J. Schulman, "Approximating KL divergence", 2020)
#
# With x ~ p and log-probabilities log p(x), log q(x). k1 and k3 are unbiased as values, k2 is biased. As *losses*,
# differentiated through log p with fixed samples, their expected gradients are
#
#     k1  0                 k2  ∇KL(p‖q)                 k3  ∇KL(q‖p), the reverse direction (used by GRPO)
#
# so a loss may use k2, or k3 for that divergence. As *rewards*, which are not differentiated, only k1 gives the
# gradient of KL(p‖q); k2 and k3 are of second order in log p/q and would have no effect near q.


def k1(logp: Float[Array, "*T"], logq: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """log p − log q: unbiased, may be negative."""
    return log_ratio(logp, logq)


def k2(logp: Float[Array, "*T"], logq: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """(log p − log q)²/2: its gradient through log p is KL's gradient in expectation."""
    return 0.5 * jnp.square(log_ratio(logp, logq))


def k3(logp: Float[Array, "*T"], logq: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """q/p − 1 − log(q/p): unbiased, never negative; its gradient through log p is that of KL(q‖p) in expectation."""
    difference = log_ratio(logq, logp)
    return jnp.expm1(difference) - difference


def loss(
    estimator: str, logp: Float[Array, "*T"], logq: Float[Array, "*T"], weight: Float[Array, "*T"] | float = 1.0
) -> Float[Array, "*T"]:
    """The per-token KL penalty to minimize, times sg[weight] (the importance weight of an off-policy token).

    `k2` follows the gradient of KL(p‖q), `k3` that of KL(q‖p); other names raise ConfigError with the reason.
    """
    estimators = {"k2": k2, "k3": k3}
    if estimator not in estimators:
        reason = "its gradient is zero in expectation, so it would only add noise" if estimator == "k1" else "unknown"
        raise ConfigError("kl.estimator", estimator, reason, "Use k2 or k3 in the loss.")
    return jax.lax.stop_gradient(jnp.asarray(weight)) * estimators[estimator](logp, logq)


# --- Policy-gradient losses: clipped ratios with corrections for stale samples, importance weights, preferences
#
# A is the advantage, r = π_θ/π_prox, w = sg[π_prox/π_b], bounded. Gradients flow through r only.


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
    """`token` times the raw weight w = π_prox/π_b as bounded by `correction`, without gradient through w.

    decoupled   min(w, cap), or with mode "mask" w where w ≤ cap, else 0 (decoupled PPO, arXiv 2110.00641; AReaL)
    icepop      w where floor ≤ w ≤ cap, else 0
    """
    if correction == "icepop":
        weight, outside = masked_outside(raw, floor, cap), beyond(raw, cap, floor)
    else:
        weight = (masked_above if mode == "mask" else truncated)(raw, cap)
        outside = beyond(raw, cap)
    return TokenLoss(weight * token.loss, token.bounded | outside)


def clipped(learner: LearnerConfig) -> Objective:
    """PPO's clipped loss per token with the correction `learner.correction`; "tis" replaces it by the loss `tis`."""
    if learner.correction == "tis":
        return tis(learner)

    def token_loss(tokens: Tokens) -> TokenLoss:
        r = ratio(tokens.logprob, tokens.proximal)
        token = surrogate(r, tokens.advantage, learner.clip_low, learner.clip_high, learner.dual_clip)
        return _corrected(token, ratio(tokens.proximal, tokens.behaviour), learner)

    return token_loss


def gspo(learner: LearnerConfig) -> Objective:
    """PPO's clipped loss of s = exp(meanₜ log r) (GSPO, arXiv 2507.18071), times the sequence's w = Πₜ π_prox/π_b."""
    # The denominator of s is π_prox and not π_b: with a clip range of about 10⁻⁴, it would clip every stale sequence.

    def token_loss(tokens: Tokens) -> TokenLoss:
        s = mean_sequence_ratio(tokens.logprob, tokens.proximal, tokens.mask, tokens.segments)
        token = surrogate(s, tokens.advantage, learner.clip_low, learner.clip_high, learner.dual_clip)
        raw = sequence_ratio(tokens.proximal, tokens.behaviour, tokens.mask, tokens.segments)
        return _corrected(token, raw, learner)

    return token_loss


def _corrected(token: TokenLoss, raw: Float[Array, "*T"], learner: LearnerConfig) -> TokenLoss:
    if learner.correction == "none":
        return token
    bounds = learner.correction_mode, learner.correction_cap, learner.correction_floor
    return weighted(token, raw, learner.correction, *bounds)


# --- importance-weighted losses: −weight · A · log π_θ, where the weight is a constant function of ρ = π_θ/π_b
#
# Every token has its policy gradient, even if the policy has changed much; only the weight is bounded. With
# r = π_θ/π_prox instead of ρ, these losses would have no correction on the first step of a claim.


def policy_gradient(logprob: Float[Array, "*T"], advantage: Float[Array, "*T"]) -> Float[Array, "*T"]:
    """−A · log π_θ (REINFORCE). With A = 1 it is cross-entropy."""
    return -advantage * logprob


def likelihood(learner: LearnerConfig | None = None) -> Objective:
    """−A · log π_θ without importance weights: supervised training if all A are 1, RAFT if only the best have 1."""
    del learner

    def token_loss(tokens: Tokens) -> TokenLoss:
        return TokenLoss(policy_gradient(tokens.logprob, tokens.advantage), jnp.zeros(tokens.logprob.shape, bool))

    return token_loss


def tis(learner: LearnerConfig) -> Objective:
    """−sg[min(ρ, c)] · A · log π_θ (truncated importance sampling); with level "sequence" ρ is the sequence's ratio."""

    def token_loss(tokens: Tokens) -> TokenLoss:
        rho, cap = behaviour_ratio(tokens, learner.ratio_level), learner.correction_cap
        loss = truncated(rho, cap) * policy_gradient(tokens.logprob, tokens.advantage)
        return TokenLoss(loss, beyond(rho, cap))

    return token_loss


def cispo(learner: LearnerConfig) -> Objective:
    """−sg[clip(ρ, 1−ε_l, 1+ε_h)] · A · log π_θ (CISPO, arXiv 2506.13585).

    With mode "mask", tokens that PPO would clip have no loss: A > 0 and ρ > 1+ε_h, or A < 0 and ρ < 1−ε_l.
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

    Good answers count fully even if the policy would not sample them any more; bad answers count less if it would not.
    """

    def token_loss(tokens: Tokens) -> TokenLoss:
        rho, good = behaviour_ratio(tokens, learner.ratio_level), tokens.advantage > 0
        weight = jnp.where(good, learner.positive_weight, learner.negative_weight * jnp.minimum(rho, 1.0))
        loss = weight * policy_gradient(tokens.logprob, tokens.advantage)
        return TokenLoss(loss, ~good & (rho > 1.0))

    return token_loss


def behaviour_ratio(tokens: Tokens, level: str) -> Float[Array, "*R T"]:
    """sg[ρ] of each token, or with `level` "sequence" of the token's sequence."""
    if level == "sequence":
        rho = sequence_ratio(tokens.logprob, tokens.behaviour, tokens.mask, tokens.segments)
    else:
        rho = ratio(tokens.logprob, tokens.behaviour)
    return jax.lax.stop_gradient(rho)


# --- preference losses: two answers to one question


def dpo(learner: LearnerConfig) -> Objective:
    """−log σ(β·[log π_θ/π_ref (y⁺) − log π_θ/π_ref (y⁻)]) at every token of both answers (DPO, arXiv 2305.18290).

    The two answers are samples 2k−1 and 2k of a row; the better one has a positive advantage. With the aggregation
    seq_mean_token_mean, the sum over tokens is the mean over pairs.
    """

    def token_loss(tokens: Tokens) -> TokenLoss:
        gain = jnp.sign(tokens.advantage) * log_ratio(tokens.logprob, jax.lax.stop_gradient(tokens.reference))
        pairs = (tokens.segments + 1) // 2
        margin = advantages.totals(jnp.where(tokens.mask, gain, 0.0), pairs)
        return TokenLoss(jax.nn.softplus(-learner.dpo_beta * margin), jnp.zeros(margin.shape, bool))

    return token_loss
