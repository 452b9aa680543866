"""Programs compiled ahead of time, and how many XLA has compiled on this thread: the witness that no more are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.monitoring

from jaxroll.protocols import Progress

_EVENT = "/jax/core/compile/backend_compile_duration"


class AheadOfTime:
    """Programs by name and number of rows, each compiled once; calls only look them up.

    `lowered(name, rows)` gives one before compilation; `who` and the tokens of a row are for what is said of it.
    """

    def __init__(self, who: str, row_tokens: int, lowered: Callable[[str, int], jax.stages.Lowered]) -> None:
        self._who, self._row_tokens, self._lowered = who, row_tokens, lowered
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}

    def get(self, name: str, rows: int = 0, progress: Progress | None = None) -> Callable[..., Any]:
        """The program, compiled if it was not; says before what it is, and after it how long that took."""
        key = (name, rows)
        if key not in self._compiled:
            what = f"{self._who} {name}" + (f" [{rows}, {self._row_tokens}]" if rows else "")
            if progress:
                progress(f"compiling {what}")
            started = time.monotonic()
            self._compiled[key] = self._lowered(name, rows).compile()
            if progress:
                progress(f"compiled {what}: {time.monotonic() - started:.1f} s")
        return self._compiled[key]


class CompileCounter:
    """Counts what its thread compiles, from its creation or last `reset`; what the persistent cache has counts too.

    Where roles share a process, others compile for themselves.
    """

    def __init__(self) -> None:
        self.count, self._thread = 0, threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def reset(self) -> None:
        """Start again at 0, for the thread that calls this."""
        self.count, self._thread = 0, threading.get_ident()

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._seen)

    def _seen(self, event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event == _EVENT and threading.get_ident() == self._thread:
            self.count += 1
