"""Values of the scheduler: sequences, limits, and requests to the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxroll.engine.prefix_cache import TOKEN_BYTES, Prefix


@dataclass(frozen=True)
class Limits:
    """The static sizes that the schedule must keep to.

    A prefill program computes `rows` rows of one of `buckets` tokens; an insert starts `inserts` requests; while work
    waits, `refill` slots must be free before any is given away; `budget` tokens are computed between two dispatches.
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
        """The most tokens of a prompt that are computed at once."""
        return self.buckets[-1]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request from its arrival to its end. `most` is the most positions of the cache that it can come to need.

    `sampled` are the tokens that it has drawn; all but the last of them are, or are to be, in the cache. `computed`
    counts the positions that are there.
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
        """Tokens of its prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def positions_wanted(self) -> int:
        """Positions that must be in the cache before it can draw its next token."""
        return self.prompt_tokens + max(self.sampled - 1, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """`count` tokens of `owner` from position `start` on, to be computed."""

    owner: Prefix | Sequence
    start: int
    count: int


@dataclass(frozen=True)
class Chunk:
    """One run of a prefill program: `fresh` rows begin at position 0 and read no page."""

    fresh: bool
    bucket: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """`sequence` runs from now on; its first token is sampled from `logit_row` after `copies` (page, to page)."""

    sequence: Sequence
    logit_row: int | None
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Preempted:
    """`sequence` was in `slot` and had the pages of `table`, which belong to others now.

    They are worth keeping if the sequence is `swapped`, and nothing was drawn yet if not.
    """

    sequence: Sequence
    slot: int
    shard: int
    table: tuple[int, ...]


def bucket_of(tokens: int, buckets: Iterable[int]) -> int:
    """The smallest bucket that holds `tokens`."""
    return min(size for size in buckets if size >= tokens)


def end_of(owner: Prefix | Sequence) -> int:
    """Number of its tokens to compute."""
    return owner.length if isinstance(owner, Prefix) else owner.positions_wanted
