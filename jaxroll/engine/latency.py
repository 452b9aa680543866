"""How long requests wait for their tokens: the latest times to a first token, and gaps between two."""

from __future__ import annotations

from collections import deque

import numpy as np

_KEPT = 2048


class Latencies:
    """The last `_KEPT` requests and dispatches. Written by the stepping thread, read by any."""

    def __init__(self) -> None:
        self._firsts: deque[float] = deque(maxlen=_KEPT)
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._last_s: float | None = None

    def first(self, waited_s: float) -> None:
        """A request has its first token, `waited_s` after it was added."""
        self._firsts.append(waited_s)

    def dispatch(self, done_s: float, steps: int, others: bool) -> None:
        """A dispatch of `steps` tokens ended; `others` ran before it too and waited for it since the one before."""
        if others and steps and self._last_s is not None:
            self._gaps.append((done_s - self._last_s) / steps)
        self._last_s = done_s

    def idle(self) -> None:
        """Nobody waits for a token now."""
        self._last_s = None

    def percentiles(self) -> dict[str, float | None]:
        """`ttft_p50_s`, `ttft_p99_s` (from `add` to the first token on the host), `itl_p50_s`, `itl_p99_s`.

        The second two are the mean gap between a running request's tokens within a dispatch, whatever came before it
        (prompts of others, a flip) included. None before there is one.
        """
        found: dict[str, float | None] = {}
        for name, values in (("ttft", tuple(self._firsts)), ("itl", tuple(self._gaps))):
            for percent in (50, 99):
                found[f"{name}_p{percent}_s"] = float(np.percentile(values, percent)) if values else None
        return found
