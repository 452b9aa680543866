"""Following the published weights through failures: each is said once, and the pauses grow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxroll.errors import DigestMismatch, TransferError
from jaxroll.records import Snapshot, Version
from jaxroll.roles import weights


class Script:
    """A store that publishes and a follower's transfer that fails, both as a list says; ends when the list does."""

    def __init__(self, *steps: tuple[Snapshot, Exception | None]) -> None:
        self.steps, self.pauses, self.lines = list(steps), [], []

    async def published(self, known: Version | None, wait_s: float) -> Snapshot:
        if not self.steps:
            raise asyncio.CancelledError
        return self.steps[0][0]

    async def bring(self, snapshot: Snapshot) -> None:
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
    monkeypatch.setattr(follower, "bring", script.bring)
    monkeypatch.setattr(weights.asyncio, "sleep", script.sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follower.follow(script))
    return script


def snapshot(step: int, address: str = "here") -> Snapshot:
    return Snapshot(Version(0, step), "tcp", address, "digest")


def test_a_learner_that_is_down_costs_one_line_and_ever_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = TransferError("no parameters from here")
    script = followed(Script(*[(snapshot(1), gone)] * 7, (snapshot(1), None)), monkeypatch)
    assert script.pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert script.lines == [
        "weights 0.1: TransferError: no parameters from here", "weights 0.1: here at attempt 8"
    ]  # fmt: skip


def test_another_kind_of_failure_and_another_snapshot_are_news(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, damaged = TransferError("gone"), DigestMismatch("damaged")
    steps = [(snapshot(1), gone), (snapshot(1), damaged), (snapshot(1), damaged),
             (snapshot(1, "there"), damaged), (snapshot(2), None)]  # fmt: skip
    script = followed(Script(*steps), monkeypatch)
    assert script.pauses == [0.2, 0.4, 0.8, 0.2], "a new address is tried as patiently as the first"
    assert [line.partition(":")[2].split(":")[0].strip() for line in script.lines] == [
        "TransferError", "DigestMismatch", "DigestMismatch",
    ]  # fmt: skip


def test_weights_that_come_at_once_are_nothing_to_talk_about(monkeypatch: pytest.MonkeyPatch) -> None:
    assert followed(Script((snapshot(1), None), (snapshot(2), None)), monkeypatch).lines == []
