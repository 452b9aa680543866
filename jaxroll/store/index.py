"""What `State` would have to be searched for: kept beside it by `apply`, written down nowhere.

A store of a large run has tens of thousands of members in work, and decides a thousand times a second. Most groups are
complete and wait for a claim; decisions about work look at the few that are not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from jaxroll.store.groups import DONE, FREE, LEASED, Group


class Index:
    """`lacking` are the open groups that miss members, in order of issue; `pending` of them have none leased.

    `leased` members, and `put_bytes` of the finished ones, are those of all groups alive. Groups are issued by rising
    numbers and never miss a member again once they have all: so the order of issue is that of the numbers, in which
    `lacking` is filled, and a group is ready when it is not in it.
    """

    def __init__(self, open_: Mapping[int, Group], held: Mapping[int, Group]) -> None:
        self.lacking: dict[int, Group] = {}
        self.pending = self.leased = self.put_bytes = 0
        self._free: dict[int, Group] = {}
        self._free_order: list[int] = []
        self._order: list[int] = []
        self._shares: dict[int, tuple[int, int, int]] = {}  # group → what it adds to `pending`, `leased`, `put_bytes`
        for group in open_.values():
            self.opened(group)
        for group in held.values():
            self._count(group, is_open=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and vars(self) == vars(other) and [*self.lacking] == [*other.lacking]

    __hash__ = None  # type: ignore[assignment]

    def place_of(self, group: Group) -> int:
        """How many open groups were issued before this one, which is open."""
        return bisect_left(self._order, group.id)

    def with_free(self) -> Iterator[Group]:
        """The open groups of which a member is not leased, be it that it rests, in order of issue.

        None may be issued, put or leased before the last was taken.
        """
        return (self._free[gid] for gid in self._free_order)

    def opened(self, group: Group) -> None:
        """It was issued, after all others."""
        self._order.append(group.id)
        self.changed(group)

    def changed(self, group: Group) -> None:
        """Members of an open group are not what they were."""
        statuses = [slot.status for slot in group.slots]
        free, leased = FREE in statuses, LEASED in statuses
        if free or leased:
            self.lacking[group.id] = group
        else:
            self.lacking.pop(group.id, None)
        if free and group.id not in self._free:
            self._free[group.id] = group
            insort(self._free_order, group.id)
        elif not free:
            self._filled(group)
        self._count(group, is_open=True)

    def claimed(self, group: Group) -> None:
        """It is not open any more, but alive."""
        self._closed(group)
        self._count(group, is_open=False)

    def ended(self, group: Group) -> None:
        """It is not alive any more."""
        self._closed(group)
        self._add(self._shares.pop(group.id), -1)

    def _closed(self, group: Group) -> None:
        self.lacking.pop(group.id, None)
        self._filled(group)
        place = bisect_left(self._order, group.id)
        if self._order[place : place + 1] == [group.id]:
            del self._order[place]

    def _filled(self, group: Group) -> None:
        if self._free.pop(group.id, None) is not None:
            del self._free_order[bisect_left(self._free_order, group.id)]

    def _count(self, group: Group, *, is_open: bool) -> None:
        leased = sum(slot.status == LEASED for slot in group.slots)
        put_bytes = sum(slot.size_bytes for slot in group.slots if slot.status == DONE)
        if group.id in self._shares:
            self._add(self._shares[group.id], -1)
        share = self._shares[group.id] = (int(is_open and group.id in self._free and not leased), leased, put_bytes)
        self._add(share, 1)

    def _add(self, share: tuple[int, int, int], sign: int) -> None:
        pending, leased, put_bytes = share
        self.pending += sign * pending
        self.leased += sign * leased
        self.put_bytes += sign * put_bytes
