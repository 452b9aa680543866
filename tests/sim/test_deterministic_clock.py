"""Work of other threads under a virtual clock: the order of results depends neither on their number nor their speed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import Future
from functools import partial

import pytest

from jaxroll.errors import DataError, InfraError
from jaxroll.sim import network
from jaxroll.sim.network import OrderedThreads, VirtualTimeLoop


def played(count: int, ends: list[tuple[float, str]]) -> None:
    """Six tasks of three calls each on `count` threads, whose calls take random real times."""

    async def job() -> None:
        threads = OrderedThreads(count)

        async def play(name: int) -> None:
            for turn in range(3):
                await asyncio.sleep(0.1 * (name % 3))
                pause_s = random.SystemRandom().uniform(0.0, 0.004)
                await threads.call(partial(time.sleep, pause_s), 60.0, "step")
                ends.append((asyncio.get_running_loop().time(), f"{name}.{turn}"))

        await asyncio.gather(*(play(name) for name in range(6)))

    network.run(job())


def test_results_of_threads_arrive_in_the_order_of_the_calls() -> None:
    traces = []
    for count in (1, 2, 4) * 7:  # 21 times
        played(count, trace := [])
        traces.append(trace)
    assert len(traces[0]) == 18 and all(trace == traces[0] for trace in traces)
    assert traces[0][-1][0] == pytest.approx(0.6), "the calls take no virtual time"


def test_calls_of_one_instant_run_at_once() -> None:
    meeting = threading.Barrier(2)

    async def job() -> list[int]:
        threads = OrderedThreads(2)
        return await asyncio.gather(*(threads.call(lambda: meeting.wait(10), 60.0, "step") for _ in range(2)))

    assert sorted(network.run(job())) == [0, 1], "with one call at a time the barrier breaks"


@pytest.mark.parametrize(("waits", "first"), [(True, "thread"), (False, "timer")])
def test_the_virtual_clock_stops_while_a_thread_works(waits: bool, first: str) -> None:
    """The control: the clock jumps past a thread that the loop does not know."""

    async def job() -> str:
        loop, work = asyncio.get_running_loop(), Future[None]()
        assert isinstance(loop, VirtualTimeLoop)
        threading.Thread(target=lambda: (time.sleep(0.05), work.set_result(None))).start()
        thread = loop.outside(work) if waits else asyncio.wrap_future(work)
        done, _ = await asyncio.wait(
            [timer := asyncio.ensure_future(asyncio.sleep(1.0)), thread], return_when=asyncio.FIRST_COMPLETED
        )
        return "timer" if timer in done else "thread"

    assert network.run(job()) == first


def test_errors_of_threads_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: BaseException) -> None:
        raise error

    async def job(error: BaseException) -> None:
        await OrderedThreads(1).call(lambda: raises(error), 60.0, "step")

    with pytest.raises(ValueError, match="as it was"):
        network.run(job(ValueError("as it was")))
    for error in (StopIteration(), SystemExit(3)):
        with pytest.raises(DataError, match=type(error).__name__):
            network.run(job(error))
    monkeypatch.setattr(network, "OUTSIDE_S", 0.05)

    async def hangs() -> None:
        await OrderedThreads(1).call(lambda: time.sleep(1.0), 60.0, "step")

    with pytest.raises(InfraError, match="did not answer"):
        network.run(hangs())


def test_the_clock_goes_on_for_years() -> None:
    """From 2²⁴ s on a float has no room for the nanosecond that asyncio adds, and its loop would spin."""

    async def job() -> list[float]:
        loop, seen = asyncio.get_running_loop(), []
        for due_s in (1e6, 2.0**24, 1e8, 1e9):
            await asyncio.sleep(due_s - loop.time())
            await asyncio.sleep(1e-12)
            seen.append(loop.time())
        return seen

    assert network.run(job(), limit_s=2e9) == pytest.approx([1e6, 2.0**24, 1e8, 1e9], rel=1e-12)
