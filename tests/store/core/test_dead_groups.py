"""A run in which every group dies ends, and its reason names the cause."""

from __future__ import annotations

import pytest

from jaxroll.config import Config, ScheduleConfig, StoreConfig
from jaxroll.errors import Closed, NoCredit
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from tests.harness.store.machine import Machine


def dead(m: Machine, groups: int) -> None:
    """So many groups die, one after the other, of DATA failures of their first member."""
    for _ in range(groups):
        key = m.lease(2)[0]
        m.fail(key, "DATA")


def started(**rules: int) -> Machine:
    m = Machine(alpha=1.0, batch=1, data_retries=0, **rules)
    m.start()
    return m


def test_a_run_whose_groups_all_die_is_closed_with_the_environment_and_the_cause() -> None:
    m = started(dead_groups=5)
    dead(m, 4)
    assert not m.state.closed
    dead(m, 1)
    assert m.states() == {"DEAD": 5}
    assert "5 groups died" in m.state.closed and "'env'" in m.state.closed and "DATA: it broke" in m.state.closed
    assert "store.dead_limit" in m.state.closed
    with pytest.raises(Closed, match="'env' fails"):
        m.lease(2)
    with pytest.raises(Closed, match="'env' fails"):
        m.claim(0)


def test_a_run_of_two_samplers_of_which_one_left_is_closed_when_the_other_always_fails() -> None:
    m = started(dead_groups=5, holders=2)
    m.ask(ev.Arrive("B", "B-1"))
    key = m.lease(2)[0]
    m.fail(key, "DATA")
    assert m.states() != {"DEAD": 1}, "B may do better"
    m.ask(ev.Leave("B", "B-1"))
    for _ in range(100):
        if m.state.closed:
            break
        m.now += 60.0
        m.fail(m.lease(2)[0], "DATA")
    assert "store.dead_limit" in m.state.closed


def test_a_claim_forgives_those_that_died_before_it() -> None:
    m = started(dead_groups=5)
    dead(m, 4)
    m.fill(2)
    m.train(0)
    dead(m, 4)
    assert not m.state.closed and m.state.dead == 8
    m.restart()
    dead(m, 1)
    assert "5 groups died" in m.state.closed


def test_without_a_limit_prompts_are_used_up() -> None:
    m = started()
    dead(m, 100)
    with pytest.raises(NoCredit):
        m.lease(2)


@pytest.mark.parametrize(("limit", "groups"), [(0, 0), (64, 64), (10, 32), (1000, 1000)])
def test_the_limit_is_four_windows_at_least(limit: int, groups: int) -> None:
    """A window here has (1 + 1) · 4 groups."""
    config = Config(schedule=ScheduleConfig(alpha=1.0, groups_per_step=4), store=StoreConfig(dead_limit=limit))
    assert Settings.of(config).dead_groups == groups
