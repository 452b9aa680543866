"""Shares of scarce work by the contract: in fractions, independent of the store's arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from jaxroll.policy.limiter import FETCHES_S
from jaxroll.store.core import events as ev
from tests.harness.store_model.books import FREE
from tests.harness.store_model.holders import Holders

ASKS_AGAIN_S = 10.0  # a sampler that was refused within this time still has its room


@dataclass(frozen=True)
class Deal:
    """Share of one sampler: `most` members of its `room`, and `fraction` of a group that is split.

    `head` groups are split as `at_head` says, the others as `elsewhere`. When the window adapts, how much there is
    to share is not known here.
    """

    room: int
    most: int
    fraction: Fraction
    at_head: bool
    elsewhere: bool
    head: int
    is_known: bool

    def splits(self, place: int) -> bool:
        """True if the group at `place` of the order is split."""
        return self.at_head if place < self.head else self.elsewhere

    def part(self, members: int, place: int) -> int:
        """The number of a group's free members that it may take, apart from its share."""
        return math.ceil(members * self.fraction) if self.splits(place) else members


class Sharing(Holders):
    """Samplers with room, as the reference model knows them."""

    def free_now(self, group: dict, name: str, now: float, reserved: bool = False) -> list[int]:
        """Members that can be leased to `name`; `reserved`: those that wait for it, and for no others."""
        free = [n for n, m in enumerate(group["members"]) if m["status"] == FREE and (m["rest"] > now) == reserved]
        free = [n for n in free if not reserved or group["members"][n]["for"] == name]
        mine = [n for n in free if not self.is_left_to_another(group["members"][n], name, now)]
        self.avoided += len(mine) < len(free)
        return mine

    def deal(self, r: ev.Lease, now: float) -> Deal:
        """The caller's share, given the samplers that were refused as there was no work, or none for their weights."""
        room, mode, head = r.max_members, self.rules.replicate, self.rules.batch
        asking = {
            name: (space, held := self.leased_to(name), fetches and not held)
            for name, (at, space, fetches) in (self.rooms | self.behind).items()
            if name != r.name and now - at <= ASKS_AGAIN_S and (self.holds_up(r.name) or not self.holds_up(name))
        }
        others = sum(space for space, *_ in asking.values())
        if not others:
            return Deal(room, room, Fraction(1), False, False, head, True)
        there, mine = self.there(r, now), self.leased_to(r.name)
        scarce = there < room + others
        work = there + mine + sum(held for _, held, _ in asking.values())
        part = Fraction(work * (room + mine), room + others + work - there)
        patience = min(ASKS_AGAIN_S, self.took.get(r.name, math.inf) / 4)
        waits = any(fetches for *_, fetches in asking.values()) and now - self.published_at <= patience
        least = 0 if there and waits else 1
        most = min(room, max(least, math.ceil(part) - mine)) if scarce else room
        fraction = Fraction(room, room + others)
        elsewhere = mode == "spread" or (mode == "auto" and scarce)
        at_head = elsewhere or (mode == "auto" and self.awaited)
        return Deal(room, most, fraction, at_head, elsewhere, head, self.rules.window == "full")

    def there(self, r: ev.Lease, now: float) -> int:
        """Members that the window lets a sampler of this version begin."""
        _, most = self.window(self.base() - r.version.step)
        found, unpublished = 0, self.unpublished()
        for place, group in enumerate(self.open.values()):
            ahead = unpublished + (place if self.rules.order == "lease_order" else len(self.open) - 1)
            if free := len(self.free_now(group, r.name, now)):
                if ahead >= most:
                    return found
                found += free
        steps_left = (self.rules.steps - self.next_claim) * (self.rules.batch + self.rules.redundant)
        groups = min(most - unpublished, steps_left) - len(self.open)
        return found + max(0, groups) * self.rules.members

    def note_room(self, r: ev.Lease, grants: dict, reply: str, now: float) -> None:
        """Note a sampler's room: it has room only if the window alone refused it, or it waits for weights."""
        if grants:
            self.rooms.pop(r.name, None)
            self.behind.pop(r.name, None)
        elif reply.startswith("no credit: weights") and " behind" in reply:
            if now - self.seen.get(r.name, -math.inf) <= FETCHES_S:
                self.behind[r.name] = (now, r.max_members, self.base() - r.version.step == 1)
                self.away.discard(r.name)
        elif self.published is not None and r.version.step >= self.published[1] and not reply.startswith("Leases"):
            self.rooms.pop(r.name, None)
            self.behind.pop(r.name, None)
            if reply.startswith("no credit: window"):
                self.rooms[r.name] = (now, r.max_members, False)
                self.idle[r.name] = now
                self.away.discard(r.name)
