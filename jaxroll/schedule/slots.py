"""Who gets which slot of a continuously batched engine: a pure state machine.

Requests wait first come, first served. A slot is free the moment its request ends. `plan` moves waiting requests into
free slots, in batches that fit one prefill program: one bucket, at most `rows` distinct prompts, at most `inserts`
requests. Requests with the same prompt share a row, so a group's prompt is computed once for all members that start
together. The bucket depends on a request's own prompt alone: the program that computes a token never depends on who
else is there.

Every function takes a state and returns the next one; nothing here knows about arrays, devices or time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from jaxroll.errors import DataError


@dataclass(frozen=True)
class Waiting:
    """A request without a slot. `prompt` identifies its prompt's content: equal prompts have equal values."""

    id: int
    bucket: int
    prompt: Hashable


@dataclass(frozen=True)
class Limits:
    """What one prefill program holds, and how many slots must be free before it is worth running (`refill`)."""

    rows: int
    inserts: int
    refill: int = 1

    def __post_init__(self) -> None:
        if min(self.rows, self.inserts, self.refill) < 1:
            raise ValueError(f"limits must be at least 1: {self}")


@dataclass(frozen=True)
class Placement:
    """Request `id` starts in `slot` from row `row` of its batch."""

    id: int
    row: int
    slot: int


@dataclass(frozen=True)
class Prefill:
    """One run of a prefill program. Row r holds the prompt of the first placement whose `row` is r."""

    bucket: int
    placements: tuple[Placement, ...]

    @property
    def rows(self) -> int:
        """How many distinct prompts it computes."""
        return 1 + max(placement.row for placement in self.placements)


@dataclass(frozen=True)
class Slots:
    """S slots and a queue. `owners[s]` is the request in slot s; `held` says that no request may start now."""

    owners: tuple[int | None, ...]
    waiting: tuple[Waiting, ...] = ()
    held: bool = False

    @property
    def free(self) -> tuple[int, ...]:
        """The free slots, lowest first."""
        return tuple(slot for slot, owner in enumerate(self.owners) if owner is None)

    @property
    def active(self) -> int:
        """Number of slots that hold a request."""
        return len(self.owners) - self.owners.count(None)


def empty(slots: int) -> Slots:
    """`slots` free slots and an empty queue."""
    if slots < 1:
        raise ValueError(f"{slots} slots: at least one is needed")
    return Slots((None,) * slots)


def bucket_of(prompt_tokens: int, buckets: Iterable[int]) -> int:
    """The smallest bucket that holds a prompt of `prompt_tokens`; DataError if none does."""
    sizes = tuple(buckets)
    fitting = [size for size in sizes if size >= prompt_tokens]
    if prompt_tokens < 1:
        raise DataError("the prompt is empty: generation needs at least one token to start from")
    if not fitting:
        raise DataError(
            f"the prompt has {prompt_tokens} tokens and the longest prefill bucket holds {max(sizes)}: "
            f"shorten the prompt or add a bucket to sampler.prefill_buckets"
        )
    return min(fitting)


def arrive(state: Slots, requests: Iterable[Waiting]) -> Slots:
    """`state` with `requests` at the end of the queue."""
    return replace(state, waiting=state.waiting + tuple(requests))


def hold(state: Slots, held: bool) -> Slots:
    """`state` in which starting requests is forbidden (True) or allowed again (False)."""
    return replace(state, held=held)


def release(state: Slots, slots: Iterable[int]) -> Slots:
    """`state` after the requests in `slots` ended."""
    ended = frozenset(slots)
    owners = tuple(None if slot in ended else owner for slot, owner in enumerate(state.owners))
    return replace(state, owners=owners)


def abort(state: Slots, ids: Iterable[int]) -> tuple[Slots, dict[int, int | None]]:
    """`state` without the requests `ids`, and where each was: its slot, or None if it waited. Others are left out."""
    wanted = frozenset(ids)
    found: dict[int, int | None] = {request.id: None for request in state.waiting if request.id in wanted}
    in_slots = {owner: slot for slot, owner in enumerate(state.owners) if owner in wanted}
    waiting = tuple(request for request in state.waiting if request.id not in wanted)
    return release(replace(state, waiting=waiting), in_slots.values()), found | in_slots


def refill_at(state: Slots, limits: Limits) -> int | None:
    """How many slots must be free for starting requests to be worth a prefill; None if none may start.

    All that wait, or `refill`: below that a prefill would run nearly empty, and it costs the same however full it is.
    """
    if state.held or not state.waiting:
        return None
    return min(limits.refill, len(state.waiting), len(state.owners))


def plan(state: Slots, limits: Limits) -> tuple[Slots, tuple[Prefill, ...]]:
    """The next state, and the prefills that start as many waiting requests as there are free slots, oldest first."""
    free, wanted = state.free, refill_at(state, limits)
    if wanted is None or len(free) < wanted:
        return state, ()
    starting = state.waiting[: len(free)]
    owners = list(state.owners)
    for request, slot in zip(starting, free, strict=False):
        owners[slot] = request.id
    slot_of = dict(zip((request.id for request in starting), free, strict=False))
    by_bucket = sorted(starting, key=lambda request: request.bucket)  # stable: oldest first inside a bucket
    prefills = tuple(
        prefill
        for bucket, members in groupby(by_bucket, key=lambda request: request.bucket)
        for prefill in _batches(bucket, tuple(members), slot_of, limits)
    )
    return replace(state, owners=tuple(owners), waiting=state.waiting[len(starting) :]), prefills


def _batches(bucket: int, members: tuple[Waiting, ...], slot_of: dict[int, int], limits: Limits) -> list[Prefill]:
    """`members`, which share a bucket, cut into prefills within `limits`."""
    batches: list[Prefill] = []
    rows: dict[Hashable, int] = {}
    placements: list[Placement] = []
    for request in members:
        new_row = request.prompt not in rows
        if len(placements) == limits.inserts or (new_row and len(rows) == limits.rows):
            batches.append(Prefill(bucket, tuple(placements)))
            rows, placements = {}, []
        row = rows.setdefault(request.prompt, len(rows))
        placements.append(Placement(request.id, row, slot_of[request.id]))
    return [*batches, Prefill(bucket, tuple(placements))]
