"""The share of time in which a device waits for the host of an engine, with one and two dispatches in flight.

    python -m benchmarks.engine.dispatches [--quick] [--rounds=N]

The engine, its scheduler and the packing of all inputs are real. The device is a model: it knows how long each answer
is, and runs the programs one after another in the time that `Device` lists. Time is virtual: it moves by the
processor time that the host takes, by `CALL_S` for every program that it sends, and to the end of a dispatch when the
host waits for its report. So other work on the machine does not count. 1,024 slots are full until the last request has
begun, and only that time counts. Answers have log-normal lengths of up to 4,096 tokens. Both arms must deliver the same
numbers of tokens. The last line is one JSON object.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from benchmarks.lib.report import Runs, arguments, finish, ratio, spread
from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import requests
from jaxroll.engine.device import Device, Dispatch
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Report, Request, Result, Sizes
from jaxroll.models import families
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

# Seconds of the modeled device: a decode step, a prefill of 16 rows, another program; of the host: sending a program.
CASES = {"20 ms a step": 0.020, "8 ms a step": 0.008}
PREFILL_S, MOVE_S, CALL_S = 0.030, 0.0003, 0.0002
PROMPT, GROUP, LONGEST, MEDIAN, SIGMA = 128, 8, 4096, 700, 0.8
CHUNK, ROUNDS, AIM = 16, 5, 0.01


@dataclass(frozen=True)
class Scale:
    """`requests` requests over `slots` slots."""

    slots: int = 1024
    requests: int = 6144


class Timeline:
    """The virtual time of the host, and that at which the device has done all it was sent."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s, self.free_s, self.idle_s = step_s, 0.0, 0.0, 0.0
        self._since_s = time.thread_time()

    def begin(self) -> None:
        """Begin at 0 s."""
        self.now_s = self.free_s = self.idle_s = 0.0
        self._since_s = time.thread_time()

    def clock(self) -> float:
        """Seconds of the host."""
        return self.now_s + time.thread_time() - self._since_s

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The host takes no time inside of it."""
        self.now_s = self.clock()
        try:
            yield
        finally:
            self._since_s = time.thread_time()

    def send(self, seconds: float) -> float:
        """Run a program of the device; the time of its end."""
        self.now_s += CALL_S
        self.idle_s += max(0.0, self.now_s - self.free_s)
        self.free_s = max(self.now_s, self.free_s) + seconds
        return self.free_s


@dataclass(frozen=True, eq=False)
class ModelledDispatch(Dispatch):
    """A dispatch that ends at `done_s`."""

    done_s: float = 0.0
    timeline: Timeline | None = None

    def report(self) -> Report:
        """See Dispatch."""
        assert self.timeline is not None
        with self.timeline.stopped():
            self.timeline.now_s = max(self.timeline.now_s, self.done_s)
        return requests.read_report(np.array(self.array), self.sizes)


class ModelledDevice(Device):
    """A device without a model of language: requests end at their limit of tokens."""

    def __init__(self, timeline: Timeline, *args: Any, **options: Any) -> None:
        self._timeline, sizes = timeline, args[3]
        self._sizes: Sizes = sizes
        self.shardings, self.served, self.dtypes = {}, {}, None
        self._programs: Any = SimpleNamespace(experts=None, hold=None)
        self._counts, self._most = np.zeros(sizes.slots, np.int32), np.zeros(sizes.slots, np.int32)
        self._running = np.zeros(sizes.slots, bool)

    def _prefill(self, params: Any, fresh: bool, bucket: int, packed: np.ndarray) -> None:
        with self._timeline.stopped():
            self._timeline.send(PREFILL_S)

    def _update(self, what: str, *inputs: np.ndarray) -> None:
        with self._timeline.stopped():
            self._timeline.send(MOVE_S)
            if what == "insert":
                (rows,) = inputs
                rows = rows[rows[:, 0] < self._sizes.slots]
                slots = rows[:, 0]
                self._counts[slots], self._most[slots] = 1, rows[:, 6 + requests.MAX_TOKENS]
                self._running[slots] = self._most[slots] > 1

    def _put_tables(self, packed: np.ndarray) -> None:
        with self._timeline.stopped():
            self._timeline.send(MOVE_S)

    def decode(self, params: Any, steps: int, until_idle: int | None) -> Dispatch:
        """See Device."""
        with self._timeline.stopped():
            sizes, running = self._sizes, self._running
            left = self._most - self._counts
            shortest, idle = np.sort(left[running]), sizes.slots - int(running.sum())
            enough = min(until_idle or sizes.slots, sizes.slots) - idle
            ran = 0 if enough <= 0 else min(steps, int(shortest[enough - 1]))
            self._counts[running] += np.minimum(left[running], ran)
            running &= self._counts < self._most
            array = np.zeros(sizes.report_shape, np.int32)
            most = sizes.dispatch_tokens
            array[2 * most + 2] = self._counts
            array[2 * most + 3] = np.where(running, requests.RUNNING, requests.LENGTH)
            array[2 * most + 4] = ran
            done_s = self._timeline.send(ran * self._timeline.step_s)
        return ModelledDispatch(array, sizes, done_s, self._timeline)  # type: ignore[arg-type]

    def held(self, params: Any) -> Any:
        """See Device."""
        return params

    def compiles(self) -> int:
        """See Device."""
        return 0


def played(scale: Scale, step_s: float, in_flight: int, seed: int) -> dict[str, Any]:
    """One run: the idle share of the device and its tokens a second, until the last request has begun."""
    timeline = Timeline(step_s)
    config = EngineConfig(
        slots=scale.slots,
        max_tokens=PROMPT + LONGEST,
        prefill_rows=16,
        prefill_buckets=(PROMPT,),
        decode_chunk=CHUNK,
        seed=0,
        page_tokens=64,
        refill=16,
        in_flight=in_flight,
    )
    make = partial(ModelledDevice, timeline)
    engine = Engine(
        families.spec("nano"), sharding.build(MeshConfig()), sharding.SAMPLER, config, clock=timeline.clock,
        make_device=make,
    )  # fmt: skip
    rng, delivered = np.random.default_rng(seed), dict[int, int]()
    drawn = np.exp(np.log(MEDIAN) + SIGMA * rng.standard_normal(scale.requests))
    lengths = np.clip(drawn.astype(int), 1, LONGEST).tolist()
    prompts = rng.integers(0, 64, (-(-scale.requests // GROUP), PROMPT)).astype(np.int32)

    def done(number: int, result: Result) -> None:
        delivered[number] = len(result.completion.tokens)

    for number, length in enumerate(lengths):
        key = GenerationKey(number // GROUP, number % GROUP)
        engine.add(Request(number, prompts[number // GROUP], key, SamplingParams(length)), partial(done, number))
    engine.swap(Version(0, 1), {})
    timeline.begin()
    full: dict[str, Any] = {}
    while engine.step():
        stats = engine.stats()
        if not full and stats.queue_depth == 0:
            whole_s = timeline.clock()
            full = {
                "idle": timeline.idle_s / whole_s,
                "tokens_per_s": stats.tokens_decoded / whole_s,
                "host_ms_per_dispatch": 1e3 * (whole_s - stats.device_s) / stats.dispatches,
                "occupancy": stats.slot_occupancy,
                "steps_per_dispatch": stats.decode_steps / stats.dispatches,
            }
    assert delivered == dict(enumerate(lengths)), "an answer has another number of tokens than it should"
    return full


def main() -> int:
    """Measure both arms in alternating rounds, each with a seed of its own."""
    parser = arguments(str(__doc__).splitlines()[0])
    chosen, started = parser.parse_args(), time.monotonic()
    scale = Scale(slots=128, requests=512) if chosen.quick else Scale()
    rounds = chosen.rounds or (2 if chosen.quick else ROUNDS)
    runs, found = Runs("dispatches", {"slots": scale.slots}, chosen.runs_file, chosen.resume), dict[str, Any]()
    for case, step_s in CASES.items():
        results: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        for number in range(rounds):
            for in_flight in (1, 2) if number % 2 == 0 else (2, 1):
                job = partial(played, scale, step_s, in_flight, number)
                results[in_flight].append(runs.run(f"{case}, {in_flight} in flight", number, job))
        speed = {arm: [one["tokens_per_s"] for one in results[arm]] for arm in results}
        found[case] = {
            "idle": {f"{arm} in flight": spread([one["idle"] for one in results[arm]]) for arm in results},
            "idle_aim_met": max(one["idle"] for one in results[2]) <= AIM,
            "tokens_per_s": ratio(speed[2], speed[1]),
            "occupancy": {f"{arm} in flight": spread([one["occupancy"] for one in results[arm]]) for arm in results},
            "host_ms_per_dispatch": {
                f"{arm} in flight": spread([one["host_ms_per_dispatch"] for one in results[arm]]) for arm in results
            },
        }
    constants = {"prefill_s": PREFILL_S, "move_s": MOVE_S, "call_s": CALL_S, "chunk": CHUNK, "refill": 16}
    finish(
        {"class": "S", **found, "slots": scale.slots, "requests": scale.requests, "constants": constants},
        command=" ".join(["python", *sys.orig_argv[1:]]),
        started=started,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
