"""Advantages within a group against hand-worked numbers, a numpy reference and what they must never do."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.algorithms import advantages
from tests.harness import numpy_losses as plain

REWARDS = hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(-100, 100, width=32))


def centred(rewards: list[float] | np.ndarray, by_std: bool = True) -> np.ndarray:
    return advantages.standardised(np.array(rewards, np.float32), divide_by_std=by_std)


def test_one_success_in_four_worked_by_hand():
    # mean 1/4; centered 3/4 and -1/4; variance (9 + 3) / 16 / 3 = 1/4, so std 1/2.
    np.testing.assert_allclose(centred([1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5], rtol=1e-12)
    np.testing.assert_allclose(centred([1, 0, 0, 0], by_std=False), [0.75, -0.25, -0.25, -0.25], rtol=1e-12)


def test_leave_one_out_worked_by_hand():
    # The others' means are 0, 1/2, 1/2.
    np.testing.assert_allclose(advantages.leave_one_out(np.array([1.0, 0.0, 0.0])), [1.0, -0.5, -0.5], rtol=1e-12)
    np.testing.assert_array_equal(advantages.leave_one_out(np.array([3.0])), [0.0])
    assert advantages.leave_one_out(np.zeros(0)).shape == (0,)


@given(rewards=REWARDS)
def test_agrees_with_numpy(rewards):
    wide = rewards.astype(np.float64)
    np.testing.assert_allclose(advantages.leave_one_out(rewards), plain.leave_one_out(wide), rtol=1e-4, atol=1e-3)
    if wide.std() >= 1e-5 * max(1.0, np.abs(wide).max()):  # nearer to the floor a group may say nothing
        np.testing.assert_allclose(centred(rewards), plain.group_std(wide), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.0] * 8, [0.1] * 7, [1e6] * 3, [1e6, 1e6 + 0.0625], [5.0], []])
def test_equal_rewards_or_one_member_say_nothing(by_std, rewards):
    np.testing.assert_array_equal(centred(rewards, by_std=by_std), np.zeros(len(rewards)))


@given(rewards=REWARDS)
def test_sums_to_zero_and_ignores_a_shift(rewards):
    got = centred(rewards, by_std=False)
    assert abs(got.sum()) < 1e-3
    np.testing.assert_allclose(centred(rewards + 1, by_std=False), got, atol=1e-3)
