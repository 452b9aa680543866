"""A slow `dense_reward` environment, with episodes that last long enough to be interrupted.

`task.env=tests.harness.envs.slow_reward:slow_reward`.
"""

import asyncio

from jaxroll.envs import registry
from tests.harness.envs.dense_reward import DenseReward

TAKES_S = 0.3


@registry.register("slow_reward")
class SlowReward(DenseReward):
    """An environment as slow as a tool or a web page."""

    async def reset(self, task, seed):
        """The messages that the model sees first."""
        await asyncio.sleep(TAKES_S)
        return await super().reset(task, seed)

    async def step(self, answer):
        """The end of the episode, after a while."""
        await asyncio.sleep(TAKES_S)
        return await super().step(answer)
