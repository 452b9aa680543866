"""Groups of members: they fail independently, and each is stored when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import GenerationKey, SamplingParams, StepResult
from jaxroll.records import Failed, Finished, Member, Message, Task
from jaxroll.rollout.episode import RolloutManager, Transcript
from tests.harness.rollout_proxy import TOKENIZER, FakeProxy, grant, run_group

DEADLINE_S = 30.0


class Env:
    """Pays 1 for anything; does what `on_step` and `on_close` do first."""

    step_limit_s = 5.0
    live = 0

    def __init__(self, on_step: Callable[[], None] = lambda: None, on_close: Callable[[], None] = lambda: None) -> None:
        self._on_step, self._on_close = on_step, on_close
        Env.live += 1

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        return task.messages

    async def step(self, answer: str) -> StepResult:
        self._on_step()
        return StepResult(done=True, reward=1.0)

    async def close(self) -> None:
        Env.live -= 1
        self._on_close()


@pytest.fixture(autouse=True)
def every_environment_is_closed():
    Env.live = 0
    yield
    assert Env.live == 0


def manager(proxy: FakeProxy, make_env: Callable[[str], Env] = lambda name: Env()) -> RolloutManager:
    return RolloutManager(proxy, make_env, TOKENIZER, SamplingParams(max_tokens=4))


def run(coroutine):
    async def within_deadline():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(within_deadline())


def raises(error: BaseException) -> Callable[[], None]:
    def step() -> None:
        raise error

    return step


def test_a_member_carries_its_identity() -> None:
    proxy = FakeProxy()
    member = run(manager(proxy).run_member(grant(0, salt=9), 3, 2))
    assert (member.group, member.member, member.attempt) == (5, 3, 2)
    assert isinstance(member.outcome, Finished) and member.outcome.reward == 1.0
    assert proxy.keys == [GenerationKey(5, 3, 9)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InfraError("engine gone"), "INFRA"),
        (DataError("no such item"), "DATA"),
        (ZeroDivisionError("of the environment"), "DATA"),
        (TimeoutError("socket"), "DATA"),
        (AssertionError("plain"), "DATA"),
    ],
)
def test_what_an_environment_raises_becomes_a_failure_of_its_kind(error: Exception, kind: str) -> None:
    member = run(manager(FakeProxy(), lambda name: Env(raises(error))).run_member(grant(0), 0, 0))
    assert isinstance(member.outcome, Failed)
    assert member.outcome.kind == kind
    assert str(error) in member.outcome.error


@pytest.mark.parametrize(("error", "kind"), [(InfraError("x"), "INFRA"), (RuntimeError("x"), "DATA")])
def test_what_the_proxy_raises_becomes_a_failure_of_its_kind(error: Exception, kind: str) -> None:
    member = run(manager(FakeProxy(errors={0: error})).run_member(grant(0), 0, 0))
    assert isinstance(member.outcome, Failed) and member.outcome.kind == kind


def test_an_environment_that_cannot_be_made_is_a_data_failure() -> None:
    def make(name: str) -> Env:
        raise KeyError(name)

    member = run(manager(FakeProxy(), make).run_member(grant(0), 0, 0))
    assert isinstance(member.outcome, Failed) and member.outcome.kind == "DATA"


def test_a_failure_of_closing_does_not_take_the_reward_away(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        member = run(
            manager(FakeProxy(), lambda name: Env(on_close=raises(OSError("gone")))).run_member(grant(0), 0, 0)
        )
    assert isinstance(member.outcome, Finished)
    assert "gone" in caplog.text


def test_one_bad_member_costs_one_member() -> None:
    put: list[Member] = []

    async def keep(member: Member) -> str:
        put.append(member)
        return "OK"

    errors = {1: RuntimeError("bad"), 2: InfraError("bad")}
    run(run_group(manager(FakeProxy(errors=errors)), grant(0, 0, 3, 0), keep))
    outcomes = {member.member: member.outcome for member in put}
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert [type(outcomes[i]) for i in range(4)] == [Finished, Failed, Failed, Finished]
    assert [outcomes[i].kind for i in (1, 2)] == ["DATA", "INFRA"]
    assert {member.member: member.attempt for member in put} == {0: 0, 1: 0, 2: 3, 3: 0}


def test_a_member_is_scored_and_put_while_others_still_generate() -> None:
    async def slow_first() -> list[int]:
        proxy = FakeProxy(gates={0: asyncio.Event()})
        order: list[int] = []
        others_are_put = asyncio.Event()

        async def keep(member: Member) -> None:
            order.append(member.member)
            if len(order) == 2:
                others_are_put.set()

        group = asyncio.create_task(run_group(manager(proxy), grant(0, 0, 0), keep))
        await others_are_put.wait()  # would never come if the group waited for its slowest
        proxy.gates[0].set()
        await group
        return order

    assert run(slow_first()) == [1, 2, 0]


def test_cancelling_aborts_every_generation_and_puts_nothing() -> None:
    async def cancelled() -> tuple[list[int], list[Member]]:
        proxy = FakeProxy(gates={i: asyncio.Event() for i in range(3)})
        put: list[Member] = []

        async def keep(member: Member) -> None:
            put.append(member)

        group = asyncio.create_task(run_group(manager(proxy), grant(0, 0, 0), keep))
        while len(proxy.keys) < 3:
            await asyncio.sleep(0)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        await asyncio.sleep(0)
        return proxy.aborted, put

    aborted, put = run(cancelled())
    assert sorted(aborted) == [0, 1, 2]
    assert put == []


def test_a_member_that_is_cancelled_in_its_environment_leaves_what_it_had_drawn() -> None:
    class Slow(Env):
        async def step(self, answer: str) -> StepResult:
            await asyncio.Event().wait()
            raise AssertionError("it is cancelled before")

    async def cancelled() -> int:
        said = Transcript()
        member = asyncio.create_task(manager(FakeProxy(), lambda name: Slow()).run_member(grant(0), 0, 0, None, said))
        while not said.versions:
            await asyncio.sleep(0)
        member.cancel()
        with pytest.raises(asyncio.CancelledError):
            await member
        return said.sampled

    assert run(cancelled()) == 2
