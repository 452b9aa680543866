"""Execution of the schedule on the device: compute prompts, start requests, move pages, record tokens.

Also the devices of an engine on several hosts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import jax
import msgspec
import numpy as np

from jaxroll.engine import requests
from jaxroll.engine.device import Device, Dispatch, SavedPages, Taken
from jaxroll.engine.ledger import DispatchResult, Ended, Filled, Ledger, Unfinished
from jaxroll.engine.requests import Add, OnTokens, Result, Sizes, next_mask
from jaxroll.engine.scheduler import Scheduler
from jaxroll.engine.sequence import PrefillChunk, PrefillSpan, Prefix, Sequence, Start
from jaxroll.errors import DataError
from jaxroll.models.params import Held, Params
from jaxroll.protocols import Completion, Progress, Supports
from jaxroll.records import Version

Decode = Callable[[list[int]], str]


@dataclass(eq=False, slots=True)
class _Open:
    """A request in the engine: its tokens before it last left its slot, saved pages, number of streamed tokens."""

    add: Add
    before: Unfinished | None = None
    saved: SavedPages | None = None
    sent: int = 0


@dataclass(frozen=True, eq=False)
class InFlight:
    """A dispatch whose report was not read yet, and what its step did before it, from `begun_s` on."""

    dispatch: Dispatch
    version: Version
    filled: Filled
    preempted: int
    begun_s: float


class EngineWork:
    """The requests in the engine, and the work of a step. Only the stepping thread may call the methods."""

    def __init__(
        self, device: Device, scheduler: Scheduler, sizes: Sizes, clock: Callable[[], float], decode: Decode | None
    ) -> None:
        self._decode, self._is_bounded = decode, False  # True once a request has `may_sample`
        self._device, self._scheduler, self._sizes, self._clock = device, scheduler, sizes, clock
        self._ledger = Ledger(sizes.slots, sizes.max_tokens + sizes.dispatch_tokens)
        self._open: dict[int, _Open] = {}
        self._refused: dict[int, DataError] = {}  # requests that cannot go on
        self._asking: set[int] = set()  # requests for which the host decides after every dispatch
        self._tables_of = -1

    def enter(self, add: Add, sequence: Sequence) -> Sequence:
        """Register the request of `sequence`, and return `sequence`."""
        self._open[add.request.id] = one = _Open(add)
        self._is_bounded |= add.request.may_sample is not None
        if add.request.allowed is not None or add.request.params.stop_strings:
            self._asking.add(add.request.id)
        if (known := add.request.before) is not None:
            tokens, logprobs = np.asarray(known.tokens, np.int32), np.asarray(known.logprobs, np.float32)
            support = Supports.decoded(known.support, tokens)
            one.before = Unfinished(tokens, logprobs, support, known.versions, self._clock())
            one.sent = sequence.sampled = len(tokens)
        return sequence

    # --- before a dispatch

    def fill(self, params: Held, version: Version) -> Filled:
        """Admit, compute prompts within the budget, and start the ready requests."""
        for sequence in self._scheduler.admit():
            assert sequence.slot is not None
            saved = self._open[sequence.id].saved
            assert saved is not None
            held = sequence.table, sequence.ring
            self._device.load(self._scheduler.shard_of(sequence.slot), held, saved)
            self._open[sequence.id].saved = None
        chunks = self._scheduler.prefill_chunks(busy=bool(self._scheduler.running))
        for chunk in chunks:
            self._compute(params, chunk)
        started = self._scheduler.start_rows()
        self._start(started, version)
        rows = [row for chunk in chunks for row in chunk.rows]
        return Filled(len(chunks), len(rows), sum(row.count for row in rows), len(started))

    def make_room(self, steps: int) -> int:
        """Allocate pages for the next `steps` tokens; return the number of requests preempted for it."""
        victims = self._scheduler.grow(steps)
        for victim in victims:
            if not victim.sequence.swapped:
                self._ledger.forget(victim.slot)
                continue
            one = self._open[victim.sequence.id]
            _, one.before = self._ledger.interrupt(victim.slot)
            one.saved = self._device.save(victim.shard, victim.held, victim.sequence.positions_wanted)
        if victims:
            self._device.cancel([victim.slot for victim in victims])
        if self._tables_of != self._scheduler.changes:
            self._tables_of = self._scheduler.changes
            self._device.set_tables([(one.table, one.ring) if one else ((), ()) for one in self._scheduler.sequences])
        return len(victims)

    def _compute(self, params: Held, chunk: PrefillChunk) -> None:
        owners = [row.owner for row in chunk.rows]
        # Only before an owner's first chunk.
        self._device.copy([(self._shard(owner), *copy) for owner in owners for copy in owner.copies])
        self._device.copy_rings([(self._shard(owner), *copy) for owner in owners for copy in owner.ring_copies])
        for owner in owners:
            owner.copies = owner.ring_copies = ()
        self._device.prefill(params, chunk.fresh, chunk.bucket, [self._prefill_row(row) for row in chunk.rows])

    def _prefill_row(self, row: PrefillSpan) -> requests.PrefillRow:
        owner, end = row.owner, row.start + row.count
        if isinstance(owner, Prefix):
            tokens, logits = np.frombuffer(owner.tokens, np.int32), owner.row
        else:
            before = self._open[owner.id].before
            assert before is not None
            tokens, logits = np.concatenate([np.frombuffer(owner.prompt, np.int32), before.tokens]), None
        tokens = tokens[row.start : end]
        return requests.PrefillRow(tokens, row.start, self._shard(owner), owner.table, logits, owner.ring)

    def _shard(self, owner: Prefix | Sequence) -> int:
        if isinstance(owner, Prefix):
            return owner.shard
        assert owner.slot is not None
        return self._scheduler.shard_of(owner.slot)

    def _start(self, started: list[Start], version: Version) -> None:
        inserts, restores, copies, ring_copies, now_s = [], [], [], [], self._clock()
        for start in started:
            sequence, one = start.sequence, self._open[start.sequence.id]
            assert sequence.slot is not None
            request, before = one.add.request, one.before
            self._ledger.start(sequence.slot, one.add, now_s, version, before)
            made = [(self._shard(sequence), *copy) for copy in start.copies]
            ring_copies += [(self._shard(sequence), *copy) for copy in start.ring_copies]
            if before is None:
                assert start.logit_row is not None
                copy = made[0] if made else (0, 0, self._sizes.shard_pages)
                inserts.append((sequence.slot, start.logit_row, copy, sequence.prompt_tokens, request))
                continue
            copies += made
            restores.append(
                (sequence.slot, before.tokens, float(before.logprobs[-1]), sequence.positions_wanted, request)
            )
        self._device.copy(copies)
        self._device.copy_rings(ring_copies)
        self._set_masks([start.sequence for start in started], reset_others=True)
        self._device.restore(restores)
        self._device.insert(inserts)

    def needs_report(self, in_flight: int) -> bool:
        """True if the next dispatch depends on the reports of those in flight.

        It does for a request with a token mask or stop strings, one that may sample too few tokens for all these
        dispatches, and if there are not enough pages for the tokens of all.
        """
        tokens = (1 + in_flight) * self._sizes.dispatch_tokens
        if self._asking or not self._scheduler.has_room(tokens):
            return True
        return self._may_sample(tokens) < tokens

    def dispatch(self, params: Held, steps: int, until_idle: int | None) -> Dispatch:
        """Dispatch up to `steps` decode steps (`Device.decode`)."""
        self._ledger.note_dispatch()
        return self._device.decode(params, steps, until_idle)

    def steps(self) -> int:
        """The number of steps of the next dispatch: 1 if a request has a token mask, fewer if one may not sample more.

        0 if the host does not have the first token of a request with a mask yet.
        """
        asking = [
            sequence for sequence in self._scheduler.running if self._open[sequence.id].add.request.allowed is not None
        ]
        if any(not sequence.sampled for sequence in asking):
            return 0
        self._set_masks(asking, reset_others=False)
        most = self._may_sample(self._sizes.dispatch_tokens)
        return min(1 if asking else self._sizes.chunk, -(-most // (1 + self._sizes.draft)))

    def waits(self) -> bool:
        """True if a running request may sample nothing at present (`Request.may_sample`)."""
        return self._may_sample(self._sizes.dispatch_tokens) == 0

    def _may_sample(self, most: int) -> int:
        """The number of tokens, up to `most`, that every running request may sample."""
        for sequence in self._scheduler.running if self._is_bounded else ():
            if (may_sample := self._open[sequence.id].add.request.may_sample) is not None:
                most = min(most, may_sample(max(sequence.sampled, 1)))  # the first token may be on the device still
        return max(most, 0)

    def _set_masks(self, sequences: list[Sequence], *, reset_others: bool) -> None:
        """Send the next token masks to the device; with `reset_others`, requests without `allowed` get a full mask."""
        if not self._sizes.masks:
            return
        masks: dict[int, np.ndarray] = {}
        for sequence in sequences:
            assert sequence.slot is not None
            request = self._open[sequence.id].add.request
            if request.allowed is not None:
                try:
                    masks[sequence.slot] = next_mask(request, self._drawn(sequence), self._device.mask_tokens)
                except DataError as error:
                    self._refused[sequence.id] = error  # it is removed before the next token is sampled
            elif reset_others:
                masks[sequence.slot] = np.ones(1, bool)
        if masks:
            self._device.set_token_masks(masks)

    def _drawn(self, sequence: Sequence) -> np.ndarray:
        """The sampled tokens of `sequence` that the host has."""
        before = self._open[sequence.id].before
        if sequence.sampled == 0:
            return np.zeros(0, np.int32)
        assert sequence.slot is not None
        if before is not None and len(before.tokens) == sequence.sampled:
            return before.tokens
        return self._ledger.tokens(sequence.slot)

    # --- after a dispatch

    def account(self, report: requests.Report) -> DispatchResult:
        """Record the report of the oldest dispatch in flight, and end requests whose stop strings are complete."""
        progressed = self._ledger.account(report)
        cut: list[int] = []
        for sequence in self._scheduler.running:
            assert sequence.slot is not None
            if not self._ledger.takes_part(sequence.slot):
                continue
            self._scheduler.note_sampled(sequence.slot, int(report.counts[sequence.slot]))
            strings = self._open[sequence.id].add.request.params.stop_strings
            tokens = self._completed(sequence.slot, strings) if strings else None
            if tokens is not None:
                if sequence.slot not in progressed.ended:
                    cut.append(sequence.slot)
                progressed.ended[sequence.slot] = Ended("stop", tokens)
        if cut:
            self._device.cancel(cut)
        return progressed

    def _completed(self, slot: int, strings: tuple[str, ...]) -> int | None:
        """The number of tokens that complete one of `strings`; None if none is complete."""
        assert self._decode is not None
        tokens = self._ledger.tokens(slot).tolist()
        if not any(string in self._decode(tokens) for string in strings):
            return None
        return next(n for n in range(1, len(tokens) + 1) if any(s in self._decode(tokens[:n]) for s in strings))

    def pieces(self, ended: Collection[int], at_least: int | None = None) -> list[tuple[OnTokens, Completion]]:
        """New tokens of the running requests that stream, except those in the slots `ended`.

        A request has none before it has sampled `at_least` (default: its `piece_tokens`).
        """
        found: list[tuple[OnTokens, Completion]] = []
        for sequence in self._scheduler.running:
            one = self._open[sequence.id]
            if one.add.request.on_tokens is None or sequence.slot is None or sequence.slot in ended:
                continue
            if sequence.sampled - one.sent < (at_least or one.add.request.piece_tokens):
                continue
            piece = self._ledger.since(sequence.slot, one.sent)
            if len(piece.tokens):
                one.sent += len(piece.tokens)
                found.append((one.add.request.on_tokens, piece))
        return found

    def take(self, slot: int, ended: Ended, end_s: float, version: Version) -> tuple[Add, Result]:
        """Remove the ended request from `slot` and return it with its result."""
        add, result = self._ledger.take(slot, ended, end_s)
        result = self._with_experts(slot, add, result)
        kept = None
        sequence = self._scheduler.sequences[slot]
        assert sequence is not None
        whole = self._sizes.keeps_window(sequence.sampled - len(result.completion.tokens))
        # A KV cache of mixed versions is not reused, nor one whose last window was overwritten behind a stop string.
        if add.request.keep and whole and all(run.version == version for run in result.completion.versions):
            kept = np.concatenate([add.request.prompt, result.completion.tokens[:-1]]).astype(np.int32).tobytes()
        self._scheduler.release(slot, kept)
        self._asking.discard(add.request.id)
        del self._open[add.request.id]
        return add, result

    def _with_experts(self, slot: int, add: Add, result: Result) -> Result:
        """`result` with the recorded choices of all its tokens but the last, which was never computed."""
        sequence = self._scheduler.sequences[slot]
        assert sequence is not None
        found = self._device.experts(self._scheduler.shard_of(slot), sequence.table)
        if found is None:
            return result
        computed = len(add.request.prompt) + len(result.completion.tokens) - 1
        experts = np.array(found)[:computed]
        return replace(result, completion=msgspec.structs.replace(result.completion, experts=experts))

    def refused(self) -> list[tuple[Add, Unfinished | None, DataError]]:
        """Remove the requests that cannot continue; return each with its tokens (None: none) and the error."""
        refused, self._refused = self._refused, {}
        left = []
        for id, error in refused.items():
            found = self.abort(id)
            assert found is not None
            left.append((*found, error))
        return left

    def abort(self, id: int) -> tuple[Add, Unfinished | None] | None:
        """Remove request `id` and return it with its tokens (None: none); None if it is not in the engine."""
        running = {sequence.id: (sequence.slot, sequence.sampled) for sequence in self._scheduler.running}
        if self._scheduler.abort(id) is None:
            return None
        one = self._open.pop(id)
        self._asking.discard(id)
        slot, sampled = running.get(id, (None, 0))
        if slot is None:
            return one.add, one.before
        self._device.cancel([slot])
        if sampled:
            return self._ledger.interrupt(slot)
        self._ledger.forget(slot)  # the host does not have its first token yet
        return one.add, one.before

    def swap_weights(self, version: Version, *, running: bool, forget_tokens: bool) -> int:
        """Prepare requests for new weights, which are `version`; return the number of discarded tokens."""
        sequences = {sequence.slot: sequence.id for sequence in self._scheduler.running}
        slots = self._scheduler.swap_weights(running=running, forget_tokens=forget_tokens)
        for slot in slots:
            _, self._open[sequences[slot]].before = self._ledger.interrupt(slot)
        if slots:
            self._device.cancel(slots)
        discarded = 0
        for one in self._open.values():
            if running:
                one.saved = None
            if forget_tokens and one.before is not None:
                discarded += len(one.before.tokens)
                one.before = None
        self._ledger.swap_version(version)
        return discarded


# --- one engine on several hosts (docs/placement.md)
#
# All processes run the same programs in the same order. Process 0 has the requests and decides; what it takes from its
# host as an input is sent to the others, which have no other source. Sizes, seed and programs follow from the config.


class Operation(msgspec.Struct, frozen=True):
    """A call of `Device` with its inputs, which all processes make now."""

    what: str
    numbers: tuple[int, ...] = ()
    arrays: tuple[np.ndarray, ...] = ()


class LeadingDevice(Device):
    """The device of process 0. It sends every operation to the other processes before it runs it here.

    The pages of a preempted request stay on the hosts that have its devices.
    """

    def __init__(self, send: Callable[[Operation], None], *args: Any, **options: Any) -> None:
        self._send, self._saves, self._is_warming = send, 0, False
        self._unused: SimpleQueue[int] = SimpleQueue()  # numbers of saved pages that no request needs any more
        super().__init__(*args, **options)

    def _repeat(self, what: str, *numbers: int, arrays: tuple[np.ndarray, ...] = ()) -> None:
        while not self._unused.empty():
            self._send(Operation("forget", (self._unused.get(),)))
        self._send(Operation(what, numbers, arrays))

    def _prefill(self, params: Held, fresh: bool, bucket: int, packed: np.ndarray) -> None:
        self._repeat("prefill", int(fresh), bucket, arrays=(packed,))
        super()._prefill(params, fresh, bucket, packed)

    def _update(self, what: str, *inputs: np.ndarray) -> None:
        self._repeat(what, arrays=inputs)
        super()._update(what, *inputs)

    def _put_tables(self, packed: np.ndarray) -> None:
        self._repeat("tables", arrays=(packed,))
        super()._put_tables(packed)

    def save(self, shard: int, held: Taken, tokens: int) -> SavedPages:
        """See Device. Every process keeps its shards."""
        found = super().save(shard, held, tokens)
        weakref.finalize(found, self._unused.put, self._saves)
        return found

    def _read_pages(self, place: np.ndarray) -> Any:
        self._saves += 1
        self._repeat("save", self._saves, arrays=(place,))
        return self._saves, super()._read_pages(place)

    def _write_pages(self, place: np.ndarray, pages: Any) -> None:
        number, own = pages
        self._repeat("load", number, arrays=(place,))
        super()._write_pages(place, own)

    def _read_experts(self, place: np.ndarray) -> jax.Array:
        self._repeat("experts", arrays=(place,))
        return super()._read_experts(place)

    def decode(self, params: Held, steps: int, until_idle: int | None) -> Dispatch:
        """See Device."""
        self._repeat("decode", steps, until_idle or 0)
        return super().decode(params, steps, until_idle)

    def held(self, params: Params) -> Held:
        """See Device. The other processes use the parameters that they have placed last."""
        self._repeat("hold", int(self._is_warming))
        return super().held(params)

    def warmup(self, params: Params | None, progress: Progress | None) -> None:
        """See Device. The other processes keep the parameters for the swap to them."""
        self._is_warming = True
        super().warmup(params, progress)
        self._is_warming = False


class FollowingDevice(Device):
    """The device of another process, which runs the operations that process 0 sends, with its own shards.

    `placed` are the parameters that process 0 swaps in next.
    """

    placed: Params | None = None
    _held: Held | None = None

    def run(self, operation: Operation) -> None:
        """Run what process 0 runs now; does not wait for the devices, except in "save"."""
        what, numbers, arrays = operation.what, operation.numbers, operation.arrays
        match what:
            case "prefill":
                self._prefill(self._in_use, bool(numbers[0]), numbers[1], *arrays)
            case "decode":
                self.decode(self._in_use, numbers[0], numbers[1] or None)
            case "tables":
                self._put_tables(*arrays)
            case "save":
                self._saved[numbers[0]] = self._read_pages(*arrays)
            case "load":
                self._write_pages(arrays[0], self._saved[numbers[0]])
            case "forget":
                del self._saved[numbers[0]]
            case "experts":
                self._read_experts(*arrays)
            case "hold":
                assert self.placed is not None, "process 0 has placed the same version before"
                self._held = None
                self._held, self.placed = self.held(self.placed), self.placed if numbers[0] else None
            case _:
                self._update(what, *arrays)

    @functools.cached_property
    def _saved(self) -> dict[int, Any]:
        return {}

    @property
    def _in_use(self) -> Held:
        assert self._held is not None, "process 0 has weights before it dispatches"
        return self._held
