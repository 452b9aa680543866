"""Advantages of batches, selections and turns: numpy references, hand-worked numbers, groups that say nothing."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxroll.algorithms import advantages
from jaxroll.algorithms.advantages import Turn
from tests.harness import numpy_losses as plain


class Member(NamedTuple):
    reward: float
    mask: np.ndarray
    turns: tuple[Turn, ...]


def member(*steps: tuple[str, float]) -> Member:
    """One turn of two tokens a step, each after one token that shows a state."""
    turns = tuple(Turn(3 * k + 1, 3 * k + 3, state.encode(), reward) for k, (state, reward) in enumerate(steps))
    return Member(sum(r for _, r in steps), np.tile([False, True, True], len(steps)), turns)


EPISODES = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@given(episodes=EPISODES, discount=st.sampled_from([1.0, 0.9, 0.5]))
def test_gigpo_agrees_with_numpy(episodes, discount):
    got = advantages.gigpo([member(*episode) for episode in episodes], discount, 0.7)
    want, at = plain.gigpo(episodes, discount, 0.7), 0
    for tokens, episode in zip(got, episodes, strict=True):
        assert isinstance(tokens, np.ndarray)
        for k in range(len(episode)):
            np.testing.assert_allclose(tokens[3 * k : 3 * k + 3], [0, want[at], want[at]], atol=1e-5)
            at += 1


def test_gigpo_worked_by_hand():
    # Episodes earn 1 and 0: A_episode = ±1/√2. Both begin in s: returns 0.5 and 0 give the same ±1/√2 there. The
    # second states were met once and add nothing.
    good, bad = member(("s", 0.0), ("x", 1.0)), member(("s", 0.0), ("y", 0.0))
    a = 1 / np.sqrt(2)
    got = advantages.gigpo([good, bad], 0.5, 1.0)
    np.testing.assert_allclose(got, [[0, 2 * a, 2 * a, 0, a, a], [0, -2 * a, -2 * a, 0, -a, -a]], rtol=1e-6)


def test_returns_of_turns_are_standardised_over_the_group():
    # Returns 0.5, 1 | 0: mean 0.5, std 0.5.
    got = advantages.segment_return([member(("a", 0.0), ("b", 1.0)), member(("a", 0.0))], 0.5)
    np.testing.assert_allclose(got[0], [0, 0, 0, 0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(got[1], [0, -1, -1], atol=1e-6)


@given(episodes=EPISODES, discount=st.sampled_from([1.0, 0.9, 0.5]))
def test_returns_of_turns_agree_with_numpy(episodes, discount):
    got = advantages.segment_return([member(*episode) for episode in episodes], discount)
    want = iter(plain.segment_return(episodes, discount))
    for tokens, episode in zip(got, episodes, strict=True):
        steps = [[0.0, value, value] for value in (next(want) for _ in episode)]
        np.testing.assert_allclose(tokens, np.concatenate(steps), atol=1e-5)


@given(rewards=st.lists(st.floats(-2, 2), min_size=1, max_size=6), discount=st.floats(0, 1))
def test_discounted_returns(rewards, discount):
    got = advantages.discounted_returns(np.array(rewards), discount)
    np.testing.assert_allclose(got, plain.returns(rewards, discount), atol=1e-9)


GAE, VALUE_LOSS = jax.jit(advantages.gae), jax.jit(advantages.clipped_value_loss, static_argnums=3)


@given(
    n=st.integers(0, 6),
    seed=st.integers(0, 99),
    discount=st.sampled_from([1.0, 0.9]),
    decay=st.sampled_from([0.95, 0.0]),
)
@settings(max_examples=25)
def test_gae_agrees_with_a_double_loop_for_any_token_positions(n, seed, discount, decay):
    rng = np.random.default_rng(seed)
    at = np.sort(rng.choice(9, n, replace=False))
    rewards, values, mask = np.full(9, np.nan), np.full(9, 1e9), np.zeros(9)
    rewards[at], values[at], mask[at] = rng.normal(size=n), rng.normal(size=n), 1
    got = np.asarray(GAE(*(np.float32(x) for x in (rewards, values, mask)), discount, decay))
    want = np.zeros(9)
    want[at] = plain.gae(rewards[at], values[at], discount, decay)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_gae_worked_by_hand():
    # V = 0.5 everywhere, reward 1 at the end, γ = 1, λ = 0.5: δ = 0, 0.5, so A = 0.25, 0.5.
    got = GAE(np.float32([0, 1]), np.float32([0.5, 0.5]), np.ones(2, np.float32), 1.0, 0.5)
    np.testing.assert_allclose(got, [0.25, 0.5])


def test_the_critic_is_held_near_its_old_values():
    # Target 1 from 0: at V = 0.8 the clipped value 0.2 is the worse one, and its loss counts.
    got = VALUE_LOSS(np.float32([0.8, 0.1]), np.float32([0, 0]), np.float32([1, 1]), 0.2)
    np.testing.assert_allclose(got, [0.32, 0.405], rtol=1e-5)
    free = VALUE_LOSS(np.float32([0.8, 0.1]), np.float32([0, 0]), np.float32([1, 1]), 0.0)
    np.testing.assert_allclose(free, [0.02, 0.405], rtol=1e-5)


@functools.cache
def losses_and_slopes(clip: float):
    """The losses and gradients of single values."""
    return jax.jit(jax.vmap(jax.value_and_grad(lambda *given: advantages.clipped_value_loss(*given, clip))))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), clip=st.sampled_from([0.0, 0.2, 1.0]))
def test_the_clipped_value_loss_agrees_with_numpy(seed, clip):
    """Also where the value is what it should have been, and where it has not moved yet."""
    values, before, targets = np.random.default_rng(seed).normal(size=(3, 96)).astype(np.float32)
    targets[:16], before[16:32] = values[:16], values[16:32]
    loss, slope = losses_and_slopes(clip)(values, before, targets)
    values, before, targets = (np.asarray(x, float) for x in (values, before, targets))
    np.testing.assert_allclose(loss, plain.value_loss(values, before, targets, clip), rtol=1e-5, atol=1e-6)
    below, above = plain.value_slopes(values, before, targets, clip)
    smooth = np.abs(above - below) < 1e-3
    assert smooth.mean() > 0.9
    np.testing.assert_allclose(np.asarray(slope)[smooth], below[smooth], rtol=1e-4, atol=1e-4)
    if clip:
        assert 0 < (np.asarray(slope)[32:] == 0).mean() < 1  # beyond the range and on the way to the target


@pytest.mark.parametrize("target", [-1.0, 0.0, 0.25, 0.5, 1.0])
def test_a_value_at_the_edge_of_its_range(target):
    """Both losses are ½·(V − R)² there; one step further one of them is constant, so the slope is a part of V − R."""
    value = np.float32([0.25, -0.25])
    loss, slope = losses_and_slopes(0.25)(value, np.zeros(2, np.float32), np.full(2, target, np.float32))
    np.testing.assert_allclose(loss, (value - target) ** 2 / 2, rtol=1e-6)
    part = np.asarray(slope) * (value - target)
    assert (part >= 0).all() and (part <= (value - target) ** 2).all()


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_values_out_of_all_bounds_have_a_loss_and_a_finite_slope(clip):
    """(10³⁰)² is infinite, and no difference of two infinite losses is taken."""
    extremes = [0.0, 1e-30, -1e-30, 1.0, 1e4, -1e4, 1e30, -1e30]
    loss, slope = losses_and_slopes(clip)(*np.array(list(itertools.product(extremes, repeat=3)), np.float32).T)
    assert (np.asarray(loss) >= 0).all() and np.isfinite(slope).all()


def test_a_batch_is_standardised_over_all_its_members():
    groups = [np.array([1.0, 0.0]), np.array([1.0, 1.0])]
    everyone = np.array([1, 0, 1, 1.0])
    np.testing.assert_allclose(np.concatenate(advantages.batch_standardised(groups)), plain.group_std(everyone))
    centred = np.array([0.5, -0.5, 0, 0])
    got = advantages.batch_standardised(groups, group_baseline=True)
    np.testing.assert_allclose(np.concatenate(got), plain.group_std(centred))
    assert [len(group) for group in got] == [2, 2]


def test_selections_worked_by_hand():
    rewards, all_of_them = np.array([0.5, 1.0, 0.0, 1.0]), np.ones(4, bool)
    np.testing.assert_array_equal(advantages.positive(rewards), [1, 1, 0, 1])
    np.testing.assert_array_equal(advantages.best(rewards, all_of_them), [0, 1, 0, 0])
    np.testing.assert_array_equal(advantages.best_worst(rewards, all_of_them), [0, 1, -1, 0])
    without = np.array([True, False, False, True])
    np.testing.assert_array_equal(advantages.best_worst(rewards, without), [-1, 0, 0, 1])
    np.testing.assert_array_equal(advantages.best(rewards, without), [0, 0, 0, 1])


MEMBERS = st.lists(st.tuples(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), st.booleans()), max_size=6)


@given(members=MEMBERS)
def test_selections_agree_with_loops(members):
    rewards, trainable = np.array([r for r, _ in members]), np.array([kept for _, kept in members], bool)
    np.testing.assert_array_equal(advantages.positive(rewards), [float(r > 0) for r in rewards])
    np.testing.assert_array_equal(advantages.best(rewards, trainable), plain.best(members))
    np.testing.assert_array_equal(advantages.best_worst(rewards, trainable), plain.best_worst(members))


@pytest.mark.parametrize("rewards", [[0.0] * 4, [0.3] * 4, [2.0], []])
def test_groups_without_a_preference_say_nothing(rewards):
    rewards = np.array(rewards)
    trainable = np.ones(len(rewards), bool)
    np.testing.assert_array_equal(advantages.best_worst(rewards, trainable), np.zeros(len(rewards)))
    np.testing.assert_array_equal(advantages.best_worst(rewards, ~trainable), np.zeros(len(rewards)))
    assert advantages.best(rewards, trainable).sum() == float(len(rewards) > 0 and rewards.max() > 0)
    assert not advantages.best(rewards, ~trainable).any()
    assert not np.concatenate([np.zeros(1), *advantages.batch_standardised([rewards])]).any()
    members = [member(("s", reward)) for reward in rewards]
    for estimate in (advantages.segment_return(members, 0.9), advantages.gigpo(members, 0.9, 1.0)):
        assert not np.concatenate([np.zeros(1), *estimate]).any()


def test_no_groups_at_all():
    assert advantages.batch_standardised([]) == [] and advantages.gigpo([], 1.0, 1.0) == []


def test_the_overlong_penalty_worked_by_hand():
    # Of 100 tokens the last 20 cost: none at 80, half at 90, all from 100 on.
    got = [advantages.overlong_penalty(tokens, 100, 20) for tokens in (0, 80, 85, 90, 100, 120)]
    assert got == [0, 0, -0.25, -0.5, -1, -1]
    assert advantages.overlong_penalty(100, 100, 0) == 0
