"""The scoring pool with real processes: throughput; scorers that hang, die, take too much, or send malformed data."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxroll.config import Config
from jaxroll.envs.executors import Executors
from jaxroll.errors import DataError, InfraError
from jaxroll.rewards import scorers, scoring_pool
from jaxroll.rewards.processes import ScoreItem, ScoringProcess
from jaxroll.rewards.scoring_pool import ScoringPool

pytestmark = pytest.mark.process

DEADLINE_S = 120.0
SPELL = json.dumps(
    {"scorer": "reasoning_gym", "dataset": "spell_backward", "entry": {"answer": "reyornac", "metadata": {}}}
)
EXACT = '{"scorer": "exact", "answer": "ok"}'

MISBEHAVING = """
import os, signal, subprocess, sys, threading, time
from jaxroll.rewards.scorers import register

@register("misbehave")
def misbehave(args, answer):
    what = args["what"]
    if what == "loop":
        while True:
            try:
                while True: pass
            except BaseException: pass
    elif what == "sleep": time.sleep(3600)
    elif what == "die": os.kill(os.getpid(), signal.SIGKILL)
    elif what == "take a while": time.sleep(2.0); return 0.25
    elif what == "exit": sys.exit(3)
    elif what == "allocate": return float(len(bytearray(16 << 30)))
    elif what == "surrogate": raise ValueError("a\\ud800b")
    elif what == "raise": raise ZeroDivisionError("of mine")
    elif what == "recurse": return misbehave(args, answer)
    elif what == "print":
        print("x" * 100000); sys.stderr.write("y" * 100000); os.write(1, b"junk" * 1000); return 0.5
    elif what == "read": return float(len(sys.stdin.read()))
    elif what == "write":
        with open(args["path"], "w") as file: file.write("x" * 100)
    elif what == "environment": return float("SECRET_TOKEN" in os.environ)
    elif what == "nan": return float("nan")
    raise AssertionError(what)
"""

Score = Callable[[str], str]


def misbehave(what: str, **more: str) -> str:
    return json.dumps({"scorer": "misbehave", "what": what, **more})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "misbehaving_scorers.py").write_text(MISBEHAVING)
    monkeypatch.syspath_prepend(tmp_path)
    return "misbehaving_scorers"


@pytest.fixture
def pool(module: str) -> Iterator[ScoringPool]:
    pool = ScoringPool(1, time_limit_s=1.0, libraries=(), modules=(module,))
    pool.start()
    yield pool
    pool.close()


def run(coroutine):
    async def within_deadline():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(within_deadline())


def test_scores_arrive_and_none_is_lost_or_swapped(pool: ScoringPool) -> None:
    pool.time_limit_s = 30.0

    async def many() -> list[float]:
        answers = ["ok" if i % 3 else "no" for i in range(1000)]
        return await asyncio.gather(*(pool.score(EXACT, answer) for answer in answers))

    assert run(many()) == [1.0 if i % 3 else 0.0 for i in range(1000)]
    assert run(pool.score(EXACT, "ok")) == 1.0, "the pool serves the next event loop, too"
    assert pool.restarts == 0


def test_a_worker_gets_whole_batches_while_items_wait(pool: ScoringPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches of one, programs would run one after another, and every item would wake worker and pool."""
    pool.time_limit_s, sizes, send = 30.0, [], ScoringProcess.send

    def counted(self: ScoringProcess, items: Iterable[ScoreItem]) -> bool:
        sizes.append(len(batch := list(items)))
        return send(self, batch)

    monkeypatch.setattr(ScoringProcess, "send", counted)

    async def many() -> list[float]:
        return await asyncio.gather(*(pool.score(EXACT, "ok") for _ in range(330)))

    assert run(many()) == [1.0] * 330
    assert sizes == [16] * 20 + [10]


def test_answers_that_a_guard_rejects_are_counted_by_reason(pool: ScoringPool) -> None:
    before = pool.rejected.copy()
    assert run(pool.score(SPELL, "reyornac\u200b")) == 0.0
    assert run(pool.score(SPELL, "x" * (scorers.MIN_ANSWER_CHARS + 1))) == 0.0
    assert run(pool.score(EXACT, "ok")) == 1.0
    assert pool.rejected - before == {scorers.NOT_ASCII: 1, scorers.TOO_LONG: 1}


def test_a_worker_gives_two_thousand_scores_a_second_of_reasoning_gym() -> None:
    pool = ScoringPool(1)
    pool.start()

    async def rate() -> float:
        await pool.score(SPELL, "reyornac")  # it has started
        started = time.perf_counter()
        await asyncio.gather(*(pool.score(SPELL, "reyornac") for _ in range(4000)))
        return 4000 / (time.perf_counter() - started)

    try:
        assert max(run(rate()) for _ in range(3)) > 2000
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (misbehave("loop"), "longer than 1 s"),
        (misbehave("sleep"), "longer than 1 s"),
        (misbehave("die"), "signal 9"),
        (misbehave("exit"), "exit status 3"),
        (misbehave("allocate"), "MemoryError"),
    ],
    ids=["loop", "sleep", "die", "exit", "allocate"],
)
def test_a_scorer_that_takes_its_worker_down_costs_its_own_item_only(
    pool: ScoringPool, bad: str, complaint: str
) -> None:
    async def mixed() -> list[object]:
        jobs = [pool.score(EXACT, "ok") for _ in range(20)] + [pool.score(bad, "ok")]
        jobs += [pool.score(EXACT, "no") for _ in range(100)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    before = pool.pids
    results = run(mixed())
    assert results[:20] == [1.0] * 20
    assert results[21:] == [0.0] * 100
    assert isinstance(results[20], DataError) and complaint in str(results[20])
    assert pool.pids != before
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).ppid() == os.getpid() for pid in before)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (misbehave("raise"), "ZeroDivisionError: of mine"),
        (misbehave("recurse"), "RecursionError"),
        (misbehave("nan"), "not a finite number"),
        (misbehave("write", path="{tmp}/file"), "PermissionError|OSError"),
        ("{", "DecodeError"),
        ('{"scorer": "nope"}', "no scorer 'nope'"),
        (SPELL.replace("spell_backward", "nonesuch"), "table of tasks"),
    ],
)
def test_a_scorer_that_raises_costs_its_item_and_not_its_worker(
    pool: ScoringPool, tmp_path: Path, bad: str, complaint: str
) -> None:
    before = pool.pids
    with pytest.raises(DataError, match=complaint):
        run(pool.score(bad.replace("{tmp}", str(tmp_path)), "ok"))
    assert run(pool.score(EXACT, "ok")) == 1.0
    assert pool.pids == before
    written = tmp_path / "file"
    assert not written.exists() or written.stat().st_size == 0


def test_output_and_input_of_a_scorer_do_not_disturb_the_protocol(
    pool: ScoringPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(pool.score(misbehave("print"), "ok")) == 0.5
    assert run(pool.score(misbehave("read"), "ok")) == 0.0
    assert pool.restarts == 0


def test_secrets_of_the_parent_do_not_reach_a_scorer(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t")
    pool = ScoringPool(1, libraries=(), modules=(module,))
    pool.start()
    try:
        assert run(pool.score(misbehave("environment"), "ok")) == 0.0
    finally:
        pool.close()


def test_an_item_whose_worker_was_killed_by_something_else_is_scored_again(pool: ScoringPool) -> None:
    pool.time_limit_s = 30.0  # however slow the machine is

    async def killed_meanwhile() -> float:
        await pool.score(EXACT, "ok")
        scoring_pool = asyncio.create_task(pool.score(misbehave("take a while"), "ok"))
        await asyncio.sleep(0.1)
        os.kill(pool.pids[0], signal.SIGKILL)
        return await scoring_pool

    assert run(killed_meanwhile()) == 0.25
    assert pool.restarts == 1


def test_an_idle_worker_that_is_killed_is_replaced(pool: ScoringPool) -> None:
    async def killed() -> float:
        await pool.score(EXACT, "ok")
        os.kill(pool.pids[0], signal.SIGKILL)
        return await pool.score(EXACT, "ok")

    assert run(killed()) == 1.0
    assert pool.restarts == 1


def test_with_two_workers_a_hang_does_not_delay_the_other(module: str) -> None:
    pool = ScoringPool(2, time_limit_s=30.0, libraries=(), modules=(module,))
    pool.start()

    async def around_a_hang() -> bool:
        while pool.ready < 2:
            await pool.score(EXACT, "ok")
        hung = asyncio.create_task(pool.score(misbehave("sleep"), "ok"))
        scores = [await pool.score(EXACT, "ok") for _ in range(200)]
        assert scores == [1.0] * 200
        done = hung.done()
        hung.cancel()
        return done

    try:
        assert not run(around_a_hang())
    finally:
        pool.close()


def test_items_overtake_one_that_takes_long(module: str) -> None:
    """No item is sent to a worker whose current item hangs, however many arrive."""
    pool = ScoringPool(2, time_limit_s=30.0, libraries=(), modules=(module,))
    pool.start()

    async def overtaken() -> bool:
        while pool.ready < 2:
            await pool.score(EXACT, "ok")
        hung = asyncio.create_task(pool.score(misbehave("sleep"), "ok"))
        await asyncio.sleep(0.3)  # by now it is known to take long
        jobs = [pool.score(EXACT, "ok") for _ in range(500)]
        assert await asyncio.gather(*jobs) == [1.0] * 500
        done = hung.done()
        hung.cancel()
        return done

    try:
        assert not run(overtaken())
    finally:
        pool.close()


def test_a_busy_loop_is_not_taken_for_a_hanging_worker(pool: ScoringPool) -> None:
    """The loop's thread also runs JAX: when it comes back after seconds, the replies are waiting in the pipe."""

    async def busy() -> list[float]:
        await pool.score(EXACT, "ok")
        jobs = [asyncio.create_task(pool.score(EXACT, "ok")) for _ in range(10)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the items are on their way
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            pass
        return await asyncio.gather(*jobs)

    assert run(busy()) == [1.0] * 10
    assert pool.restarts == 0


def test_a_caller_that_is_cancelled_leaves_nothing_wrong_behind(pool: ScoringPool) -> None:
    async def cancelled() -> list[float]:
        jobs = [asyncio.create_task(pool.score(EXACT, "ok")) for _ in range(50)]
        await asyncio.sleep(0)
        for job in jobs[::2]:
            job.cancel()
        await asyncio.gather(*jobs[::2], return_exceptions=True)
        return await asyncio.gather(*jobs[1::2], pool.score(EXACT, "no"))

    assert run(cancelled()) == [1.0] * 25 + [0.0]


def test_large_arguments_pass_through_a_small_pipe(pool: ScoringPool) -> None:
    big = json.dumps({"scorer": "exact", "answer": "ok", "padding": "x" * 1_000_000})
    pool.time_limit_s = 30.0

    async def many() -> list[float]:
        return await asyncio.gather(*(pool.score(big, "ok") for _ in range(40)))

    assert run(many()) == [1.0] * 40


def test_closing_ends_the_processes_and_fails_pending_scores(pool: ScoringPool) -> None:
    async def closed() -> None:
        await pool.score(EXACT, "ok")
        waiting = asyncio.create_task(pool.score(misbehave("sleep"), "ok"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(InfraError, match="closed"):
            await waiting

    pids = pool.pids
    run(closed())
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(InfraError, match="closed"):
        run(pool.score(EXACT, "ok"))


def test_workers_that_cannot_start_end_the_pool_with_their_stderr() -> None:
    pool = ScoringPool(1, libraries=(), modules=("no_such_module_anywhere",))
    pool.start()
    with pytest.raises(InfraError, match="no_such_module_anywhere"):
        run(pool.score(EXACT, "ok"))
    with pytest.raises(InfraError, match="do not start"):
        run(pool.score(EXACT, "ok"))
    pool.close()


def test_a_pool_started_on_a_thread_that_has_ended_still_scores() -> None:
    """The trap: the kernel's death signal follows the thread that started the worker, not the process."""
    pool = ScoringPool(1, libraries=())
    thread = threading.Thread(target=pool.start)
    thread.start()
    thread.join()
    try:
        assert run(pool.score(EXACT, "ok")) == 1.0
    finally:
        pool.close()


PARENT = """
import asyncio, sys
from jaxroll.rewards.scoring_pool import ScoringPool

async def main():
    pool = ScoringPool(2, time_limit_s=1000.0, libraries=(), modules=("misbehaving_scorers",))
    pool.start()
    await asyncio.gather(*(pool.score('{"scorer": "exact", "answer": "ok"}', "ok") for _ in range(100)))
    hung = [asyncio.create_task(pool.score('{"scorer": "misbehave", "what": "loop"}', "ok")) for _ in range(2)]
    await asyncio.sleep(0.2)
    print(*pool.pids, flush=True)
    await asyncio.gather(*hung)

asyncio.run(main())
"""


def test_workers_end_when_their_parent_is_killed_even_inside_a_scorer(module: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as parent:
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(worker.is_running() for worker in workers)
        parent.kill()
    _, alive = psutil.wait_procs(workers, timeout=5)
    alive = [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]
    assert not alive


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the operating system refuse the next so many scoring processes."""
    left = [0]

    class Refused(ScoringProcess):
        def __init__(self, *arguments: Any) -> None:
            if left[0]:
                left[0] -= 1
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            super().__init__(*arguments)

    monkeypatch.setattr(scoring_pool, "ScoringProcess", Refused)
    monkeypatch.setattr(scoring_pool, "_PAUSE_FIRST_S", 0.01)
    return lambda count: left.__setitem__(0, count)


def test_a_worker_that_the_system_refuses_is_started_later(module: str, refused: Callable[[int], None]) -> None:
    pool = ScoringPool(1, time_limit_s=30.0, libraries=(), modules=(module,))
    pool.start()

    async def refused_three_times() -> list[float]:
        await pool.score(EXACT, "ok")
        refused(3)
        os.kill(pool.pids[0], signal.SIGKILL)
        return await asyncio.gather(*(pool.score(EXACT, "ok") for _ in range(50)))

    try:
        assert run(refused_three_times()) == [1.0] * 50
        assert (pool.restarts, pool.failed_starts, pool.gave_up.is_set()) == (1, 3, False)
        assert run(pool.score(EXACT, "ok")) == 1.0
    finally:
        pool.close()


def test_a_pool_without_workers_gives_up_and_ends_its_role(module: str, refused: Callable[[int], None]) -> None:
    pool = ScoringPool(1, libraries=(), modules=(module,))
    pool.start()

    async def refused_for_ever() -> None:
        ending = asyncio.ensure_future(Executors(pool, Config()).raise_when_worn_out())  # the roles wait for it
        await pool.score(EXACT, "ok")
        refused(1000)
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(InfraError, match="temporarily unavailable"):
            await pool.score(EXACT, "ok")
        with pytest.raises(InfraError, match=r"the scoring pool does not work: .*temporarily unavailable"):
            await ending

    try:
        run(refused_for_ever())
        assert pool.pids == [] and "temporarily unavailable" in pool.broken
    finally:
        pool.close()


def test_a_pool_that_cannot_start_at_all_leaves_nothing(module: str, refused: Callable[[int], None]) -> None:
    refused(1)
    pool = ScoringPool(2, libraries=(), modules=(module,))
    with pytest.raises(InfraError, match="temporarily unavailable"):
        pool.start()
    assert pool.pids == []


def test_nothing_is_written_to_or_read_from_a_process_that_was_killed(pool: ScoringPool) -> None:
    """The numbers of its descriptors may be reused for other files by then."""
    process = pool._workers[0].process
    numbers = {process.input_descriptor, process.output_descriptor}
    process.kill()
    reading, writing = os.pipe()
    try:
        assert {reading, writing} & numbers, "the system gives free numbers again"
        process.send([ScoreItem(0, EXACT, "ok")])
        process.flush()
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        assert process.receive() == ([], False)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(("args", "answer"), [('{"answer": "\ud800"}', "ok"), (None, "ok"), (EXACT, None), (EXACT, 1)])
def test_an_item_that_does_not_travel_costs_no_other(pool: ScoringPool, args: Any, answer: Any) -> None:
    async def amid_others() -> list[object]:
        jobs = [pool.score(EXACT, "ok"), pool.score(args, answer), pool.score(EXACT, "ok")]
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, bad, last = run(amid_others())
    assert (first, last) == (1.0, 1.0) and isinstance(bad, DataError) and pool.restarts == 0


def test_an_error_whose_text_cannot_be_encoded_fails_its_item_and_not_its_worker(pool: ScoringPool) -> None:
    before = pool.pids
    with pytest.raises(DataError, match=r"ValueError: a\?b"):
        run(pool.score(misbehave("surrogate"), "ok"))
    assert pool.pids == before


def test_a_pool_without_work_has_no_processes_and_gets_them_back(module: str) -> None:
    pool = ScoringPool(2, libraries=(), modules=(module,), idle_s=0.4)
    pool.start()

    async def both() -> None:
        for nap in range(1, 3):
            slow = asyncio.create_task(pool.score(misbehave("take a while"), "ok"))  # longer than idle_s
            results = await asyncio.gather(*(pool.score(EXACT, "ok") for _ in range(50)), slow)
            assert results == [1.0] * 50 + [0.25] and pool.sleeps == nap - 1
            pids = pool.pids
            while pool.pids:
                await asyncio.sleep(0.05)
            assert (pool.sleeps, pool.ready, pool.restarts, pool.failed_starts) == (nap, 0, 0, 0)
            assert not any(psutil.pid_exists(pid) for pid in pids)
        # Items that arrive together with the end of the workers, and a worker that is killed while it starts.
        scores = [asyncio.create_task(pool.score(EXACT, "ok")) for _ in range(20)]
        await asyncio.sleep(0)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert await asyncio.gather(*scores) == [1.0] * 20

    try:
        run(both())
    finally:
        pool.close()
