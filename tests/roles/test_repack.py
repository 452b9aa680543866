"""Samplers whose new weights wait for their last members give these to one another, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll import wire
from jaxroll.records import Finished, Grant, Member, Version
from jaxroll.roles.sampler import Key, Members
from jaxroll.roles.weights import SwapGate
from jaxroll.sim.network import run
from jaxroll.sim.world import MemoryLog
from jaxroll.store.core import events as ev
from jaxroll.store.log.replay import replay_log
from jaxroll.store.messages import RepackReply
from tests.harness.sampler_members import TASK, members, settle
from tests.harness.virtual_run import VirtualRun
from tests.roles.test_migration import Fleet, config, parts, text


async def played(folder: Path, seed: int, repack_s: float, ends: int = 0) -> tuple[Fleet, list[Member], list[Any]]:
    """A run of four samplers, `ends` of which die or leave: the fleet, the stored members, the log."""
    made = config()
    schedule = replace(made.schedule, weight_swap="trajectory", alpha=2.0, repack_s=repack_s)
    at = VirtualRun(replace(made, schedule=schedule), folder)
    at.store._log = MemoryLog(keep_bytes=2**30)
    async with at:
        fleet = Fleet(at, seed)
        for _ in range(4):
            fleet.join()
        learner = at.learner(train_s=1.0)
        trouble = asyncio.ensure_future(fleet.trouble(ends))
        assert await learner == 0
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
        assert not (found := replay_log(at.store._log.connection)).violations, found.violations
        assert at.store.status()["conservation_residual"] == 0
        members = [wire.decode(body, Member) for (body,) in at.store.sql("SELECT body FROM payloads")]
        bodies = at.store.sql("SELECT body FROM log ORDER BY position")
        return fleet, members, [wire.decode(body, ev.Event) for (body,) in bodies]  # type: ignore[arg-type]


def given(log: list[Any]) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """For each member that was released for a sampler: that sampler and its next holder, each time."""
    found: dict[tuple[int, int], list[tuple[str, str]]] = {}
    waiting: dict[tuple[int, int], str] = {}
    for event in log:
        if isinstance(event, ev.LeaseEnded) and event.reserved_for:
            waiting |= {(event.group, member): event.reserved_for for member in event.members}
        elif isinstance(event, ev.Leased):
            for member, _ in event.members:
                if to := waiting.pop((event.group, member), ""):
                    found.setdefault((event.group, member), []).append((to, event.holder))
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
@pytest.mark.parametrize("ends", [0, pytest.param(8, marks=pytest.mark.soak)])
def test_members_that_move_keep_their_tokens_and_their_version(tmp_path: Path, seed: int, ends: int) -> None:
    fleet, members, log = run(played(tmp_path, seed, repack_s=1.0, ends=ends))
    by_member, moves, kept = parts(fleet.made), given(log), 0
    for one in members:
        assert isinstance(one.outcome, Finished)
        played_by, answer = by_member[one.group, one.member], one.outcome.segments[-1]
        assert answer.tokens.tolist() == text(played_by[0].key), "not the answer of an undisturbed run"
        assert len({part.version for part in one.outcome.versions}) == 1, "a member with two versions"
        for before, after in itertools.pairwise(played_by) if (one.group, one.member) in moves else ():
            assert ends or before.end - after.start <= 1, "more is sampled again than while the move is under way"
            # A sampler that died may have had the last copy of its version: the member starts again with another one.
            again = min(part.start for part in played_by[played_by.index(after) :])
            assert again in (0, after.start)
            assert (answer.logprobs[before.start : again] == -float(before.by)).all(), "tokens are not kept"
            kept += again
    taken = [to == holder for same in moves.values() for to, holder in same]
    assert len(taken) > 3 and kept > 20 and taken.count(True) > taken.count(False), (taken, kept)


def test_without_a_period_no_member_moves(tmp_path: Path) -> None:
    _, members, log = run(played(tmp_path, 0, repack_s=0.0))
    assert members and given(log) == {}


def test_weights_that_wait_let_members_that_move_go_first_but_not_while_they_change() -> None:
    gate, seen = SwapGate(), list[str]()

    async def member(name: str, seconds: float, *, joins: bool) -> None:
        async with gate.member(joins=joins):
            seen.append(name)
            await asyncio.sleep(seconds)

    async def change() -> None:
        async with gate.change():
            seen.append("change")
            await asyncio.sleep(1.0)
            seen.append("end of change")

    async def drains() -> None:
        await gate.drains()
        seen.append("drains")

    async def job() -> None:
        jobs = [asyncio.ensure_future(drains()), asyncio.ensure_future(member("a", 2.0, joins=False))]
        await asyncio.sleep(1.0)
        jobs.append(asyncio.ensure_future(change()))
        await asyncio.sleep(0.1)
        jobs += [asyncio.ensure_future(member(name, 2.0, joins=joins)) for name, joins in (("b", False), ("c", True))]
        await asyncio.sleep(2.5)  # the change is under way
        jobs.append(asyncio.ensure_future(member("d", 1.0, joins=True)))
        await asyncio.gather(*jobs)

    run(job())
    assert seen[:5] == ["a", "drains", "c", "change", "end of change"] and sorted(seen[5:]) == ["b", "d"]


class Planner:
    """A store that answers each report of a sampler that drains when the test says so."""

    def __init__(self) -> None:
        self.reports = list[int]()
        self.leaving = list[bool]()
        self.leased = 0
        self.replies = asyncio.Queue[RepackReply]()
        self.given = list[tuple[list[Key], str]]()
        self.jobs = list[asyncio.Future[None]]()

    async def repack(self, version: Version, members: int, tokens: int, wait_s: float, *, leaves: bool) -> RepackReply:
        self.reports.append(members)
        self.leaving.append(leaves)
        return await self.replies.get()

    async def lease(self, version: Version, members: int, *, reserved: bool) -> list[Grant]:
        assert reserved
        self.leased += 1
        return [Grant(9, TASK, ((0, 2), (1, 2)), 30.0)]

    async def flushed(self) -> None:
        pass

    async def release(self, keys: list[Key], to: str, *, away: bool = False) -> None:
        self.given.append((keys, to))


async def draining(store: Planner, gather: Callable[[Members], Awaitable[None]] | None = None) -> Members:
    """A sampler whose new weights wait for two members; `gather` runs before it gives some away."""
    work = members(store)
    if gather is not None:
        work._gather = lambda: gather(work)
    work._start_all([Grant(0, TASK, ((0, 1), (1, 1)), 30.0)])
    await settle()

    async def change() -> None:
        async with work._gate.change():
            pass

    store.jobs = [asyncio.ensure_future(change()), asyncio.ensure_future(work._repack(5.0))]
    await settle()
    return work


def test_a_sampler_reports_all_members_that_it_received() -> None:
    """The store would otherwise fill it beyond its slots, or have it give away what it does not count."""

    async def job() -> None:
        await draining(store := Planner())
        store.replies.put_nowait(RepackReply(coming=True))
        await settle()
        assert store.reports == [2, 4]

    run(job())


def test_a_sampler_that_stops_may_give_members_and_takes_none() -> None:
    async def job() -> None:
        work = await draining(store := Planner())
        work.session.stopping.set()
        store.replies.put_nowait(RepackReply(coming=True))  # its report was sent before the stop
        await settle()
        assert store.leased == 0 and store.leaving == [False, True]
        store.replies.put_nowait(RepackReply(to="sampler-1"))
        await settle()
        assert store.given == [([(0, 0, 1), (0, 1, 1)], "sampler-1")]

    run(job())


def test_a_sampler_gives_what_it_reported_and_nothing_that_began_since() -> None:
    """New members have newer weights than their destination: they would start again there."""

    async def gather(work: Members) -> None:
        work._cancel((0, 0, 1))
        work._start_all([Grant(1, TASK, ((0, 1),), 30.0)], joins=True)
        await settle()

    async def job() -> None:
        work = await draining(store := Planner(), gather)
        store.replies.put_nowait(RepackReply(to="sampler-1"))
        await settle()
        await settle()
        assert store.given == [([(0, 1, 1)], "sampler-1")] and (work.moved, work.repacks) == (1, 1)
        assert work.open.keys() == {(1, 0, 1)}

    run(job())
