"""Per-token losses against numpy, hand-worked numbers, their identities, and extreme inputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.config import LearnerConfig
from jaxroll.math import objective, ratio

LOGPROBS = st.lists(st.floats(-6, 0, width=32), min_size=4, max_size=4)
ADVANTAGES = st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4)
VARIANTS = [
    LearnerConfig(correction=correction, correction_mode=mode, correction_cap=cap)
    for correction, mode, cap in itertools.product(("decoupled", "tis", "none"), ("truncate", "mask"), (1.0, 2.0))
]


def reference(config: LearnerConfig, logp, prox, beh, adv) -> float:
    """One token, in plain Python with float64, written from the formulas."""
    r, w, rho = np.exp(logp - prox), np.exp(prox - beh), np.exp(logp - beh)
    if config.correction == "tis":
        return -min(rho, config.correction_cap) * adv * logp
    clipped = max(min(r, 1 + config.clip_high), 1 - config.clip_low)
    loss = -min(r * adv, clipped * adv)
    if config.correction == "none":
        return loss
    if config.correction_mode == "mask":
        return loss * (w if w <= config.correction_cap else 0.0)
    return loss * min(w, config.correction_cap)


@functools.cache
def compiled(config):
    token_loss = objective.build(config)
    return jax.jit(token_loss), jax.jit(jax.grad(lambda *streams: token_loss(*streams).loss.sum()))


def losses(config, *streams):
    return compiled(config)[0](*(np.asarray(x, np.float32) for x in streams))


def gradient(config, *streams):
    return compiled(config)[1](*(np.asarray(x, np.float32) for x in streams))


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c.correction}-{c.correction_mode}-{c.correction_cap}")
@given(logp=LOGPROBS, prox=LOGPROBS, beh=LOGPROBS, adv=ADVANTAGES)
def test_agrees_with_the_formulas(config, logp, prox, beh, adv):
    weights = np.exp(np.subtract(prox, beh))
    if np.abs(weights - config.correction_cap).min() < 1e-4:
        return  # exactly at the cap, rounding decides on which side
    want = [reference(config, *token) for token in zip(logp, prox, beh, adv, strict=True)]
    np.testing.assert_allclose(losses(config, logp, prox, beh, adv).loss, want, rtol=2e-4, atol=1e-5)


def test_the_clip_worked_by_hand():
    # r = 2: with A > 0 the clip at 1.28 binds (loss -1.28, no gradient); with A < 0 the larger loss 2 counts.
    config = LearnerConfig(correction="none")
    logp, prox = [np.log(0.4)] * 2, [np.log(0.2)] * 2
    token = losses(config, logp, prox, prox, [1.0, -1.0])
    np.testing.assert_allclose(token.loss, [-1.28, 2.0], rtol=1e-5)
    np.testing.assert_array_equal(token.bounded, [True, False])
    np.testing.assert_allclose(gradient(config, logp, prox, prox, [1.0, -1.0]), [0.0, 2.0], rtol=1e-5)


def test_the_weight_worked_by_hand():
    # w = 3, over the cap of 2: truncated to 2, or dropped. w = 1/2 is left alone. r = 1, A = 1.
    prox, beh = np.log([0.3, 0.1]), np.log([0.1, 0.2])
    np.testing.assert_allclose(losses(LearnerConfig(), prox, prox, beh, [1, 1]).loss, [-2.0, -0.5], rtol=1e-5)
    mask = LearnerConfig(correction_mode="mask")
    np.testing.assert_allclose(losses(mask, prox, prox, beh, [1, 1]).loss, [0.0, -0.5], rtol=1e-5)
    np.testing.assert_array_equal(losses(mask, prox, prox, beh, [1, 1]).bounded, [True, False])


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c.correction}-{c.correction_mode}-{c.correction_cap}")
@given(logp=LOGPROBS, adv=ADVANTAGES)
def test_on_policy_every_variant_is_the_policy_gradient(config, logp, adv):
    """With π_θ = π_prox = π_b (α = 0, first step) ratios are 1 and corrections vanish: ∇ = −A."""
    np.testing.assert_allclose(gradient(config, logp, logp, logp, adv), -np.asarray(adv), rtol=1e-5, atol=1e-6)
    assert not np.asarray(losses(config, logp, logp, logp, adv).bounded).any()


@given(logp=LOGPROBS, beh=LOGPROBS, adv=ADVANTAGES)
def test_on_the_first_step_decoupled_and_tis_have_one_gradient(logp, beh, adv):
    """r = 1, so w·∇r·A = w·A·∇log π: with the same cap the two corrections coincide at the start of a claim."""
    decoupled = LearnerConfig(correction="decoupled", correction_cap=2.0)
    tis = LearnerConfig(correction="tis", correction_cap=2.0)
    np.testing.assert_allclose(
        gradient(decoupled, logp, logp, beh, adv), gradient(tis, logp, logp, beh, adv), rtol=1e-5, atol=1e-6
    )


def test_the_uncapped_correction_is_the_true_gradient_by_enumeration():
    """E_{x~b}[w·∇(−A log π)] over a whole vocabulary equals ∇ of −E_{x~π}[A], which uncorrected data miss."""
    theta = jnp.array([0.2, -0.7, 1.1, 0.0])
    behaviour = jax.nn.log_softmax(jnp.array([1.0, 0.5, -0.5, 0.3]))
    adv = jnp.array([1.0, -0.5, 0.25, 0.0])

    def surrogate(config):
        def expected(logits):
            logp = jax.nn.log_softmax(logits)
            loss = objective.build(config)(logp, jax.lax.stop_gradient(logp), behaviour, adv).loss
            return jnp.sum(jnp.exp(behaviour) * loss)

        return jax.grad(expected)(theta)

    want = jax.grad(lambda logits: -jnp.sum(jax.nn.softmax(logits) * adv))(theta)
    for correction in ("decoupled", "tis"):
        np.testing.assert_allclose(surrogate(LearnerConfig(correction=correction, correction_cap=1e9)), want, atol=1e-6)
    assert np.abs(surrogate(LearnerConfig(correction="none")) - want).max() > 0.01


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c.correction}-{c.correction_mode}-{c.correction_cap}")
def test_gradients_agree_with_finite_differences(config):
    # TIS' weight is a constant of the loss, so only its log π is moved: by hand.
    if config.correction == "tis":
        return
    logp, prox = np.array([-1.0, -2.0, -0.5, -1.5]), np.array([-1.1, -1.9, -0.55, -1.2])
    beh, adv, eps = np.array([-1.3, -1.7, -0.2, -2.2]), np.array([1.0, -1.0, 0.5, -0.3]), 1e-5
    up = np.array([reference(config, *token) for token in zip(logp + eps, prox, beh, adv, strict=True)])
    down = np.array([reference(config, *token) for token in zip(logp - eps, prox, beh, adv, strict=True)])
    np.testing.assert_allclose(gradient(config, logp, prox, beh, adv), (up - down) / (2 * eps), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c.correction}-{c.correction_mode}-{c.correction_cap}")
def test_extreme_log_probs_stay_finite(config):
    extremes = [0.0, -1e-7, -30.0, -1e4, -1e30, -np.inf]
    streams = np.array(list(itertools.product(extremes[:-1], extremes, extremes, (-1e3, 0.0, 1e3)))).T
    assert np.isfinite(losses(config, *streams).loss).all()
    assert np.isfinite(gradient(config, *streams)).all()


def test_cross_entropy_is_blind_to_who_sampled():
    token = objective.cross_entropy()(jnp.array([-1.5]), jnp.array([-9.0]), jnp.array([-np.inf]), jnp.array([1.0]))
    np.testing.assert_array_equal(token.loss, [1.5])


def test_ratios_are_bounded_and_never_nan():
    inf = jnp.array([-jnp.inf])
    np.testing.assert_array_equal(ratio.ratio(inf, inf), [1.0])
    assert np.isfinite(ratio.ratio(jnp.array([0.0]), inf)).all()
    assert float(ratio.ratio(inf, jnp.array([0.0]))[0]) < 1e-8


def test_every_correction_of_the_config_is_known():
    field = next(f for f in dataclasses.fields(LearnerConfig) if f.name == "correction")
    assert {c.correction for c in VARIANTS} == set(eval_literal(field.type))


def eval_literal(annotation: str) -> list[str]:
    """The words of a `Literal[...]` annotation that is kept as text."""
    return [word.strip(" \"'") for word in annotation.removeprefix("Literal[").removesuffix("]").split(",")]
