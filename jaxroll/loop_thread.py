"""The asyncio loop thread of a role, which callbacks of foreign code cannot block, and the thread for its JAX jobs.

Environments run on this loop. A blocking call cannot be interrupted, so another thread takes the loop over and runs
everything else. The blocked thread finishes its callback, and then waits until the process ends: it must not end
itself, because its end would kill the child processes that it started (`lifeline.bind`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextvars import Context
from typing import Any, TypeVar

from jaxroll.errors import EXIT_FAILURE, InfraError, described
from jaxroll.protocols import OWNER, Owner

# --- Event loop that another thread can take over, and tasks that foreign code cannot cancel


class OwnedTask(asyncio.Task):
    """A task that an owner can cancel only if it is its own; `owner` is None for a task of JaxRoll."""

    def __init__(self, coro: Any, *, context: Context | None = None, **options: Any) -> None:
        self.owner = OWNER.get() if context is None else context.get(OWNER)
        super().__init__(coro, context=context, **options)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task; False if it has ended, or belongs to others."""
        caller = OWNER.get()
        if caller is None or caller is self.owner:
            return super().cancel(msg)
        caller.cancelled += 1
        return False


class _Ready(deque):
    """The callbacks that are due; only the thread that runs the loop takes one."""

    wait_while_elsewhere: Callable[[], None]

    def popleft(self) -> Any:
        self.wait_while_elsewhere()
        return super().popleft()


class SharedLoop(asyncio.SelectorEventLoop):
    """An event loop that another thread can take over. Uses internals of asyncio: tried with Python 3.11 to 3.13."""

    _ready: Any

    def __init__(self) -> None:
        super().__init__()
        self._owner_changed, self._runs_in, self._handed, self._waiting = threading.Condition(), 0, 0, 0
        self._ready = _Ready(self._ready)
        self._ready.wait_while_elsewhere = self._wait_while_elsewhere
        self.set_task_factory(lambda loop, coro, **options: OwnedTask(coro, loop=loop, **options))

    @property
    def blocked(self) -> int:
        """The number of threads that lost the loop and are still in their callback."""
        return self._handed - self._waiting

    @property
    def is_elsewhere(self) -> bool:
        """True if another thread than this one runs the loop."""
        return self._runs_in not in (0, threading.get_ident())

    def hand_over(self, blocked: threading.Thread, to: threading.Thread) -> Owner | None:
        """Let `to` run the loop instead of `blocked`, if an owner's callback runs there; the owner, else None."""
        handle = _running_handle(blocked)
        owner = None if handle is None else handle._context.get(OWNER)
        if owner is None:
            return None
        self._runs_in = to.ident or 0
        if _running_handle(blocked) is not handle:  # it has just ended
            with self._owner_changed:
                self._runs_in = blocked.ident or 0
                self._owner_changed.notify_all()
            return None
        if (task := asyncio.current_task(self)) is not None:
            with contextlib.suppress(RuntimeError):  # from Python 3.14 on the current task is one of its thread
                asyncio.tasks._leave_task(self, task)  # type: ignore[attr-defined]
        self._thread_id = None  # otherwise `run_forever` refuses to run it
        self._handed += 1
        return owner

    def _wait_while_elsewhere(self) -> None:
        if self.is_elsewhere:
            with contextlib.suppress(RuntimeError):  # it is closed
                self.call_soon_threadsafe(lambda: None)  # wakes the other thread: the callback may have scheduled some
            with self._owner_changed:
                self._waiting += 1
                self._owner_changed.wait_for(lambda: not self.is_elsewhere)
                self._waiting -= 1

    def _run_once(self) -> None:
        self._wait_while_elsewhere()
        super()._run_once()  # type: ignore[misc]


def _running_handle(thread: threading.Thread) -> asyncio.Handle | None:
    """The callback that the event loop in `thread` runs now, if any."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


# --- The thread, with a watchdog, and the thread that runs JAX jobs
#
# A SystemExit or KeyboardInterrupt of a task that an environment started, and a `loop.stop()` of its code, end
# `run_forever`, which is then entered again. If an environment blocks the loop for
# `hand_over_s`, another thread runs it. If the thread ends nevertheless, or other code or too many environments block
# the loop for `blocked_s`, its jobs fail with that cause, so that the process ends instead of holding leases without
# renewing them.

T = TypeVar("T")
BLOCKED_S, HAND_OVER_S = 60.0, 2.0
MOST_BLOCKED = 16  # threads at one time that environments block
_WATCH_EVERY_S = 1.0
_START_S = 20.0  # in which a thread has started, also on a machine that swaps
_NO_MEMORY = 10  # callbacks of a loop that had no memory, after which the process ends
_FRAMES = 12  # of the blocked thread, for its error


class LoopThread:
    """An asyncio loop on a thread of its own, ended by `close`.

    `escapes` counts the exceptions and stops of foreign code that ended `run_forever`; `failure` is the reason why the
    loop can no longer be used.
    """

    def __init__(self, name: str, blocked_s: float = BLOCKED_S, hand_over_s: float = HAND_OVER_S) -> None:
        self.loop, self.escapes, self.failure = SharedLoop(), 0, ""
        self._name, self._blocked_s, self._hand_over_s = name, blocked_s, hand_over_s
        self._closing = threading.Event()
        self._jobs: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._lock = threading.Lock()
        self._alive_s, self._no_memory = time.monotonic(), 0
        self.loop.set_exception_handler(self._on_error)
        _note_starts_of_threads()
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

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report the error, and end the process if callbacks of the loop have no memory again and again.

        Errors of tasks, which are foreign code, do not count. A callback that lost the loop ends with an error.
        """
        if self.loop.is_elsewhere:
            return
        if "handle" in context and isinstance(context.get("exception"), MemoryError):
            self._no_memory += 1
            if self._no_memory >= _NO_MEMORY:
                try:
                    print(f"{self._name}: MemoryError in {_NO_MEMORY} callbacks of the event loop", flush=True)
                finally:
                    os._exit(EXIT_FAILURE)
        loop.default_exception_handler(context)

    def _watch(self) -> None:
        """Fail the jobs when the loop has not answered for `blocked_s`.

        Only seconds in which this thread ran count, so that a process that was suspended does not fail. The process
        ends if its main thread starts a thread that never runs.
        """
        silent_s, starting_s, last_s, seen_s = 0.0, 0.0, time.monotonic(), self._alive_s
        starting: threading.Thread | None = None
        every_s = min(_WATCH_EVERY_S, self._hand_over_s)
        while not self._closing.wait(every_s) and self._thread.is_alive():
            now_s = time.monotonic()
            watched_s = min(now_s - last_s, 2 * _WATCH_EVERY_S)
            silent_s = silent_s + watched_s if self._alive_s == seen_s else 0.0
            last_s, seen_s, before, starting = now_s, self._alive_s, starting, _starting_thread()
            starting_s = starting_s + watched_s if starting is not None and starting is before else 0.0
            if starting is not None and starting_s >= _START_S:
                print(f"{self._name}: the thread {starting.name} did not start, as if out of memory", flush=True)
                os._exit(EXIT_FAILURE)
            if silent_s >= self._hand_over_s and self._hand_over(silent_s):
                silent_s = 0.0
            if silent_s >= self._blocked_s:
                what, _, stack = self._blocker(silent_s)
                remedy = 'Run an environment that blocks with place = "thread" or "process"'
                self._fail(f"{self._name}: {what}. {remedy}")
                _print_stack(stack)
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._alive_s = time.monotonic()

    def _hand_over(self, silent_s: float) -> bool:
        """True if an environment blocks the loop, and another thread runs it now."""
        blocked, decided = self._thread, threading.Event()
        heir = threading.Thread(target=self._inherit, args=(decided,), name=f"{self._name}-loop", daemon=True)
        if self.loop.blocked >= MOST_BLOCKED:
            return False
        try:
            heir.start()
        except RuntimeError:  # the machine refuses a thread
            return False
        what, where, stack = self._blocker(silent_s)
        if owner := self.loop.hand_over(blocked, heir):  # else the loop waits or has gone on: this process was slow
            self._thread = heir
            self.loop.call_soon_threadsafe(owner.note_blocked, where)
        decided.set()
        if owner is not None:
            _print_stack(stack, f"{self._name}: {what}; another thread runs the loop now")
        return owner is not None

    def _inherit(self, decided: threading.Event) -> None:
        decided.wait()
        if self._thread is threading.current_thread():
            self._run()

    def _blocker(self, silent_s: float) -> tuple[str, str, str]:
        """Description of the task that blocks the loop, its source line, and its stack as text."""
        task = asyncio.current_task(self.loop)
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown line"
        name = "a callback" if task is None else f"the task {task.get_name()}"
        what = f"{name} blocked the event loop for {silent_s:.0f} s at {where}"
        return what, where, "".join(traceback.format_list(stack))

    def _fail(self, cause: str) -> None:
        self.failure = cause
        with self._lock:
            jobs = dict(self._jobs)
        for future, job in jobs.items():
            with contextlib.suppress(InvalidStateError):  # it ended meanwhile
                future.set_exception(InfraError(cause))
            if inspect.getcoroutinestate(job) == inspect.CORO_CREATED:  # the loop will not start it any more
                job.close()


def _print_stack(stack: str, report: str = "") -> None:
    """Print both; if that fails, as on a full disk, the watchdog goes on without them."""
    with contextlib.suppress(OSError, ValueError):
        print(stack, end="", file=sys.stderr, flush=True)
        print(report, end="\n" if report else "", flush=True)


_starting: dict[int, threading.Thread] = {}  # by the thread that waits in `Thread.start`


@functools.cache
def _note_starts_of_threads() -> None:
    """From now on, let each `Owner` know the threads that it starts, and `_starting` those that do not run yet."""
    original_start = threading.Thread.start  # Python 3.11 has no audit event for it

    @functools.wraps(original_start)
    def start(self: threading.Thread) -> None:
        if (owner := OWNER.get()) is not None and not self.name.startswith("asyncio_"):  # those are the loop's own
            owner.threads.append(weakref.ref(self))
            self.run = functools.partial(_owned, owner, self, vars(self).get("run"))
        _starting[threading.get_ident()] = self
        try:
            original_start(self)
        finally:
            _starting.pop(threading.get_ident(), None)

    threading.Thread.start = start


def _owned(owner: Owner, thread: threading.Thread, run: Callable[[], None] | None) -> None:
    """Run a thread of `owner`, which also owns what the thread starts. `run` is one that only this thread had."""
    OWNER.set(owner)
    del thread.run  # it refers to the thread
    (run or thread.run)()


def _starting_thread() -> threading.Thread | None:
    """The thread that the main thread starts now, if any.

    Without memory a new thread may die before its first line: `Thread.start` then waits without end, and nothing is
    reported (seen with Python 3.11). The main thread's frames are not read for this, because they change meanwhile.
    """
    return _starting.get(threading.main_thread().ident or 0)


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


def ended(session: Future[T], timeout_s: float | None = None) -> T:
    """The result of `session`. InfraError if foreign code cancelled it."""
    try:
        return session.result(timeout_s)
    except CancelledError as error:
        reason = "code on the event loop cancelled the session; environments must not cancel tasks of others"
        raise InfraError(reason) from error


async def until_one_ends(jobs: tuple[Coroutine[Any, Any, None], ...]) -> None:
    """Run all jobs until one of them ends, cancel the others, and raise the error of the one that ended."""
    loops = [asyncio.ensure_future(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            job.result()
    finally:
        for job in loops:
            job.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
