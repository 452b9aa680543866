"""Claim order (STORE.md, promise 8), and the share of scarce work that one sampler may lease. Pure.

`lease_order` takes groups in the order of their prompts, so short answers are not favoured and a run is reproducible;
`ready_first` takes whatever finished first; `freshest_first` whatever was sampled last. The latter two let the rest
grow stale.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A group that is not claimed yet, in the order of issue. `ready_place` counts completions; None is unfinished."""

    group: int
    ready_place: int | None
    oldest_step: int = 0  # of its tokens


@dataclass(frozen=True)
class Pick:
    """`chosen` groups, `surplus` to be aborted; or what is `missing` before anything can be chosen."""

    chosen: tuple[int, ...] = ()
    surplus: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


def pick(policy: str, candidates: Sequence[Candidate], batch: int, redundant: int, last: bool) -> Pick:
    """The groups of the next claim out of `candidates` (in order of issue).

    `last` says that no further group will come: a batch may then be short. With `redundant` groups the first `batch`
    to finish among `batch + redundant` are chosen and the others are surplus.
    """
    head = candidates[: batch + redundant] if policy == "lease_order" else candidates
    ready = [c for c in head if c.ready_place is not None]
    wanted = min(batch, len(candidates)) if last else batch
    if len(ready) < wanted or wanted == 0:
        return Pick(missing=tuple(c.group for c in head if c.ready_place is None))
    if policy == "ready_first":
        ready.sort(key=lambda c: (c.ready_place, c.group))
    elif policy == "freshest_first":
        ready.sort(key=lambda c: (-c.oldest_step, c.group))
    elif redundant:
        ready.sort(key=lambda c: (c.ready_place, c.group))
    chosen = sorted(c.group for c in ready[:wanted])
    return Pick(chosen=tuple(chosen), surplus=_surplus(head, chosen, redundant))


def _surplus(head: Sequence[Candidate], chosen: list[int], redundant: int) -> tuple[int, ...]:
    """At most `redundant` groups of the head that lost the race; unfinished ones first, for they cost least."""
    rest = [c for c in head if c.group not in set(chosen)]
    rest.sort(key=lambda c: (c.ready_place is not None, c.group))
    return tuple(sorted(c.group for c in rest[:redundant]))


def groups_ahead(policy: str, place: int, total: int) -> int:
    """How many of `total` unclaimed groups may be trained before the one at `place` in the order of issue."""
    return place if policy == "lease_order" else max(0, total - 1)


def shuffled(groups: Sequence[int], seed: int) -> tuple[int, ...]:
    """`groups` in the order that `seed` gives."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    return tuple(order)


# --- shares of scarce work, and whether groups are split for them
#
#     share = ⌈available · room / (room + the others' room)⌉   members, when there is less work than room; else its room
#
# Members of a group kept `together` on one sampler have their prompt computed once; `spread` over all that have room
# they
# finish sooner. `auto` keeps them together until samplers would be idle, or the learner waits for that very group. A
# sampler with room for a part of a group would be idle too: but for `together` it asks for that part. So under load
# groups are spread, since places become free one by one.


@dataclass(frozen=True)
class Share:
    """What one sampler with `room` may take of `available` work, beside others with room for `others`, in members."""

    room: int
    others: int = 0
    available: int = 0
    replicate: str = "together"

    @property
    def is_scarce(self) -> bool:
        """True if somebody will go without."""
        return self.others > 0 and self.available < self.room + self.others

    @property
    def members(self) -> int:
        """How many members it may take; at least one, if there is one."""
        return max(1, self._part(self.available)) if self.is_scarce else self.room

    def splits(self, awaited: bool) -> bool:
        """True if members of a group are dealt out; `awaited` says that the learner waits for that group."""
        if self.others == 0 or self.replicate == "together":
            return False
        return self.replicate == "spread" or self.is_scarce or awaited

    def of_group(self, free: int, left: int, awaited: bool, *, begun: bool) -> int:
        """How many of a group's `free` members it may take with `left` of its share.

        A new group that is kept together goes to it whole, as far as it has room; one that has `begun` is in pieces.
        """
        if self.splits(awaited):
            return min(left, self._part(free))
        return min(free, left if begun else left + self.room - self.members)

    def _part(self, members: int) -> int:
        return -(-members * self.room // (self.room + self.others))
