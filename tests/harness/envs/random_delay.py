"""A `dense_reward` environment whose answers take a random time, drawn from the system: no seed repeats it.

`task.env=tests.harness.envs.random_delay:random_delay`, or `…:blocking_delay`.
"""

import asyncio
import random
import time

from jaxroll.envs import registry
from jaxroll.protocols import StepResult
from tests.harness.envs.dense_reward import DenseReward, early_letters

MOST_S = 0.4


@registry.register("random_delay")
class RandomDelay(DenseReward):
    """An environment that starts and answers after a random time."""

    async def reset(self, task, seed):
        """The messages that the model sees first, after a random time."""
        await asyncio.sleep(random.SystemRandom().uniform(0.0, MOST_S))
        return await super().reset(task, seed)

    async def step(self, answer):
        """The reward and the end of the episode, after a random time."""
        await asyncio.sleep(random.SystemRandom().uniform(0.0, MOST_S))
        return await super().step(answer)


@registry.register("blocking_delay")
class BlockingDelay:
    """The same on a thread, which blocks for the random time."""

    step_limit_s, place = 120.0, "thread"

    def __init__(self, pool, config):
        pass

    def reset(self, task, seed):
        """The messages that the model sees first, after a random time."""
        time.sleep(random.SystemRandom().uniform(0.0, MOST_S / 10))
        return task.messages

    def step(self, answer):
        """The reward and the end of the episode, after a random time."""
        time.sleep(random.SystemRandom().uniform(0.0, MOST_S / 10))
        return StepResult(done=True, reward=early_letters({}, answer))

    def close(self):
        """Nothing is held."""
