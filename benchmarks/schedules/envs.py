"""Environments of benchmarks/schedules, named in a config as `benchmarks.schedules.envs:NAME`.

The environment variable JAXROLL_RACE holds a `Race` as JSON. Latencies are slept, not computed.

`waiting` judges like the ordinary one-turn environment, after a latency. `pays_nothing` gives every member reward 0, so
that no member has an advantage and training takes no time. `lottery` gives random rewards, with `Race.score_s` after a
scoring worker has taken that long. With `Race.turns` each
answer of the model is followed by a reply after a latency. To switch mechanisms off, environments wait for each other:
with
`barrier` before each reply until all have one, with `wave` before the first question until the previous wave has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxroll.envs import registry
from jaxroll.errors import InfraError
from jaxroll.protocols import StepResult
from jaxroll.records import Message
from jaxroll.rewards import scorers

VARIABLE = "JAXROLL_RACE"
LIMIT_S = 120.0
HELD_OUT = 5000  # the first line of questions that are not trained on
NEIGHBOUR = "--index=1"  # in the command line of the second sampler or actor


@dataclass(frozen=True)
class Race:
    """Settings of the environments. `latency_s` is the mean and deviation of a normal time, cut at 0.

    All rewards of the share `dull` of questions are 0. The share `slow` of steps takes ten times as long; the share
    `stopped` never answers and writes its question to the file `journal`. With `length` the share of slow steps is
    proportional to the answer's length, and equals `slow` at `length` characters. Held-out questions (of the file
    `questions`, from line HELD_OUT on) are judged at once. `neighbour` applies to the second sampler or actor only:
    "at_once" raises in every reset, "late" raises InfraError after the latency of a step, "slow" takes ten times as
    long. `worker` applies to the scoring workers of each process but the first one to answer, and so to all that
    replace them: "at_once" ends them at each answer, "late" after a second of it, "slow" takes ten times as long.
    """

    latency_s: tuple[float, float] = (0.0, 0.0)
    turns: int = 1
    barrier: int = 0  # number of environments that wait for each other; 0: none
    wave: int = 0
    dull: float = 0.0
    slow: float = 0.0
    stopped: float = 0.0
    length: float = 0.0
    neighbour: str = ""  # the fault in the second sampler or actor
    score_s: float = 0.0  # seconds of a scoring worker for an answer; 0: none scores
    worker: str = ""  # the fault of all but one of them
    limit_s: float = LIMIT_S  # time limit of an answer
    journal: str = ""
    questions: str = ""

    @staticmethod
    def ordered() -> Race:
        """The settings from the environment variable."""
        return Race(**json.loads(os.environ.get(VARIABLE, "{}")))


class _Together:
    """A barrier that releases callers when `count` of them wait; it does not wait for ended conversations.

    A step has `count` conversations; when all of them are over, the next step's begin.
    """

    def __init__(self, count: int) -> None:
        self._count, self._there, self._over, self._go = count, 0, 0, asyncio.Event()

    async def wait(self) -> None:
        """Wait for the last caller."""
        self._there, go = self._there + 1, self._go
        self._look()
        await go.wait()

    def leave(self) -> None:
        """Remove an ended conversation, which may release the others."""
        self._over = (self._over + 1) % self._count
        self._look()

    def _look(self) -> None:
        if self._there and self._there + self._over >= self._count:
            go, self._there, self._go = self._go, 0, asyncio.Event()
            go.set()


class _Waves:
    """A gate that admits `count` callers, and the next ones when all of these have left."""

    def __init__(self, count: int) -> None:
        self._count, self._entered, self._left, self._moved = count, 0, 0, asyncio.Event()

    async def enter(self) -> None:
        """Wait for room in a wave from which no caller has left."""
        while self._entered == self._count:
            await self._moved.wait()
        self._entered += 1

    def leave(self) -> None:
        """Leave; the last caller opens the next wave."""
        self._left += 1
        if self._left == self._count:
            self._entered = self._left = 0
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()


class _Shared:
    """The barriers of all environments in one process."""

    def __init__(self, race: Race) -> None:
        self.race = race
        self.together = _Together(race.barrier) if race.barrier else None
        self.waves = _Waves(race.wave) if race.wave else None
        lines = Path(race.questions).read_text().splitlines()[HELD_OUT:] if race.questions else []
        self.held_out = {json.loads(line)["question"] for line in lines}
        self.scoring = ""  # the arguments of the scorer `raced`
        if race.score_s:
            (sound := Path(f"{race.journal}-{os.getpid()}")).touch()
            args = {"scorer": "raced", "seconds": race.score_s, "fault": race.worker, "sound": str(sound)}
            self.scoring = json.dumps(args)


_shared: list[_Shared] = []


class _Judged:
    """An environment with a question and `Race.turns` answers."""

    def __init__(self, pool, config):
        if not _shared:
            _shared.append(_Shared(Race.ordered()))
        self._pool, self._shared, self._inside, self._turn = pool, _shared[0], False, 0
        self._fault = self._shared.race.neighbour if NEIGHBOUR in sys.argv else ""
        self.step_limit_s = self._shared.race.limit_s
        self.reset_limit_s = LIMIT_S  # a wave may have to wait for the previous one

    async def reset(self, task, seed):
        """The question, when the wave begins."""
        if self._fault == "at_once":
            raise RuntimeError("this machine lacks a library of the environment")
        self._args, self._question, self._chance = task.env_args, task.messages[-1].content, random.Random()
        if self._shared.waves:
            await self._shared.waves.enter()
        self._inside = True
        return task.messages

    async def step(self, answer):
        """The end or another question, after the latency."""
        race, self._turn = self._shared.race, self._turn + 1
        if self._question not in self._shared.held_out:
            await self._late(race, len(answer))
        if self._shared.together:
            await self._shared.together.wait()
        if self._turn < race.turns:
            return StepResult(done=False, messages=(Message("user", "ab"),))
        return StepResult(done=True, reward=await self._paid(answer))

    async def _late(self, race, length):
        seconds, drawn = max(0.0, self._chance.gauss(*race.latency_s)), self._chance.random()
        if drawn < race.stopped:
            with Path(race.journal).open("a") as file:
                file.write(f"{self._question}\n")
            await asyncio.Event().wait()
        slow = race.slow * (length / race.length if race.length else 1.0)
        await asyncio.sleep(seconds * (10 if drawn < race.stopped + slow or self._fault == "slow" else 1))
        if self._fault == "late":
            raise InfraError("the judge cannot be reached from this machine")

    async def _paid(self, answer):
        return float(await self._pool.score(self._args, answer) == 1.0)

    async def close(self):
        """Leave barrier and wave."""
        if not self._inside:
            return
        self._inside = False
        if self._shared.together:
            self._shared.together.leave()
        if self._shared.waves:
            self._shared.waves.leave()


@registry.register("waiting")
class Waiting(_Judged):
    """An environment that judges after a latency."""


@registry.register("pays_nothing")
class PaysNothing(_Judged):
    """An environment whose rewards are all 0."""

    async def _paid(self, answer):
        return 0.0


@registry.register("lottery")
class Lottery(_Judged):
    """An environment that rewards half of the answers to a question, or none of a dull one."""

    async def _paid(self, answer):
        if self._shared.scoring:
            await self._pool.score(self._shared.scoring, answer)
        dull = zlib.crc32(self._question.encode()) % 1000 < 1000 * self._shared.race.dull
        return float(not dull and self._chance.random() < 0.5)


@scorers.register("raced")
def raced(args: Mapping[str, Any], answer: str) -> float:
    """1, after `seconds`. Every worker has the `fault` but the one that has locked the file `sound`."""
    fault = args["fault"] if args["fault"] and not _locks(args["sound"]) else ""
    if fault in ("at_once", "late"):
        time.sleep(fault == "late")
        os._exit(1)
    time.sleep(args["seconds"] * (10 if fault == "slow" else 1))
    return 1.0


@cache
def _locks(path: str) -> bool:
    """True if this process has the lock of the file, which it tries to take once and keeps until it ends."""
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
