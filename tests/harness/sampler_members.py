"""The members of a sampler, with a store and an engine that the test controls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from jaxroll.records import Grant, Member, Task, Version
from jaxroll.roles.sampler import MemberPlayer, Members

TASK = Task(0, (), "single_turn", "{}", 0, "0")


class Store:
    """Grants and cancels leases when the test says so."""

    def __init__(self) -> None:
        self.grants: asyncio.Queue[list[Grant]] = asyncio.Queue()
        self.endings: asyncio.Queue[list[tuple[int, int, int]]] = asyncio.Queue()
        self.taken = asyncio.Event()
        self.holders = 1

    async def lease(self, version: Version, members: int, wait_s: float) -> list[Grant]:
        self.taken.set()
        return await self.grants.get()

    async def ended(self, wait_s: float) -> list[tuple[int, int, int]]:
        return await self.endings.get()

    async def put(self, member: Member) -> str:
        raise AssertionError("no member finishes here")


def members(
    store: Any, begin: Any = None, *, samplers: int = 1, actors: int = 0, size: int = 2, group_placement: str = "auto"
) -> Members:
    store.holders = max(samplers, actors)
    config = SimpleNamespace(
        schedule=SimpleNamespace(members_per_group=size, group_placement=group_placement),
        placement=SimpleNamespace(actors=actors),
        store=SimpleNamespace(lease_s=0.0),
    )
    session: Any = SimpleNamespace(config=config, store=store, progress=lambda text: None, stopping=asyncio.Event())

    async def version() -> Version:
        return Version(0, 0)

    async def forever(*arguments: Any) -> Any:
        await asyncio.Event().wait()

    def endless(grant: Grant) -> MemberPlayer:
        return forever

    return Members(session, 8, version, begin or endless)


def counted(work: Members) -> dict[str, int]:
    """The counts of healthy members."""
    counts = work.counts()
    assert counts.pop("puts_refused") == 0
    counts.pop("members_lost")
    assert counts.pop("members_moved") == counts.pop("repacks") == counts.pop("tokens_moved") == 0
    return counts


def grant(group: int, attempt: int = 1) -> Grant:
    return Grant(group, TASK, ((0, attempt), (1, attempt)), 30.0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
