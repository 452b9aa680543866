"""Environments that break the contract, each in one way, and two that keep it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.protocols import Place, StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards import scorers
from jaxroll.rewards.scoring_pool import ScoringPool


class Kept:
    """An environment of two turns whose reward is 1 for the task's answer."""

    step_limit_s = 20.0

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._pool, self._turns, self._wanted = pool, 0, ""

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's question."""
        self._turns, self._wanted = 0, task.args().get("answer", "")
        return (*task.messages, Message("user", str(random.Random(seed).random())))

    async def step(self, answer: str) -> StepResult:
        """Take one more turn, then end."""
        self._turns += 1
        if self._turns == 1:
            return StepResult(done=False, messages=(Message("user", "sure?"),))
        return StepResult(done=True, reward=float(answer == self._wanted), reward_parts={"turns": float(self._turns)})

    async def close(self) -> None:
        """Nothing is held."""


register("kept")(Kept)


@register("kept_in_process")
class KeptInProcess(Kept):
    """The same environment in its own process."""

    place: Place = "process"


@scorers.register("broken_scorer")
def broken_scorer(args: Any, answer: str) -> Any:
    """No number."""
    return {}


def broken(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register an environment that calls the function with itself in every step."""

    def add(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        class Broken(Kept):
            async def step(self, answer: str) -> StepResult:
                found = act(self)
                found = await found if asyncio.iscoroutine(found) else found
                return found if isinstance(found, StepResult) else await super().step(answer)

        Broken.__name__ = name
        Broken.step_limit_s = 0.2 if name == "hangs" else 20.0
        register(name)(Broken)
        return act

    return add


broken("exits")(lambda env: sys.exit(0))
broken("raises")(lambda env: 1 // 0)
broken("nan")(lambda env: StepResult(done=True, reward=float("nan")))
broken("mute")(lambda env: StepResult(done=False))
broken("surrogate")(lambda env: StepResult(done=False, messages=(Message("user", "\ud800"),)))
broken("huge")(lambda env: StepResult(done=False, messages=(Message("user", "x" * (1 << 21)),)))
broken("blocks")(lambda env: time.sleep(0.4))
broken("leaks_threads")(lambda env: threading.Thread(target=time.sleep, args=(30.0,), daemon=True).start())
_KEPT: list[Any] = []
broken("leaks_descriptors")(lambda env: _KEPT.append(os.open(os.devnull, os.O_RDONLY)))
broken("leaks_memory")(lambda env: _KEPT.append(bytearray(os.urandom(1 << 20))))
broken("leaks_tasks")(lambda env: _KEPT.append(asyncio.ensure_future(asyncio.sleep(3600))))
broken("by_chance")(lambda env: StepResult(done=True, reward=random.random()))


@broken("scores_badly")
async def _scores_badly(env: Any) -> None:
    await env._pool.score(json.dumps({"scorer": "broken_scorer"}), "ok")


@broken("hangs")
async def _hangs(env: Any) -> None:
    await asyncio.Event().wait()


@broken("stray_exit")
async def _stray_exit(env: Any) -> None:
    async def child() -> None:
        sys.exit(3)

    task = asyncio.ensure_future(child())
    await asyncio.wait([task])


@broken("deaf")
async def _deaf(env: Any) -> None:
    for _ in range(12):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


@register("prompt_by_chance")
class PromptByChance(Kept):
    """An environment with a random prompt."""

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """Without the seed."""
        return (Message("user", str(random.random())),)


@register("forgets")
class Forgets(Kept):
    """An environment whose state lacks what its steps changed."""

    async def step(self, answer: str) -> StepResult:
        """Show the number of the turn."""
        self._turns += 1
        return StepResult(self._turns == 3, (Message("user", str(self._turns)),), state=b"")

    async def restore(self, state: bytes) -> None:
        """Begin again."""
        self._turns = 0


@register("large_state")
class LargeState(Forgets):
    """An environment whose state is too large to be kept."""

    async def step(self, answer: str) -> StepResult:
        """Show the number of the turn."""
        self._turns += 1
        return StepResult(self._turns == 3, (Message("user", str(self._turns)),), state=b"%65537d" % self._turns)

    async def restore(self, state: bytes) -> None:
        """Continue after an earlier turn."""
        self._turns = int(state)


@register("no_restore")
class NoRestore(Kept):
    """An environment that returns a state and cannot be restored."""

    async def step(self, answer: str) -> StepResult:
        """Ask for another answer."""
        return StepResult(False, (Message("user", "again"),), state=b"")


@register("continues")
class Continues(Forgets):
    """An environment whose state has all of it."""

    async def step(self, answer: str) -> StepResult:
        """Show the number of the turn."""
        shown = await super().step(answer)
        return StepResult(shown.done, shown.messages, state=b"%d" % self._turns)

    async def restore(self, state: bytes) -> None:
        """Go on."""
        self._turns = int(state)


@register("shared")
class Shared(Kept):
    """State in the class: concurrent instances disturb each other."""

    turns = 0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """Set the shared state."""
        Shared.turns = 0
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """Count for all."""
        await asyncio.sleep(0)
        Shared.turns += 1
        return StepResult(Shared.turns >= 2, (Message("user", "sure?"),), 1.0, {"turns": float(Shared.turns)})


@register("slow_close")
class SlowClose(Kept):
    """Takes its time."""

    async def close(self) -> None:
        """Take longer than any limit."""
        await asyncio.sleep(0.3)


@register("close_raises")
class CloseRaises(Kept):
    """Cannot be closed."""

    async def close(self) -> None:
        """Never well."""
        raise OSError("cannot be closed")


@register("close_needs_reset")
class CloseNeedsReset(Kept):
    """An environment whose close fails without a reset."""

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """Make the object that close needs."""
        self._held = True
        return task.messages

    async def close(self) -> None:
        """Close the object that reset made."""
        del self._held


@register("misdeclared")  # type: ignore[arg-type]
class Misdeclared(Kept):
    """A limit that is not a number."""

    step_limit_s = "long"  # type: ignore[assignment]


LEFT = {"constructions": 1 << 30, "resets": 1 << 30}  # of the environment `wears_out`, which fails after these


@register("wears_out")
class WearsOut(Kept):
    """Its constructor exits, or its reset raises, once LEFT says so."""

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        super().__init__(pool, config)
        LEFT["constructions"] -= 1
        if LEFT["constructions"] < 0:
            sys.exit(3)

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's question."""
        LEFT["resets"] -= 1
        if LEFT["resets"] < 0:
            raise ValueError("worn out")
        return await super().reset(task, seed)
