"""Sequences of the scheduler, and the pages of the KV cache that hold them: block allocator, prefix cache.

No arrays, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from jaxroll.errors import ConfigError

# --- Pages of the KV cache: their number, the block allocator and the prefix cache

_GB = 1e9


@dataclass(frozen=True)
class MemoryShare:
    """A `fraction` of the `limit_bytes` of a device, and what an engine needs of it besides its state, in bytes.

    While weights arrive, the device holds two versions: `arriving` and `in_use`, which may be quantised. `temporaries`
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
class Row:
    """A row of a prefill: `count` tokens of `owner` from position `start` on."""

    owner: Prefix | Sequence
    start: int
    count: int


@dataclass(frozen=True)
class Chunk:
    """One run of a prefill program; `fresh` rows begin at position 0 and read no pages."""

    fresh: bool
    bucket: int
    rows: tuple[Row, ...]


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
