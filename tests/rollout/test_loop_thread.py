"""The event loop of a role continues after exits of foreign code; if it is lost, its jobs fail with the cause."""

from __future__ import annotations

import asyncio
import errno
import gc
import inspect
import io
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from jaxroll import loop_thread
from jaxroll.envs.executors import EnvironmentCalls
from jaxroll.errors import InfraError
from jaxroll.loop_thread import LoopThread, ended
from jaxroll.protocols import StepResult

DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def tasks_are_collected() -> Iterator[None]:
    """asyncio reports the lost tasks of these tests when they are collected, and Python 3.11 parses source for that
    report: in the middle of another test's `ast.parse`, that one fails."""
    yield
    gc.collect()


def closed(thread: LoopThread) -> None:
    """Close the thread and its loop, which a role leaves open until its process ends."""
    thread.close()
    thread.loop.close()


async def leaves(how: str) -> None:
    """A stray task raises past the loop."""

    async def stray() -> None:
        if how == "exit":
            sys.exit(0)
        if how == "interrupt":
            raise KeyboardInterrupt
        asyncio.get_running_loop().stop()

    await asyncio.wait([asyncio.ensure_future(stray())])


@pytest.mark.parametrize("how", ["exit", "interrupt", "stop"])
def test_the_loop_goes_on_after_an_exit_of_a_stray_task(how: str) -> None:
    thread = LoopThread("test")

    async def job() -> str:
        await leaves(how)
        await asyncio.sleep(0.01)
        return "still here"

    assert thread.start(job()).result(DEADLINE_S) == "still here"
    assert thread.escapes == 1 and not thread.failure
    closed(thread)


def test_a_loop_that_is_lost_fails_its_jobs_with_the_cause() -> None:
    thread = LoopThread("test")
    waiting = thread.start(asyncio.Event().wait())

    def broken(*_: object) -> list[object]:
        raise OSError("the selector is gone")

    thread.loop._selector.select = broken  # type: ignore[attr-defined]
    thread.loop.call_soon_threadsafe(lambda: None)
    with pytest.raises(InfraError, match="the selector is gone"):
        waiting.result(DEADLINE_S)
    with pytest.raises(InfraError, match="the selector is gone"):
        thread.start(late := asyncio.sleep(0)).result(DEADLINE_S)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED, "or Python warns that it was never awaited"
    closed(thread)


def test_a_blocked_loop_fails_its_jobs_and_names_the_task_and_the_line() -> None:
    thread = LoopThread("test", blocked_s=1.5)
    waiting = thread.start(asyncio.Event().wait())
    free = threading.Event()

    async def blocks() -> None:
        free.wait(DEADLINE_S)

    async def job() -> None:
        await asyncio.get_running_loop().create_task(blocks(), name="Bad.step")

    thread.start(job())
    with pytest.raises(InfraError, match=r"Bad\.step blocked the event loop.*threading"):
        waiting.result(DEADLINE_S)
    free.set()
    closed(thread)


class Blocks:
    """An environment whose step blocks the event loop until `free`."""

    step_limit_s = DEADLINE_S

    def __init__(self, free: threading.Event) -> None:
        self.free, self.blocks = free, threading.Event()

    async def step(self, answer: str) -> StepResult:
        self.blocks.set()
        self.free.wait(DEADLINE_S)
        await asyncio.sleep(0)
        return StepResult(done=True, reward=1.0)


def test_another_thread_takes_the_loop_over_from_an_environment_that_blocks_it() -> None:
    """Jobs that began before go on there; the call itself goes on where it blocks, and its result counts."""
    thread, calls, free = LoopThread("test", hand_over_s=0.2), EnvironmentCalls(), threading.Event()
    env, began, go_on = Blocks(free), threading.Event(), asyncio.Event()

    async def other() -> int:
        began.set()
        await go_on.wait()
        return threading.get_ident()

    before = thread.start(other())
    assert began.wait(DEADLINE_S)
    blocked = thread.start(calls.step(env, ""))  # type: ignore[arg-type]
    assert env.blocks.wait(DEADLINE_S)
    thread.loop.call_soon_threadsafe(go_on.set)
    idents = {before.result(DEADLINE_S), thread.start(other()).result(DEADLINE_S)}
    assert not blocked.done() and thread.loop.blocked == 1 and len(idents) == 1
    free.set()
    assert blocked.result(DEADLINE_S).reward == 1.0
    until_s = time.monotonic() + DEADLINE_S
    while thread.loop.blocked and time.monotonic() < until_s:
        time.sleep(0.01)
    assert thread.loop.blocked == 0, "the thread that was blocked takes callbacks of the loop"
    assert thread.start(other()).result(DEADLINE_S) in idents
    ((cause, times),) = calls.counts.faults.items()
    assert cause.startswith("Blocks.step blocked the event loop at ") and times == 1 and not thread.failure
    closed(thread)


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_loop_is_taken_over_twice_although_nothing_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a role may be on a full disk."""
    monkeypatch.setattr(sys, "stderr", FullDisk())
    thread, calls, free = LoopThread("test", hand_over_s=0.2), EnvironmentCalls(), threading.Event()
    jobs = []
    for _ in range(2):
        env = Blocks(free)
        jobs.append(thread.start(calls.step(env, "")))  # type: ignore[arg-type]
        assert env.blocks.wait(DEADLINE_S)
    assert thread.start(asyncio.sleep(0, "runs")).result(DEADLINE_S) == "runs"
    free.set()
    assert [job.result(DEADLINE_S).reward for job in jobs] == [1.0, 1.0]
    closed(thread)


def test_a_thread_that_lost_the_loop_waits_quietly_after_the_loop_is_closed(capfd: pytest.CaptureFixture[str]) -> None:
    """It waits forever: with its end, the child processes that it started would end too."""
    thread, calls, free = LoopThread("test", hand_over_s=0.2), EnvironmentCalls(), threading.Event()
    blocked, lost = thread.start(calls.step(Blocks(free), "")), thread._thread  # type: ignore[arg-type]
    until_s = time.monotonic() + DEADLINE_S
    while not thread.loop.blocked and time.monotonic() < until_s:
        time.sleep(0.01)
    closed(thread)
    free.set()
    while thread.loop.blocked and lost.is_alive() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert lost.is_alive() and not thread.loop.blocked and "RuntimeError" not in capfd.readouterr().err
    blocked.cancel()


def test_too_many_environments_that_block_the_loop_fail_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "MOST_BLOCKED", 1)
    thread, calls, free = LoopThread("test", blocked_s=1.5, hand_over_s=0.2), EnvironmentCalls(), threading.Event()
    jobs = [thread.start(calls.step(Blocks(free), "")) for _ in range(2)]  # type: ignore[arg-type]
    with pytest.raises(InfraError, match=r"Blocks\.step blocked the event loop"):
        jobs[0].result(DEADLINE_S)
    free.set()
    closed(thread)


def test_a_busy_loop_is_not_taken_for_a_blocked_one() -> None:
    thread = LoopThread("test", blocked_s=4.0, hand_over_s=4.0)  # a callback of 0.2 s takes longer on a busy machine

    async def job() -> None:
        until_s = time.monotonic() + 6.0
        while time.monotonic() < until_s:
            time.sleep(0.2)
            await asyncio.sleep(0)

    thread.start(job()).result(DEADLINE_S)
    assert not thread.failure
    closed(thread)


def test_a_loop_that_waits_is_not_handed_over_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """As on a machine so slow that the loop has not answered yet, although nothing blocks it."""
    thread = LoopThread("test")
    assert not thread._hand_over(silent_s=3.0)
    closed(thread)
    out, err = capfd.readouterr()
    assert "run_forever" not in err and "blocked the event loop" not in out


def test_a_session_that_foreign_code_cancels_ends_with_that_cause() -> None:
    thread = LoopThread("test")

    async def cancels_all() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    session = thread.start(asyncio.Event().wait())
    thread.start(cancels_all())
    with pytest.raises(InfraError, match="cancelled the session"):
        ended(session, DEADLINE_S)
    closed(thread)


def test_a_process_ends_whose_main_thread_starts_a_thread_that_never_runs() -> None:
    """As without memory: the new thread dies before its first line, and `Thread.start` waits for it without end."""
    code = (
        "import threading\n"
        "from jaxroll import loop_thread\n"
        "loop_thread._WATCH_EVERY_S, loop_thread._START_S = 0.05, 0.3\n"
        "loop = loop_thread.LoopThread('learner')\n"
        "threading._start_new_thread = lambda *_: 1\n"
        "threading.Thread(target=print, name='late').start()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "learner: the thread late did not start, as if out of memory\n")


def test_the_watchdog_reads_no_frames_of_a_thread_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They change while they are read. In a long run that ended a watchdog, so that nothing watched the loop."""
    read, frames, enough = list[int](), sys._current_frames, threading.Event()
    answers, answer = itertools.count(1), LoopThread._answer

    def answered(self: LoopThread) -> None:
        answer(self)  # or the loop counts as blocked after a while, and its frames may be read
        if next(answers) == 5:
            enough.set()

    monkeypatch.setattr(loop_thread, "_WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(LoopThread, "_answer", answered)
    monkeypatch.setattr(sys, "_current_frames", lambda: read.append(1) or frames())
    thread = LoopThread("test")
    assert enough.wait(DEADLINE_S) and not read
    closed(thread)


@pytest.mark.parametrize(("callbacks", "code"), [(9, 0), (10, 1)])
def test_a_process_ends_whose_loop_has_no_memory_again_and_again(callbacks: int, code: int) -> None:
    """As a learner did not: its loop could not read the byte that wakes it, and tried again without end."""
    program = f"""
import asyncio, gc
from jaxroll.loop_thread import LoopThread
def callback():
    raise MemoryError
async def task():
    raise MemoryError
async def job():
    for _ in range(20):
        asyncio.ensure_future(task())  # its error is never fetched
    for _ in range({callbacks}):
        asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(0.01)
    gc.collect()
    await asyncio.sleep(0.01)
LoopThread("learner").start(job()).result({DEADLINE_S})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("learner: MemoryError in 10 callbacks" in done.stdout) == bool(code)
    assert done.stderr.count("never retrieved") == 20, "errors of tasks are reported and do not count"
