"""The window in force, against a learner whose waiting is given: bounds, where it settles, what trying costs."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxroll.policy.limiter import TOLERATED, Pace, adapted

LEAST, MOST, BATCH = 8, 40, 8


def after(waits: list[float], pace: Pace = Pace(), worked_s: float = 1.0) -> Pace:  # noqa: B008 (frozen)
    for waited_s in waits:
        pace = adapted(pace, LEAST, MOST, BATCH, waited_s, worked_s)
    return pace


def settled(enough: int, claims: int, pace: Pace = Pace()) -> tuple[list[int], float]:  # noqa: B008 (frozen)
    """The windows of `claims` claims when the learner waits half a step below `enough` groups; its waiting share."""
    windows, waited = [], 0.0
    for _ in range(claims):
        waited_s = 0.5 if windows and windows[-1] < enough else 0.0
        pace = adapted(pace, LEAST, MOST, BATCH, waited_s, 1.0)
        windows.append(pace.groups)
        waited += waited_s
    return windows, waited / (claims + waited)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=60), st.integers(1, 9), st.integers(0, 30))
def test_it_stays_between_its_bounds_whatever_happens(seen: list, batch: int, room: int) -> None:
    pace = Pace()
    for waited_s, worked_s in seen:
        pace = adapted(pace, batch, batch + room, batch, waited_s, worked_s)
        assert batch <= pace.groups <= batch + room
        assert 0 <= pace.waiting_share <= 0.5


def test_the_window_begins_full_and_shrinks_to_the_least_while_no_one_waits() -> None:
    assert after([0.0]).groups == MOST
    windows, _ = settled(0, 250)
    assert windows[-1] == LEAST
    assert all(a >= b for a, b in itertools.pairwise(windows)), "it never grew"


def test_it_stays_full_when_the_learner_waits_whatever_the_window() -> None:
    assert after([0.3] * 300).groups == MOST
    assert after([0.0] * 250 + [0.3] * 60).groups == MOST, "and goes back there, in steps that double"


@pytest.mark.parametrize("enough", [9, 16, 23, 40])
def test_it_settles_where_waiting_begins_and_the_search_costs_little(enough: int) -> None:
    windows, share = settled(enough, 1500)
    late = windows[500:]
    assert enough - 1 <= min(late)
    assert sum(late) / len(late) < enough + 1
    assert share < 2.5 * TOLERATED


def test_a_change_is_given_time_to_show() -> None:
    """Groups leased under a window of 40 are claimed five claims later."""
    windows, _ = settled(0, 30)
    assert windows[:7] == [MOST] * 7, "the pipeline fills, and then the first change"
    assert windows[7:14] == [MOST - 1] * 7


def test_one_long_wait_does_not_keep_it_full_for_ever() -> None:
    """A sampler died for a thousand steps' time."""
    narrow = after([0.0] * 250)
    struck = after([1000.0], narrow)
    assert after([0.0] * 500, struck).groups == LEAST


def test_what_is_not_known_changes_nothing() -> None:
    pace = after([0.0] * 20)
    assert adapted(pace, LEAST, MOST, BATCH, 5.0, 0.0) == pace


def test_the_first_waits_are_those_of_an_empty_pipeline() -> None:
    assert after([9.0]).waiting_share == 0.0


def test_a_run_resumed_with_another_bound_is_within_it() -> None:
    assert adapted(after([0.0] * 3), LEAST, 10, BATCH, 0.0, 1.0).groups <= 10
