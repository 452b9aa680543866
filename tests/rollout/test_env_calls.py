"""Environment calls: synchronous or not, with time limits, with declared retries; and thousands concurrently."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxroll import protocols
from jaxroll.envs.executors import EnvironmentCalls
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, StepResult
from jaxroll.records import Failed, Finished, Grant, Member, Message, Task, Version, VersionRun
from jaxroll.rollout.episode import RolloutManager
from jaxroll.text.tokenizers import CharTokenizer
from tests.harness.rollout_proxy import run_group

TOKENIZER = CharTokenizer("abc")
TASK = Task(0, (Message("user", "abc"),), "x", "{}", 7, "h")
DEADLINE_S = 60.0


def run(coroutine):
    async def within_deadline():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(within_deadline())


class Plain:
    """Synchronous methods; raises the given errors, one per call, before it replies."""

    step_limit_s = 5.0

    def __init__(self, *errors: Exception, **declared: object) -> None:
        self._errors = list(errors)
        self.calls: Counter[str] = Counter()
        vars(self).update(declared)

    def _call(self, what: str) -> None:
        self.calls[what] += 1
        if self._errors:
            raise self._errors.pop(0)

    def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        self._call("reset")
        return task.messages

    def step(self, answer: str) -> StepResult:
        self._call("step")
        return StepResult(done=True, reward=1.0)

    def close(self) -> None:
        self.calls["close"] += 1


@dataclass
class Pauses:
    """A sleep that does not sleep."""

    taken: list[float] = field(default_factory=list)

    async def __call__(self, pause_s: float) -> None:
        self.taken.append(pause_s)


def test_retries_are_those_declared_with_pauses_that_double() -> None:
    pauses, gone = Pauses(), InfraError("gone")
    env, asking = Plain(gone, gone, gone, step_retries=3), EnvironmentCalls(pauses)
    assert run(asking.step(env, "a")).reward == 1.0
    assert env.calls["step"] == 4
    assert pauses.taken == [0.1, 0.2, 0.4]
    assert (asking.counts.calls, asking.counts.retries) == (4, 3)


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        ({}, InfraError("x")),
        ({"step_retries": 2}, InfraError("x")),
        ({"reset_retries": 9}, InfraError("x")),
        ({"step_retries": 9}, DataError("x")),
        ({"step_retries": 9}, OSError("x")),
    ],
)
def test_nothing_is_asked_again_that_may_not_be(declared: dict[str, int], error: Exception) -> None:
    env = Plain(*[error] * 5, **declared)
    with pytest.raises(type(error)):
        run(EnvironmentCalls(Pauses()).step(env, "a"))
    assert env.calls["step"] == (3 if declared == {"step_retries": 2} else 1)


def test_resets_have_retries_and_a_limit_of_their_own() -> None:
    class Slow(Plain):
        reset_limit_s = 0.05

        async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:  # type: ignore[override]
            await asyncio.Event().wait()
            raise AssertionError

    assert run(EnvironmentCalls(Pauses()).reset(Plain(InfraError("x"), reset_retries=1), TASK)) == TASK.messages
    asking = EnvironmentCalls()
    with pytest.raises(DataError, match=r"reset took longer than 0\.05 s"):
        run(asking.reset(Slow(), TASK))
    assert asking.counts.overdue == 1


def test_an_environment_whose_member_is_cancelled_while_it_is_made_is_closed() -> None:
    """At every step of the loop: before the constructor runs, after it, and after its task has ended."""

    class Slow(Plain):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0.05)
            super().close()

    async def cancelled_after(steps: int) -> tuple[int, int, bool]:
        calls, made = EnvironmentCalls(), list[Plain]()

        def make(name: str) -> Plain:
            made.append(Slow())
            return made[-1]

        member = asyncio.ensure_future(calls.make(make, "x"))
        for _ in range(steps):
            await asyncio.sleep(0)
        member.cancel()
        (ended,) = await asyncio.gather(member, return_exceptions=True)
        return len(made), sum(one.calls["close"] for one in made), isinstance(ended, asyncio.CancelledError)

    found = [run(cancelled_after(steps)) for steps in range(5)]
    assert found[0] == (0, 0, True) and (1, 1, True) in found, found
    assert all(closed == made for made, closed, cancelled in found if cancelled), found
    assert found[-1] == (1, 0, False), "it was the caller's by then"


def test_traits_have_defaults_and_places_are_checked() -> None:
    assert protocols.traits(Plain()) == protocols.Traits("thread", 5.0, 5.0)
    with pytest.raises(DataError, match="place = 'moon'"):
        EnvironmentCalls().traits(Plain(place="moon"))


@dataclass
class Answers:
    """A proxy that always generates "a"."""

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        ids = np.array([4, TOKENIZER.eos_id], np.int32)
        return Completion(ids, np.zeros(2, np.float32), (VersionRun(Version(0, 0), 2),), "stop")


class Meeting(Plain):
    """An environment that waits until `wanted` episodes are in it: a limit on concurrency anywhere else hangs it."""

    place = "loop"

    def __init__(self, wanted: int, here: list[int], all_here: asyncio.Event) -> None:
        super().__init__()
        self._wanted, self._here, self._all_here = wanted, here, all_here

    async def step(self, answer: str) -> StepResult:  # type: ignore[override]
        self._here.append(1)
        if len(self._here) == self._wanted:
            self._all_here.set()
        await self._all_here.wait()
        return StepResult(done=True, reward=1.0, reward_parts={"met": 1.0})


def test_two_thousand_episodes_are_in_their_environments_at_once() -> None:
    async def play() -> tuple[list[Member], RolloutManager]:
        here, all_here = [], asyncio.Event()
        manager = RolloutManager(
            Answers(), lambda name: Meeting(2000, here, all_here), TOKENIZER, SamplingParams(max_tokens=4)
        )
        grants = [Grant(group, TASK, ((0, 0),), 30.0) for group in range(2000)]
        return await asyncio.gather(*(manager.run_member(grant, 0, 0) for grant in grants)), manager

    members, manager = run(play())
    assert all(isinstance(member.outcome, Finished) for member in members)
    assert (manager.counts.finished, manager.counts.parts) == (2000, {"met": 2000.0, "truncated": 0.0})


def test_fail_slow_and_fail_stop_environments_cost_their_members_only() -> None:
    """One in ten hangs, one in ten raises: the other members finish, and each failed one has its record."""

    class Faulty(Plain):
        place, step_limit_s = "loop", 0.2

        def __init__(self, fate: int) -> None:
            super().__init__()
            self._fate = fate

        async def step(self, answer: str) -> StepResult:  # type: ignore[override]
            if self._fate == 0:
                await asyncio.Event().wait()
            if self._fate == 1:
                raise InfraError("stopped")
            return StepResult(done=True, reward=1.0)

    async def play() -> tuple[list[Member], RolloutManager]:
        fates = iter(range(10**6))
        manager = RolloutManager(
            Answers(), lambda name: Faulty(next(fates) % 10), TOKENIZER, SamplingParams(max_tokens=4)
        )
        grant = Grant(3, TASK, tuple((member, 0) for member in range(200)), 30.0)
        put: list[Member] = []

        async def keep(member: Member) -> None:
            put.append(member)

        await run_group(manager, grant, keep)
        return put, manager

    put, manager = run(play())
    failed = [member.outcome for member in put if isinstance(member.outcome, Failed)]
    assert len(put) == 200 and sorted(member.member for member in put) == list(range(200))
    assert Counter(outcome.kind for outcome in failed) == {"DATA": 20, "INFRA": 20} == manager.counts.failed
    assert sum("took longer than 0.2 s" in outcome.error for outcome in failed) == 20 == manager.env_calls.overdue
    last = [member.member for member in put[180:]]
    assert sorted(last) == list(range(0, 200, 10)), "no episode waits for a hanging one"
