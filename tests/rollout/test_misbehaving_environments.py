"""Environments that exit, cancel, ignore their cancellation or return malformed data: only their own member fails."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxroll import wire
from jaxroll.envs import executors
from jaxroll.loop_thread import LoopThread
from jaxroll.protocols import SamplingParams, StepResult
from jaxroll.records import Failed, Finished, Member, Message, Task
from jaxroll.rollout import episode
from jaxroll.rollout.episode import RolloutManager
from jaxroll.store.server import puts
from tests.harness.rollout_proxy import TOKENIZER, FakeProxy, grant

DEADLINE_S = 60.0
END = StepResult(done=True, reward=1.0)


class Good:
    """Pays 1."""

    step_limit_s = 30.0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        return task.messages

    async def step(self, answer: str) -> StepResult:
        return END

    async def close(self) -> None:
        return None


def exits(what: BaseException) -> Callable[[], Any]:
    def raise_it() -> None:
        raise what

    return raise_it


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def exits_in_a_task_of_its_own() -> None:
    async def child() -> None:
        await asyncio.sleep(0)
        sys.exit(3)

    await asyncio.gather(child())


async def exits_in_wait_for() -> None:
    async def child() -> None:
        sys.exit(3)

    await asyncio.wait_for(child(), 5.0)


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    raise ValueError("stopped")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "sys.exit": (exits(SystemExit(0)), "SystemExit"),
    "KeyboardInterrupt": (exits(KeyboardInterrupt()), "KeyboardInterrupt"),
    "GeneratorExit": (exits(GeneratorExit()), "GeneratorExit"),
    "CancelledError": (exits(asyncio.CancelledError("foreign")), "CancelledError"),
    "BaseException": (exits(BaseException("a panic")), "a panic"),
    "StopIteration": (exits(StopIteration()), "StopIteration"),
    "unprintable": (exits(Unprintable()), "Unprintable"),
    "cancels itself": (cancels_itself, "cancelled itself"),
    "exit in a task": (exits_in_a_task_of_its_own, "SystemExit"),
    "exit in wait_for": (exits_in_wait_for, "SystemExit"),
    "stops the loop": (stops_the_loop, "stopped"),
}


def played(make_env: Callable[[str], Any], then: Callable[[RolloutManager], Any] | None = None) -> list[Member]:
    """Member 0 plays `make_env`'s environment, member 1 a good one, on the loop of a role."""
    thread = LoopThread("test")

    async def both() -> list[Member]:
        bad = RolloutManager(FakeProxy(), make_env, TOKENIZER, SamplingParams(max_tokens=4))
        good = RolloutManager(FakeProxy(), lambda name: Good(), TOKENIZER, SamplingParams(max_tokens=4))
        found = await asyncio.gather(bad.run_member(grant(1, 1), 0, 1), good.run_member(grant(1, 1), 1, 1))
        if then is not None:
            then(bad)
        return list(found)

    try:
        return thread.start(both()).result(DEADLINE_S)
    finally:
        thread.close()
        thread.loop.close()


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("what", BAD)
def test_what_would_end_the_loop_is_a_data_failure_of_its_member(what: str, where: str) -> None:
    act, complaint = BAD[what]

    class Bad(Good):
        async def _act(self) -> None:
            found = act()
            if found is not None:
                await found

    async def acting(self: Any, *_: Any) -> Any:
        await self._act()
        return END if where == "step" else (Message("user", "abc"),)

    setattr(Bad, where, acting)
    bad, good = played(lambda name: Bad())
    assert isinstance(good.outcome, Finished)
    assert isinstance(bad.outcome, Failed) and bad.outcome.kind == "DATA" and complaint in bad.outcome.error
    wire.encode(bad)


@pytest.mark.parametrize("what", ["sys.exit", "KeyboardInterrupt", "CancelledError", "cancels itself"])
def test_what_would_end_the_loop_in_close_takes_no_reward_away(what: str) -> None:
    class Bad(Good):
        async def close(self) -> None:
            found = BAD[what][0]()
            if found is not None:
                await found

    def counted(manager: RolloutManager) -> None:
        ((cause, times),) = manager.env_calls.faults.items()
        assert cause.startswith("close: ") and times == 1

    bad, good = played(lambda name: Bad(), counted)
    assert isinstance(good.outcome, Finished) and isinstance(bad.outcome, Finished)


def test_an_environment_that_exits_while_it_is_made_is_a_data_failure() -> None:
    bad, good = played(lambda name: sys.exit(0))
    assert isinstance(good.outcome, Finished)
    assert isinstance(bad.outcome, Failed) and bad.outcome.kind == "DATA" and "SystemExit" in bad.outcome.error


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (END.__class__(done=True, reward=1.0, reward_parts={"a": None}), "reward part 'a' is None"),
        (END.__class__(done=True, reward="1"), "the reward is a value of type str"),
        (END.__class__(done=True, reward_parts={"x" * 200: 1.0}), "200 characters"),
        (END.__class__(done=False, messages=(Message("user", "\ud800"),)), "surrogate"),
        ((1, 2), "returned a value of type tuple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_result_that_no_store_takes_is_a_data_failure_that_names_the_field(result: Any, complaint: str) -> None:
    class Bad(Good):
        async def step(self, answer: str) -> Any:
            return result

    bad, _ = played(lambda name: Bad())
    assert isinstance(bad.outcome, Failed) and bad.outcome.kind == "DATA" and complaint in bad.outcome.error
    wire.encode(bad)


def test_numpy_numbers_and_booleans_are_put_as_floats() -> None:
    class Own(Good):
        async def step(self, answer: str) -> StepResult:
            return StepResult(done=True, reward=np.float32(1.0), reward_parts={"exact": answer == "a"})  # type: ignore[arg-type]

    own, _ = played(lambda name: Own())
    assert isinstance(own.outcome, Finished)
    decoded = wire.decode(wire.encode(own), Member).outcome
    assert isinstance(decoded, Finished)
    assert (decoded.reward, decoded.reward_parts) == (1.0, {"exact": 1.0, "truncated": 0.0})


def test_a_call_that_ignores_its_cancellation_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "CANCEL_GRACE_S", 0.05)
    closed: list[bool] = []

    class Deaf(Good):
        step_limit_s = 0.05

        async def step(self, answer: str) -> StepResult:
            until_s = time.monotonic() + 1.0
            while time.monotonic() < until_s:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue
            return END

        async def close(self) -> None:
            closed.append(True)

    def counted(manager: RolloutManager) -> None:
        assert (manager.env_calls.overdue, manager.env_calls.abandoned) == (1, 1)

    bad, _ = played(lambda name: Deaf(), counted)
    assert isinstance(bad.outcome, Failed) and "longer than 0.05 s" in bad.outcome.error
    assert not closed, "its call has not come back"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_limit_s", None),
        ("step_limit_s", float("nan")),
        ("step_limit_s", -1),
        ("step_retries", 10**9),
        ("reset_retries", "many"),
        ("max_turns", 0),
    ],
)
def test_a_declaration_that_makes_no_sense_is_a_data_failure_that_names_it(name: str, value: Any) -> None:
    bad, _ = played(lambda _: type("Bad", (Good,), {name: value})())
    assert isinstance(bad.outcome, Failed) and bad.outcome.kind == "DATA" and name in bad.outcome.error


class Hostile:
    """Raises wherever it is looked at."""

    def _raises(self, *_: Any) -> Any:
        raise RuntimeError("do not look at me")

    __str__ = __repr__ = __len__ = __iter__ = __getitem__ = __float__ = __bool__ = __eq__ = __hash__ = _raises


def endless() -> Iterator[Message]:
    while True:
        yield Message("user", "b")


NOT_NUMBERS = [None, "1", b"1", "", [], {}, (1.0,), 1j, 10**400, math.nan, -math.inf, np.ones(1), np.float32("nan")]
NOT_NUMBERS += [np.datetime64("now"), Hostile()]
NOT_TEXTS = [0, b"b", "\ud800", "a" * (2**20 + 1), [], ("a",), object(), np.str_("\udfff"), Hostile()]
NOT_MESSAGES = [None, 0, "text", b"b", {}, {"role": "user", "content": "a"}, [None], ("a",), Hostile(), endless(), [()]]
NOT_MESSAGES += [[Message(role, "a")] for role in (None, "r" * 1000, "\ud800", 7)]  # type: ignore[arg-type]
NOT_MESSAGES += [[Message("user", text)] for text in NOT_TEXTS]  # type: ignore[arg-type]
NOT_MESSAGES += [[Message("user", "a" * 2**19)] * 3, np.ones(3), StepResult(done=True)]
WRONG: dict[str, list[Any]] = {
    "done": [None, 0, 1, "", "yes", [], math.nan, np.ones(2, bool), Hostile()],
    "messages": NOT_MESSAGES,
    "reward": NOT_NUMBERS,
    "reward_parts": [None, 0, "a", [], [("a", 1.0)], Hostile(), {str(number): 0.0 for number in range(1000)}]
    + [{"a": number} for number in NOT_NUMBERS]
    + [{label: 1.0} for label in (None, 7, b"a", "x" * 1000, "\ud800", ("a",))],
    "extracted": NOT_TEXTS,
    "state": [0, "a", True, [], bytearray(b"a"), memoryview(b"a"), np.zeros(2, np.uint8), Hostile()],
}
RIGHT: dict[str, list[Any]] = {
    "done": [True, False, np.True_],
    "messages": [(Message("user", "b"),), [Message("tool", "ab"), Message("", "")]],
    "reward": [1.0, -1, True, np.float32(0.5), np.ones(()), 1e308],
    "reward_parts": [{}, {"a": 1, "b": True}, {"": np.int64(3), "truncated": 9.0}],
    "extracted": [None, "", "abc", "a" * 2**20],
    "state": [None, b"", b"\xff" * 9, b"a" * (2**20 + 1)],  # the last is not kept, which takes no member away
}


class Fuzzed(Good):
    """An environment whose answers have up to two fields with a value from `WRONG`, and none if it is `tame`."""

    def __init__(self, seed: int, tame: bool) -> None:
        self._chance, self._tame = random.Random(seed), tame

    async def reset(self, task: Task, seed: int) -> Any:
        is_wrong = not self._tame and self._chance.random() < 0.2
        return self._chance.choice([*NOT_MESSAGES, ()]) if is_wrong else task.messages

    async def step(self, answer: str) -> Any:
        wrong = [] if self._tame else self._chance.sample(sorted(WRONG), self._chance.choice((0, 1, 1, 2)))
        fields = {name: self._chance.choice((WRONG if name in wrong else RIGHT)[name]) for name in RIGHT}
        return StepResult(**fields)

    async def restore(self, state: bytes) -> None:
        """Its results may have a state."""


@pytest.mark.parametrize("tame", [True, False], ids=["right values", "wrong values"])
def test_whatever_values_an_environment_returns_its_member_can_be_stored(tame: bool) -> None:
    """A failure is DATA with the name of the field; the store's own check takes all members."""
    thread, number = LoopThread("test"), 600

    async def member(seed: int) -> Member:
        manager = RolloutManager(
            FakeProxy(),
            lambda name: Fuzzed(seed, tame),
            TOKENIZER,
            SamplingParams(max_tokens=4),
            bounds=episode.Bounds(turns=4),
        )
        return await manager.run_member(grant(1, 1), 0, 1)

    async def all_of_them() -> list[Member]:
        return list(await asyncio.gather(*map(member, range(number))))

    try:
        found = thread.start(all_of_them()).result(DEADLINE_S)
    finally:
        thread.close()
        thread.loop.close()
    failed = [one.outcome for one in found if isinstance(one.outcome, Failed)]
    assert len(failed) == 0 if tame else number / 4 < len(failed) < number
    for outcome in failed:
        named = ("StepResult.", "the reward", "reward part", "a label", "reset()", "shows nothing", "do not look at me")
        assert outcome.kind == "DATA" and any(name in outcome.error for name in named), outcome.error
        assert len(outcome.error) < 2000
    for one in found:
        request = puts.put_request(wire.encode(one))
        assert (request.failure is None) == isinstance(one.outcome, Finished)
        if isinstance(one.outcome, Finished):
            assert all(map(math.isfinite, (one.outcome.reward, *one.outcome.reward_parts.values())))
