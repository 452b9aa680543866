"""For how many members a sampler asks, and when: whole groups, or as many as end, where work is plenty."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxroll.records import Grant, Member, Version
from jaxroll.roles import members as rooms
from jaxroll.roles.members import MemberPlayer
from jaxroll.rollout.episode import Transcript
from tests.harness.sampler_members import TASK, members


class Store:
    """Grants all that it is asked for while it `has_work`, one member a group; `few`: one less. What is put waits for
    the test where it is `slow`.
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
        """So many of those that wait are put."""
        for _ in range(count):
            self.unput.pop().set_result("OK")


End = Callable[[int], Awaitable[None]]  # so many episodes end at once; returns when all that follows has happened


def asked(store: Store, ends: list[int], **options: Any) -> list[int]:
    """What `store` was asked for when, with its places taken, episodes end: so many at once, and the next when all that
    follows from these has happened.
    """

    async def script(end: End) -> None:
        for count in ends:
            await end(count)

    return asked_in(store, script, **options)


def asked_in(store: Store, script: Callable[[End], Awaitable[None]], **options: Any) -> list[int]:
    """What `store` was asked for when, with its places taken, `script` happens."""
    over: list[asyncio.Future] = []

    def begin(grant: Grant) -> MemberPlayer:
        async def play(member: int, attempt: int, said: Transcript) -> Any:
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
    monkeypatch.setattr(rooms, "GATHER_S", 0.0)


def test_where_work_is_plenty_a_free_place_takes_the_next_member() -> None:
    assert asked(Store(), [1, 2, 1]) == [8, 1, 2, 1]


def test_what_ends_while_room_is_gathered_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four are the room of a group, for which nothing is gathered: without them the time, here an hour, would pass."""
    monkeypatch.setattr(rooms, "GATHER_S", 3600.0)
    assert asked(Store(), [1, 2, 1]) == [8, 4]


@pytest.mark.parametrize(
    ("options", "replicate"),
    [({"samplers": 2}, "together"), ({"actors": 2}, "together"), ({"actors": 2}, "auto")],
    ids=str,
)
def test_beside_others_a_group_that_stays_together_is_leased_whole(options: dict[str, int], replicate: str) -> None:
    """The rest of it would go to one of them."""
    assert asked(Store(), [1, 2, 1], replicate=replicate, **options) == [8, 4]


@pytest.mark.parametrize(
    ("options", "replicate"),
    [({"samplers": 2}, "spread"), ({"samplers": 2}, "auto"), ({"actors": 2}, "spread")],
    ids=str,
)
def test_beside_others_a_group_that_may_be_spread_is_leased_in_parts(options: dict[str, int], replicate: str) -> None:
    assert asked(Store(), [1, 2, 1], replicate=replicate, **options) == [8, 1, 2, 1]
    assert asked(Store(few=True), [2, 2], replicate=replicate, **options) == [8, 5], (
        "where work is scarce for a whole one"
    )


def test_where_work_is_scarce_a_call_is_for_a_whole_group() -> None:
    """Otherwise a call for one would wait, and what becomes free meanwhile would wait for another."""
    assert asked(Store(few=True), [2, 2]) == [8, 5]


def test_what_became_free_while_a_call_waited_is_asked_for_when_that_one_brought_all() -> None:
    """Less than a group is free then, and there may be work for it: places would stand empty as long as others play."""
    store = Store()

    async def script(end: End) -> None:
        store.has_work.clear()
        await end(5)
        await end(2)
        assert store.asked == [8, 5]
        store.has_work.set()
        await end(0)

    assert asked_in(store, script) == [8, 5, 2]


def test_a_place_is_free_while_its_member_is_on_its_way_to_the_store() -> None:
    assert asked(Store(slow=True), [1, 2, 1]) == [8, 1, 2, 1]


def test_a_store_that_is_slow_gives_no_more_than_as_many_again() -> None:
    store = Store(slow=True)

    async def script(end: End) -> None:
        await end(8)
        await end(6)
        assert store.asked == [8, 8], "14 are to be put and two are played"
        store.take(3)
        await end(0)
        assert store.asked == [8, 8, 3]
        await end(5)
        store.take(14)
        await end(0)

    assert asked_in(store, script) == [8, 8, 3, 8]
