"""Environments run where they say, and what they do there costs their own episode only."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from jaxroll import protocols
from jaxroll.config import Config, SamplerConfig, TaskConfig
from jaxroll.envs import executors, processes
from jaxroll.envs import threads as environment_threads
from jaxroll.envs.executors import EnvironmentCalls, Executors
from jaxroll.errors import DataError, InfraError, RestartRequired
from jaxroll.loop_thread import LoopThread
from jaxroll.protocols import Environment, StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool

NAME = "tests.harness.envs.blocking:{}"
TASK = Task(0, (Message("user", "hello"),), "x", "{}", 5, "h")
DEADLINE_S = 60.0
LONG = "x" * (128 << 10)
HANGING = (os.cpu_count() or 1) + 8  # the default executor has four threads more than cores


def play(body: Callable[[Executors], Awaitable[object]], *, most: int = 1) -> None:
    async def within_deadline() -> None:
        config = Config(task=TaskConfig(name="told"), sampler=SamplerConfig(env_processes=most))
        places = Executors(ScoringPool(1), config)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await body(places)
        finally:
            await places.close()

    asyncio.run(within_deadline())


async def where(env: Environment) -> tuple[int, int]:
    """The process and thread that the environment reports; its other answers are checked here."""
    messages = await EnvironmentCalls().reset(env, TASK)
    process, thread, name, seed = messages[-1].content.split()
    assert (messages[0], name, seed) == (TASK.messages[0], "told", "5")
    return int(process), int(thread)


@pytest.mark.parametrize("name", ["on_loop", "asynchronous"])
def test_on_the_loop(name: str) -> None:
    async def body(places: Executors) -> None:
        env = places.create(NAME.format(name))
        assert await where(env) == (os.getpid(), threading.get_ident())

    play(body)


def test_plain_functions_go_to_a_thread() -> None:
    async def body(places: Executors) -> None:
        env = places.create(NAME.format("in_thread"))
        process, thread = await where(env)
        assert process == os.getpid() and thread != threading.get_ident()
        assert not (await EnvironmentCalls().step(env, "a")).done
        assert (await EnvironmentCalls().step(env, "b")).reward == 1.0
        await env.close()  # type: ignore[misc]

    play(body)


async def restored(env: Environment) -> str:
    """The process and thread that restore the environment, which continues after its first turn."""
    process, _ = await where(env)
    with pytest.raises((ValueError, DataError)) as error:
        await EnvironmentCalls().restore(env, b"where")
    assert str(process) in str(error.value)
    await EnvironmentCalls().restore(env, b"1")
    assert (await EnvironmentCalls().step(env, "b")).reward == 1.0, "the turn before is not counted"
    return str(error.value)


def test_an_environment_is_restored_where_it_is_played() -> None:
    async def body(places: Executors) -> None:
        env = places.create(NAME.format("in_thread"))
        assert str(threading.get_ident()) not in await restored(env)
        for other in ("contract_breaking:kept", "contract_breaking:kept_in_process", "hanging:hanging_env"):
            assert not protocols.traits(places.create(f"tests.harness.envs.{other}")).restores

    play(body)


@pytest.mark.parametrize("name", ["misplaced", "nowhere"])
def test_a_place_that_cannot_be_is_refused(name: str) -> None:
    async def body(places: Executors) -> None:
        with pytest.raises(DataError, match="place"):
            places.create(NAME.format(name))

    play(body)


def test_an_environment_in_a_process_shows_its_declared_traits() -> None:
    async def body(places: Executors) -> None:
        env = places.create(NAME.format("in_process"))
        assert (protocols.traits(env).step_retries, protocols.traits(env).max_turns) == (1, protocols.MAX_TURNS)

    play(body)


@pytest.mark.process
def test_a_process_plays_each_source_with_its_own_settings() -> None:
    """They are longer than an argument of a command may be."""

    async def job() -> None:
        seen = set()
        sources = [{"name": name, "env": NAME.format("in_process")} for name in ("other", "told")]
        places = Executors(ScoringPool(1), Config(task=TaskConfig(name="another", mixture=sources, system_prompt=LONG)))
        try:
            async with asyncio.timeout(DEADLINE_S):
                for source in ("other", "told"):
                    env = places.create(f"{NAME.format('in_process')}@{source}")
                    process, _, name, _ = (await EnvironmentCalls().reset(env, TASK))[-1].content.split()
                    assert name == source and int(process) != os.getpid()
                    seen.add(process)
                    await env.close()  # type: ignore[misc]
        finally:
            await places.close()
        assert len(seen) == 1, "a process plays one after the other"

    asyncio.run(job())


@pytest.mark.process
def test_a_process_plays_one_episode_after_another() -> None:
    async def body(places: Executors) -> None:
        seen = set()
        for _ in range(3):
            env, asking = places.create(NAME.format("in_process")), EnvironmentCalls()
            process, _ = await where(env)
            seen.add(process)
            assert (await asking.step(env, "print")).messages == (Message("user", "and?"),)
            assert (await asking.step(env, "b")).reward_parts == {"turns": 2.0}
            await env.close()  # type: ignore[misc]
        assert len(seen) == 1 and os.getpid() not in seen
        assert places.processes.pids == [*seen]
        assert str(os.getpid()) not in (await restored(env)).split()
        assert places.counts()["env_processes_replaced"] == 0

    play(body)


@pytest.mark.process
def test_a_process_that_hangs_or_dies_is_replaced_and_what_raises_is_not() -> None:
    async def body(places: Executors) -> None:
        for name, answer, error, words, replaced in (
            ("in_process", "raise", DataError, "ZeroDivisionError: of the environment", 0),
            ("in_process_hasty", "hang", DataError, r"step took longer than 0\.5 s", 1),
            ("in_process", "die", InfraError, "died in step|process is gone", 2),
        ):
            env, before = places.create(NAME.format(name)), places.processes.pids
            await where(env)
            with pytest.raises(error, match=words):
                await EnvironmentCalls().step(env, answer)
            await env.close()  # type: ignore[misc]
            assert places.counts()["env_processes_replaced"] == replaced
            assert bool(set(before) & set(places.processes.pids)) == (answer == "raise" and bool(before))
        await where(env := places.create(NAME.format("in_process")))
        assert not (await EnvironmentCalls().step(env, "a")).done, "the next episode finds a process"
        await env.close()  # type: ignore[misc]

    play(body)


@pytest.mark.process
def test_an_infra_error_in_a_process_may_be_asked_again() -> None:
    async def body(places: Executors) -> None:
        env, pauses = places.create(NAME.format("in_process")), []

        async def sleep(pause_s: float) -> None:
            pauses.append(pause_s)

        asking = EnvironmentCalls(sleep)
        await asking.reset(env, TASK)
        assert not (await asking.step(env, "flaky")).done
        assert (len(pauses), asking.counts.retries) == (1, 1)
        await env.close()  # type: ignore[misc]

    play(body)


@pytest.mark.process
def test_an_episode_waits_for_a_process_and_cancelling_kills_it() -> None:
    async def body(places: Executors) -> None:
        first, second = (places.create(NAME.format("in_process")) for _ in range(2))
        process, _ = await where(first)
        waiting = asyncio.ensure_future(where(second))
        hanging = asyncio.ensure_future(EnvironmentCalls().step(first, "hang"))
        done, _ = await asyncio.wait([waiting, hanging], timeout=0.2)
        assert not done, "there is one process, and the first episode has it"
        hanging.cancel()
        await asyncio.wait([hanging])
        await first.close()  # type: ignore[misc]
        other, _ = await waiting
        assert other != process and places.processes.pids == [other]
        await second.close()  # type: ignore[misc]

    play(body)


@pytest.mark.process
@pytest.mark.parametrize("what", ["exit", "interrupt", "cancel"])
def test_an_exit_in_a_process_costs_its_member_and_not_the_process(what: str) -> None:
    async def body(places: Executors) -> None:
        for name in ("in_process", "in_process_coroutines"):
            env = places.create(NAME.format(name))
            process, _ = await where(env)
            with pytest.raises(DataError, match=r"SystemExit|KeyboardInterrupt|CancelledError"):
                await EnvironmentCalls().step(env, what)
            await env.close()  # type: ignore[misc]
            assert places.processes.pids == [process] and places.processes.replaced == 0
            env = places.create(NAME.format(name))
            assert (await where(env))[0] == process
            await env.close()  # type: ignore[misc]

    play(body)


@pytest.mark.process
def test_a_result_that_does_not_travel_is_a_data_error_of_its_field() -> None:
    async def body(places: Executors) -> None:
        env = places.create(NAME.format("in_process"))
        await where(env)
        with pytest.raises(DataError, match="the reward is None"):
            await EnvironmentCalls().step(env, "no reward")
        with pytest.raises(DataError, match=r"a\?b"):
            await EnvironmentCalls().step(env, "surrogate")
        assert (await EnvironmentCalls().step(env, "numpy")).reward == 1.0
        await env.close()  # type: ignore[misc]
        assert places.processes.replaced == 0

    play(body)


@pytest.mark.process
def test_a_process_that_the_system_refuses_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PAUSE_FIRST_S", 0.01)
    start, left = asyncio.create_subprocess_exec, [2]

    async def refused(*arguments: Any, **more: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*arguments, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)

    async def body(places: Executors) -> None:
        env = places.create(NAME.format("in_process"))
        await where(env)
        await env.close()  # type: ignore[misc]
        assert places.counts()["env_process_failed_starts"] == 2
        left[0] = 1000
        await places.processes._idle.pop().kill()
        ending = asyncio.ensure_future(places.raise_when_worn_out())
        while not ending.done():
            with pytest.raises(InfraError, match="temporarily unavailable"):
                await EnvironmentCalls().reset(places.create(NAME.format("in_process")), TASK)
            await asyncio.sleep(0)
        with pytest.raises(InfraError, match=r"do not start: .*temporarily unavailable"):
            await ending

    play(body)


@pytest.mark.process
def test_an_idle_process_that_died_is_given_to_no_episode() -> None:
    async def body(places: Executors) -> None:
        env = places.create(NAME.format("in_process"))
        process, _ = await where(env)
        await env.close()  # type: ignore[misc]
        os.kill(process, signal.SIGKILL)
        while places.processes._idle[0].is_alive:
            await asyncio.sleep(0.01)
        env = places.create(NAME.format("in_process"))
        assert (await where(env))[0] != process
        await env.close()  # type: ignore[misc]

    play(body)


class Waiting:
    """An environment on the loop whose step waits in the default executor until the gate opens."""

    step_limit_s = 3.0  # the calls have begun by then, also on a slow machine

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    async def step(self, answer: str) -> None:
        await asyncio.to_thread(self._gate.wait)


def test_calls_that_hang_in_the_default_executor_leave_it_to_the_role_and_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are more than the executor has threads, and as many as may hang in environments."""
    monkeypatch.setattr(environment_threads, "CANCEL_S", 0.0)
    config = Config(task=TaskConfig(name="told"), sampler=SamplerConfig(env_threads=4 * HANGING))
    role, gate = LoopThread("role"), threading.Event()

    async def body() -> None:
        places = Executors(ScoringPool(1), config)
        exhausted = asyncio.ensure_future(places.raise_when_worn_out())
        asking = EnvironmentCalls()
        envs: list[Any] = [Waiting(gate) for _ in range(HANGING)]
        ends = await asyncio.gather(*(asking.step(env, "a") for env in envs), return_exceptions=True)
        assert all(isinstance(end, DataError) and "longer than" in str(end) for end in ends), ends
        assert await asyncio.to_thread(int) == 0
        assert places.counts()["env_threads_hanging"] == HANGING
        with pytest.raises(RestartRequired, match=f"{HANGING} threads hang"):
            await exhausted
        await places.close()

    try:
        role.start(body()).result(DEADLINE_S)
    finally:
        gate.set()
        role.close()


class Leaving(Waiting):
    """An environment that does not wait for its calls in the default executor: one ends, one goes on after close."""

    async def step(self, answer: str) -> None:
        self._calls = [asyncio.ensure_future(asyncio.to_thread(job)) for job in (self._gate.wait, int)]
        await self._calls[1]

    async def close(self) -> None:
        """Leave the call."""


def test_a_call_that_an_environment_leaves_in_the_default_executor_counts_as_hanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executors, "LEFT_S", 0.0)
    role, gate = LoopThread("role"), threading.Event()

    async def body() -> None:
        places, asking = Executors(ScoringPool(1), Config()), EnvironmentCalls()
        env: Any = Leaving(gate)
        await asking.step(env, "a")
        assert asking.left_threads() == 0, "it is not closed yet"
        await asking.close(env)
        assert places.threads.hanging == 0
        asking.left_threads()
        await asyncio.wait(env._calls)
        assert places.counts()["env_threads_hanging"] == 1
        assert asking.counts.faults == {"Leaving left a call in a thread running": 1}
        asking.left_threads()
        assert asking.counts.faults.total() == 1
        await places.close()

    try:
        role.start(body()).result(DEADLINE_S)
    finally:
        gate.set()
        role.close()


def test_growth_of_a_process_is_counted_from_the_first_episode_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    player = processes.Player({}, asyncio.Runner())
    monkeypatch.setattr(processes, "_THREADS_END_S", 0.0)
    seen = []
    for kind, threads, held in (("a", 3, 100), ("b", 9, 700), ("b", 10, 900), ("a", 10, 900)):
        monkeypatch.setattr(processes, "_threads", lambda threads=threads: threads)
        monkeypatch.setattr(processes, "resident_bytes", lambda held=held: held)
        player._name = kind
        seen.append(player.answer(processes.Close()))
    assert seen == [processes.Closed(*grown) for grown in ((0, 0), (0, 0), (1, 200), (7, 800))]


class Pinging:
    """Its `reset` starts a task that its close forgets."""

    def __init__(self, *, cancels: bool) -> None:
        self._cancels = cancels

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        self._ping = asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="ping")
        return (Message("user", "?"),)

    async def step(self, answer: str) -> StepResult:
        return StepResult(done=True)

    async def close(self) -> None:
        if self._cancels:
            self._ping.cancel()


@pytest.mark.parametrize("cancels", [True, False])
def test_a_task_that_an_environment_leaves_on_the_loop_is_counted_once(
    cancels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "LEFT_S", 0.0)
    role = LoopThread("role")

    async def body() -> None:
        asking = EnvironmentCalls()
        env: Any = Pinging(cancels=cancels)
        await asking.reset(env, TASK)
        await asking.close(env)
        await asyncio.sleep(0)
        for _ in range(2):
            await asking.judged_threads()
            assert asking.counts.faults == ({} if cancels else {"Pinging left the task ping running": 1})
        env._ping.cancel()

    try:
        role.start(body()).result(DEADLINE_S)
    finally:
        role.close()


def test_a_process_with_too_many_left_threads_ends() -> None:
    async def body(places: Executors) -> None:
        exhausted = asyncio.ensure_future(places.raise_when_worn_out())
        places.threads.note_leftover(255)
        await asyncio.sleep(0)
        assert not exhausted.done()
        places.threads.note_leftover(256)
        with pytest.raises(RestartRequired, match="256 run on after close"):
            await exhausted

    play(body)


def test_a_member_that_is_collected_after_its_loop_has_ended_reports_nothing() -> None:
    """Its coroutine is closed by a GeneratorExit; no error of an environment is made of it."""
    found = []

    @types.coroutine
    def waits() -> Iterator[None]:
        yield

    async def member() -> None:
        try:
            await waits()
        except GeneratorExit as error:
            found.append(executors.is_cancellation(error))
            raise

    left = member()
    left.send(None)
    left.close()
    assert found == [True]
