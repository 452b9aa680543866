"""Clocks as arguments: nothing below the shells reads the time by itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; only differences mean anything."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to: for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        self._now_s += by_s


def _elapsed_s() -> float:
    """Seconds on a clock that is never set, and that counts the time while the machine sleeps where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_EPOCH_S = time.time() - _elapsed_s()


def unix_s() -> float:
    """Unix seconds for records: the wall clock as it was when this process began, and what has passed since.

    Differences within a process are durations, also where somebody sets the machine's clock meanwhile.
    """
    return _EPOCH_S + _elapsed_s()
