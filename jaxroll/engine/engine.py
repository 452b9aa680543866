"""The engine: continuous batching of requests over a fixed number of slots.

One thread calls `step`, which applies the commands that arrived, starts waiting requests in free slots, runs one decode
dispatch and delivers what ended. Commands (`add`, `abort`, `suspend`, `resume`, `swap`) come from any thread through a
queue and take effect between two dispatches; they never block. `on_done` is called by the stepping thread, outside any
lock; it must neither block nor raise.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from jaxroll.engine import requests
from jaxroll.engine.device import Device
from jaxroll.engine.ledger import Ledger, Progressed
from jaxroll.engine.packets import Sizes
from jaxroll.engine.requests import OnDone, Request, Result
from jaxroll.engine.stats import EngineStats
from jaxroll.errors import ConfigError, DataError
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Params
from jaxroll.protocols import Completion, Progress
from jaxroll.records import Version
from jaxroll.schedule import slots as scheduling
from jaxroll.sharding.rules import Rules

Flip = Literal["keep_kv", "drain"]


class Engine:
    """Slots, a cache and a queue on one mesh. Construction allocates; `warmup` compiles; `swap` brings weights.

    `slots` requests run at once, each with `max_tokens` cache positions; one prefill computes `prefill_rows` distinct
    prompts and starts up to `insert_rows` requests with them; a dispatch decodes up to `decode_chunk` tokens a slot.
    `refill` is how many slots must be free, while requests wait, before a prefill is worth its cost: a dispatch ends
    early as soon as that many are, so a large `decode_chunk` leaves no slot idle for long.
    `flip` says what a swap does to running requests: `keep_kv` goes on with the new weights over the old cache, `drain`
    lets them end first and starts none meanwhile.
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, rules: Rules, *, slots: int, max_tokens: int, prefill_rows: int,
        prefill_buckets: Sequence[int], decode_chunk: int, seed: int, flip: Flip = "keep_kv",
        refill: int | None = None, insert_rows: int | None = None, max_stops: int = 4,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        inserts = insert_rows or max(prefill_rows, min(slots // 2, 16))
        refill = refill or max(1, slots // 6)  # while work waits at least 5 of 6 slots are busy in every step
        self._sizes = Sizes(
            slots, max_tokens, prefill_rows, inserts, tuple(sorted(set(prefill_buckets))), decode_chunk, max_stops
        )
        _check_sizes(self._sizes, flip)
        self._drain, self._clock, self._vocab_size = flip == "drain", clock, spec.vocab_size
        self._device = Device(spec, mesh, rules, self._sizes, seed=seed, refill=refill)
        self._limits = scheduling.Limits(prefill_rows, inserts, refill)
        self._slots = scheduling.empty(slots)
        self._ledger = Ledger(slots, max_tokens + decode_chunk)
        self._waiting: dict[int, requests.Add] = {}  # by id: what the scheduler's queue stands for
        self._params: Params | None = None
        self._next: requests.Swap | None = None  # a swap that waits for running requests to end
        self._stats = EngineStats()
        self._commands: queue.SimpleQueue[requests.Command] = queue.SimpleQueue()
        self._ids: set[int] = set()  # of the requests that entered and have not left
        self._ids_lock = threading.Lock()

    # ------------------------------------------------------------------------------------------- from any thread

    @property
    def version(self) -> Version | None:
        """The version that tokens are drawn at now; None before the first swap took effect."""
        return self._stats.version

    def stats(self) -> EngineStats:
        """A consistent snapshot, as of the last step."""
        return self._stats

    def add(self, request: Request, on_done: OnDone) -> None:
        """Queue `request`; `on_done` gets its `Result`. DataError, here and now, if it could never be served."""
        sizes = self._sizes
        requests.check(request, max_tokens=sizes.max_tokens, max_stops=sizes.max_stops, vocab_size=self._vocab_size)
        bucket = scheduling.bucket_of(len(request.prompt), sizes.buckets)
        with self._ids_lock:
            if request.id in self._ids:
                raise DataError(f"request {request.id} is in the engine already: an id is unique while it is in use")
            self._ids.add(request.id)
        self._commands.put(requests.Add(request, bucket, on_done))

    def abort(self, id: int, keep: bool) -> None:
        """End request `id`: with `keep` deliver its tokens so far (finish "abort"), else deliver nothing.

        A request that has ended meanwhile is left alone.
        """
        self._commands.put(requests.Abort(id, keep))

    def suspend(self) -> None:
        """Stop before the next dispatch; running requests stay in their slots."""
        self._commands.put(requests.Suspend())

    def resume(self) -> None:
        """Go on after `suspend`."""
        self._commands.put(requests.Resume())

    def swap(self, version: Version, params: Params) -> None:
        """Draw at `version` from the next dispatch on, or once drained. TransferError if `params` do not fit.

        Of two swaps that both wait for draining the later one counts.
        """
        self._device.check(params)
        self._commands.put(requests.Swap(version, params))

    # -------------------------------------------------------------------------------------- by the stepping thread

    def warmup(self, params: Params, progress: Progress | None = None) -> None:
        """Compile every program for parameters like `params`; `progress` is told what and how long."""
        self._device.warmup(params, progress)

    def step(self) -> bool:
        """Do what there is to do, up to one decode dispatch; False if there was nothing to decode."""
        self._apply_commands()
        self._flip_if_due()
        working = self._params is not None and not self._stats.suspended and self._generate(self._params)
        self._stats = replace(
            self._stats, queue_depth=len(self._slots.waiting), active=self._slots.active,
            compiles=self._device.compiles(),
        )  # fmt: skip
        return working

    # -------------------------------------------------------------------------------------------------- commands

    def _apply_commands(self) -> None:
        arrivals: list[requests.Add] = []
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, requests.Add):
                arrivals.append(command)
                continue
            self._enqueue(arrivals)
            arrivals = []
            match command:
                case requests.Abort():
                    self._abort(command)
                case requests.Swap():
                    self._next = command
                    self._flip_if_due()
                case requests.Suspend() | requests.Resume():
                    self._stats = replace(self._stats, suspended=isinstance(command, requests.Suspend))
        self._enqueue(arrivals)

    def _enqueue(self, arrivals: list[requests.Add]) -> None:
        if not arrivals:
            return
        self._waiting.update((add.request.id, add) for add in arrivals)
        self._slots = scheduling.arrive(
            self._slots,
            [scheduling.Waiting(add.request.id, add.bucket, add.request.prompt.tobytes()) for add in arrivals],
        )

    def _flip_if_due(self) -> None:
        swap = self._next
        if swap is None:
            return
        if self._drain and self._slots.active:
            self._slots = scheduling.hold(self._slots, True)
            return
        self._params, self._next = swap.params, None
        self._ledger.flip(swap.version)
        self._slots = scheduling.hold(self._slots, False)
        self._stats = replace(self._stats, version=swap.version, flips=self._stats.flips + 1)

    def _abort(self, command: requests.Abort) -> None:
        self._slots, found = scheduling.abort(self._slots, [command.id])
        for id, slot in found.items():
            now_s = self._clock()
            if slot is None:
                nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "abort")
                add, result = self._waiting.pop(id), Result(nothing, now_s, now_s)
            else:
                self._device.cancel([slot])
                add, result = self._ledger.take(slot, "abort", now_s)
            self._stats = replace(self._stats, aborted=self._stats.aborted + 1)
            self._leave([id])
            if command.keep:
                add.on_done(result)

    # -------------------------------------------------------------------------------------------------- one step

    def _generate(self, params: Params) -> bool:
        """Start what can start, decode, deliver; False if no slot holds a request."""
        self._start_waiting(params)
        if not self._slots.active:
            return False
        report = self._device.decode(params, scheduling.refill_at(self._slots, self._limits))
        progressed = self._ledger.account(report)
        self._count(report.steps, progressed, waits=bool(self._slots.waiting))
        self._deliver(progressed.ended)
        return True

    def _start_waiting(self, params: Params) -> None:
        self._slots, prefills = scheduling.plan(self._slots, self._limits)
        version = self._stats.version
        if not prefills or version is None:
            return
        start_s = self._clock()
        for prefill in prefills:
            adds = [self._waiting.pop(placement.id) for placement in prefill.placements]
            for placement, add in zip(prefill.placements, adds, strict=True):
                self._ledger.start(placement.slot, add, start_s, version)
            entries = [(p.row, p.slot, add.request) for p, add in zip(prefill.placements, adds, strict=True)]
            self._device.prefill(params, prefill.bucket, entries)
        stats, rows = self._stats, sum(prefill.rows for prefill in prefills)
        self._stats = replace(
            stats, prefills=stats.prefills + len(prefills), prefill_rows=stats.prefill_rows + rows,
            prefill_rows_total=stats.prefill_rows_total + len(prefills) * self._sizes.rows,
            started=stats.started + sum(len(prefill.placements) for prefill in prefills),
        )  # fmt: skip

    def _count(self, steps: int, progressed: Progressed, *, waits: bool) -> None:
        stats, busy, total = self._stats, progressed.decoded, steps * self._sizes.slots
        self._stats = replace(
            stats, tokens_decoded=stats.tokens_decoded + busy + progressed.firsts,
            decode_steps=stats.decode_steps + steps, dispatches=stats.dispatches + 1,
            finished=stats.finished + len(progressed.ended),
            slot_steps_busy=stats.slot_steps_busy + busy, slot_steps_total=stats.slot_steps_total + total,
            slot_steps_busy_while_waiting=stats.slot_steps_busy_while_waiting + busy * waits,
            slot_steps_total_while_waiting=stats.slot_steps_total_while_waiting + total * waits,
        )  # fmt: skip

    def _deliver(self, ended: Sequence[tuple[int, str]]) -> None:
        if not ended:
            return
        end_s = self._clock()
        results = [self._ledger.take(slot, finish, end_s) for slot, finish in ended]
        self._slots = scheduling.release(self._slots, [slot for slot, _ in ended])
        self._leave([add.request.id for add, _ in results])
        for add, result in results:
            add.on_done(result)

    def _leave(self, ids: Sequence[int]) -> None:
        with self._ids_lock:
            self._ids.difference_update(ids)


def _check_sizes(sizes: Sizes, flip: str) -> None:
    """ConfigError for sizes that no program can have."""
    if flip not in ("keep_kv", "drain"):
        raise ConfigError("schedule.flip", flip, "unknown policy", "Use keep_kv or drain.")
    counts = {"slots": sizes.slots, "prefill_rows": sizes.rows, "decode_chunk": sizes.chunk}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"sampler.{name}", count, "at least 1 is needed")
    if not all(1 <= bucket <= sizes.max_tokens for bucket in sizes.buckets or (0,)):
        raise ConfigError(
            "sampler.prefill_buckets", sizes.buckets, f"every bucket must hold 1..{sizes.max_tokens} tokens",
            "The cache of a slot must hold the longest prompt and its answer.",
        )  # fmt: skip
