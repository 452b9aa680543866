"""Cancelled leases: their members are aborted, also if the cancellation arrives before the lease."""

from __future__ import annotations

import asyncio

import numpy as np

from jaxroll.protocols import Completion
from jaxroll.records import Grant, Member, Version, VersionRun
from jaxroll.roles.sampler import MemberPlayer
from jaxroll.rollout.episode import Transcript
from tests.harness.sampler_members import Store, counted, grant, members, settle


def test_cancelled_members_are_aborted_and_not_started_if_the_cancellation_came_first() -> None:
    async def job() -> None:
        store = Store()
        work = members(store)
        loops = [asyncio.ensure_future(work._lease()), asyncio.ensure_future(work._abort_cancelled())]
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


def test_tokens_of_aborted_and_of_late_members_are_counted() -> None:
    """Three members of one answer each: one is stored, one waits in its environment, one is too late."""

    class Dropped(Store):
        async def put(self, member: Member) -> str:
            return "SURPLUS" if member.member == 2 else "OK"

    def begin(grant: Grant) -> MemberPlayer:
        async def play(member: int, attempt: int, transcript: Transcript) -> Member:
            transcript.show([1, 2])
            tokens = np.arange(10 * (member + 1), dtype=np.int32)
            transcript.add(
                Completion(tokens, np.zeros(len(tokens), np.float32), (VersionRun(Version(0, 0), len(tokens)),), "stop")
            )
            if member == 1:
                await asyncio.Event().wait()
            return Member(grant.group, member, attempt, transcript.finished("stop", 0.0, {}))

        return play

    async def job() -> None:
        work = members(Dropped(), begin)
        for member in range(3):
            work._start((5, member, 1), work._begin(grant(5)))
        await settle()
        assert counted(work) == {
            "members_in_flight": 1,
            "members_unstored": 0,
            "members_aborted": 1,
            "tokens_aborted_done": 30,
        }
        work._abort((5, 1, 1))
        await settle()
        assert counted(work) == {
            "members_in_flight": 0,
            "members_unstored": 0,
            "members_aborted": 2,
            "tokens_aborted_done": 30 + 20,
        }

    asyncio.run(asyncio.wait_for(job(), 20))


def test_a_member_on_its_way_to_the_store_is_not_aborted_by_a_renewal() -> None:
    """Its lease ended with its put, whose answer is still under way."""

    class Late(Store):
        answer = asyncio.Event()

        async def put(self, member: Member) -> str:
            await self.answer.wait()
            return "OK"

    async def whole(member: int, attempt: int, transcript: Transcript) -> Member:
        return Member(5, member, attempt, transcript.finished("stop", 0.0, {}))

    async def job() -> None:
        work = members(store := Late(), lambda grant: whole)
        work._start((5, 0, 1), work._begin(grant(5)))
        await settle()
        work._abort((5, 0, 1))
        await settle()
        assert counted(work) == {
            "members_in_flight": 1,
            "members_unstored": 1,
            "members_aborted": 0,
            "tokens_aborted_done": 0,
        }
        store.answer.set()
        await settle()
        assert counted(work) == {
            "members_in_flight": 0,
            "members_unstored": 0,
            "members_aborted": 0,
            "tokens_aborted_done": 0,
        }

    asyncio.run(asyncio.wait_for(job(), 20))
