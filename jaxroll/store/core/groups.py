"""Groups and their members, with an index of the unfinished ones. Only `apply` changes them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

import msgspec

from jaxroll.records import Task, VersionRun

FREE, LEASED, DONE, DROPPED = "free", "leased", "done", "dropped"


class Slot(msgspec.Struct, gc=False):
    """One member of a group. `attempt` counts its leases; a put must carry the current attempt.

    `digest` belongs to the put that finished it; `failed_digest` to its last failure, reported by `failed_attempt`.
    """

    status: str = FREE
    attempt: int = 0
    fenced: int = 0  # a rewind ended the attempts up to this one
    holder: str = ""
    session: str = ""
    deadline_s: float = 0.0
    leased_at_s: float | None = None  # None: the store has restarted since
    rests_until_s: float = 0.0
    digest: str = ""
    size_bytes: int = 0
    runs: tuple[VersionRun, ...] = ()
    reward: float = 0.0
    failed_attempt: int = 0
    failed_digest: str = ""
    infra_failures: int = 0
    data_failures: int = 0
    failed_by: tuple[str, ...] = ()  # holders
    avoided_until_s: float = 0.0  # until then the holders in `failed_by` do not get it while others are present

    @property
    def tokens(self) -> int:
        """Sampled tokens of the finished member."""
        return sum(run.count for run in self.runs)


class Group(msgspec.Struct, gc=False):
    """G members of one task. `step` is the claim that took it; `leased_at_s` the time of its first lease.

    `ordinal` is the position of its prompt in the prompt stream.
    """

    id: int
    task: Task
    slots: list[Slot]
    reissue_of: int | None = None
    reissues: int = 0
    ordinal: int = 0
    wanted: int = 0  # the first `wanted` members to finish count; 0: all
    leased_at_s: float | None = None
    ready_place: int | None = None
    step: int | None = None
    acked: bool = False
    note: str = ""

    @property
    def state(self) -> str:
        """The name of its state, as docs/store_contract.md defines it."""
        if self.acked:
            return "ACKED"
        if self.step is not None:
            return "CLAIMED"
        if self.ready:
            return "READY"
        return "LEASED" if any(s.status == LEASED for s in self.slots) else "PENDING"

    @property
    def ready(self) -> bool:
        """True if all members that still count (at least one) are stored."""
        return self.ready_place is not None

    def done(self) -> Iterator[tuple[int, Slot]]:
        """The finished members, with their numbers."""
        return ((m, s) for m, s in enumerate(self.slots) if s.status == DONE)

    def missing(self) -> Iterator[tuple[int, Slot]]:
        """The members that are not stored yet (free or leased), with their numbers."""
        return ((m, s) for m, s in enumerate(self.slots) if s.status in (FREE, LEASED))

    @property
    def tokens(self) -> int:
        """Sampled tokens of its finished members."""
        return sum(s.tokens for s in self.slots)

    @property
    def size_bytes(self) -> int:
        """Bytes of its finished members."""
        return sum(s.size_bytes for s in self.slots)

    @property
    def oldest_step(self) -> int:
        """The step of its oldest token; 0 when there is none."""
        return min((run.version.step for s in self.slots for run in s.runs), default=0)

    @property
    def newest_step(self) -> int:
        """The step of its newest token; 0 when there is none."""
        return max((run.version.step for s in self.slots for run in s.runs), default=0)


# --- index of groups with free or unfinished members; derived, never logged
#
# The store of a large run has tens of thousands of leased members and takes a thousand decisions per second. Most
# groups are complete and wait for a claim; decisions about leases look only at the few that are not.


class Index:
    """`lacking` are the open groups that miss members, in order of issue; `pending` of them have none leased.

    `leased` counts the leased members, and `put_bytes` sums the finished ones, over all groups alive. Groups are issued
    with rising ids and a complete group never misses a member again. So `lacking` is filled in the order of issue, and
    an open group is ready exactly if it is not in `lacking`.
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
        """The number of open groups that were issued before this open group."""
        return bisect_left(self._order, group.id)

    def with_free(self) -> Iterator[Group]:
        """The open groups with a free member (which may be resting), in order of issue.

        Consume the iterator before you apply another event: events change the index.
        """
        return (self._free[gid] for gid in self._free_order)

    def opened(self, group: Group) -> None:
        """Add a group that was issued after all others."""
        self._order.append(group.id)
        self.changed(group)

    def changed(self, group: Group) -> None:
        """Update the entries of an open group whose members changed."""
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
        """Remove a claimed group from the open ones; it stays alive."""
        self._closed(group)
        self._count(group, is_open=False)

    def ended(self, group: Group) -> None:
        """Remove a group that is not alive any more."""
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
