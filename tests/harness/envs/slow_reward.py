"""The environment of `dense_reward`, which takes its time: episodes last long enough to be interrupted.

`task.env=tests.harness.envs.slow_reward:slow_reward`.
"""

import asyncio

from jaxroll.envs import registry
from tests.harness.envs.dense_reward import DenseReward

TAKES_S = 0.3


@registry.register("slow_reward")
class SlowReward(DenseReward):
    """As a tool or a web page would be."""

    async def reset(self, task, seed):
        """The messages the model sees first."""
        await asyncio.sleep(TAKES_S)
        return await super().reset(task, seed)

    async def step(self, answer):
        """The end, after a while."""
        await asyncio.sleep(TAKES_S)
        return await super().step(answer)
