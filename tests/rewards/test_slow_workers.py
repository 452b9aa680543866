"""Scoring workers that are slower than others, on the real pool in virtual time: items go where the answer is first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from jaxroll.rewards import scoring_pool
from jaxroll.rewards.processes import Scored, WorkerSettings
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.sim.network import run
from tests.harness.virtual_neighbours import START_S, MemoryWorker

QUICK_S = 0.02


class TimedWorker(MemoryWorker):
    """An item takes the seconds of its answer, and `delays` of worker and time. The score is the worker."""

    delays: ClassVar[Callable[[int, float], float]]
    count: ClassVar[int]

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._index = TimedWorker.count
        TimedWorker.count += 1

    def _work(self) -> None:
        if self._items:
            item = self._items.popleft()
            delay_s = TimedWorker.delays(self._index, asyncio.get_running_loop().time())
            self._after(float(item.answer) + delay_s, Scored(item.id, float(self._index)))


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scoring_pool, "ScoringProcess", TimedWorker)
    TimedWorker.count = 0
    TimedWorker.delays = staticmethod(lambda index, now_s: 0.0)
    yield


async def answered_by(pool: ScoringPool, until_s: float) -> list[int]:
    """Score an item every 50 ms; the number of answers by worker."""
    jobs = []
    while asyncio.get_running_loop().time() < until_s:
        jobs.append(asyncio.ensure_future(pool.score("{}", str(QUICK_S))))
        await asyncio.sleep(0.05)
    scores = await asyncio.gather(*jobs)
    return [scores.count(0.0), scores.count(1.0)]


def test_a_slow_worker_gets_few_items_and_its_share_again_when_it_has_recovered() -> None:
    TimedWorker.delays = staticmethod(lambda index, now_s: 0.3 if index == 0 and now_s < 60.0 else 0.0)

    async def job() -> None:
        pool = ScoringPool(2)
        pool.start()
        slow, quick = await answered_by(pool, 50.0)
        assert 2 <= slow <= 0.05 * quick, "it is tried now and then"
        assert pool.found_slow == 1, "trials that are slow again do not count again"
        await answered_by(pool, 75.0)
        recovered, quick = await answered_by(pool, 90.0)
        assert recovered > quick, "both are as quick, and it is the first"
        assert pool.found_slow == 1
        pool.close()

    run(job())


def test_a_worker_is_not_slow_because_of_one_item() -> None:
    async def job() -> None:
        pool = ScoringPool(2)
        pool.start()
        await answered_by(pool, START_S + 1.0)  # of items that waited for the start, both get some
        assert (await answered_by(pool, START_S + 2.0))[1] == 0, "the first one is enough"
        long = asyncio.ensure_future(pool.score("{}", "3.0"))
        assert (await answered_by(pool, START_S + 4.5))[0] <= 3, "they overtake the long item"
        assert await long == 0.0
        first, second = await answered_by(pool, START_S + 8.0)
        assert first > 10 * second
        assert pool.found_slow == 0
        pool.close()

    run(job())


def test_items_that_wait_for_the_quickest_go_to_a_slow_one_when_it_is_stuck() -> None:
    TimedWorker.delays = staticmethod(lambda index, now_s: 1.0 * index)

    async def job() -> None:
        pool = ScoringPool(2)
        pool.start()
        now_s = asyncio.get_running_loop().time
        await asyncio.gather(*(pool.score("{}", str(QUICK_S)) for _ in range(8)))  # both are measured
        at_s = now_s()
        stuck = asyncio.ensure_future(pool.score("{}", "4.5"))
        rest = [asyncio.ensure_future(pool.score("{}", str(QUICK_S))) for _ in range(40)]
        done, _ = await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
        assert {job.result() for job in done} == {1.0} and now_s() - at_s < 2.0
        await asyncio.gather(stuck, *rest)
        pool.close()

    run(job())
