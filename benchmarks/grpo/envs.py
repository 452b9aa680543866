"""The environment of benchmarks/grpo, in a config `benchmarks.grpo.envs:links`."""

from __future__ import annotations

import asyncio
import json
import os

import numpy as np

from benchmarks.grpo.work import Work, letters, text
from jaxroll.envs import registry
from jaxroll.protocols import StepResult
from jaxroll.records import Message

WORK = "JAXROLL_GRPO_WORK"  # an environment variable: the work, as JSON


@registry.register("links")
class Links:
    """An environment with the work's number of turns, each with its latency; the reward is the mean over turns."""

    step_limit_s = 120.0

    def __init__(self, pool, config):
        self._work = Work(**json.loads(os.environ[WORK]))

    async def reset(self, task, seed):
        """The question."""
        self._question, self._earned = letters(task.messages[0].content), []
        return task.messages

    async def step(self, answer):
        """The first letter of the next turn, or the end."""
        await asyncio.sleep(self._work.latency_s)
        self._earned.append(self._work.reward(self._question, letters(answer)))
        if len(self._earned) < self._work.turns:
            return StepResult(done=False, messages=(Message("user", text(np.zeros(1, int))),))
        return StepResult(done=True, reward=sum(self._earned) / len(self._earned))

    async def close(self):
        """Nothing is held."""
