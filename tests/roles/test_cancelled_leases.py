"""What a sampler or an actor does about leases that nobody needs any more, also when the end is heard of first."""

from __future__ import annotations

import asyncio

import numpy as np

from jaxroll.protocols import Completion
from jaxroll.records import Grant, Member, Version, VersionRun
from jaxroll.roles.members import MemberPlayer
from jaxroll.rollout.episode import Transcript
from tests.harness.sampler_members import Store, counted, grant, members, settle


def test_members_are_aborted_when_they_end_early_and_never_begun_when_they_ended_before() -> None:
    async def job() -> None:
        store = Store()
        work = members(store)
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


def test_a_member_that_is_aborted_before_it_begins_makes_room_again() -> None:
    async def job() -> None:
        work = members(Store())
        work._start((5, 0, 1), work._begin(grant(5)))
        work._abort((5, 0, 1))
        await settle()
        assert work.open == {} and work.room.is_set() and work.aborted == 1

    asyncio.run(asyncio.wait_for(job(), 20))


def test_what_a_member_had_is_counted_when_it_is_let_go_and_when_it_comes_too_late() -> None:
    """Of three members of one answer each the first is kept, the second in its environment, the third put too late."""

    class Dropped(Store):
        async def put(self, member: Member) -> str:
            return "SURPLUS" if member.member == 2 else "OK"

    def begin(grant: Grant) -> MemberPlayer:
        async def play(member: int, attempt: int, said: Transcript) -> Member:
            said.show([1, 2])
            tokens = np.arange(10 * (member + 1), dtype=np.int32)
            said.add(
                Completion(tokens, np.zeros(len(tokens), np.float32), (VersionRun(Version(0, 0), len(tokens)),), "stop")
            )
            if member == 1:
                await asyncio.Event().wait()
            return Member(grant.group, member, attempt, said.finished("stop", 0.0, {}))

        return play

    async def job() -> None:
        work = members(Dropped(), begin)
        for member in range(3):
            work._start((5, member, 1), work._begin(grant(5)))
        await settle()
        assert counted(work) == {"open": 1, "unput": 0, "members_aborted": 1, "tokens_let_go": 30}
        work._abort((5, 1, 1))
        await settle()
        assert counted(work) == {"open": 0, "unput": 0, "members_aborted": 2, "tokens_let_go": 30 + 20}

    asyncio.run(asyncio.wait_for(job(), 20))


def test_a_member_on_its_way_to_the_store_is_not_let_go_by_a_renewal_that_finds_it_there() -> None:
    """Its lease ended with its put, whose answer is still under way."""

    class Late(Store):
        answer = asyncio.Event()

        async def put(self, member: Member) -> str:
            await self.answer.wait()
            return "OK"

    async def whole(member: int, attempt: int, said: Transcript) -> Member:
        return Member(5, member, attempt, said.finished("stop", 0.0, {}))

    async def job() -> None:
        work = members(store := Late(), lambda grant: whole)
        work._start((5, 0, 1), work._begin(grant(5)))
        await settle()
        work._abort((5, 0, 1))
        await settle()
        assert counted(work) == {"open": 1, "unput": 1, "members_aborted": 0, "tokens_let_go": 0}
        store.answer.set()
        await settle()
        assert counted(work) == {"open": 0, "unput": 0, "members_aborted": 0, "tokens_let_go": 0}

    asyncio.run(asyncio.wait_for(job(), 20))
