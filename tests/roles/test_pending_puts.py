"""Members that were played and are on their way to the store: their leases live, and end well when all ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxroll.records import Failed, Grant, Member, Version
from jaxroll.roles import sampler
from jaxroll.roles.sampler import Key, MemberPlayer, Members
from jaxroll.rollout.episode import Transcript
from tests.harness.sampler_members import counted as all_counted
from tests.harness.sampler_members import grant as granted
from tests.harness.sampler_members import members, settle


class Store:
    """Takes a member when the test says so, in `puts`; grants nothing."""

    def __init__(self) -> None:
        self.puts: dict[Key, asyncio.Future[str]] = {}
        self.renewed: list[Key] = []
        self.lost: list[Key] = []
        self.endings: asyncio.Queue[list[Key]] = asyncio.Queue()
        self.released: list[Key] = []

    async def lease(self, version: Version, wanted: int, wait_s: float) -> list[Grant]:
        return await asyncio.Event().wait() or []

    async def put(self, member: Member) -> str:
        key = (member.group, member.member, member.attempt)
        assert key not in self.puts, "it is put once"
        self.puts[key] = asyncio.get_running_loop().create_future()
        return await self.puts[key]

    async def renew(self, keys: list[Key]) -> list[Key]:
        self.renewed = keys
        return self.lost

    async def ended(self, wait_s: float) -> list[Key]:
        return await self.endings.get()

    async def release(self, keys: list[Key]) -> None:
        self.released += keys


PLAYED, PLAYING = (0, 0, 1), (0, 1, 1)


def begin(grant: Grant) -> MemberPlayer:
    """Member 0 has ended, the other never does."""

    async def play(member: int, attempt: int, said: Transcript) -> Member:
        if member:
            await asyncio.Event().wait()
        return Member(grant.group, member, attempt, Failed("DATA", "no matter"))

    return play


async def under_way(store: Store) -> Members:
    """Two members, of which one is played and not put yet."""
    work = members(store, begin)
    for key in (PLAYED, PLAYING):
        work._start(key, work._begin(granted(0)))
    await settle()
    assert list(store.puts) == [PLAYED] and not store.puts[PLAYED].done()
    assert counted(work) == {"members_in_flight": 2, "members_unstored": 1, "members_aborted": 0}
    return work


def counted(work: Members) -> dict[str, int]:
    """Without the tokens, of which these members have none."""
    return {key: count for key, count in all_counted(work).items() if key != "tokens_aborted_done"}


async def ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def played(script: Callable[[Store, Members], Awaitable[None]]) -> None:
    """Runs `script` with two members, of which one is played and not put yet; ends what it leaves."""

    async def job() -> None:
        store = Store()
        work = await under_way(store)
        await script(store, work)
        await ended(*work.open.values())

    asyncio.run(asyncio.wait_for(job(), 20))


def test_its_lease_is_renewed_and_where_that_is_lost_the_answer_to_its_put_counts() -> None:
    async def script(store: Store, work: Members) -> None:
        renewing = asyncio.ensure_future(work._renew())
        await settle()
        assert store.renewed == [PLAYED, PLAYING]
        store.lost = [PLAYED]
        await settle()
        assert list(work.open) == [PLAYED, PLAYING]
        store.puts[PLAYED].set_result("SURPLUS")
        await settle()
        assert counted(work) == {"members_in_flight": 1, "members_unstored": 0, "members_aborted": 1}
        await ended(renewing)

    played(script)


def test_one_that_ended_is_put_all_the_same_for_it_may_be_there_already() -> None:
    async def script(store: Store, work: Members) -> None:
        hearing = asyncio.ensure_future(work._abort_cancelled())
        store.endings.put_nowait([PLAYED])
        await settle()
        store.puts[PLAYED].set_result("OK")
        await settle()
        assert counted(work) == {"members_in_flight": 1, "members_unstored": 0, "members_aborted": 0}
        await ended(hearing)

    played(script)


def test_when_all_ends_it_still_reaches_the_store() -> None:
    async def script(store: Store, work: Members) -> None:
        giving_back = asyncio.ensure_future(work.give_back())
        await settle()
        store.puts[PLAYED].set_result("OK")
        await giving_back
        assert store.released == [PLAYING] and work.open == {}

    played(script)


def test_when_all_ends_it_is_given_back_if_the_store_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LAST_PUTS_S", 0.0)

    async def script(store: Store, work: Members) -> None:
        await work.give_back()
        assert store.puts[PLAYED].cancelled() and store.released == [PLAYED, PLAYING] and work.open == {}

    played(script)
