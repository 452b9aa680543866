"""Programs compiled ahead of time, and a counter of XLA compilations that shows that no others are compiled."""

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

    `lowered(name, rows)` returns a program before compilation. `owner` and `row_tokens` appear in progress messages.
    """

    def __init__(self, owner: str, row_tokens: int, lowered: Callable[[str, int], jax.stages.Lowered]) -> None:
        self._owner, self._row_tokens, self._lowered = owner, row_tokens, lowered
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}

    def get(self, name: str, rows: int = 0, progress: Progress | None = None) -> Callable[..., Any]:
        """The program, compiled on first use; `progress` gets its name before and the duration after compilation."""
        key = (name, rows)
        if key not in self._compiled:
            what = f"{self._owner} {name}" + (f" [{rows}, {self._row_tokens}]" if rows else "")
            if progress:
                progress(f"compiling {what}")
            started = time.monotonic()
            self._compiled[key] = self._lowered(name, rows).compile()
            if progress:
                progress(f"compiled {what}: {time.monotonic() - started:.1f} s")
        return self._compiled[key]


class CompileCounter:
    """Count of compilations on one thread since creation or the last `reset`; hits of the persistent cache count too.

    It counts one thread only, because roles that share a process compile on threads of their own.
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
