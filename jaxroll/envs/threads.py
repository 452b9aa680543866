"""Environments on daemon threads: an executor for their blocking calls, with time limits.

A call that exceeds its limit is abandoned: its thread ends if the call ever returns, and another thread is started
when there is work. ThreadPoolExecutor is not usable here: it would wait for such a thread at exit, and count it as a
worker forever.

Threads: `call` runs on the event loop, `_work` on worker threads; they share a queue and a lock. Each new thread
starts the next one if it is needed, so that the event loop never waits for a series of thread starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxroll import protocols
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Environment, StepResult
from jaxroll.records import Message, Task

T = TypeVar("T")
HANGING_SHARE, HANGING_LEAST = 4, 4  # a quarter of all threads may hang, and at least four
IDLE_S = 10.0  # a thread ends after this time without work
CANCEL_S = 5.0  # for a cancelled call to end: many are cancelled at once when members are aborted
LEFTOVER_LEAST = 256  # threads of a library that environments share are left over as well


class Abandoned(DataError):
    """A call took too long; a thread is still executing it."""


@dataclass(eq=False)
class _Call:
    job: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    started_s: float | None = None
    finished: bool = False
    abandoned: bool = False
    overdue: bool = False

    def left_s(self, limit_s: float) -> float:
        """Seconds until the call exceeds its limit; the time before its start on a thread does not count."""
        return limit_s if self.started_s is None else self.started_s + limit_s - time.monotonic()


class Threads:
    """At most `most` working threads, and up to a quarter as many that hang in abandoned calls.

    `abandoned` counts all abandoned calls, `hanging` those that still occupy a thread. When these are too many, `worn`
    is set and every call raises InfraError; the process must then be restarted. A cancelled call has `CANCEL_S` to end.
    """

    def __init__(self, most: int = 1024) -> None:
        self.abandoned = self.hanging = self.started = self.leftover = 0
        self._fresh = 0  # calls that were cancelled within `CANCEL_S`: most of them end at once
        self.worn = asyncio.Event()
        self._most, self._most_hanging = most, max(HANGING_LEAST, most // HANGING_SHARE)
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._live = self._idle = self._waiting = 0
        self._starting = False  # a thread is starting and does not run yet

    def note_leftover(self, count: int) -> None:
        """Take the number of threads that closed environments left running; `worn` is set if they are too many."""
        self.leftover = count
        if self.leftover >= max(LEFTOVER_LEAST, self._most_hanging):
            self.worn.set()

    @property
    def live(self) -> int:
        """The number of threads that work or wait for work."""
        return self._live

    async def call(self, job: Callable[[], T], limit_s: float, what: str) -> T:
        """Run `job` on a thread; return its result or raise its exception.

        Raises Abandoned when it takes longer than `limit_s` from its start on a thread, InfraError when too many
        threads hang. Cancelling abandons the thread too, because nothing can interrupt it.
        """
        if self._hang_too_many() or self.hanging >= 2 * self._most_hanging:
            raise InfraError(f"{self.hanging} threads hang in environments; no more are started")
        loop, context = asyncio.get_running_loop(), copy_context()
        call = _Call(lambda: context.run(job), loop.create_future(), loop)
        try:
            self._submit(call)
            while not call.future.done():
                left_s = call.left_s(limit_s)
                if left_s <= 0:
                    self.abandoned, call.overdue = self.abandoned + 1, True
                    raise Abandoned(f"the environment's {what} took longer than {limit_s:g} s; its thread is abandoned")
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
        """True if another thread must be started; it is counted as idle at once. The caller holds the lock."""
        if self._starting or self._waiting <= self._idle or self._live >= self._most:
            return False
        self._live, self._idle, self.started = self._live + 1, self._idle + 1, self.started + 1
        self._starting = True
        return True

    def _start(self) -> None:
        """Start a thread that `_wants_another` counted; if that fails and there is no other, fail waiting calls."""
        thread = threading.Thread(target=self._work, name="environment", daemon=True)
        try:
            Context().run(thread.start)  # not in the context of an environment, which does not own it
        except RuntimeError as error:  # the machine's limit is below ours; the existing threads continue
            with self._lock:
                self._starting = False
                self._live, self._idle, self.started = self._live - 1, self._idle - 1, self.started - 1
                if not self._live:
                    self._refuse_waiting(f"no thread can be started for environments: {error}")

    def _refuse_waiting(self, reason: str) -> None:
        """Fail the calls that no thread has taken. The caller holds the lock."""
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
                if not call.overdue:
                    self._fresh += 1
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        call.loop.call_later(CANCEL_S, self._note_old)
            start = self._wants_another()  # other calls may have been waiting for this thread
        self._judge()
        if start:
            self._start()

    def _note_old(self) -> None:
        """Count a call that was cancelled `CANCEL_S` ago as hanging, if it has not ended."""
        self._fresh -= 1
        self._judge()

    def _judge(self) -> None:
        if self._hang_too_many():
            self.worn.set()

    def _hang_too_many(self) -> bool:
        return self.hanging - self._fresh >= self._most_hanging

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
                if self._retire():
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
            if not self._execute(call):
                return

    def _retire(self) -> bool:
        """Stop counting this idle thread and return True, unless a call is waiting."""
        with self._lock:
            if self._waiting:
                return False
            self._live, self._idle = self._live - 1, self._idle - 1
            return True

    def _execute(self, call: _Call) -> bool:
        """Run the job and deliver its result. Return False if the call was abandoned and this thread replaced."""
        try:
            result, error = call.job(), None
        except BaseException as raised:  # noqa: BLE001 - user code, and the thread must survive it
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
    else:  # a future refuses StopIteration; SystemExit must not end this process
        future.set_exception(DataError(f"the environment raised {type(error).__name__}: {error}"))


class InThread:
    """A blocking environment as coroutines; each call runs on any free thread."""

    def __init__(self, env: Environment, threads: Threads) -> None:
        self._env, self._threads, self._declared = env, threads, protocols.traits(env)
        self._lost = False  # a thread may still be executing one of its calls
        self.step_limit_s = self.reset_limit_s = math.inf  # `Threads` enforces the limits, from the start on a thread
        self.reset_retries, self.step_retries = self._declared.reset_retries, self._declared.step_retries
        self.max_turns = self._declared.max_turns
        if self._declared.restores:
            self.restore = self._restore

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The first messages."""
        return await self._call(lambda: self._env.reset(task, seed), self._declared.reset_limit_s, "reset")

    async def step(self, answer: str) -> StepResult:
        """The result of `answer`."""
        return await self._call(lambda: self._env.step(answer), self._declared.step_limit_s, "step")

    async def _restore(self, state: bytes) -> None:
        restore = getattr(self._env, "restore")  # noqa: B009 - optional in the protocol
        await self._call(lambda: restore(state), self._declared.reset_limit_s, "restore")

    async def close(self) -> None:
        """Close the environment, unless a call never returned: it may not be used from another thread then."""
        if not self._lost:
            await self._call(self._env.close, self._declared.step_limit_s, "close")

    async def _call(self, job: Any, limit_s: float, what: str) -> Any:
        self._lost = True  # also when this is cancelled
        try:
            found = await self._threads.call(job, limit_s, what)
        except Abandoned:
            raise
        except Exception:
            self._lost = False
            raise
        self._lost = False
        return found
