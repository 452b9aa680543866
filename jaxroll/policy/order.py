"""Claim order (docs/store_contract.md, promise 8), and the share of scarce work that one sampler may lease. Pure.

`lease_order` takes groups in the order of their prompts, so short answers are not favoured and a run is reproducible;
`ready_first` takes the groups that finished first; `freshest_first` those sampled last. With the latter two, the other
groups grow stale.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """Unclaimed group. `ready_place` is its position in the order of completion; None if it is unfinished."""

    group: int
    ready_place: int | None
    oldest_step: int = 0  # the version of its oldest token


@dataclass(frozen=True)
class Pick:
    """Groups `chosen` for a claim and `surplus` ones to abort; or the unfinished groups that are `missing` for it."""

    chosen: tuple[int, ...] = ()
    surplus: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


def pick(policy: str, candidates: Sequence[Candidate], batch: int, redundant: int, last: bool) -> Pick:
    """Pick the groups of the next claim from `candidates` (in the order of issue).

    `last`: no further group will come, so the batch may be short. With `redundant` groups the first `batch` to finish
    among `batch + redundant` are chosen and the others are surplus.
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
    """At most `redundant` groups of the head that were not chosen; unfinished ones first, because they cost least."""
    rest = [c for c in head if c.group not in set(chosen)]
    rest.sort(key=lambda c: (c.ready_place is not None, c.group))
    return tuple(sorted(c.group for c in rest[:redundant]))


def groups_ahead(policy: str, place: int, total: int) -> int:
    """The number of the `total` unclaimed groups that may be trained before the one at position `place`."""
    return place if policy == "lease_order" else max(0, total - 1)


def shuffled(groups: Sequence[int], seed: int) -> tuple[int, ...]:
    """`groups` in a random order determined by `seed`."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    return tuple(order)


# --- shares of scarce work, and the splitting of groups
#
#     share = ⌈available · room / (room + the others' room)⌉   members if there is less work than room, otherwise `room`
#
# If the members of a group stay `together` on one sampler, their prompt is computed once; `spread` over all samplers
# with room they finish sooner. `auto` keeps them together unless samplers would be idle or the learner waits for that
# group. A sampler with room for a part of a group takes that part, except with `together`. So under load groups are
# spread, because slots become free one by one.


@dataclass(frozen=True)
class Share:
    """Share of a sampler with `room`; `others` is the room of all others, `available` the work. Unit: members."""

    room: int
    others: int = 0
    available: int = 0
    replicate: str = "together"

    @property
    def is_scarce(self) -> bool:
        """True if there is less work than room."""
        return self.others > 0 and self.available < self.room + self.others

    @property
    def members(self) -> int:
        """The number of members that the sampler may take; at least one, if there is one."""
        return max(1, self._part(self.available)) if self.is_scarce else self.room

    def splits(self, awaited: bool) -> bool:
        """True if the members of a group are split between samplers; `awaited`: the learner waits for that group."""
        if self.others == 0 or self.replicate == "together":
            return False
        return self.replicate == "spread" or self.is_scarce or awaited

    def of_group(self, free: int, left: int, awaited: bool, *, begun: bool) -> int:
        """The number of a group's `free` members that the sampler may take with `left` of its share.

        A new group that stays together is taken whole, as far as there is room; one that has `begun` is split already.
        """
        if self.splits(awaited):
            return min(left, self._part(free))
        return min(free, left if begun else left + self.room - self.members)

    def _part(self, members: int) -> int:
        return -(-members * self.room // (self.room + self.others))
