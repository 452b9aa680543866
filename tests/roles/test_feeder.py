"""The store's end of the prompt feeder: timeouts count from the last progress message, and errors name the cause."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.data.tasks import Candidates, PromptPipeline, WorkedTask
from jaxroll.errors import ConfigError, InfraError
from jaxroll.records import Task
from jaxroll.roles import store
from jaxroll.roles.store import FeederProcess, FeedReply, FeedRequest

pytestmark = pytest.mark.process
DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]

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
    send(FeedReply(progress="a part"))
send(FeedReply(((Task(0, (), "e", "{}", 0, "q"), b"1"),)))
time.sleep(60)
"""
HANGS = """
send(FeedReply(progress="it hangs"))
time.sleep(600)
"""
HANGS_ONCE = (
    """
if life == 1:
    send(FeedReply(progress="it hangs"))
    time.sleep(600)
"""
    + SLOW
)


class Clocked(FeederProcess):
    """Its loop's clock jumps forward by DEADLINE_S / 3 at each part, and by five times DEADLINE_S soon after the child
    says that it hangs."""

    later_s = 0.0

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        loop = asyncio.get_running_loop()
        real_s = loop.time
        loop.time = lambda: real_s() + self.later_s  # type: ignore[method-assign]
        return await super().next(count)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_doing" and value == "a part":
            self._jump(DEADLINE_S / 3)
        if name == "_doing" and value == "it hangs":
            asyncio.get_running_loop().call_later(0.2, self._jump, 5 * DEADLINE_S)

    def _jump(self, seconds: float) -> None:
        self.later_s += seconds


def feeder(tmp_path: Path, body: str) -> FeederProcess:
    (tmp_path / "child.py").write_text(CHILD + body)
    command = [sys.executable, str(tmp_path / "child.py"), str(tmp_path / "starts")]
    return Clocked(tmp_path, deadline_s=DEADLINE_S, command=command)


def asked(tmp_path: Path, body: str):
    async def ask():
        one = feeder(tmp_path, body)
        try:
            return await one.next(1)
        finally:
            await one.close()

    return asyncio.run(ask())


def test_a_child_that_makes_progress_may_take_longer_than_the_deadline(tmp_path: Path) -> None:
    """Its answer takes 2.7 times as long, with a sign of progress in each third of it."""
    assert [task.index for task, _ in asked(tmp_path, SLOW)] == [0]
    assert len((tmp_path / "starts").read_text()) == 1


def test_a_child_without_progress_is_started_again(tmp_path: Path) -> None:
    assert [task.index for task, _ in asked(tmp_path, HANGS_ONCE)] == [0]
    assert len((tmp_path / "starts").read_text()) >= 2


def test_three_children_without_progress_end_it_with_what_they_were_at(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match=r"no progress for .*it hangs.*store's log"):
        asked(tmp_path, HANGS)
    assert len((tmp_path / "starts").read_text()) == 3


def test_three_children_that_end_are_named(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="it ended"):
        asked(tmp_path, "sys.exit(1)")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel has no descriptors of processes")
def test_a_child_needs_no_thread_that_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused thread ended the store, because RuntimeError is not among the errors of a child."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if "waitpid" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert [task.index for task, _ in asked(tmp_path, SLOW)] == [0]


FAILS = """
sys.stdin.buffer.read(1)
send(FeedReply(error="the server is gone", may_pass=MAY_PASS))
time.sleep(60)
"""


@pytest.mark.parametrize(("may_pass", "error"), [("True", InfraError), ("False", ConfigError)])
def test_an_error_that_may_pass_is_not_one_of_the_config(tmp_path: Path, may_pass: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="the server is gone"):
        asked(tmp_path, FAILS.replace("MAY_PASS", may_pass))


@pytest.mark.parametrize("name", ["smoke", "two_tasks"])
def test_a_source_that_fails_for_a_while_gives_the_same_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in a mixture, which counts an item as drawn before it is made."""
    config, count = configs.load(ROOT / "configs" / f"{name}.py"), 6
    fresh = PromptPipeline(config)
    wanted = [(next(fresh), fresh.state()) for _ in range(count)]
    pipeline, calls, at, sent = PromptPipeline(config), itertools.count(), Candidates.at, list[FeedReply]()

    def failing(self: Candidates, index: int) -> WorkedTask:
        if next(calls) in (0, 3, 4):
            raise InfraError("the server is gone")
        return at(self, index)

    monkeypatch.setattr(Candidates, "at", failing)
    monkeypatch.setattr(store, "RETRY_PAUSES_S", (0.0, 0.0))
    reply = store._answer(pipeline, FeedRequest(count), sent.append)
    assert list(reply.tasks) == wanted
    assert ["the server is gone" in one.progress for one in sent if "source failed" in one.progress] == [True] * 3
    monkeypatch.setattr(Candidates, "at", gone)
    with pytest.raises(InfraError, match="the server is gone"):
        store._answer(pipeline, FeedRequest(count), sent.append)


def gone(self: Candidates, index: int) -> WorkedTask:
    raise InfraError("the server is gone")
