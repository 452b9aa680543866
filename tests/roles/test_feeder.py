"""The store's end of the prompt feeder: timeouts count from the last progress message, and errors name the cause."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from jaxroll.errors import InfraError
from jaxroll.roles.store import FeederProcess

pytestmark = pytest.mark.process

CHILD = """
import pathlib, struct, sys, time
from jaxroll import wire
from jaxroll.records import Task
from jaxroll.roles.store import FeedReply

def send(reply):
    data = wire.encode(reply)
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()

starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
life = len(starts.read_text())
"""
SLOW = """
for part in range(8):
    send(FeedReply(progress=f"part {part}"))
    time.sleep(0.5)
send(FeedReply(((Task(0, (), "e", "{}", 0, "q"), b"1"),)))
time.sleep(60)
"""
HANGS = """
send(FeedReply(progress="it opens the data"))
time.sleep(600)
"""
HANGS_ONCE = (
    """
if life == 1:
    time.sleep(600)
"""
    + SLOW
)


def feeder(tmp_path: Path, body: str, deadline_s: float) -> FeederProcess:
    (tmp_path / "child.py").write_text(CHILD + body)
    command = [sys.executable, str(tmp_path / "child.py"), str(tmp_path / "starts")]
    return FeederProcess(tmp_path, deadline_s=deadline_s, command=command)


def asked(tmp_path: Path, body: str, deadline_s: float):
    async def ask():
        one = feeder(tmp_path, body, deadline_s)
        try:
            return await one.next(1)
        finally:
            await one.close()

    return asyncio.run(asyncio.wait_for(ask(), 120.0))


def test_a_child_that_makes_progress_may_take_longer_than_the_deadline(tmp_path: Path) -> None:
    """Its answer takes 4 s with a sign of progress every half second; the first sign has a longer way to come."""
    assert [task.index for task, _ in asked(tmp_path, SLOW, deadline_s=3.0)] == [0]
    assert len((tmp_path / "starts").read_text()) <= 2, "a machine under load may start the first one too slowly"


def test_a_child_without_progress_is_started_again(tmp_path: Path) -> None:
    assert [task.index for task, _ in asked(tmp_path, HANGS_ONCE, deadline_s=3.0)] == [0]
    assert len((tmp_path / "starts").read_text()) >= 2


@pytest.mark.soak
def test_three_children_without_progress_end_it_with_what_they_were_at(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match=r"no progress for .*opens the data.*store's log"):
        asked(tmp_path, HANGS, deadline_s=2.0)
    assert len((tmp_path / "starts").read_text()) == 3


def test_three_children_that_end_are_named(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="it ended"):
        asked(tmp_path, "sys.exit(1)", deadline_s=20.0)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel has no descriptors of processes")
def test_a_child_needs_no_thread_that_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused thread ended the store, because RuntimeError is not among the errors of a child."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if "waitpid" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert [task.index for task, _ in asked(tmp_path, SLOW, deadline_s=20.0)] == [0]
