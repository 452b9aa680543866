"""Bounds for hostile input: memory and time of one call, and the form of a refusal."""

from __future__ import annotations

import contextlib
import math
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from jaxroll.errors import JaxRollError

MEMORY_BYTES, TIME_S, MESSAGE_CHARACTERS = 64 << 20, 30.0, 1500
OTHERS_BYTES = 128 << 20  # of libraries, of code that is loaded meanwhile, and of counting itself


class OutOfTime(BaseException):
    """A BaseException, so that no handler of the code under test catches it."""


@contextlib.contextmanager
def bounded(memory_bytes: int | None = MEMORY_BYTES, time_s: float = TIME_S) -> Iterator[None]:
    """Fail if the block takes more memory (allocated by Python and numpy) or more time than these bounds.

    Counting memory makes Python several times slower; None does not count it. The process, which SQLite and the
    tokenizers in Rust are part of, may grow by `OTHERS_BYTES` more at its peak (Linux).
    """

    def late(*_: object) -> NoReturn:
        raise OutOfTime(f"not done within {time_s:g} s")

    resident = _reset_peak()
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, time_s)
    if memory_bytes is not None:
        tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]  # 0 when it was not started
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert memory_bytes is None or peak <= memory_bytes, (
        f"{peak / 2**20:.0f} MiB at the peak, {(memory_bytes or 0) / 2**20:.0f} are allowed"
    )
    grown = _memory("VmHWM") - resident if resident < math.inf else 0
    assert grown <= (memory_bytes or MEMORY_BYTES) + OTHERS_BYTES, f"the process grew by {grown / 2**20:.0f} MiB"


def _reset_peak() -> float:
    """Let the kernel count the peak of this process from now on; return its resident bytes, inf where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return math.inf
    return _memory("VmRSS")


def _memory(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def check_refusal(error: JaxRollError, *words: Any) -> None:
    """Assert that the error is one line of bounded length that holds all `words`."""
    text = str(error)
    assert len(text) <= MESSAGE_CHARACTERS and text.isprintable(), repr(text[:3000])
    assert all(str(word) in text for word in words), text


MB = 2**20
