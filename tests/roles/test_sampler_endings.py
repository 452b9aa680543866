"""What a sampler does about leases that nobody needs any more, also when it hears of the end before the lease."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from jaxroll.records import Grant, Task, Version
from jaxroll.roles.sampler import Sampling

TASK = Task(0, (), "single_turn", "{}", 0, "0")


class Store:
    """Grants group 0 and then group 1, each when the test lets it; says what ended when the test says so."""

    def __init__(self) -> None:
        self.grants: asyncio.Queue[list[Grant]] = asyncio.Queue()
        self.endings: asyncio.Queue[list[tuple[int, int, int]]] = asyncio.Queue()
        self.taken = asyncio.Event()

    async def lease(self, version: Version, members: int, wait_s: float) -> list[Grant]:
        self.taken.set()
        return await self.grants.get()

    async def ended(self, wait_s: float) -> list[tuple[int, int, int]]:
        return await self.endings.get()


def sampling(store: Store) -> Sampling:
    made = Sampling.__new__(Sampling)
    first = asyncio.Event()
    first.set()
    made.session = SimpleNamespace(parts=SimpleNamespace(follower=SimpleNamespace(first=first, version=Version(0, 0))))  # type: ignore[assignment]
    made.config = SimpleNamespace(schedule=SimpleNamespace(members_per_group=2))  # type: ignore[assignment]
    made.store = store  # type: ignore[assignment]
    made.capacity, made.open, made.ended, made.aborted, made.room = 8, {}, set(), 0, asyncio.Event()

    async def for_ever(*arguments: Any) -> None:
        await asyncio.Event().wait()

    made._produce = for_ever  # type: ignore[method-assign]
    return made


def grant(group: int, attempt: int = 1) -> Grant:
    return Grant(group, TASK, ((0, attempt), (1, attempt)), 30.0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_members_are_aborted_when_they_end_early_and_never_begun_when_they_ended_before() -> None:
    async def job() -> None:
        store = Store()
        work = sampling(store)
        loops = [asyncio.ensure_future(work._lease()), asyncio.ensure_future(work._end_early())]
        await store.taken.wait()
        store.grants.put_nowait([grant(0)])
        await settle()
        running = dict(work.open)
        assert set(running) == {(0, 0, 1), (0, 1, 1)}
        store.endings.put_nowait([(0, 1, 1)])
        await settle()
        assert (running[0, 1, 1].cancelled(), running[0, 0, 1].done(), work.aborted) == (True, False, 1)
        store.endings.put_nowait([(1, 0, 1)])  # its lease is still on its way
        await settle()
        store.grants.put_nowait([grant(1)])
        await settle()
        assert (1, 1, 1) in work.open and (1, 0, 1) not in work.open
        assert work.ended == set(), "what is leased from now on is another attempt"
        for task in (*loops, *work.open.values()):
            task.cancel()
        await asyncio.gather(*loops, *work.open.values(), return_exceptions=True)

    asyncio.run(asyncio.wait_for(job(), 20))
