"""Event loop on a virtual clock: when no task is ready, the clock jumps to the next timer.

Code under test must take its time from the loop: `loop.time()`, `asyncio.sleep`, `asyncio.timeout`. There are no
threads, because the clock could jump while one of them works. Work for an executor of its own is done in place and
takes no time. Work for the default executor, where code waits for the outside world, is refused.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LIMIT_S = 7 * 86400.0


class Stuck(AssertionError):
    """Every task waits, and no timer is set: real code would hang forever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: where a real selector would, it advances the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See BaseSelector."""
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise Stuck("all tasks wait for something that no timer and no other task will do")
        self.now_s += max(timeout, 0.0)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that starts at 0 s and never sleeps."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call `callback` when the clock shows `when`, and not the little earlier that asyncio's loop allows.

        Otherwise code that waits for the rest of a period, of 1e-15 s at last, would wait for it without end.
        """

        def due() -> None:
            self._jumping.now_s = max(self._jumping.now_s, when)
            callback(*args)

        return super().call_at(when, due, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """A future that is done: `func` runs at once. AssertionError for the default executor: see the module."""
        if executor is None:
            raise AssertionError(f"{func} on a thread, under a virtual clock")
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as with an executor, the future raises it
            done.set_exception(error)
        return done


class LoopClock:
    """The running loop's clock, as the store takes it."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


def run(job: Coroutine[Any, Any, T], limit_s: float = LIMIT_S) -> T:
    """The result of `job` under a virtual clock. Stuck if it can never end, TimeoutError after `limit_s` virtual s."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(asyncio.wait_for(job, limit_s))
