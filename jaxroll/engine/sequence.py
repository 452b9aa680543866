"""Host records of an engine: sequences of the scheduler and the pages that hold them; counters and latencies.

No clock, and no arrays of a device: a simulation uses them without an engine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from jaxroll.errors import ConfigError
from jaxroll.records import Version

if TYPE_CHECKING:  # these load JAX
    from jaxroll.engine.ledger import DispatchResult, Filled

# --- Pages of the KV cache: their number, the block allocator and the prefix cache

_GB = 1e9


@dataclass(frozen=True)
class MemoryShare:
    """A `fraction` of the `limit_bytes` of a device, and what an engine needs of it besides its state, in bytes.

    While weights arrive, the device holds two versions: `arriving` and `in_use`, which may be quantized. `temporaries`
    are those of the most demanding program, with the code of all.
    """

    limit_bytes: int
    fraction: float
    arriving: int
    in_use: int
    temporaries: int = 0

    @property
    def parameters(self) -> int:
        """The bytes of both versions."""
        return self.arriving + self.in_use

    @property
    def state_bytes(self) -> int:
        """The bytes that are left for the engine's state, which is its KV cache above all; may be negative."""
        return int(self.fraction * self.limit_bytes) - self.parameters - self.temporaries

    def described(self) -> str:
        """The share and what is taken from it, as text."""
        taken = f"{self.parameters / _GB:.3g} GB for two versions of the parameters"
        taken += f" and {self.temporaries / _GB:.3g} for temporaries and code" if self.temporaries else ""
        share = self.fraction * self.limit_bytes / _GB
        return f"{self.fraction:g} of {self.limit_bytes / _GB:.3g} GB are {share:.3g}, of them {taken}"


def fitting_pages(share: MemoryShare, state_bytes: Callable[[int], int], least: int, most: int) -> int:
    """The largest number of pages, from `least` to `most`, with which an engine's state fits `share`.

    `state_bytes` gives the bytes of the state for a number of pages and never falls. ConfigError if `least` are too
    many, with the numbers and the fraction that would do.
    """
    if (smallest := state_bytes(least)) > share.state_bytes:
        needed = math.ceil(100 * (share.parameters + share.temporaries + smallest) / share.limit_bytes) / 100
        reason, remedy = share.described(), f"Set it to {needed:g} or more."
        if not share.temporaries:  # nothing is compiled yet
            remedy = f"Set it above {needed:g}: the temporaries of programs are added."
        if smallest:
            reason += f"; slots and a KV cache of {least} pages, for one request, need {smallest / _GB:.3g}"
        if needed > 1:
            remedy = "Use a larger sampler.mesh.tensor or fewer sampler.slots."
        raise ConfigError("sampler.memory_fraction", share.fraction, reason, remedy)
    return least + bisect_right(range(least + 1, most + 1), share.state_bytes, key=state_bytes)


class BlockAllocator:
    """`count` pages, numbered from 0. A page becomes free when its last reference is dropped."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def count(self) -> int:
        """The number of all pages."""
        return len(self._holders)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages with one reference each; ValueError when fewer are free (check `free` first)."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are requested and {len(self._free)} of {self.count} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> list[int]:
        """Add a reference to each of `pages` and return them; ValueError for a free page."""
        shared = list(pages)
        for page in shared:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1
        return shared

    def free_pages(self, pages: Iterable[int]) -> None:
        """Drop one reference to each of `pages`; ValueError for a free page."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free already")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def reference_count(self, page: int) -> int:
        """The number of references to `page`; 0 for a free one."""
        return self._holders[page]


# --- prefix cache: prompts computed once for all requests that start with them
#
# A *prefix* is a run of tokens whose keys and values are in pages that it holds. It is *ready* when all of them are
# computed; then the requests that wait for it may start. It stays in the cache, for later members of its group, until
# its pages or its row of logits are needed: the least recently used prefix is evicted first. A weight swap removes all.

TOKEN_BYTES = 4  # tokens are compared as the bytes of int32


@dataclass(eq=False, slots=True)
class Prefix:
    """A prefix. `computed` of its tokens are in the pages of `table`; `row` is the row of its last logits, or None.

    `waiting` counts the requests that use it and have not started, and the prefixes that continue it (their `base`) and
    are not computed yet.
    """

    tokens: bytes
    shard: int
    table: list[int]
    row: int | None
    computed: int = 0
    waiting: int = 0
    used: int = 0
    base: Prefix | None = None
    ring: list[int] = field(default_factory=list)  # its number; empty in an engine without rings
    copies: tuple[tuple[int, int], ...] = ()  # pages to copy (from, to) before the first chunk is computed
    ring_copies: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def ready(self) -> bool:
        """True if all tokens are computed."""
        return self.computed == self.length


@dataclass
class PrefixCache:
    """The cached prefixes by shard and tokens, and the free rows of logits."""

    rows: list[int]
    _known: dict[tuple[int, bytes], Prefix] = field(default_factory=dict)
    _uses: int = 0

    def find(self, shard: int, tokens: bytes) -> Prefix | None:
        """The prefix equal to `tokens`, if it has (or will have) a row of logits; otherwise None."""
        found = self._known.get((shard, tokens))
        return found if found is not None and found.row is not None else None

    def longest(self, shard: int, tokens: bytes, allowed: Callable[[Prefix], bool]) -> Prefix | None:
        """The longest ready, `allowed` prefix that is a proper prefix of `tokens`; None if there is none."""
        found = [
            prefix
            for (where, known), prefix in self._known.items()
            if where == shard
            and len(known) < len(tokens)
            and tokens.startswith(known)
            and prefix.ready
            and allowed(prefix)
        ]
        return max(found, key=lambda prefix: prefix.length, default=None)

    def add(self, prefix: Prefix) -> Prefix | None:
        """Add `prefix`; return a replaced prefix with the same tokens, whose pages the caller must free."""
        former = self._known.pop((prefix.shard, prefix.tokens), None)
        self._known[prefix.shard, prefix.tokens] = prefix
        if former is not None and former.row is not None:
            self.rows.append(former.row)
        self.touch(prefix)
        return former

    def touch(self, prefix: Prefix) -> None:
        """Mark `prefix` as most recently used."""
        self._uses += 1
        prefix.used = self._uses

    def idle(self, shard: int | None = None) -> Iterator[Prefix]:
        """Prefixes that no request waits for, least recently used first; of one shard or of all."""
        known = (p for p in self._known.values() if not p.waiting and shard in (None, p.shard))
        return iter(sorted(known, key=lambda prefix: prefix.used))

    def forget(self, prefix: Prefix) -> None:
        """Remove `prefix`; the caller must free its pages."""
        if self._known.get((prefix.shard, prefix.tokens)) is prefix:
            del self._known[prefix.shard, prefix.tokens]
            if prefix.row is not None:
                self.rows.append(prefix.row)

    def all(self) -> tuple[Prefix, ...]:
        """All cached prefixes."""
        return tuple(self._known.values())


# --- Sequences of the scheduler


@dataclass(frozen=True)
class Limits:
    """The static sizes that limit the schedule.

    A prefill program computes `rows` rows of one of `buckets` tokens; an insert starts up to `inserts` requests; while
    requests wait, none is admitted before `refill` slots are free; up to `budget` prompt tokens are computed between
    two dispatches. `reserve`: a sequence gets all the pages that it can need at its admission.
    """

    rows: int
    inserts: int
    refill: int
    buckets: tuple[int, ...]
    page_tokens: int
    budget: int
    reserve: bool = True

    @property
    def chunk(self) -> int:
        """The maximum number of tokens of a prompt that are computed at once."""
        return self.buckets[-1]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request from its arrival to its end. `max_positions` is the largest number of cache positions it can need.

    `sampled` counts its sampled tokens; all but the last must be in the cache before it can continue. `computed` counts
    the positions that are in the cache. `swapped`: its pages were copied to the host when it was preempted.
    """

    id: int
    prompt: bytes
    max_positions: int
    arrival: int = 0
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    prefix: Prefix | None = None
    copies: tuple[tuple[int, int], ...] = ()
    ring: list[int] = field(default_factory=list)
    ring_copies: tuple[tuple[int, int], ...] = ()
    sampled: int = 0
    computed: int = 0
    running: bool = False
    swapped: bool = False

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of its prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def positions_wanted(self) -> int:
        """The number of positions that must be in the cache before it can sample its next token."""
        return self.prompt_tokens + max(self.sampled - 1, 0)


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A row of a prefill: `count` tokens of `owner` from position `start` on."""

    owner: Prefix | Sequence
    start: int
    count: int


@dataclass(frozen=True)
class PrefillChunk:
    """One run of a prefill program; `fresh` rows begin at position 0 and read no pages."""

    fresh: bool
    bucket: int
    rows: tuple[PrefillSpan, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """The start of `sequence`: pages are copied by `copies` (from, to), its first token is sampled from `logit_row`.

    The same for rings.
    """

    sequence: Sequence
    logit_row: int | None
    copies: tuple[tuple[int, int], ...]
    ring_copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Preempted:
    """The preemption of `sequence`, which was in `slot` and held the pages of `table`, and its ring.

    If the sequence is `swapped`, they must be saved before they are reused; otherwise it has sampled no token yet.
    """

    sequence: Sequence
    slot: int
    shard: int
    table: tuple[int, ...]
    ring: tuple[int, ...] = ()

    @property
    def held(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its pages, and its ring."""
        return self.table, self.ring


def bucket_of(tokens: int, buckets: Iterable[int]) -> int:
    """The smallest bucket with room for `tokens`."""
    return min(size for size in buckets if size >= tokens)


def end_of(owner: Prefix | Sequence) -> int:
    """The number of tokens of `owner` to compute."""
    return owner.length if isinstance(owner, Prefix) else owner.positions_wanted


# --- Counters of an engine, and latencies of its requests


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was created, and its current state.

    A slot-step is one slot during one decode step; it is busy if the slot sampled tokens that are kept (several only
    with speculative decoding). The
    `_while_waiting` counters cover only dispatches during which requests were waiting for a slot.
    """

    tokens_decoded: int = 0  # sampled tokens, including first tokens (sampled by inserts)
    decode_steps: int = 0
    dispatches: int = 0  # decode dispatches, of up to decode_chunk steps
    slot_steps_busy: int = 0
    slot_steps_total: int = 0
    slot_steps_busy_while_waiting: int = 0
    slot_steps_total_while_waiting: int = 0
    prefills: int = 0  # runs of a prefill program
    prefill_rows: int = 0  # distinct prompts computed
    prefill_rows_total: int = 0  # rows computed, including padding rows
    started: int = 0
    finished: int = 0
    aborted: int = 0
    tokens_aborted: int = 0  # sampled by requests that were aborted before their end
    weight_swaps: int = 0
    queue_depth: int = 0
    active: int = 0
    version: Version | None = None
    suspended: bool = False
    compiles: int = 0  # since warm-up; more than 0 is a defect
    prefill_tokens: int = 0  # prompt tokens computed, including those of requests that restart or resume
    prefix_hits: int = 0  # requests whose prompt, or the beginning of it, was in the cache
    preemptions: int = 0  # requests that lost their pages to others
    tokens_discarded: int = 0  # sampled tokens that a weight swap discarded (`restart`)
    tokens_drafted: int = 0  # drafted tokens that a decode step verified
    tokens_accepted: int = 0  # decoded tokens beyond one per busy slot-step, which were drafted
    step_s: float = 0.0  # time in steps that decoded
    device_s: float = 0.0  # part of `step_s` spent waiting for the device

    @property
    def slot_occupancy(self) -> float | None:
        """The busy share of the slot-steps while requests waited; None if none ever waited."""
        total = self.slot_steps_total_while_waiting
        return self.slot_steps_busy_while_waiting / total if total else None

    def speculation(self) -> dict[str, float | None]:
        """The counters of drafted tokens, and `tokens_per_pass`: the mean number of tokens of a busy slot-step.

        `tokens_per_pass` is 1 without speculative decoding, and None before the first step.
        """
        busy, accepted = self.slot_steps_busy, self.tokens_accepted
        per_pass = (busy + accepted) / busy if busy else None
        return {"tokens_drafted": self.tokens_drafted, "tokens_accepted": accepted, "tokens_per_pass": per_pass}

    @property
    def host_share(self) -> float | None:
        """The share of `step_s` in which the host did not wait for the device; None before the first step."""
        return 1 - self.device_s / self.step_s if self.step_s else None

    def after_dispatch(
        self,
        steps: int,
        slots: int,
        progressed: DispatchResult,
        filled: Filled,
        preempted: int,
        *,
        waits: bool,
        prefill_rows: int,
        prefix_hits: int,
        step_s: float,
        device_s: float,
    ) -> EngineStats:
        """These counters after one more dispatch of `steps` decode steps."""
        busy, total = progressed.decoded - progressed.extra, steps * slots
        return replace(
            self,
            tokens_decoded=self.tokens_decoded + progressed.decoded + progressed.firsts,
            tokens_drafted=self.tokens_drafted + progressed.drafted,
            tokens_accepted=self.tokens_accepted + progressed.extra,
            decode_steps=self.decode_steps + steps,
            dispatches=self.dispatches + 1,
            finished=self.finished + len(progressed.ended),
            slot_steps_busy=self.slot_steps_busy + busy,
            slot_steps_total=self.slot_steps_total + total,
            slot_steps_busy_while_waiting=self.slot_steps_busy_while_waiting + busy * waits,
            slot_steps_total_while_waiting=self.slot_steps_total_while_waiting + total * waits,
            prefills=self.prefills + filled.prefills,
            prefill_rows=self.prefill_rows + filled.rows,
            prefill_rows_total=self.prefill_rows_total + filled.prefills * prefill_rows,
            prefill_tokens=self.prefill_tokens + filled.tokens,
            started=self.started + filled.started,
            preemptions=self.preemptions + preempted,
            prefix_hits=prefix_hits,
            step_s=self.step_s + step_s,
            device_s=self.device_s + device_s,
        )


# --- latencies: time to the first token, and between tokens

_KEPT = 2048


class Latencies:
    """Latencies of the last `_KEPT` requests and dispatches. Written by the stepping thread, read by any thread."""

    def __init__(self) -> None:
        self._firsts: deque[float] = deque(maxlen=_KEPT)
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._last_s: float | None = None
        self._waits_since_s: float | None = None
        self.flush_wait_s = 0.0  # in which requests ran and none sampled, because the store had not their tokens

    def note_wait(self, waits: bool, now_s: float) -> bool:
        """Record that the engine waits, or samples again at `now_s`; `waits` again."""
        if not waits and self._waits_since_s is not None:
            self.flush_wait_s += now_s - self._waits_since_s
        since_s = now_s if self._waits_since_s is None else self._waits_since_s
        self._waits_since_s = since_s if waits else None
        return waits

    def first(self, waited_s: float) -> None:
        """Record that a request got its first token `waited_s` seconds after it was added."""
        self._firsts.append(waited_s)

    def dispatch(self, done_s: float, tokens: float, others: bool) -> None:
        """Record the end of a dispatch of `tokens` per slot; `others`: requests already ran in the previous one."""
        if others and tokens and self._last_s is not None:
            self._gaps.append((done_s - self._last_s) / tokens)
        self._last_s = done_s

    def idle(self) -> None:
        """Note that no request waits for a token now."""
        self._last_s = self._waits_since_s = None

    def percentiles(self) -> dict[str, float | None]:
        """`ttft_p50_s`, `ttft_p99_s` (from `add` to the first token on the host), `itl_p50_s`, `itl_p99_s`.

        The inter-token latency is the mean time per token of a dispatch, including the time since the previous dispatch
        (prefills of other requests, a weight swap). None before the first value.
        """
        found: dict[str, float | None] = {}
        for name, values in (("ttft", tuple(self._firsts)), ("itl", tuple(self._gaps))):
            for percent in (50, 99):
                found[f"{name}_p{percent}_s"] = float(np.percentile(values, percent)) if values else None
        return found
