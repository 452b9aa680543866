"""Group advantages against hand-worked numbers, a numpy reference and what they must never do."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.math import advantage

REWARDS = hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(-100, 100, width=32))


def reference(rewards: np.ndarray, mask: np.ndarray, by_std: bool) -> np.ndarray:
    """The same in float64 with numpy's own mean and std, member by member."""
    kept = rewards[mask > 0].astype(np.float64)
    out = np.zeros(len(rewards))
    if len(kept) < 2:
        return out
    scale = kept.std(ddof=1) if by_std else 1.0
    if scale == 0:
        return out
    out[mask > 0] = (kept - kept.mean()) / scale
    return out


compiled = jax.jit(advantage.group_centred, static_argnums=2)


def centred(rewards: list[float], mask: list[float] | None = None, by_std: bool = True) -> np.ndarray:
    mask = [1.0] * len(rewards) if mask is None else mask
    return np.asarray(compiled(np.array(rewards, np.float32), np.array(mask, np.float32), by_std))


def test_one_success_in_four_worked_by_hand():
    # mean 1/4; centred 3/4 and -1/4; variance (9 + 3) / 16 / 3 = 1/4, so std 1/2.
    np.testing.assert_allclose(centred([1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5], rtol=1e-6)
    np.testing.assert_allclose(centred([1, 0, 0, 0], by_std=False), [0.75, -0.25, -0.25, -0.25], rtol=1e-6)


def test_leave_one_out_worked_by_hand():
    # The others' means are 0, 1/2, 1/2.
    got = advantage.leave_one_out(jnp.array([1.0, 0.0, 0.0]), jnp.ones(3))
    np.testing.assert_allclose(got, [1.0, -0.5, -0.5], rtol=1e-6)
    np.testing.assert_array_equal(advantage.leave_one_out(jnp.array([3.0]), jnp.ones(1)), [0.0])


@pytest.mark.parametrize("by_std", [True, False])
@given(rewards=REWARDS, seed=st.integers(0, 9))
def test_agrees_with_numpy(by_std, rewards, seed):
    mask = np.random.default_rng(seed).integers(0, 2, len(rewards)).astype(np.float32)
    want = reference(rewards, mask, by_std)
    kept = rewards[mask > 0].astype(np.float64)
    if by_std and len(kept) > 1 and kept.std() < 1e-3 * max(1.0, np.abs(kept).max()):
        return  # near the floor float32 decides whether the group says anything
    np.testing.assert_allclose(centred(list(rewards), list(mask), by_std), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.0] * 8, [0.1] * 7, [1e6] * 3, [5.0]])
def test_equal_rewards_or_one_member_say_nothing(by_std, rewards):
    np.testing.assert_allclose(centred(rewards, by_std=by_std), np.zeros(len(rewards)), atol=1e-7 * max([*rewards, 1]))


def test_padding_changes_nothing_whatever_stands_there():
    alone = centred([1.0, 0.0, 0.5])
    padded = centred([1.0, np.nan, 0.0, 1e30, 0.5], [1, 0, 1, 0, 1])
    np.testing.assert_array_equal(padded, [alone[0], 0, alone[1], 0, alone[2]])


def test_no_members_at_all():
    np.testing.assert_array_equal(centred([3.0, 4.0], [0, 0]), [0, 0])


@given(rewards=REWARDS)
def test_sums_to_zero_and_ignores_a_shift(rewards):
    got = centred(list(rewards), by_std=False)
    assert abs(got.sum()) < 1e-3
    np.testing.assert_allclose(centred(list(rewards + 1), by_std=False), got, atol=1e-3)


def test_vmaps_over_groups():
    rewards = jnp.array([[1.0, 0.0], [0.0, 0.0]])
    got = jax.vmap(advantage.group_centred, in_axes=(0, 0, None))(rewards, jnp.ones((2, 2)), True)
    np.testing.assert_allclose(got, [[0.70710678, -0.70710678], [0, 0]], rtol=1e-6)
