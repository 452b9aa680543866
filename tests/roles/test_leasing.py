"""Sizes of lease requests: whole groups, or as many members as have ended while the store has plenty of work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxroll.records import Grant, Member, Version
from jaxroll.roles import sampler
from jaxroll.roles.sampler import MemberPlayer
from jaxroll.rollout.episode import Transcript
from tests.harness.sampler_members import TASK, members, settle


class Store:
    """Grants every request while it `has_work`, one member per group; with `few` one member less. A `slow` store
    replies to puts when the test says so.
    """

    def __init__(self, *, few: bool = False, slow: bool = False) -> None:
        self.few, self.slow = few, slow
        self.asked: list[int] = []
        self.unput: list[asyncio.Future[str]] = []
        self.has_work = asyncio.Event()
        self.has_work.set()
        self._group = 0

    async def lease(self, version: Version, wanted: int, wait_s: float) -> list[Grant]:
        self.asked.append(wanted)
        await self.has_work.wait()
        first, self._group = self._group, self._group + wanted - (self.few and wanted > 1)
        return [Grant(group, TASK, ((0, 1),), 30.0) for group in range(first, self._group)]

    async def put(self, member: Member) -> str:
        self.unput.append(answer := asyncio.get_running_loop().create_future())
        if not self.slow:
            answer.set_result("OK")
        return await answer

    def take(self, count: int) -> None:
        """Answer `count` of the waiting puts."""
        for _ in range(count):
            self.unput.pop().set_result("OK")


End = Callable[[int], Awaitable[None]]  # ends that many episodes together; returns when all tasks are idle again


def asked(store: Store, ends: list[int], **options: Any) -> list[int]:
    """The lease requests at `store` when, with all capacity in use, `ends[i]` episodes end together, one i after the
    other.
    """

    async def script(end: End) -> None:
        for count in ends:
            await end(count)

    return asked_in(store, script, **options)


def asked_in(store: Store, script: Callable[[End], Awaitable[None]], **options: Any) -> list[int]:
    """The lease requests at `store` when, with all capacity in use, `script` runs."""
    over: list[asyncio.Future] = []

    def begin(grant: Grant) -> MemberPlayer:
        async def play(member: int, attempt: int, transcript: Transcript) -> Any:
            over.append(done := asyncio.get_running_loop().create_future())
            await done

        return play

    async def settled() -> None:
        for _ in range(50):  # turns of the loop: with no time to gather in, all else follows at once
            await asyncio.sleep(0)

    async def end(count: int) -> None:
        for _ in range(count):
            over.pop().set_result(None)
        await settled()

    async def job() -> list[int]:
        work = members(store, begin, size=4, **options)
        leasing = asyncio.ensure_future(work._lease())
        await settled()
        assert len(over) == 8 - store.few
        await script(end)
        leasing.cancel()
        for task in work.open.values():
            task.cancel()
        await asyncio.gather(leasing, *work.open.values(), return_exceptions=True)
        return store.asked

    return asyncio.run(asyncio.wait_for(job(), 30))


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered."""
    monkeypatch.setattr(sampler, "GATHER_S", 0.0)


def test_while_work_is_plenty_one_free_slot_requests_one_member() -> None:
    assert asked(Store(), [1, 2, 1]) == [8, 1, 2, 1]


def test_members_that_moved_here_fill_more_than_the_capacity_and_nothing_is_leased_before_there_is_room() -> None:
    """A call for a negative number of members is malformed, which ended the sampler."""

    async def job() -> list[int]:
        work = members(store := Store(), size=4)
        leasing = asyncio.ensure_future(work._lease())
        await settle()
        moved = Grant(99, TASK, tuple((member, 2) for member in range(4)), 30.0)
        work._start_all([moved], joins=True)
        for ends in (2, 4):
            for key in list(work.open)[:ends]:
                work._cancel(key)
            await settle()
        leasing.cancel()
        for task in work.open.values():
            task.cancel()
        await asyncio.gather(leasing, *work.open.values(), return_exceptions=True)
        return store.asked

    assert asyncio.run(asyncio.wait_for(job(), 30)) == [8, 2]


def test_what_ends_while_room_is_gathered_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four are the room of a group, for which nothing is gathered: without them the time, here an hour, would pass."""
    monkeypatch.setattr(sampler, "GATHER_S", 3600.0)
    assert asked(Store(), [1, 2, 1]) == [8, 4]


@pytest.mark.parametrize(
    ("options", "group_placement"),
    [({"samplers": 2}, "together"), ({"actors": 2}, "together"), ({"actors": 2}, "auto")],
    ids=str,
)
def test_with_other_samplers_a_group_that_stays_together_is_leased_as_a_whole(
    options: dict[str, int], group_placement: str
) -> None:
    """The rest of it would go to one of them."""
    assert asked(Store(), [1, 2, 1], group_placement=group_placement, **options) == [8, 4]


@pytest.mark.parametrize(
    ("options", "group_placement"),
    [({"samplers": 2}, "spread"), ({"samplers": 2}, "auto"), ({"actors": 2}, "spread")],
    ids=str,
)
def test_with_other_samplers_a_group_that_may_be_spread_is_leased_in_parts(
    options: dict[str, int], group_placement: str
) -> None:
    assert asked(Store(), [1, 2, 1], group_placement=group_placement, **options) == [8, 1, 2, 1]
    assert asked(Store(few=True), [2, 2], group_placement=group_placement, **options) == [8, 5], (
        "while work is scarce, a request for a whole group"
    )


def test_while_work_is_scarce_a_call_is_for_a_whole_group() -> None:
    """Otherwise a call for one member would wait, and room that becomes free meanwhile would wait for the next call."""
    assert asked(Store(few=True), [2, 2]) == [8, 5]


def test_room_that_became_free_during_a_call_is_requested_if_that_call_was_granted_in_full() -> None:
    """Less than a group is free then, and there may be work for it: slots would stay idle while other episodes run."""
    store = Store()

    async def script(end: End) -> None:
        store.has_work.clear()
        await end(5)
        await end(2)
        assert store.asked == [8, 5]
        store.has_work.set()
        await end(0)

    assert asked_in(store, script) == [8, 5, 2]


def test_a_member_on_its_way_to_the_store_takes_no_capacity() -> None:
    assert asked(Store(slow=True), [1, 2, 1]) == [8, 1, 2, 1]


def test_with_a_slow_store_at_most_twice_the_capacity_is_open() -> None:
    store = Store(slow=True)

    async def script(end: End) -> None:
        await end(8)
        await end(6)
        assert store.asked == [8, 8], "14 wait to be stored and two run"
        store.take(3)
        await end(0)
        assert store.asked == [8, 8, 3]
        await end(5)
        store.take(14)
        await end(0)

    assert asked_in(store, script) == [8, 8, 3, 8]
