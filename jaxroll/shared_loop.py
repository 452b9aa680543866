"""Event loop that survives callbacks of foreign code which block it, and tasks that such code cannot cancel.

A blocking call cannot be interrupted, so another thread takes the loop over and runs everything else. The blocked
thread finishes its callback, and then waits for its turn, which never comes: it must not end, because its end would
kill the child processes that it started (`lifeline.bind`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from jaxroll.protocols import OWNER, Owner


class OwnedTask(asyncio.Task):
    """A task that an owner can cancel only if it is its own."""

    def __init__(self, coro: Any, *, context: Context | None = None, **options: Any) -> None:
        self._owner = OWNER.get() if context is None else context.get(OWNER)
        super().__init__(coro, context=context, **options)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task; False if it has ended, or belongs to others."""
        caller = OWNER.get()
        if caller is None or caller is self._owner:
            return super().cancel(msg)
        caller.cancelled += 1
        return False


class _Ready(deque):
    """The callbacks that are due; only the thread whose turn it is takes one."""

    wait_for_turn: Callable[[], None]

    def popleft(self) -> Any:
        self.wait_for_turn()
        return super().popleft()


class SharedLoop(asyncio.SelectorEventLoop):
    """An event loop that another thread can take over. Uses internals of asyncio: tried with Python 3.11 to 3.13."""

    _ready: Any

    def __init__(self) -> None:
        super().__init__()
        self._turn, self._runs_in, self._handed, self._waiting = threading.Condition(), 0, 0, 0
        self._ready = _Ready(self._ready)
        self._ready.wait_for_turn = self._wait_for_turn
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
            with self._turn:
                self._runs_in = blocked.ident or 0
                self._turn.notify_all()
            return None
        if (task := asyncio.current_task(self)) is not None:
            with contextlib.suppress(RuntimeError):  # from Python 3.14 on the current task is one of its thread
                asyncio.tasks._leave_task(self, task)  # type: ignore[attr-defined]
        self._thread_id = None  # otherwise `run_forever` refuses to run it
        self._handed += 1
        return owner

    def _wait_for_turn(self) -> None:
        if self.is_elsewhere:
            with contextlib.suppress(RuntimeError):  # it is closed
                self.call_soon_threadsafe(lambda: None)  # wakes the other thread: the callback may have scheduled some
            with self._turn:
                self._waiting += 1
                self._turn.wait_for(lambda: not self.is_elsewhere)
                self._waiting -= 1

    def _run_once(self) -> None:
        self._wait_for_turn()
        super()._run_once()  # type: ignore[misc]


def _running_handle(thread: threading.Thread) -> asyncio.Handle | None:
    """The callback that the event loop in `thread` runs now, if any."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")
