"""One case of benchmarks/gpu in its own process: points that fail alone, results that survive a kill, timing.

python _gpu_FILE.py CASE RESULT.json SECONDS full|quick

Imports JAX lazily and nothing of jaxroll, so that a case that needs only JAX runs where only JAX is installed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.report import _plain, say, spread

OF_CASE = "left of this case"  # in the record of a point that did not fit
_RESERVE_S = 5.0  # no further point starts with less of the case's time left
_PARENT_S = 1.0  # interval of the checks that the parent process lives


class Case:
    """The case's name, scale, deadline and result. Every finished point is written to the result file at once."""

    def __init__(self, name: str, path: Path, seconds: float, quick: bool) -> None:
        self.name, self.quick, self.result = name, quick, {"points": {}}
        self._path, self._end_s = path, time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds until the parent process kills this one."""
        return self._end_s - time.monotonic()

    def put(self, **facts: Any) -> None:
        """Add `facts` to the result."""
        self.result |= facts
        self._write()

    def point(self, name: str, measure: Callable[[], Mapping[str, Any]], needs_s: float = _RESERVE_S) -> Any:
        """Record and return `measure()`; None if it raised, or if less than `needs_s` seconds are left."""
        if self.left_s() < needs_s:
            self._record(name, {"skipped": f"{self.left_s():.0f} s {OF_CASE}, {needs_s:.0f} needed"}, 0.0)
            return None
        started = time.monotonic()
        say(f"{self.name}: {name} …")
        try:
            found = dict(measure())
        except Exception as error:  # noqa: BLE001 - recorded: the other points are measured all the same
            self._record(name, failure(error), time.monotonic() - started)
            return None
        self._record(name, found, time.monotonic() - started)
        return found

    def skip(self, name: str, why: str) -> None:
        """Record that `name` is not measured."""
        self._record(name, {"skipped": why}, 0.0)

    def _record(self, name: str, found: Mapping[str, Any], seconds: float) -> None:
        self.result["points"][name] = {**found, "took_s": seconds}
        say(f"{self.name}: {name} ({seconds:.1f} s): {json.dumps(_plain(finite(found)))[:400]}")
        self._write()

    def _write(self) -> None:
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(finite(self.result)))
        os.replace(beside, self._path)


def failure(error: Exception) -> dict[str, Any]:
    """The record of a point that raised: the error's kind and beginning, out of memory or not, the last calls."""
    text = str(error)
    calls = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)[-4:]]
    out = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    return {"error": f"{type(error).__name__}: {text[:1500]}", "out_of_memory": out, "calls": calls}


def finite(value: Any) -> Any:
    """`value` as plain JSON: numbers that are not finite as None, numpy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if hasattr(value, "item") and not hasattr(value, "__len__"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run_case(cases: Mapping[str, Callable[[Case], None]]) -> None:
    """Run the case that the command line names."""
    name, path, seconds, scale = sys.argv[1:5]
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    cases[name](Case(name, Path(path), float(seconds), scale == "quick"))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)  # the parent process made this one the first of its group


# --- timing


def timed(call: Callable[[], Any], runs: int = 7, least_s: float = 0.05, most_s: float = 10.0) -> list[float]:
    """Seconds per `call` in each of `runs` runs; a run repeats it until it lasts `least_s`. The first is warm-up.

    A run waits for the results of all its calls. After `most_s` no further run starts, but there are at least three.
    """
    import jax

    jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    repeats = max(1, math.ceil(least_s / max(time.perf_counter() - started, 1e-7)))
    seconds, begun, last = [], time.perf_counter(), None
    while len(seconds) < runs and (len(seconds) < 3 or time.perf_counter() - begun < most_s):
        started = time.perf_counter()
        for _ in range(repeats):
            last = call()
        jax.block_until_ready(last)  # one stream: earlier calls are done too
        seconds.append((time.perf_counter() - started) / repeats)
    return seconds


def rates(amount: float, seconds: Sequence[float]) -> dict[str, float]:
    """`amount` per second: median, minimum and maximum."""
    return spread([amount / one for one in seconds])


def device_facts() -> dict[str, Any]:
    """Versions and the device; the first call of JAX in a case, which fails where there is no device."""
    from importlib.metadata import version

    import jax

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "memory_gib": stats.get("bytes_limit", 0) / 2**30 or None,
    }


def on_gpu() -> bool:
    """True if JAX computes on a GPU here."""
    import jax

    return jax.default_backend() == "gpu"
