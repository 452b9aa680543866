"""Saying what a role is doing, so that nothing is silent for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxroll.clock import unix_s

if TYPE_CHECKING:
    from jax.sharding import Mesh

Row = dict[str, Any]


class Progress:
    """Says what a role is doing: one line in its log and one row in the metrics, at the start and at the end."""

    def __init__(self, role: str, emit: Callable[[Row], None]) -> None:
        self._role, self._emit, self._started = role, emit, {}

    def start(self, what: str) -> None:
        """`what` begins, and may take long."""
        self._started[what] = time.monotonic()
        self._say({"kind": "compile", "what": what, "state": "start"}, f"{what} …")

    def end(self, what: str) -> None:
        """`what` is over."""
        seconds = time.monotonic() - self._started.pop(what, time.monotonic())
        self._say({"kind": "compile", "what": what, "state": "end", "seconds": seconds}, f"{what}: {seconds:.1f} s")

    def devices(self, mesh: Mesh, attention: Mapping[str, str]) -> None:
        """What this process runs on, as which mesh, and what computes attention there, by use."""
        from jaxroll.sharding import meshes  # loads JAX, which must come after a sampler's scoring pool

        platform, kind = meshes.platform(mesh), meshes.device_kind(mesh)
        row = {"kind": "devices", "platform": platform, "devices": f"{mesh.size} x {kind}", "mesh": dict(mesh.shape)}
        chosen = ", ".join(f"{use} {name}" for use, name in attention.items())
        line = f"{mesh.size} x {kind} ({platform}) as {dict(mesh.shape)}; attention: {chosen}"
        self._say(row | {"attention": dict(attention)}, line)

    def span(self, what: str, t0: float, t1: float, **more: Any) -> None:
        """`what` took from `t0` to `t1` (unix seconds); only the metrics hear of it."""
        self._emit({"t": t1, "role": self._role, "kind": "span", "what": what, "t0": t0, "t1": t1, **more})

    def __call__(self, text: str) -> None:
        """An event worth a line."""
        self._say({"kind": "event", "text": text}, text)

    def _say(self, row: Row, line: str) -> None:
        print(f"{self._role}: {line}", flush=True)
        self._emit({"t": unix_s(), "role": self._role, **row})
