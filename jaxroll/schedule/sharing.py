"""How much of the work at hand one sampler may take while others have room too, and whether groups are split for it.

    share = ⌈available · room / (room + the others' room)⌉   members, when there is less work than room; else its room

Members of a group kept `together` on one sampler have their prompt computed once; `spread` over all that have room they
finish sooner. `auto` keeps them together until samplers would be idle, or the learner waits for that very group. A
sampler with room for a part of a group would be idle too: but for `together` it asks for that part. So under load
groups are spread, since places become free one by one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """What one sampler with `room` may take of `available` work, beside others with room for `others`, in members."""

    room: int
    others: int = 0
    available: int = 0
    replicate: str = "together"

    @property
    def is_scarce(self) -> bool:
        """Whether somebody will go without."""
        return self.others > 0 and self.available < self.room + self.others

    @property
    def members(self) -> int:
        """How many members it may take; at least one, if there is one."""
        return max(1, self._part(self.available)) if self.is_scarce else self.room

    def splits(self, awaited: bool) -> bool:
        """Whether members of a group are dealt out; `awaited` says that the learner waits for that group."""
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
