"""Latency of our engine, for benchmarks/engine: running requests while others come and go, and at a weight swap.

    python -m benchmarks.engine.latency FOLDER SCALE-AS-JSON

`quiet`, `storm`, `first` or `swap` on stdin: one run each, answered with one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engine.our_arm import engine
from benchmarks.engine.work import MODEL, answering
from jaxroll.engine.requests import Request
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version


@dataclass(frozen=True)
class Scale:
    """`watched` requests sample `tokens` each; in a storm up to `extra` more requests with long prompts run."""

    watched: int = 16
    tokens: int = 512
    extra: int = 8
    extra_prompt: int = 1024
    extra_tokens: int = 8
    chunk: int = 8
    prefill_tokens: int = 64
    dispatches_per_swap: int = 8

    def options(self) -> dict[str, Any]:
        """The engine's options: long prompts are prefilled in pieces, one between two dispatches."""
        return {
            "slots": self.watched + self.extra,
            "max_tokens": self.extra_prompt + self.extra_tokens,
            "prefill_rows": 1,
            "prefill_buckets": [self.prefill_tokens],
            "decode_chunk": self.chunk,
            "page_tokens": 32,
        }


class Bench:
    """One engine, and the actions between two of its dispatches."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self._engine, self._weights = engine(folder, scale.options())
        self._other = {name: leaf + 0.0 for name, leaf in self._weights.items()}
        jax.block_until_ready(self._other)
        self._scale, self._rng, self._versions, self._ids = scale, np.random.default_rng(0), 0, 0
        self._extra: list[int] = []

    def _add(self, prompt_tokens: int, tokens: int, on_done: Callable[[int], None]) -> int:
        self._ids += 1
        prompt = self._rng.integers(1, MODEL["vocab_size"], prompt_tokens).astype(np.int32)
        request = Request(self._ids, prompt, GenerationKey(self._ids, 0), SamplingParams(max_tokens=tokens))
        self._engine.add(request, lambda _, id=self._ids: on_done(id))
        return self._ids

    def _gone(self, other: int) -> None:
        if other in self._extra:  # otherwise it was just aborted
            self._extra.remove(other)

    def _swap(self) -> None:
        self._versions += 1
        self._engine.swap(Version(0, self._versions), self._other if self._versions % 2 else self._weights)

    def watch(self, between: Callable[[int], Any]) -> tuple[list[float], list[int], list[Any]]:
        """Seconds and steps of each dispatch while all watched requests run, and results of `between` before each."""
        self._swap()  # so that no run finds the cache of an earlier one
        ended: list[int] = []
        for _ in range(self._scale.watched):
            self._add(16, self._scale.tokens, ended.append)
        while self._engine.stats().active < self._scale.watched or self._engine.stats().queue_depth:
            self._engine.step()
        seconds, steps, did = [], [], []
        self._engine.step()
        at, counted = time.perf_counter(), self._engine.stats().decode_steps
        for dispatch in range(1_000_000):
            did.append(between(dispatch))
            self._engine.step()
            now, stats = time.perf_counter(), self._engine.stats()
            if ended:
                break
            seconds.append(now - at)
            steps.append(stats.decode_steps - counted)
            at, counted = now, stats.decode_steps
        for id in list(self._extra):
            self._engine.abort(id, keep=False)
        self._extra.clear()
        while self._engine.step():
            pass
        if self._engine.stats().compiles:
            raise RuntimeError(f"{self._engine.stats().compiles} compilations after warm-up")
        return seconds, steps, did[: len(seconds)]

    def quiet(self) -> dict[str, Any]:
        """Nothing happens."""
        before = self._engine.stats()
        seconds, steps, _ = self.watch(lambda _: None)
        after = self._engine.stats()
        host = 1 - (after.device_s - before.device_s) / (after.step_s - before.step_s)
        return {**_latencies(seconds, steps), "host_share": host}

    def storm(self) -> dict[str, Any]:
        """Latency while long prompts arrive before every dispatch, up to `extra`, and every second one is aborted."""
        adds, aborts = [0], [0]
        before = self._engine.stats()

        def between(_: int) -> None:
            while len(self._extra) < self._scale.extra:
                self._extra.append(self._add(self._scale.extra_prompt, self._scale.extra_tokens, self._gone))
                adds[0] += 1
            if self._rng.random() < 0.5:
                other = self._extra.pop(int(self._rng.integers(len(self._extra))))
                self._engine.abort(other, keep=False)
                aborts[0] += 1

        seconds, steps, _ = self.watch(between)
        after = self._engine.stats()
        return {
            **_latencies(seconds, steps),
            "adds": adds[0],
            "aborts": aborts[0],
            "extra_finished": after.finished - before.finished - self._scale.watched,
            "prefill_tokens": after.prefill_tokens - before.prefill_tokens,
        }

    def first(self) -> dict[str, Any]:
        """Seconds from adding a short request to its only token while the watched requests run."""
        waits: list[float] = []

        def between(dispatch: int) -> None:
            if dispatch % 4 == 0:
                added = time.perf_counter()
                self._add(16, 1, lambda _: waits.append(time.perf_counter() - added))

        self.watch(between)
        return {"first_token_s": waits}

    def swap(self) -> dict[str, Any]:
        """The extra time of a dispatch after a weight swap, in units of the median dispatch."""

        def between(dispatch: int) -> bool:
            if swaps := dispatch % self._scale.dispatches_per_swap == self._scale.dispatches_per_swap - 1:
                self._swap()
            return swaps

        seconds, steps, swaps = self.watch(between)
        whole = [s for s, count, swap in zip(seconds, steps, swaps, strict=True) if not swap and count == max(steps)]
        usual = float(np.median(whole))
        pauses = [s - usual for s, swap in zip(seconds, swaps, strict=True) if swap]
        return {"chunk_s": usual, "pause_s": pauses, "swaps": len(pauses)}


def _latencies(seconds: list[float], steps: list[int]) -> dict[str, Any]:
    """Seconds per token (a dispatch's time is divided evenly over its steps), and seconds between two reports."""
    tokens = [s / count for s, count in zip(seconds, steps, strict=True) if count for _ in range(count)]
    return {"token_s": [round(s, 7) for s in tokens], "report_s": seconds}


def main() -> None:
    """Serve."""
    say = answering()
    bench = Bench(Path(sys.argv[1]), Scale(**json.loads(sys.argv[2])))
    bench.quiet()
    say({"ready": True})
    for line in sys.stdin:
        say(getattr(bench, line.strip())())


if __name__ == "__main__":
    main()
