"""An environment in which a model that knows nothing earns something, so that short runs of it do learn.

`task.env=tests.harness.envs.dense_reward:dense_reward`. Exact answers are beyond an untrained model: with rewards that
are all 0 nothing is computed, no parameter moves, and a comparison of losses compares zeros.
"""

import json

from jaxroll.envs import registry
from jaxroll.protocols import StepResult
from jaxroll.rewards import scorers


@scorers.register("early_letters")
def early_letters(args, answer):
    """The share of twelve places that hold a letter of the alphabet's first half."""
    return min(sum("a" <= letter <= "m" for letter in answer), 12) / 12


@registry.register("dense_reward")
class DenseReward:
    """One question, one answer, a reward between 0 and 1."""

    def __init__(self, pool, config):
        self.step_limit_s = pool.time_limit_s + 120.0
        self._pool = pool

    async def reset(self, task, seed):
        """The messages the model sees first."""
        return task.messages

    async def step(self, answer):
        """The consequence of the model's answer: the end."""
        share = await self._pool.score(json.dumps({"scorer": "early_letters"}), answer)
        return StepResult(done=True, reward=share, reward_parts={"early": share})

    async def close(self):
        """Nothing is held."""
