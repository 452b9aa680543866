"""Roles that share a process end together: by the learner's end, by anybody's error, or when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll import config as configs
from jaxroll.config import RoleArgs
from jaxroll.errors import EXIT_INTERRUPTED, InfraError
from jaxroll.roles import colocated, learner
from jaxroll.roles import session as sessions

LIMIT_S = 20.0


class FakeLife:
    """A part without a store and an engine: `plays` does what it would do until it is asked to leave."""

    plays: Callable[[FakeLife], None]

    def __init__(self, part: sessions.RoleSpec, args: RoleArgs) -> None:
        self.part, self.asked, self.ended, self.begun = part, threading.Event(), threading.Event(), threading.Event()
        self.closed = False
        self.session = SimpleNamespace(request_stop=self.asked.set)
        LIVES[part.role] = self

    def open(self) -> SimpleNamespace:
        return self.session

    def run(self, turn: object) -> None:
        self.begun.set()
        type(self).plays(self)
        self.ended.set()

    def close(self) -> None:
        self.closed = True


LIVES: dict[str, FakeLife] = {}


def until_asked(life: FakeLife) -> None:
    assert life.asked.wait(LIMIT_S)


def publishing(end: int | Exception, wait: bool = False) -> Callable[..., int]:
    """A learner that publishes, has all begin, waits to be told to stop if it is to `wait`, and ends so."""

    def lived(args: RoleArgs, stop: threading.Event, beside: learner.ColocationHooks) -> int:
        assert not any(life.begun.is_set() for life in LIVES.values()), "before there are weights of this life"
        beside.published()
        assert all(life.begun.wait(LIMIT_S) for life in LIVES.values())
        assert not wait or stop.wait(LIMIT_S), "the learner was not told"
        if isinstance(end, Exception):
            raise end
        return end

    return lived


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoleArgs:
    """Two samplers, an evaluator and a learner of a config, none of them real."""
    LIVES.clear()
    monkeypatch.setattr(sessions, "EngineProcess", FakeLife)
    monkeypatch.setattr(sessions, "print_stacks_on_signal", lambda *_: None)
    monkeypatch.setattr(colocated.lifeline, "on_stop", lambda *_: None)
    monkeypatch.setattr(FakeLife, "plays", until_asked, raising=False)
    settings = configs.parse(configs.override(configs.defaults().to_dict(), ["sampler.count=2"]))
    return RoleArgs(settings, tmp_path)


def test_every_role_with_devices_has_a_part_and_the_evaluator_only_where_it_is_wanted(args: RoleArgs) -> None:
    assert [part.role for part in colocated.role_specs(args)] == ["sampler-0", "sampler-1", "evaluator"]
    silent = replace(args, config=replace(args.config, evaluator=replace(args.config.evaluator, every=0)))
    assert [part.role for part in colocated.role_specs(silent)] == ["sampler-0", "sampler-1"]


def test_when_the_learner_is_done_the_last_evaluation_is_waited_for(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = threading.Event()

    def plays(life: FakeLife) -> None:
        if life.part.role == "evaluator":
            assert not life.asked.wait(0.3), "asked to leave before its last answers"
            scored.set()

    monkeypatch.setattr(FakeLife, "plays", plays)
    monkeypatch.setattr(learner, "run_learner", publishing(0))
    assert colocated.main(args) == 0 and scored.is_set()


def test_told_to_stop_the_learner_leaves_first(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    def lived(args: RoleArgs, stop: threading.Event, beside: learner.ColocationHooks) -> int:
        code = publishing(EXIT_INTERRUPTED)(args, stop, beside)
        assert not any(life.asked.is_set() for life in LIVES.values())
        return code

    monkeypatch.setattr(learner, "run_learner", lived)
    assert colocated.main(args) == EXIT_INTERRUPTED
    assert [life.ended.is_set() for life in LIVES.values()] == [True] * 3


def test_told_to_stop_during_the_last_evaluation_it_leaves(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Callable[[], object]] = []
    monkeypatch.setattr(colocated.lifeline, "on_stop", handlers.append)

    def plays(life: FakeLife) -> None:
        if life.part.role == "evaluator":  # only now is the learner done
            threading.Timer(0.2, handlers[0]).start()
            until_asked(life)

    monkeypatch.setattr(FakeLife, "plays", plays)
    monkeypatch.setattr(learner, "run_learner", publishing(0))
    began = time.monotonic()
    assert colocated.main(args) == 0, "all steps are trained"
    assert time.monotonic() - began < LIMIT_S / 2


def test_where_nothing_is_published_nobody_begins(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run that is over is resumed: what the store knows of weights is of a life that has ended."""
    monkeypatch.setattr(learner, "run_learner", lambda args, stop, beside: 0)
    assert colocated.main(args) == 0
    assert [(life.begun.is_set(), life.closed) for life in LIVES.values()] == [(False, True)] * 3


def failing(name: str, then: Callable[[FakeLife], None]) -> Callable[[FakeLife], None]:
    def plays(life: FakeLife) -> None:
        if life.part.role == name:
            raise InfraError("the store is gone")
        then(life)

    return plays


def test_an_error_of_a_part_stops_the_learner_and_is_the_error_of_the_process(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLife, "plays", failing("sampler-1", until_asked))
    monkeypatch.setattr(learner, "run_learner", publishing(EXIT_INTERRUPTED, wait=True))
    with pytest.raises(InfraError, match="the store is gone"):
        colocated.main(args)
    assert all(LIVES[name].ended.is_set() for name in ("sampler-0", "evaluator"))
    assert "the store is gone" in capsys.readouterr().err


def test_an_error_after_the_last_step_is_said_and_does_not_have_all_begin_again(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLife, "plays", failing("evaluator", lambda _: None))
    monkeypatch.setattr(learner, "run_learner", publishing(0))
    assert colocated.main(args) == 0
    assert "the store is gone" in capsys.readouterr().err


def test_an_error_of_a_sampler_at_the_end_does_not_cost_the_last_evaluation(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plays(life: FakeLife) -> None:
        assert life.part.role != "evaluator" or not life.asked.wait(0.3), "asked to leave before its last answers"

    monkeypatch.setattr(FakeLife, "plays", failing("sampler-0", plays))
    monkeypatch.setattr(learner, "run_learner", publishing(0))
    assert colocated.main(args) == 0
    assert LIVES["evaluator"].ended.is_set()


def test_told_to_stop_before_there_are_weights_nobody_begins(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Callable[[], object]] = []
    monkeypatch.setattr(colocated.lifeline, "on_stop", handlers.append)

    def lived(args: RoleArgs, stop: threading.Event, beside: learner.ColocationHooks) -> int:
        handlers[0]()
        beside.published()
        return EXIT_INTERRUPTED

    monkeypatch.setattr(learner, "run_learner", lived)
    assert colocated.main(args) == EXIT_INTERRUPTED
    assert not any(life.begun.is_set() for life in LIVES.values()) and all(life.closed for life in LIVES.values())


def test_an_error_of_the_learner_ends_the_others(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "run_learner", publishing(InfraError("no checkpoint")))
    with pytest.raises(InfraError, match="no checkpoint"):
        colocated.main(args)
    assert all(life.ended.is_set() for life in LIVES.values())


def test_who_does_not_leave_is_named(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()

    def plays(life: FakeLife) -> None:
        until_asked(life)
        assert life.part.role != "evaluator" or late.wait(LIMIT_S)

    monkeypatch.setattr(colocated, "LEAVE_S", 0.2)
    monkeypatch.setattr(FakeLife, "plays", plays)
    monkeypatch.setattr(learner, "run_learner", publishing(EXIT_INTERRUPTED))
    try:
        with pytest.raises(InfraError, match=r"evaluator did not leave within 0\.2 s"):
            colocated.main(args)
    finally:
        late.set()
