"""Blocking calls off the loop: many at once, limits from their start, and threads that never come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from jaxroll.envs import threads as environment_threads
from jaxroll.envs.threads import Abandoned, Threads
from jaxroll.errors import DataError, InfraError

DEADLINE_S = 30.0
LONG_S = 3600.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Open at the end, so that what hangs in a test ends with it."""
    event = threading.Event()
    yield event
    event.set()


def run(coroutine):
    async def within_deadline():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(within_deadline())


def raises(error: BaseException):
    def job() -> None:
        raise error

    return job


def test_calls_run_at_the_same_time_and_not_on_the_loop() -> None:
    """All meet at a barrier, which one thread alone would never pass."""
    threads, barrier = Threads(), threading.Barrier(200)

    def job() -> int:
        barrier.wait(DEADLINE_S)
        return threading.get_ident()

    async def together() -> list[int]:
        return await asyncio.gather(*(threads.call(job, LONG_S, "step") for _ in range(200)))

    assert len({threading.get_ident(), *run(together())}) == 201
    assert (threads.hanging, threads.abandoned) == (0, 0)


def test_a_thread_serves_one_call_after_another() -> None:
    threads = Threads()

    async def in_turn() -> None:
        for number in range(50):
            assert await threads.call(lambda number=number: number, LONG_S, "step") == number

    run(in_turn())
    assert threads.started == 1


def test_there_are_never_more_threads_than_allowed_and_waiting_costs_no_time_limit(gate: threading.Event) -> None:
    """Three calls of which two find a thread: the third waits for longer than its limit, then ends well."""
    threads = Threads(most=2)

    async def crowd() -> int:
        slow = [asyncio.ensure_future(threads.call(lambda: gate.wait(DEADLINE_S), LONG_S, "step")) for _ in range(2)]
        third = asyncio.ensure_future(threads.call(lambda: 7, 0.05, "step"))
        await asyncio.wait([third], timeout=0.2)
        assert not third.done()
        gate.set()
        await asyncio.gather(*slow)
        return await third

    assert run(crowd()) == 7
    assert threads.started == 2


def test_a_hanging_call_is_given_up_and_its_thread_replaced(gate: threading.Event) -> None:
    threads = Threads(most=1)

    async def hang_and_go_on() -> str:
        with pytest.raises(Abandoned, match=r"step took longer than 0\.05 s"):
            await threads.call(lambda: gate.wait(DEADLINE_S), 0.05, "step")
        assert (threads.hanging, threads.abandoned, threads.live) == (1, 1, 0)
        return await threads.call(lambda: "served", LONG_S, "step")

    assert run(hang_and_go_on()) == "served"
    assert threads.started == 2


def test_a_call_behind_a_hanging_thread_gets_its_replacement(gate: threading.Event) -> None:
    threads = Threads(most=1)

    async def hang_before_another() -> str:
        hanging = asyncio.ensure_future(threads.call(lambda: gate.wait(DEADLINE_S), 0.05, "step"))
        waiting = asyncio.ensure_future(threads.call(lambda: "served", LONG_S, "step"))
        with pytest.raises(Abandoned):
            await hanging
        return await waiting

    assert run(hang_before_another()) == "served"


def test_where_no_thread_can_be_started_it_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = Threads()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(InfraError, match="can't start"):
            run(threads.call(lambda: 1, LONG_S, "step"))
    assert run(threads.call(lambda: 2, LONG_S, "step")) == 2
    assert threads.hanging == 0


def test_a_call_that_waits_for_a_replacement_that_is_refused_fails(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would start a thread for it: it waited without limit, since its limit counts from its start."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, inside = Threads(most=1), threading.Event()

    def hang() -> None:
        inside.set()
        gate.wait(DEADLINE_S)

    async def hang_before_another() -> None:
        hanging = asyncio.ensure_future(threads.call(hang, 0.5, "step"))
        assert await asyncio.to_thread(inside.wait, DEADLINE_S)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        waiting = asyncio.ensure_future(threads.call(lambda: "served", LONG_S, "step"))
        with pytest.raises(Abandoned):
            await hanging
        with pytest.raises(InfraError, match="can't start"):
            await waiting
        monkeypatch.undo()
        assert await threads.call(lambda: "served", LONG_S, "step") == "served"

    run(hang_before_another())


def test_a_thread_that_comes_back_is_counted_no_longer(gate: threading.Event) -> None:
    threads, back = Threads(), threading.Event()

    def job() -> None:
        gate.wait(DEADLINE_S)
        back.set()

    async def hang() -> None:
        with pytest.raises(Abandoned):
            await threads.call(job, 0.05, "reset")
        gate.set()
        assert await asyncio.to_thread(back.wait, DEADLINE_S)
        while threads.hanging:
            await asyncio.sleep(0)

    run(hang())
    assert (threads.hanging, threads.abandoned) == (0, 1)


def test_when_too_many_threads_hang_no_more_are_started(gate: threading.Event) -> None:
    threads = Threads(most=20)

    async def fill() -> None:
        hung = [threads.call(lambda: gate.wait(DEADLINE_S), 0.05, "step") for _ in range(5)]
        assert all(isinstance(error, Abandoned) for error in await asyncio.gather(*hung, return_exceptions=True))
        with pytest.raises(InfraError, match="5 threads hang"):
            await threads.call(lambda: 1, LONG_S, "step")
        assert threads.worn.is_set()

    run(fill())


def test_cancelling_gives_the_thread_up(gate: threading.Event) -> None:
    threads, inside = Threads(), threading.Event()

    def job() -> None:
        inside.set()
        gate.wait(DEADLINE_S)

    async def cancel() -> None:
        call = asyncio.ensure_future(threads.call(job, LONG_S, "step"))
        assert await asyncio.to_thread(inside.wait, DEADLINE_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run(cancel())
    assert (threads.hanging, threads.abandoned) == (1, 0), "an abandoned call is not an error of the pool"


def test_a_burst_of_cancellations_wears_out_nothing_unless_the_calls_go_on(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Surplus members are cancelled together, in the middle of calls that end soon."""

    async def cancel(threads: Threads) -> None:
        inside = threading.Semaphore(0)

        def job() -> None:
            inside.release()
            gate.wait(DEADLINE_S)

        calls = [asyncio.ensure_future(threads.call(job, LONG_S, "step")) for _ in calls_of_burst]
        for _ in calls:
            assert await asyncio.to_thread(inside.acquire, timeout=DEADLINE_S)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert threads.hanging == len(calls)

    async def burst() -> None:
        threads = Threads(most=20)
        await cancel(threads)
        assert await threads.call(lambda: 1, LONG_S, "step") == 1 and not threads.worn.is_set()
        monkeypatch.setattr(environment_threads, "CANCEL_S", 0.0)
        threads = Threads(most=20)
        await cancel(threads)
        await asyncio.wait_for(threads.worn.wait(), DEADLINE_S)

    calls_of_burst = range(7)
    run(burst())


def test_a_call_that_is_cancelled_before_it_starts_never_does(gate: threading.Event) -> None:
    threads, ran = Threads(most=1), []

    async def cancel() -> None:
        first = asyncio.ensure_future(threads.call(lambda: gate.wait(DEADLINE_S), LONG_S, "step"))
        second = asyncio.ensure_future(threads.call(lambda: ran.append(2), LONG_S, "step"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        gate.set()
        await first
        await threads.call(lambda: ran.append(3), LONG_S, "step")

    run(cancel())
    assert ran == [3]


@pytest.mark.parametrize("error", [ValueError("v"), InfraError("i"), DataError("d")])
def test_an_exception_of_a_call_is_raised(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        run(Threads().call(raises(error), LONG_S, "step"))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(1)])
def test_an_exception_that_would_end_a_thread_is_a_data_error_of_the_item(error: BaseException) -> None:
    threads = Threads()

    async def twice() -> int:
        with pytest.raises(DataError, match=type(error).__name__):
            await threads.call(raises(error), LONG_S, "step")
        return await threads.call(lambda: 1, LONG_S, "step")

    assert run(twice()) == 1
    assert threads.started == 1, "the thread outlived it"
