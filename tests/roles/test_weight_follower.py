"""Following the published weights through failures: each is reported once, and the pauses grow."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from jaxroll.errors import DigestMismatch, InfraError, TransferError
from jaxroll.records import Version, VersionRef
from jaxroll.roles import weights
from jaxroll.store.messages import PublishedReply


class Script:
    """A store that publishes and a follower's transfer that fails, both as a list says; ends when the list does."""

    def __init__(self, *steps: tuple[VersionRef, Exception | None]) -> None:
        self.steps, self.pauses, self.lines = list(steps), [], []

    async def announced(self, known: Version | None, wait_s: float, **_: Any) -> PublishedReply:
        if not self.steps:
            raise asyncio.CancelledError
        return PublishedReply(self.steps[0][0])

    async def load(self, snapshot: VersionRef, relays: tuple[()]) -> None:
        announced, error = self.steps.pop(0)
        assert snapshot == announced
        if error is not None:
            raise error

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)


def followed(script: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    """`script` after it was followed to its end."""
    nothing: Any = None
    follower = weights.WeightFollower(nothing, nothing, script.lines.append)
    monkeypatch.setattr(follower, "load", script.load)
    monkeypatch.setattr(weights.asyncio, "sleep", script.sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follower.follow(script))
    return script


def version_ref(step: int, address: str = "here") -> VersionRef:
    return VersionRef(Version(0, step), "tcp", address, "digest")


def test_a_learner_that_is_down_costs_one_line_and_ever_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = TransferError("no parameters from here")
    script = followed(Script(*[(version_ref(1), gone)] * 7, (version_ref(1), None)), monkeypatch)
    assert script.pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert script.lines == ["weights 0.1: TransferError: no parameters from here", "weights 0.1: fetched at attempt 8"]


def test_another_kind_of_failure_and_another_version_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, damaged = TransferError("gone"), DigestMismatch("damaged")
    steps = [
        (version_ref(1), gone),
        (version_ref(1), damaged),
        (version_ref(1), damaged),
        (version_ref(1, "there"), damaged),
        (version_ref(2), None),
    ]
    script = followed(Script(*steps), monkeypatch)
    assert script.pauses == [0.2, 0.4, 0.8, 0.2], "a new address is tried as patiently as the first"
    assert [line.partition(":")[2].split(":")[0].strip() for line in script.lines] == [
        "TransferError",
        "DigestMismatch",
        "DigestMismatch",
    ]


def test_a_process_without_free_descriptors_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    starved = TransferError("no parameters from here: [Errno 24] Too many open files")
    script = Script(*[(version_ref(1 + number // 3), starved) for number in range(20)])
    nothing: Any = None
    follower = weights.WeightFollower(nothing, nothing, script.lines.append)
    monkeypatch.setattr(follower, "load", script.load)
    monkeypatch.setattr(weights.asyncio, "sleep", script.sleep)
    with pytest.raises(InfraError, match="ulimit -n"):
        asyncio.run(follower.follow(script))
    assert len(script.pauses) == 7


def test_a_shortage_of_descriptors_that_passes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    starved = TransferError("no parameters from here: [Errno 24] Too many open files")
    steps = [
        *[(version_ref(1), starved)] * 5,
        (version_ref(1), None),
        *[(version_ref(2), starved)] * 5,
        (version_ref(2), None),
    ]
    assert followed(Script(*steps), monkeypatch).steps == []


def test_weights_that_come_at_once_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert followed(Script((version_ref(1), None), (version_ref(2), None)), monkeypatch).lines == []


async def fetched(ref: VersionRef) -> Any:
    return SimpleNamespace(fetched_bytes=4)


class SlowEngine:
    """A host and its engine, which computes with the new weights after `looks` calls of `stats`."""

    def __init__(self, looks: int) -> None:
        self.engine, self.left, self.calls = self, looks, 0

    def call(self, job: Any) -> Future:
        """Accept the job without running it."""
        done: Future = Future()
        done.set_result(None)
        return done

    def stats(self) -> Any:
        self.calls += 1
        self.left -= 1
        return SimpleNamespace(version=Version(0, 1) if self.left < 0 else Version(0, 0))


@pytest.mark.parametrize(("in_force_s", "looks", "calls"), [(60.0, 7, 8), (60.0, 0, 1), (0.0, 7, 0)])
def test_with_rolling_updates_a_load_ends_when_the_engine_computes_with_the_weights(in_force_s, looks, calls) -> None:
    """Otherwise when the engine was handed the weights; the span ends then."""
    engine: Any = SlowEngine(looks)
    spans: list[tuple[str, int]] = []
    progress: Any = SimpleNamespace(span=lambda what, *_, **__: spans.append((what, engine.calls)))
    arriving: Any = SimpleNamespace(fetch=fetched)
    follower = weights.WeightFollower(engine, arriving, progress, in_force_s)
    asyncio.run(follower.load(version_ref(1)))
    assert spans == [("fetch", calls), ("weight_swap", calls)]
    assert follower.version == Version(0, 1)


def test_the_wait_for_a_weight_swap_is_bounded() -> None:
    engine: Any = SlowEngine(10**9)
    progress: Any = SimpleNamespace(span=lambda *_, **__: None)
    arriving: Any = SimpleNamespace(fetch=fetched)
    follower = weights.WeightFollower(engine, arriving, progress, in_force_s=0.05)
    asyncio.run(asyncio.wait_for(follower.load(version_ref(1)), 20.0))
    assert engine.calls >= 1
