"""Environments for the tests: they say where they run, hang, die and fail."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import numpy as np

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.errors import InfraError
from jaxroll.protocols import Place, StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool


class Blocking:
    """Does what the answer says, in plain functions; pays 1 at the end of two turns."""

    step_limit_s = 30.0

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._turns, self._failed, self._name = 0, False, config.name

    def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """Say where it is."""
        return (*task.messages, Message("user", f"{os.getpid()} {threading.get_ident()} {self._name} {seed}"))

    def step(self, answer: str) -> StepResult:
        """Hang, die, raise, print, or a turn."""
        match answer:
            case "hang":
                time.sleep(3600)
            case "die":
                os._exit(7)
            case "raise":
                raise ZeroDivisionError("of the environment")
            case "print":
                print("this is not a message")
            case "exit":
                sys.exit(0)
            case "interrupt":
                raise KeyboardInterrupt
            case "cancel":
                raise asyncio.CancelledError
            case "surrogate":
                raise ValueError("a\ud800b")
            case "no reward":
                return StepResult(done=True, reward=None)  # type: ignore[arg-type]
            case "numpy":
                return StepResult(done=True, reward=np.float32(1.0))  # type: ignore[arg-type]
            case "flaky" if not self._failed:
                self._failed = True
                raise InfraError("a peer is gone")
        self._turns += 1
        if self._turns == 2:
            return StepResult(done=True, reward=1.0, reward_parts={"turns": 2.0})
        return StepResult(done=False, messages=(Message("user", "and?"),))

    def close(self) -> None:
        """Nothing is held."""


@register("in_thread")
class InThread(Blocking):
    """Says nothing about its place: plain functions go to a thread."""


@register("in_process")
class InProcess(Blocking):
    """In a process of its own, with a second for each step."""

    place: Place = "process"
    step_retries = 1


@register("in_process_hasty")
class InProcessHasty(InProcess):
    """The same, with less time."""

    step_limit_s = 0.5


@register("on_loop")
class OnLoop(Blocking):
    """Plain functions that are quick enough for the loop."""

    place: Place = "loop"


@register("asynchronous")
class Asynchronous(Blocking):
    """Coroutines, which go to the loop."""

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:  # type: ignore[override]
        return super().reset(task, seed)

    async def step(self, answer: str) -> StepResult:  # type: ignore[override]
        return super().step(answer)


@register("in_process_coroutines")
class InProcessCoroutines(Asynchronous):
    """Coroutines in a process."""

    place: Place = "process"


@register("misplaced")
class Misplaced(Asynchronous):
    """Coroutines that ask for a thread."""

    place: Place = "thread"


@register("nowhere")
class Nowhere(Blocking):
    """A place that there is not."""

    place = "cloud"
