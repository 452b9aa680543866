"""A proxy with scripted answers, a task and grants for it, and a pool that scores in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Grant, Member, Message, Task, Version, VersionRun
from jaxroll.rewards import scorers
from jaxroll.rollout.episode import RolloutManager
from jaxroll.text.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("abc")
TASK = Task(0, (Message("user", "abc"),), "single_turn", "{}", 7, "h")
VERSION = Version(0, 0)


def grant(*attempts: int, salt: int = 0) -> Grant:
    return Grant(5, TASK, tuple(enumerate(attempts)), 30.0, salt)


async def run_group(manager: RolloutManager, grant: Grant, put: Callable[[Member], Awaitable[object]]) -> None:
    """Run all members of the grant concurrently and `put` each one when it ends."""

    async def run_and_put(member: int, attempt: int) -> None:
        await put(await manager.run_member(grant, member, attempt))

    await asyncio.gather(*(run_and_put(member, attempt) for member, attempt in grant.members))


def answered() -> Completion:
    ids = np.array([4, TOKENIZER.eos_id], np.int32)
    return Completion(ids, np.zeros(2, np.float32), (VersionRun(VERSION, 2),), "stop")


@dataclass
class FakeProxy:
    """A proxy that answers every member with "a"; `errors` and `gates` are by member."""

    errors: dict[int, BaseException] = field(default_factory=dict)
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    keys: list[GenerationKey] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        self.keys.append(key)
        try:
            if key.member in self.gates:
                await self.gates[key.member].wait()
        except asyncio.CancelledError:
            self.aborted.append(key.member)
            raise
        if key.member in self.errors:
            raise self.errors[key.member]
        return answered()


class LocalPool:
    """A pool that grades in this process."""

    time_limit_s = 5.0

    async def score(self, env_args: str, answer: str) -> float:
        return scorers.score(env_args, answer)

    async def grade(self, env_args: str, completion: str, instructions: str) -> scorers.Graded:
        return scorers.grade(scorers.decoded(instructions), env_args, completion)
