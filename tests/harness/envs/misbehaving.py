"""An environment that misbehaves as its task says, in every way that whole runs have met or may meet."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Place, StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool

STEP_LIMIT_S = 1.0
RELEASED = threading.Event()  # ends the threads that environments kept
KEPT: list[bytes] = []


def result(**fields: Any) -> Callable[[], StepResult]:
    """An environment's answer with these fields."""
    return lambda: StepResult(**({"done": True, "reward": 1.0} | fields))


def shows(*messages: Any, **fields: Any) -> Callable[[], StepResult]:
    """Another turn with these messages."""
    return lambda: StepResult(done=False, messages=messages, **fields)


def raises(error: Callable[[], BaseException]) -> Callable[[], Any]:
    """A step that raises `error`."""

    def act() -> Any:
        raise error()

    return act


async def _hangs() -> None:
    await asyncio.Event().wait()


async def _ignores_cancellation() -> None:
    until_s = time.monotonic() + 3 * STEP_LIMIT_S
    while time.monotonic() < until_s:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


async def _cancels_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


async def _waits_for_all() -> None:
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


async def _blocks_in_a_task() -> None:
    await asyncio.ensure_future(_blocks())


async def _blocks() -> None:
    time.sleep(3 * STEP_LIMIT_S)


async def _blocks_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(time.sleep, 3 * STEP_LIMIT_S)
    await asyncio.Event().wait()


async def _exits_in_a_task() -> None:
    async def child() -> None:
        sys.exit(3)

    await asyncio.gather(child())


async def _stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    raise DataError("the loop was stopped")


async def _cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError


Act = Callable[[], Any]
# name → the act, and text of the recorded failure; "" if the member finishes all the same
WAYS: dict[str, tuple[Act, str]] = {
    "reward none": (result(reward=None), "the reward is None"),
    "reward text": (result(reward="1.0"), "the reward is a value of type str"),
    "reward nan": (result(reward=float("nan")), "the reward is nan"),
    "reward inf": (result(reward=np.float32("inf")), "the reward is inf"),
    "reward array": (result(reward=np.ones(2)), "the reward is a value of type ndarray"),
    "reward numpy": (result(reward=np.float32(1)), ""),
    "parts boolean": (result(reward_parts={"exact": True}), ""),
    "parts none": (result(reward_parts=None), "reward_parts is None"),
    "part none": (result(reward_parts={"a": None}), "reward part 'a' is None"),
    "part long": (result(reward_parts={"x" * 1000: 1.0}), "1000 characters"),
    "part surrogate": (result(reward_parts={"\ud800": 1.0}), "lone surrogate"),
    "parts many": (result(reward_parts={str(i): 0.0 for i in range(1000)}), "1000 entries"),
    "done text": (result(done="yes"), "done is a value of type str"),
    "state text": (result(state="x"), "StepResult.state is a value of type str"),
    "state unasked": (shows(Message("user", "a"), state=b"x"), r"has no method restore"),
    "tuple": (lambda: ((), 1.0, True, {}), "a value of type tuple"),
    "nothing": (lambda: None, "returned None"),
    "message empty": (shows(), "shows nothing"),
    "message text": (shows("again"), r"a value of type str, not a Message"),
    "message surrogate": (shows(Message("user", "\ud800")), "lone surrogate"),
    "message huge": (shows(Message("user", "a" * 2**22)), "4194304 characters"),
    "message none": (shows(Message("user", None)), "content is None"),  # type: ignore[arg-type]
    "raises": (raises(lambda: ZeroDivisionError("of mine")), "ZeroDivisionError: of mine"),
    "raises mute": (raises(Mute), "Mute"),
    "raises surrogate": (raises(lambda: ValueError("\ud800")), "ValueError"),
    "infra": (raises(lambda: InfraError("a peer is gone")), "a peer is gone"),
    "exit": (raises(lambda: SystemExit(0)), "SystemExit"),
    "interrupt": (raises(KeyboardInterrupt), "KeyboardInterrupt"),
    "generator exit": (raises(GeneratorExit), "GeneratorExit"),
    "cancelled": (raises(asyncio.CancelledError), "CancelledError"),
    "stop iteration": (raises(StopIteration), "StopIteration"),
    "base exception": (raises(lambda: BaseException("a panic")), "a panic"),
    "cancels itself": (_cancels_itself, "cancelled itself"),
    "exit in a task": (_exits_in_a_task, "SystemExit"),
    "stops the loop": (_stops_the_loop, "the loop was stopped"),
    "hangs": (_hangs, "longer than 1 s"),
    "deaf": (_ignores_cancellation, "longer than 1 s"),
    "blocks": (lambda: time.sleep(0.3) or StepResult(done=True, reward=1.0), ""),
    "blocks the loop": (_blocks, "longer than 1 s and blocked the event loop"),
    "blocks in a task": (_blocks_in_a_task, "longer than 1 s and blocked the event loop"),
    "blocks in a callback": (_blocks_in_a_callback, "longer than 1 s and blocked the event loop"),
    "runs the loop again": (lambda: asyncio.get_running_loop().run_forever(), "already running"),
    "cancels all": (_cancels_all, "tasks that it did not start"),
    "waits for all": (_waits_for_all, "longer than 1 s"),
    "thread": (lambda: threading.Thread(target=time.sleep, args=(0.1,)).start() or StepResult(done=True), ""),
    "dies": (lambda: os._exit(7), "died in step"),
}
ON_THE_LOOP = [way for way in WAYS if way != "dies"]
IN_A_PROCESS = ["reward none", "part none", "message surrogate", "raises surrogate", "exit", "cancelled", "dies"]
# The same for what `reset` does or returns.
RESETS: dict[str, tuple[Act, str]] = {
    "reset none": (lambda: None, "the value of reset() is None"),
    "reset text": (lambda: "abc", "the value of reset() is a value of type str"),
    "reset nothing": (lambda: (), "shows nothing"),
    "reset number": (lambda: (7,), "not a Message"),
    "reset surrogate": (lambda: (Message("user", "\ud800"),), "lone surrogate"),
    "reset raises": (raises(lambda: ZeroDivisionError("in reset")), "ZeroDivisionError: in reset"),
    "reset exits": (raises(lambda: SystemExit(5)), "SystemExit"),
    "reset cancelled": (raises(asyncio.CancelledError), "CancelledError"),
    "reset hangs": (_hangs, "reset took longer than 1 s"),
}
RESETS_IN_A_PROCESS = [way for way in RESETS if way != "reset hangs"]  # its limit there is that of a slow process
CLOSES = {
    "close raises": raises(ValueError), "close exits": raises(SystemExit), "close hangs": _hangs,
    "close cancelled": raises(asyncio.CancelledError),
}  # fmt: skip


class _Misbehaving:
    """An environment that misbehaves as the question says, in `reset`, its first step or `close`, or not at all."""

    step_limit_s = reset_limit_s = STEP_LIMIT_S

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._way = ""

    async def reset(self, task: Task, seed: int) -> Any:
        self._way = task.args()["way"]
        found = RESETS[self._way][0]() if self._way in RESETS else task.messages
        return await found if isinstance(found, Awaitable) else found

    async def step(self, answer: str) -> Any:
        act, _ = WAYS.get(self._way, (result(), ""))
        found = act()
        return await found if isinstance(found, Awaitable) else found

    async def close(self) -> None:
        found = CLOSES[self._way]() if self._way in CLOSES else None
        return await found if isinstance(found, Awaitable) else found


@register("misbehaving")
class Misbehaving(_Misbehaving):
    """The environment on the event loop."""


LATE: list[str] = []  # the ways of environments that were closed although their constructor was too late


def _late() -> None:
    time.sleep(3 * STEP_LIMIT_S)


# The same for what the constructor does; each way is an environment of its own, `making_WAY`.
MAKES: dict[str, tuple[Act, str]] = {
    "raises": (raises(lambda: ZeroDivisionError("of its constructor")), "ZeroDivisionError: of its constructor"),
    "exits": (raises(lambda: SystemExit(4)), "making the environment raised SystemExit: 4"),
    "generator_exit": (raises(GeneratorExit), "making the environment raised GeneratorExit"),
    "times_out": (raises(TimeoutError), "making the environment timed out"),
    "infra": (raises(lambda: InfraError("no peer to make it")), "no peer to make it"),
    "is_late": (_late, "making the environment took longer than 1 s and blocked the event loop"),
}


def _making(way: str) -> type[_Misbehaving]:
    class Made(_Misbehaving):
        """An environment whose constructor misbehaves."""

        def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
            super().__init__(pool, config)
            MAKES.get(way, (lambda: None, ""))[0]()

        async def close(self) -> None:
            LATE.extend([way] if way in MAKES else [])

    return Made


for _way in (*MAKES, "fair"):
    register(f"making_{_way}")(_making(_way))


@register("leaving")
class Leaving(_Misbehaving):
    """An environment on the event loop that keeps a thread or memory when it is closed, if the question says so."""

    async def step(self, answer: str) -> Any:
        return self._step()

    def _step(self) -> StepResult:
        if self._way == "thread":
            kept = threading.Thread(target=RELEASED.wait, name=f"kept-{len(KEPT)}", daemon=True)
            outer = threading.Thread(target=kept.start)  # what a thread starts belongs to its environment, too
            outer.start()
            outer.join()
            KEPT.append(b"")
        elif self._way == "memory":
            KEPT.append(b"x" * (600 << 20))
        return StepResult(done=True, reward=1.0)


@register("leaving_in_thread")
class LeavingInThread(Leaving):
    """The same in a thread."""

    place: Place = "thread"

    def step(self, answer: str) -> StepResult:  # type: ignore[override]
        return self._step()

    def reset(self, task: Task, seed: int) -> tuple[Message, ...]:  # type: ignore[override]
        self._way = task.args()["way"]
        return task.messages

    def close(self) -> None:  # type: ignore[override]
        """Keep everything."""


@register("leaving_in_process")
class LeavingInProcess(Leaving):
    """The same in a process."""

    place: Place = "process"
    step_limit_s = reset_limit_s = 30.0


@register("misbehaving_in_process")
class MisbehavingInProcess(_Misbehaving):
    """The environment in its own process."""

    place: Place = "process"
    step_limit_s = reset_limit_s = 30.0
