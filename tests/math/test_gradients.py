"""The expected gradient of stale samples, by enumeration of every answer, against the true on-policy gradient.

A tabular softmax policy over four words, one of which ends the answer; answers have one to three tokens. The policy is
π_θ = π_prox (the first step of a claim), answers are drawn by another. Nothing is sampled: every answer counts with the
probability that it has, so what is left of an angle is bias.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.config import LearnerConfig
from jaxroll.math import algorithms
from jaxroll.math.tokens import Tokens

WORDS, LONGEST, END = 4, 3, 0
SEEDS = range(4)


class World(NamedTuple):
    """Every answer as a row [A, 3]: its words, the state each is drawn in, where there is one; and who draws them."""

    words: np.ndarray
    states: np.ndarray
    mask: np.ndarray
    theta: np.ndarray  # [states, WORDS]
    behaviour: np.ndarray
    rewards: np.ndarray  # [A]


def world(seed: int, drift: float) -> World:
    rng = np.random.default_rng(seed)
    answers = [
        word
        for length in range(1, LONGEST + 1)
        for word in itertools.product(range(WORDS), repeat=length)
        if END not in word[:-1] and (word[-1] == END or length == LONGEST)
    ]
    prefixes = {prefix: number for number, prefix in enumerate(sorted({a[:t] for a in answers for t in range(len(a))}))}
    words, states = np.zeros((2, len(answers), LONGEST), int)
    mask = np.zeros((len(answers), LONGEST), bool)
    for row, answer in enumerate(answers):
        for t, word in enumerate(answer):
            words[row, t], states[row, t], mask[row, t] = word, prefixes[answer[:t]], True
    theta = rng.normal(size=(len(prefixes), WORDS))
    behaviour = theta + drift * rng.normal(size=theta.shape)
    return World(words, states, mask, theta, behaviour, rng.integers(0, 2, len(answers)).astype(float))


def logprobs(world: World, logits: jax.Array) -> jax.Array:
    """log π of every token of every answer, 0 where there is none."""
    return jnp.where(world.mask, jax.nn.log_softmax(logits)[world.states, world.words], 0.0)


def true_gradient(world: World) -> np.ndarray:
    def value(logits):
        return jnp.sum(jnp.exp(logprobs(world, logits).sum(1)) * world.rewards)

    return np.asarray(jax.grad(value)(jnp.asarray(world.theta)))


def stale_gradient(world: World, config: LearnerConfig, drawn_by: np.ndarray) -> np.ndarray:
    """−E_{y~drawn_by} Σₜ ∇ loss, with A = reward − E_π[reward]."""
    objective = algorithms.build(config).objective
    now, then = logprobs(world, jnp.asarray(world.theta)), logprobs(world, jnp.asarray(drawn_by))
    baseline = jnp.sum(jnp.exp(now.sum(1)) * world.rewards)
    advantage = jnp.broadcast_to((world.rewards - baseline)[:, None], now.shape)
    drawn = jnp.exp(then.sum(1))

    def loss(logits):
        given = Tokens(logprobs(world, logits), now, then, now, advantage, world.mask, world.mask.astype(int))
        each = jnp.where(world.mask, objective(given).loss, 0.0).sum(1)
        return jnp.sum(drawn * each)

    return -np.asarray(jax.grad(loss)(jnp.asarray(world.theta)))


def angle(a: np.ndarray, b: np.ndarray) -> float:
    """Degrees."""
    cosine = (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum())
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


@functools.cache
def angles(config: LearnerConfig, drift: float = 1.0) -> tuple[float, ...]:
    worlds = [world(seed, drift) for seed in SEEDS]
    return tuple(angle(stale_gradient(w, config, w.behaviour), true_gradient(w)) for w in worlds)


UNCORRECTED = LearnerConfig(correction="none")
# Mean degrees over the worlds, drift 1: the uncorrected gradient is 41.6° off, on the way to nowhere at 90°.
BOUNDS = {
    "grpo": (LearnerConfig(), 34),
    "grpo-mask": (LearnerConfig(correction_mode="mask"), 33),
    "icepop": (LearnerConfig(algorithm="icepop"), 34),
    "tis": (LearnerConfig(algorithm="tis"), 34),
    "tis at 1": (LearnerConfig(algorithm="tis", correction_cap=1.0), 35),
    "cispo": (LearnerConfig(algorithm="cispo"), 33),
    "topr": (LearnerConfig(algorithm="topr"), 36),
    "topr-token": (LearnerConfig(algorithm="topr", level="token"), 39),
    "tis-sequence": (LearnerConfig(algorithm="tis", level="sequence"), 19),
    "gspo": (LearnerConfig(algorithm="gspo"), 19),
}
FAIL = 40  # degrees that every uncorrected gradient exceeds, and no corrected one


@pytest.mark.parametrize("name", BOUNDS)
def test_corrections_turn_the_gradient_of_stale_answers_towards_the_true_one(name):
    config, bound = BOUNDS[name]
    assert np.mean(angles(config)) < bound < FAIL


@pytest.mark.parametrize("config", [UNCORRECTED, LearnerConfig(algorithm="gspo", correction="none")], ids=repr)
def test_without_a_correction_it_fails(config):
    assert np.mean(angles(config)) > FAIL


@pytest.mark.parametrize("name", ["tis", "gspo"])
def test_the_uncapped_weight_of_the_sequence_gives_the_true_gradient(name):
    config = LearnerConfig(algorithm=name, level="sequence", correction_cap=1e6)
    for seed in SEEDS:
        w = world(seed, 1.0)
        np.testing.assert_allclose(stale_gradient(w, config, w.behaviour), true_gradient(w), atol=1e-5)


@pytest.mark.parametrize("name", ["tis", "cispo", "topr", "topr-token"])
def test_with_r_in_place_of_rho_they_are_uncorrected(name):
    """The trap: told that π_prox drew the answers, ρ is r, which is 1 on the first step."""
    config, w = BOUNDS[name][0], world(0, 1.0)
    blind = w._replace(behaviour=w.theta)

    def expected(of: World, learner: LearnerConfig) -> np.ndarray:
        objective = algorithms.build(learner).objective
        now, then = logprobs(of, jnp.asarray(of.theta)), logprobs(of, jnp.asarray(of.behaviour))
        drawn = jnp.exp(logprobs(w, jnp.asarray(w.behaviour)).sum(1))

        def loss(logits):
            given = Tokens(logprobs(of, logits), now, then, now, jnp.ones_like(now), of.mask, of.mask.astype(int))
            return jnp.sum(drawn * jnp.where(of.mask, objective(given).loss, 0.0).sum(1))

        return np.asarray(jax.grad(loss)(jnp.asarray(of.theta)))

    np.testing.assert_allclose(expected(blind, config), expected(w, UNCORRECTED), atol=1e-6)


@pytest.mark.parametrize("name", BOUNDS)
def test_on_policy_every_gradient_is_the_true_one(name):
    """α = 0 and one step: the answers are the policy's own, and no correction turns anything."""
    w = world(7, 1.0)
    np.testing.assert_allclose(stale_gradient(w, BOUNDS[name][0], w.theta), true_gradient(w), atol=1e-5)


def test_a_kl_in_the_reward_has_the_gradient_of_reward_minus_kl():
    """Σ k1 of the answer off its reward, on policy."""
    w, coef = world(3, 1.0), 0.3
    now, ref = (logprobs(w, jnp.asarray(x)) for x in (w.theta, w.behaviour))
    charged = w._replace(rewards=np.asarray(w.rewards - coef * (now - ref).sum(1)))

    def value(logits):
        logp = logprobs(w, logits)
        return jnp.sum(jnp.exp(logp.sum(1)) * (w.rewards - coef * (logp - ref).sum(1)))

    want = np.asarray(jax.grad(value)(jnp.asarray(w.theta)))
    np.testing.assert_allclose(stale_gradient(charged, UNCORRECTED, w.theta), want, atol=1e-5)


def test_a_kl_in_the_loss_has_the_gradient_of_the_kl_whoever_drew():
    """One token, drawn by another policy: k2 weighted by ρ is exact, k2 alone is not."""
    rng = np.random.default_rng(0)
    theta, drawn_by, ref = rng.normal(size=(3, WORDS))
    behaviour, reference = jax.nn.log_softmax(jnp.asarray(drawn_by)), jax.nn.log_softmax(jnp.asarray(ref))
    learner = LearnerConfig(algorithm="raft", kl_coef=1.0, reference="init", correction_cap=1e6)

    def gradient(told: jax.Array) -> np.ndarray:
        objective = algorithms.build(learner).objective

        def loss(logits):
            logp, zero = jax.nn.log_softmax(logits), jnp.zeros(WORDS)
            given = Tokens(logp, logp, told, reference, zero, jnp.ones(WORDS, bool), jnp.arange(WORDS))
            return jnp.sum(jnp.exp(behaviour) * objective(given).loss)

        return np.asarray(jax.grad(loss)(jnp.asarray(theta)))

    def divergence(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - reference))

    want = np.asarray(jax.grad(divergence)(jnp.asarray(theta)))
    np.testing.assert_allclose(gradient(behaviour), want, atol=1e-5)
    assert np.abs(gradient(jax.nn.log_softmax(jnp.asarray(theta))) - want).max() > 0.05
