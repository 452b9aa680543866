"""The restart policy: verdicts when a process ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.config import SupervisorConfig
from jaxroll.control.child import FORGIVEN_AFTER_S, Done, GiveUp, Restart, RestartHistory, after_exit
from jaxroll.errors import (
    EXIT_CLOSED,
    EXIT_CONFIG,
    EXIT_WORN,
    Closed,
    ConfigError,
    InfraError,
    RestartRequired,
    Unauthorized,
    exit_code,
)

CONFIG = SupervisorConfig(max_restarts=4, backoff_s=0.5, backoff_max_s=3.0)


def test_backoff_doubles_to_its_bound_and_then_the_run_ends() -> None:
    history, delays = RestartHistory(), []
    while isinstance(verdict := after_exit("learner", -9, 1.0, history, CONFIG), Restart):
        delays.append(verdict.delay_s)
        history = verdict.history
    assert delays == [0.5, 1.0, 2.0, 3.0]
    assert isinstance(verdict, GiveUp) and "learner died 5 times" in verdict.reason and "signal 9" in verdict.reason


@given(st.lists(st.tuples(st.integers(-15, 63).filter(bool), st.floats(0, 1000)), max_size=40))
def test_restarts_are_bounded_until_a_process_runs_for_long(ends: list[tuple[int, float]]) -> None:
    history, short = RestartHistory(), 0
    for restarts, (code, uptime_s) in enumerate(ends):
        short = 1 if uptime_s >= FORGIVEN_AFTER_S else short + 1
        verdict = after_exit("x", code, uptime_s, history, CONFIG)
        if short > CONFIG.max_restarts:
            assert isinstance(verdict, GiveUp)
            return
        assert isinstance(verdict, Restart) and verdict.history.restarts == restarts + 1
        assert 0 < verdict.delay_s <= CONFIG.backoff_max_s
        history = verdict.history


def test_a_process_that_requests_a_restart_gets_it_without_counting_as_dead() -> None:
    history = RestartHistory(deaths=CONFIG.max_restarts)
    for again in range(1, 30):
        verdict = after_exit("sampler-0", EXIT_WORN, 1.0, history, CONFIG)
        assert verdict == Restart(CONFIG.backoff_s, RestartHistory(CONFIG.max_restarts, again))
        history = verdict.history


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [("sampler-0", 0, Done), ("sampler-0", EXIT_CONFIG, GiveUp), ("learner", EXIT_CLOSED, GiveUp),
     ("colocated", EXIT_CLOSED, GiveUp),
     ("sampler-0", EXIT_CLOSED, Done), ("learner", 1, Restart)],
)  # fmt: skip
def test_exit_codes_determine_the_verdict(name: str, code: int, verdict: type) -> None:
    assert isinstance(after_exit(name, code, 1.0, RestartHistory(), CONFIG), verdict)


def test_errors_have_the_exit_codes_the_policy_reads() -> None:
    assert exit_code(ConfigError("a", 1, "b", "c")) == exit_code(Unauthorized("x")) == EXIT_CONFIG
    assert exit_code(Closed("over")) == EXIT_CLOSED
    assert exit_code(InfraError("gone")) == 1
    assert exit_code(RestartRequired("256 threads hang")) == EXIT_WORN
