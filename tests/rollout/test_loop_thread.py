"""The event loop of a role continues after exits of foreign code; if it is lost, its jobs fail with the cause."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time

import pytest

from jaxroll.errors import InfraError
from jaxroll.roles.session import ended
from jaxroll.rollout.manager import LoopThread

DEADLINE_S = 60.0


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


def test_a_busy_loop_is_not_taken_for_a_blocked_one() -> None:
    thread = LoopThread("test", blocked_s=1.5)

    async def job() -> None:
        until_s = time.monotonic() + 4.0
        while time.monotonic() < until_s:
            time.sleep(0.2)
            await asyncio.sleep(0)

    thread.start(job()).result(DEADLINE_S)
    assert not thread.failure
    closed(thread)


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
        "from jaxroll.rollout import manager\n"
        "manager._WATCH_EVERY_S, manager._START_S = 0.05, 0.3\n"
        "loop = manager.LoopThread('learner')\n"
        "threading._start_new_thread = lambda *_: 1\n"
        "threading.Thread(target=print, name='late').start()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "learner: the thread late did not start, as if out of memory\n")


@pytest.mark.parametrize(("callbacks", "code"), [(9, 0), (10, 1)])
def test_a_process_ends_whose_loop_has_no_memory_again_and_again(callbacks: int, code: int) -> None:
    """As a learner did not: its loop could not read the byte that wakes it, and tried again without end."""
    program = f"""
import asyncio, gc
from jaxroll.rollout.manager import LoopThread
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
