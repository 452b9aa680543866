"""Values of the scheduler: sequences, limits, prefill chunks, starts and preemptions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxroll.engine.block_allocator import TOKEN_BYTES, Prefix


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
    """The start of `sequence`: pages are copied by `copies` (from, to), its first token is sampled from `logit_row`."""

    sequence: Sequence
    logit_row: int | None
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Preempted:
    """The preemption of `sequence`, which was in `slot` and held the pages of `table`.

    If the sequence is `swapped`, its pages must be saved before they are reused; otherwise it has sampled no token yet.
    """

    sequence: Sequence
    slot: int
    shard: int
    table: tuple[int, ...]


def bucket_of(tokens: int, buckets: Iterable[int]) -> int:
    """The smallest bucket with room for `tokens`."""
    return min(size for size in buckets if size >= tokens)


def end_of(owner: Prefix | Sequence) -> int:
    """The number of tokens of `owner` to compute."""
    return owner.length if isinstance(owner, Prefix) else owner.positions_wanted
