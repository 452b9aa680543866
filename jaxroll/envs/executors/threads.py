"""Blocking calls of environments, on threads that nobody has to wait for.

A call that takes longer than its limit is abandoned: its thread is left to itself, ends when the call ever returns, and
is replaced as work comes. The standard library's executor would wait for such a thread when the process ends, and would
count it as a worker forever; therefore these threads are daemons and are counted here.

Threads: `call` belongs to the event loop; `_work` is what a worker thread runs. They meet in a queue and in one lock.
One thread is started at a time, by the one that was started before it, so that the loop waits for none to come up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxroll.errors import DataError, InfraError

T = TypeVar("T")
HANGING_SHARE, HANGING_LEAST = 4, 4  # the fourth part of all threads may hang, and four in any case
IDLE_S = 10.0  # a thread without work for so long ends


class Abandoned(DataError):
    """A call took too long; a thread is still inside it."""


@dataclass(eq=False)
class _Call:
    job: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    started_s: float | None = None
    finished: bool = False
    abandoned: bool = False

    def left_s(self, limit_s: float) -> float:
        """Seconds until it is overdue; waiting for a thread costs none."""
        return limit_s if self.started_s is None else self.started_s + limit_s - time.monotonic()


class Threads:
    """At most `most` threads at work, and a quarter as many that were abandoned and have not come back.

    `abandoned` counts the calls that ever were, `hanging` those that still hold a thread. When these are too many,
    `worn` is set and every call raises InfraError: the process is to be started again.
    """

    def __init__(self, most: int = 1024) -> None:
        self.abandoned = self.hanging = self.started = 0
        self.worn = asyncio.Event()
        self._most, self._most_hanging = most, max(HANGING_LEAST, most // HANGING_SHARE)
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._live = self._idle = self._waiting = 0
        self._starting = False  # a thread that has not come up yet

    @property
    def live(self) -> int:
        """Threads that work or wait for work."""
        return self._live

    async def call(self, job: Callable[[], T], limit_s: float, what: str) -> T:
        """What `job` returns or raises. Abandoned when it takes longer than `limit_s` from its start on a thread.

        Cancelling gives the thread up to the job, too: nothing can interrupt it.
        """
        if self.hanging >= self._most_hanging:
            raise InfraError(f"{self.hanging} threads hang in environments: no other is given to one")
        loop = asyncio.get_running_loop()
        call = _Call(job, loop.create_future(), loop)
        try:
            self._submit(call)
            while not call.future.done():
                left_s = call.left_s(limit_s)
                if left_s <= 0:
                    self.abandoned += 1
                    raise Abandoned(f"the environment's {what} took longer than {limit_s:g} s; its thread was given up")
                await asyncio.wait([call.future], timeout=None if math.isinf(left_s) else left_s)
            return call.future.result()
        finally:
            if not call.future.done():
                self._give_up(call)

    def _submit(self, call: _Call) -> None:
        with self._lock:
            self._waiting += 1
            self._calls.put(call)
            start = self._wants_another()
        if start:
            self._start()

    def _wants_another(self) -> bool:
        """True if to start a thread, which then counts as idle already. Only with the lock."""
        if self._starting or self._waiting <= self._idle or self._live >= self._most:
            return False
        self._live, self._idle, self.started = self._live + 1, self._idle + 1, self.started + 1
        self._starting = True
        return True

    def _start(self) -> None:
        """Start the thread that was promised. Where there can be none at all, all calls that wait get InfraError."""
        try:
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        except RuntimeError as error:  # the machine's limit, below ours: those that there are go on
            with self._lock:
                self._starting = False
                self._live, self._idle, self.started = self._live - 1, self._idle - 1, self.started - 1
                if not self._live:
                    self._refuse_waiting(f"no thread can be started for environments: {error}")

    def _refuse_waiting(self, reason: str) -> None:
        """Fail the calls that no thread has taken. Only with the lock."""
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                self._waiting -= 1
                if not call.abandoned:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        call.loop.call_soon_threadsafe(_settle, call.future, None, InfraError(reason))

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            call.abandoned = True
            if call.started_s is not None and not call.finished:
                self.hanging, self._live = self.hanging + 1, self._live - 1
            start = self._wants_another()  # others may have been waiting for this thread
            if self.hanging >= self._most_hanging:
                self.worn.set()
        if start:
            self._start()

    def _work(self) -> None:
        with self._lock:
            self._starting = False
            start = self._wants_another()
        if start:
            self._start()
        while True:
            try:
                call = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                if self._retired():
                    return
                continue
            with self._lock:
                self._waiting -= 1
                if call.abandoned:
                    continue
                self._idle -= 1
                call.started_s = time.monotonic()
                start = self._wants_another()
            if start:
                self._start()
            if not self._finished(call):
                return

    def _retired(self) -> bool:
        with self._lock:
            if self._waiting:
                return False
            self._live, self._idle = self._live - 1, self._idle - 1
            return True

    def _finished(self, call: _Call) -> bool:
        """Do the job and tell whoever waits; False when nobody does any more and this thread was replaced."""
        try:
            result, error = call.job(), None
        except BaseException as raised:  # noqa: BLE001 - foreign code, and the thread must outlive it
            result, error = None, raised
        with self._lock:
            if call.abandoned:
                self.hanging -= 1
                return False
            call.finished = True
            self._idle += 1
        with contextlib.suppress(RuntimeError):  # the loop is closed
            call.loop.call_soon_threadsafe(_settle, call.future, result, error)
        return True


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a future takes no StopIteration; SystemExit is the environment's, not ours
        future.set_exception(DataError(f"the environment raised {type(error).__name__}: {error}"))
