"""The asyncio loop thread of a role, with a watchdog, and the thread that runs its JAX jobs.

Environments run on this loop. A SystemExit or KeyboardInterrupt of a task that an environment started, and a
`loop.stop()` of its code, end `run_forever`, which is then entered again. If the thread ends nevertheless, or the loop
is blocked for longer than `blocked_s`, its jobs fail with that cause, so that the process ends instead of holding
leases without renewing them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from jaxroll.errors import EXIT_FAILURE, InfraError
from jaxroll.protocols import described

T = TypeVar("T")
BLOCKED_S = 60.0
_WATCH_EVERY_S = 1.0
_START_S = 20.0  # in which a thread has started, also on a machine that swaps
_FRAMES = 12  # of the blocked thread, for its error


class LoopThread:
    """An asyncio loop on a thread of its own, ended by `close`.

    `escapes` counts the exceptions and stops of foreign code that ended `run_forever`; `failure` is the reason why the
    loop can no longer be used.
    """

    def __init__(self, name: str, blocked_s: float = BLOCKED_S) -> None:
        self.loop, self.escapes, self.failure = asyncio.new_event_loop(), 0, ""
        self._name, self._blocked_s, self._closing = name, blocked_s, threading.Event()
        self._jobs: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._lock = threading.Lock()
        self._alive_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"{name}-loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name=f"{name}-loop-watch", daemon=True).start()

    def start(self, job: Coroutine[Any, Any, Any]) -> Future[Any]:
        """The future result of `job`, which runs on the loop. It is an InfraError if the loop ends or blocks before."""
        if self.failure:
            job.close()
            future: Future[Any] = Future()
            future.set_exception(InfraError(self.failure))
            return future
        future = asyncio.run_coroutine_threadsafe(job, self.loop)
        with self._lock:
            self._jobs[future] = job
        future.add_done_callback(self._forget)
        if self.failure:  # since the test above
            self._fail(self.failure)
        return future

    def close(self) -> None:
        """Stop the loop, join its thread, and close the loop unless a callback still blocks it."""
        self._closing.set()
        with contextlib.suppress(RuntimeError):  # it is closed already
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self.loop.close()

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._jobs.pop(future, None)

    def _run(self) -> None:
        cause = "its event loop ended"
        try:
            while not self._closing.is_set():
                try:
                    self.loop.run_forever()
                    what = "loop.stop()"
                except (SystemExit, KeyboardInterrupt) as error:
                    what = described(error)
                if not self._closing.is_set():
                    self.escapes += 1
                    print(f"{self._name}: {what} of foreign code left the event loop, which goes on", flush=True)
        except BaseException as error:  # noqa: BLE001 - the jobs fail with it, and the process with them
            traceback.print_exc()
            cause = f"its event loop ended: {described(error)}"
        if not self._closing.is_set():
            self._fail(f"{self._name}: {cause}")

    def _watch(self) -> None:
        """Fail the jobs when the loop has not answered for `blocked_s`.

        Only seconds in which this thread ran count, so that a process that was suspended does not fail. The process
        ends if its main thread starts a thread that never runs.
        """
        silent_s, starting_s, last_s, seen_s = 0.0, 0.0, time.monotonic(), self._alive_s
        starting: threading.Thread | None = None
        while not self._closing.wait(_WATCH_EVERY_S) and self._thread.is_alive():
            now_s = time.monotonic()
            watched_s = min(now_s - last_s, 2 * _WATCH_EVERY_S)
            silent_s = silent_s + watched_s if self._alive_s == seen_s else 0.0
            last_s, seen_s, before, starting = now_s, self._alive_s, starting, _starting_thread()
            starting_s = starting_s + watched_s if starting is not None and starting is before else 0.0
            if starting is not None and starting_s >= _START_S:
                print(f"{self._name}: the thread {starting.name} did not start, as if out of memory", flush=True)
                os._exit(EXIT_FAILURE)
            if silent_s >= self._blocked_s:
                self._fail(f"{self._name}: {self._blocked(silent_s)}")
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._alive_s = time.monotonic()

    def _blocked(self, silent_s: float) -> str:
        """Description of the task that blocks the loop, with its source line."""
        task = asyncio.current_task(self.loop)
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        for line in traceback.format_list(stack):
            print(line, end="", file=sys.stderr, flush=True)
        where = f" at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""
        name = "a callback" if task is None else f"the task {task.get_name()}"
        return (
            f"{name} blocked the event loop for {silent_s:.0f} s{where}. Run an environment that blocks with "
            'place = "thread" or "process"'
        )

    def _fail(self, cause: str) -> None:
        self.failure = cause
        with self._lock:
            jobs = dict(self._jobs)
        for future, job in jobs.items():
            with contextlib.suppress(InvalidStateError):  # it ended meanwhile
                future.set_exception(InfraError(cause))
            if inspect.getcoroutinestate(job) == inspect.CORO_CREATED:  # the loop will not start it any more
                job.close()


def _starting_thread() -> threading.Thread | None:
    """The thread that the main thread starts now, if any.

    Without memory a new thread may die before its first line: `Thread.start` then waits without end, and nothing is
    reported (seen with Python 3.11).
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not threading.Thread.start.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


class DeviceThread:
    """Runs jobs of an event loop, one at a time, on the thread that calls `run`: the only one that uses JAX."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()

    async def __call__(self, job: Callable[[], T]) -> T:
        """The result of `job`."""
        done: Future[T] = Future()
        self._jobs.put((job, done))
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        """Make `run` return after the jobs before."""
        self._jobs.put(None)

    def run(self) -> None:
        """Run jobs until `stop`."""
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(job())
            except Exception as error:  # noqa: BLE001 - the waiting coroutine raises it
                done.set_exception(error)
