"""Environments that report where they run, hang, die and fail."""

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
    """An environment of plain functions that follows the answer's command; its reward after two turns is 1."""

    step_limit_s = 30.0

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._turns, self._failed, self._name = 0, False, config.name

    def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """Report the process, the thread, the class and the seed."""
        return (*task.messages, Message("user", f"{os.getpid()} {threading.get_ident()} {self._name} {seed}"))

    def step(self, answer: str) -> StepResult:
        """Hang, die, raise, print, or take a turn, as the answer says."""
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
        return StepResult(done=False, messages=(Message("user", "and?"),), state=str(self._turns).encode())

    def restore(self, state: bytes) -> None:
        """Continue after the turns that `state` counts."""
        if state == b"where":
            raise ValueError(f"{os.getpid()} {threading.get_ident()}")
        self._turns = int(state)

    def close(self) -> None:
        """Nothing is held."""


@register("in_thread")
class InThread(Blocking):
    """Without a declared executor: plain functions run in a thread."""


@register("in_process")
class InProcess(Blocking):
    """In its own process, with one second per step."""

    place: Place = "process"
    step_retries = 1


@register("in_process_hasty")
class InProcessHasty(InProcess):
    """In its own process, with less time per step."""

    step_limit_s = 0.5


@register("on_loop")
class OnLoop(Blocking):
    """Plain functions that are fast enough for the event loop."""

    place: Place = "loop"


@register("asynchronous")
class Asynchronous(Blocking):
    """Coroutines, which run on the event loop."""

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:  # type: ignore[override]
        return super().reset(task, seed)

    async def step(self, answer: str) -> StepResult:  # type: ignore[override]
        return super().step(answer)


@register("in_process_coroutines")
class InProcessCoroutines(Asynchronous):
    """Coroutines in their own process."""

    place: Place = "process"


@register("misplaced")
class Misplaced(Asynchronous):
    """Coroutines that declare a thread."""

    place: Place = "thread"


@register("nowhere")
class Nowhere(Blocking):
    """An executor that does not exist."""

    place = "cloud"
