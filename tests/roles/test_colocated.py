"""Roles that share a process end together: by the learner's end, by anybody's error, or when told to."""

from __future__ import annotations

import threading
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

    def __init__(self, part: sessions.Part, args: RoleArgs) -> None:
        self.part, self.asked, self.ended = part, threading.Event(), threading.Event()
        self.session = SimpleNamespace(request_stop=self.asked.set)
        LIVES[part.role] = self

    def open(self) -> SimpleNamespace:
        return self.session

    def run(self, turn: object) -> None:
        type(self).plays(self)
        self.ended.set()


LIVES: dict[str, FakeLife] = {}


def until_asked(life: FakeLife) -> None:
    assert life.asked.wait(LIMIT_S)


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoleArgs:
    """Two samplers, an evaluator and a learner of a config, none of them real."""
    LIVES.clear()
    monkeypatch.setattr(sessions, "Life", FakeLife)
    monkeypatch.setattr(sessions, "show_when_asked", lambda *_: None)
    monkeypatch.setattr(colocated.signal, "signal", lambda *_: None)
    monkeypatch.setattr(FakeLife, "plays", until_asked, raising=False)
    settings = configs.parse(configs.override(configs.defaults().to_dict(), ["sampler.count=2"]))
    return RoleArgs(settings, tmp_path)


def test_every_role_with_devices_has_a_part_and_the_evaluator_only_where_it_is_wanted(args: RoleArgs) -> None:
    assert [part.role for part in colocated.parts(args)] == ["sampler-0", "sampler-1", "evaluator"]
    silent = replace(args, config=replace(args.config, evaluator=replace(args.config.evaluator, every=0)))
    assert [part.role for part in colocated.parts(silent)] == ["sampler-0", "sampler-1"]


def test_when_the_learner_is_done_the_last_evaluation_is_waited_for(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = threading.Event()

    def plays(life: FakeLife) -> None:
        if life.part.role == "evaluator":
            assert not life.asked.wait(0.3), "asked to leave before its last answers"
            scored.set()

    monkeypatch.setattr(FakeLife, "plays", plays)
    monkeypatch.setattr(learner, "lived", lambda args, stop, trainer: 0)
    assert colocated.main(args) == 0 and scored.is_set()


def test_told_to_stop_the_learner_leaves_first(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    def lived(args: RoleArgs, stop: threading.Event, trainer: object) -> int:
        assert not any(life.asked.is_set() for life in LIVES.values())
        return EXIT_INTERRUPTED

    monkeypatch.setattr(learner, "lived", lived)
    assert colocated.main(args) == EXIT_INTERRUPTED
    assert [life.ended.is_set() for life in LIVES.values()] == [True] * 3


def test_an_error_of_a_part_stops_the_learner_and_is_the_error_of_the_process(
    args: RoleArgs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plays(life: FakeLife) -> None:
        if life.part.role == "sampler-1":
            raise InfraError("the store is gone")
        until_asked(life)

    def lived(args: RoleArgs, stop: threading.Event, trainer: object) -> int:
        assert stop.wait(LIMIT_S), "the learner was not told"
        return EXIT_INTERRUPTED

    monkeypatch.setattr(FakeLife, "plays", plays)
    monkeypatch.setattr(learner, "lived", lived)
    with pytest.raises(InfraError, match="the store is gone"):
        colocated.main(args)
    assert all(LIVES[name].ended.is_set() for name in ("sampler-0", "evaluator"))
    assert "the store is gone" in capsys.readouterr().err, "said when it happened, not when all had left"


def test_an_error_of_the_learner_ends_the_others(args: RoleArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    def lived(args: RoleArgs, stop: threading.Event, trainer: object) -> int:
        raise InfraError("no checkpoint")

    monkeypatch.setattr(learner, "lived", lived)
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
    monkeypatch.setattr(learner, "lived", lambda args, stop, trainer: EXIT_INTERRUPTED)
    try:
        with pytest.raises(InfraError, match=r"evaluator did not leave within 0\.2 s"):
            colocated.main(args)
    finally:
        late.set()
