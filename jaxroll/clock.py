"""Clocks that are passed as arguments, so that pure code and tests do not read the time themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds; only differences are meaningful."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when `advance` is called, for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        self._now_s += by_s


def _elapsed_s() -> float:
    """Seconds on a clock that nothing sets; it includes suspended time where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_EPOCH_S = time.time() - _elapsed_s()


_simulated: Callable[[], float] | None = None


def unix_s() -> float:
    """Unix seconds for records: the wall clock at the start of this process plus the elapsed time since then.

    Differences within a process are durations, even if the machine's clock is set meanwhile.
    """
    return _simulated() if _simulated is not None else _EPOCH_S + _elapsed_s()


@contextlib.contextmanager
def simulated_unix(now_s: Callable[[], float]) -> Iterator[None]:
    """Let `unix_s` return `now_s()` inside the block, in the whole process: for records of a simulated run."""
    global _simulated
    before, _simulated = _simulated, now_s
    try:
        yield
    finally:
        _simulated = before
