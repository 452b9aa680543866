"""Colocated roles end together: after the learner, after an error of any role, or on a stop signal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll import config as configs
from jaxroll import lifeline
from jaxroll.config import RoleArgs
from jaxroll.errors import EXIT_INTERRUPTED, InfraError
from jaxroll.roles import colocated, learner
from jaxroll.roles import session as sessions

LIMIT_S = 20.0


class FakeProcess:
    """A role without a store and an engine: `plays` replaces its work, until it is asked to stop."""

    plays: Callable[[FakeProcess], None]

    def __init__(self, spec: sessions.RoleSpec, args: RoleArgs) -> None:
        self.spec, self.asked, self.ended, self.begun = spec, threading.Event(), threading.Event(), threading.Event()
        self.closed = False
        self.session = SimpleNamespace(request_stop=self.asked.set)
        PROCESSES[spec.role] = self

    def open(self) -> SimpleNamespace:
        return self.session

    def run(self, device_lock: object) -> None:
        self.begun.set()
        type(self).plays(self)
        self.ended.set()

    def close(self) -> None:
        self.closed = True


PROCESSES: dict[str, FakeProcess] = {}


def until_stopped(process: FakeProcess) -> None:
    assert process.asked.wait(LIMIT_S)


def publishing(end: int | Exception, wait: bool = False) -> Callable[..., int]:
    """A learner that publishes, waits until all roles have started (with `wait`, also for its stop event), and ends."""

    def run_learner(args: RoleArgs, stop: threading.Event, hooks: learner.ColocationHooks) -> int:
        assert not any(process.begun.is_set() for process in PROCESSES.values()), (
            "started before this process published weights"
        )
        hooks.published()
        assert all(process.begun.wait(LIMIT_S) for process in PROCESSES.values())
        assert not wait or stop.wait(LIMIT_S), "the learner was not stopped"
        if isinstance(end, Exception):
            raise end
        return end

    return run_learner


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoleArgs:
    """Two samplers, an evaluator and a learner of a config, none of them real."""
    PROCESSES.clear()
    monkeypatch.setattr(sessions, "EngineProcess", FakeProcess)
    monkeypatch.setattr(lifeline, "print_stacks_on_signal", lambda *_: None)
    monkeypatch.setattr(colocated.lifeline, "on_stop", lambda *_: None)
    monkeypatch.setattr(FakeProcess, "plays", until_stopped, raising=False)
    settings = configs.parse(configs.override(configs.defaults().to_dict(), ["sampler.count=2"]))
    return RoleArgs(settings, tmp_path)


def test_every_sampler_is_started_and_the_evaluator_if_it_is_configured(args: RoleArgs) -> None:
    assert [spec.role for spec in colocated.role_specs(args)] == ["sampler-0", "sampler-1", "evaluator"]
    silent = replace(args, config=replace(args.config, evaluator=replace(args.config.evaluator, every=0)))
    assert [spec.role for spec in colocated.role_specs(silent)] == ["sampler-0", "sampler-1"]


def test_the_last_evaluation_ends_after_the_learner(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = threading.Event()

    def plays(process: FakeProcess) -> None:
        if process.spec.role == "evaluator":
            assert not process.asked.wait(0.3), "asked to stop before its last answers"
            scored.set()

    monkeypatch.setattr(FakeProcess, "plays", plays)
    monkeypatch.setattr(learner, "run_learner", publishing(0))
    assert colocated.main(args) == 0 and scored.is_set()


def test_on_a_stop_the_learner_ends_first(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_learner(args: RoleArgs, stop: threading.Event, hooks: learner.ColocationHooks) -> int:
        code = publishing(EXIT_INTERRUPTED)(args, stop, hooks)
        assert not any(process.asked.is_set() for process in PROCESSES.values())
        return code

    monkeypatch.setattr(learner, "run_learner", run_learner)
    assert colocated.main(args) == EXIT_INTERRUPTED
    assert [process.ended.is_set() for process in PROCESSES.values()] == [True] * 3


def test_a_stop_during_the_last_evaluation_ends_the_process(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Callable[[], object]] = []
    monkeypatch.setattr(colocated.lifeline, "on_stop", handlers.append)

    def plays(process: FakeProcess) -> None:
        if process.spec.role == "evaluator":  # starts after the learner is done
            threading.Timer(0.2, handlers[0]).start()
            until_stopped(process)

    monkeypatch.setattr(FakeProcess, "plays", plays)
    monkeypatch.setattr(learner, "run_learner", publishing(0))
    began = time.monotonic()
    assert colocated.main(args) == 0, "all steps are trained"
    assert time.monotonic() - began < LIMIT_S / 2


def test_without_a_publication_no_other_role_starts(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on resuming a finished run: the weights that the store knows are of a process that has ended."""
    monkeypatch.setattr(learner, "run_learner", lambda args, stop, hooks: 0)
    assert colocated.main(args) == 0
    assert [(process.begun.is_set(), process.closed) for process in PROCESSES.values()] == [(False, True)] * 3


def failing(name: str, then: Callable[[FakeProcess], None]) -> Callable[[FakeProcess], None]:
    def plays(process: FakeProcess) -> None:
        if process.spec.role == name:
            raise InfraError("the store is gone")
        then(process)

    return plays


def test_an_error_of_a_role_stops_the_learner_and_is_the_error_of_the_process(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeProcess, "plays", failing("sampler-1", until_stopped))
    monkeypatch.setattr(learner, "run_learner", publishing(EXIT_INTERRUPTED, wait=True))
    with pytest.raises(InfraError, match="the store is gone"):
        colocated.main(args)
    assert all(PROCESSES[name].ended.is_set() for name in ("sampler-0", "evaluator"))
    assert "the store is gone" in capsys.readouterr().err


def test_an_error_after_the_last_step_is_reported_and_causes_no_restart(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeProcess, "plays", failing("evaluator", lambda _: None))
    monkeypatch.setattr(learner, "run_learner", publishing(0))
    assert colocated.main(args) == 0
    assert "the store is gone" in capsys.readouterr().err


def test_an_error_of_a_sampler_at_the_end_does_not_cost_the_last_evaluation(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plays(process: FakeProcess) -> None:
        assert process.spec.role != "evaluator" or not process.asked.wait(0.3), "asked to stop before its last answers"

    monkeypatch.setattr(FakeProcess, "plays", failing("sampler-0", plays))
    monkeypatch.setattr(learner, "run_learner", publishing(0))
    assert colocated.main(args) == 0
    assert PROCESSES["evaluator"].ended.is_set()


def test_a_stop_before_the_first_weights_starts_no_other_role(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Callable[[], object]] = []
    monkeypatch.setattr(colocated.lifeline, "on_stop", handlers.append)

    def run_learner(args: RoleArgs, stop: threading.Event, hooks: learner.ColocationHooks) -> int:
        handlers[0]()
        hooks.published()
        return EXIT_INTERRUPTED

    monkeypatch.setattr(learner, "run_learner", run_learner)
    assert colocated.main(args) == EXIT_INTERRUPTED
    assert not any(process.begun.is_set() for process in PROCESSES.values()) and all(
        process.closed for process in PROCESSES.values()
    )


def test_an_error_of_the_learner_ends_the_others(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "run_learner", publishing(InfraError("no checkpoint")))
    with pytest.raises(InfraError, match="no checkpoint"):
        colocated.main(args)
    assert all(process.ended.is_set() for process in PROCESSES.values())


def test_a_role_that_does_not_stop_is_named(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()

    def plays(process: FakeProcess) -> None:
        until_stopped(process)
        assert process.spec.role != "evaluator" or late.wait(LIMIT_S)

    monkeypatch.setattr(colocated, "LEAVE_S", 0.2)
    monkeypatch.setattr(FakeProcess, "plays", plays)
    monkeypatch.setattr(learner, "run_learner", publishing(EXIT_INTERRUPTED))
    try:
        with pytest.raises(InfraError, match=r"evaluator did not stop within 0\.2 s"):
            colocated.main(args)
    finally:
        late.set()
