"""Environments of benchmarks/sync_vs_async.py, named in a config as `_race_envs:NAME` (this folder is on the path).

`waiting` judges like the ordinary one-turn environment, after a latency that is normal and cut at 0: its mean and
deviation stand in the environment's variables, every draw is new. `pays_nobody` judges nothing:
every reward is 0, so that no member has an advantage and training takes no time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random

from jaxroll.envs import registry
from jaxroll.protocols import StepResult


def latency() -> tuple[float, float]:
    """Mean and deviation in seconds, as the benchmark ordered them."""
    mean, deviation = json.loads(os.environ.get("JAXROLL_RACE_LATENCY", "[0, 0]"))
    return float(mean), float(deviation)


class _Judged:
    """A question, an answer, a reward of 1 for the very answer."""

    step_limit_s = 120.0

    def __init__(self, pool, config):
        self._pool = pool

    async def reset(self, task, seed):
        """The question."""
        self._args, self._chance = task.env_args, random.Random()
        return task.messages

    async def close(self):
        """Nothing is held."""


@registry.register("waiting")
class Waiting(_Judged):
    """Judges after a while."""

    async def step(self, answer):
        """The end, late."""
        mean, deviation = latency()
        await asyncio.sleep(max(0.0, self._chance.gauss(mean, deviation)))
        score = await self._pool.score(self._args, answer)
        return StepResult(done=True, reward=float(score == 1.0))


@registry.register("pays_nobody")
class PaysNobody(_Judged):
    """Judges nothing."""

    async def step(self, answer):
        """The end."""
        return StepResult(done=True, reward=0.0)
