"""A sampler on the learner's devices: it leaves them in each step, unless no other one is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxroll.policy.step_times import Seeding
from jaxroll.records import Grant, Version
from jaxroll.roles import session as sessions
from jaxroll.roles.sampler import Key
from jaxroll.sim.network import run
from tests.harness.sampler_members import TASK, Store, members, settle


class Leaving(Store):
    """A store that answers a release when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.given = list[tuple[list[Key], str]]()
        self.answered = asyncio.Event()

    async def release(self, keys: list[Key], to: str = "", *, away: bool = False) -> None:
        self.given.append((keys, "away" if away else to))
        await self.answered.wait()


def test_a_sampler_that_vacates_returns_its_members_before_it_ends_them_and_asks_for_none() -> None:
    async def job() -> None:
        work = members(store := Leaving())
        work._start_all([Grant(0, TASK, ((0, 1), (1, 1), (2, 1)), 30.0)])
        finished, in_environment = work.open[0, 1, 1], work.open[0, 2, 1]
        await settle()
        del work.playing[0, 1, 1]  # its episode has ended, and its put is on the way
        vacating = asyncio.ensure_future(work.vacate(lambda: {(0, 0), (0, 1)}))
        await settle()
        assert store.given == [([(0, 0, 1)], "away")] and not work.works.is_set()
        assert not work.open[0, 0, 1].cancelling(), "the store may still refuse or need its tokens"
        store.answered.set()
        assert await vacating, "one goes on"
        await settle()
        assert work.open.keys() == {(0, 1, 1), (0, 2, 1)}
        assert not finished.cancelling() and not in_environment.cancelling()
        assert (work.moved, work.repacks) == (1, 0)

    run(job())


class Followed:
    """Weights that the test publishes, and the samplers that the store knows."""

    def __init__(self) -> None:
        self.present, self.version, self.changed = ["sampler-0", "sampler-1"], Version(0, 0), asyncio.Event()

    async def other_than(self, known: Version | None, wait_s: float) -> Version | None:
        while self.version == known:
            await self.changed.wait()
        return self.version

    async def status(self) -> dict[str, Any]:
        return {"present": self.present, "holders": dict.fromkeys(self.present, str(self.version))}


class Worker:
    def __init__(self) -> None:
        self.works, self.vacated = asyncio.Event(), 0
        self.works.set()

    async def vacate(self, generating: Callable[[], Any]) -> bool:
        self.works.clear()
        self.vacated += 1
        return False


class Instants:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0


def test_a_sampler_leaves_the_learners_devices_after_its_time_unless_it_is_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "LOOK_S", 0.01)
    clock = Instants()

    async def until(met: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not met():
                await asyncio.sleep(0.001)

    async def job() -> None:
        store, worker = Followed(), Worker()
        seeding = Seeding(["sampler-1"], lambda: clock.now_s, contextlib.nullcontext())
        seeding._time.seconds = 0.02
        proxy = SimpleNamespace(paused="keep", generating=set)
        session: Any = SimpleNamespace(role="sampler-1", seeding=seeding, store=store, proxy=proxy,
                                       parts=SimpleNamespace(follower=store), soon=lambda call: call())  # fmt: skip
        playing = asyncio.ensure_future(sessions.share_devices(session, worker))
        await until(lambda: worker.vacated == 1)
        clock.now_s = 1.0
        assert seeding.learner_waits_s(0) == 0.0, "it has left"
        store.present = ["sampler-1"]
        await until(worker.works.is_set)
        assert worker.vacated == 1, "no other one is there: it goes on"
        store.present = ["sampler-0", "sampler-1"]
        await until(lambda: worker.vacated == 2)
        seeding.claimed(0, 8, 0.0)
        await until(worker.works.is_set)
        store.version = Version(0, 1)
        store.changed.set()
        await until(lambda: worker.vacated == 3)
        playing.cancel()

    run(job())
