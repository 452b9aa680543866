"""An environment in which an untrained model gets rewards, so that short runs learn.

`task.env=tests.harness.envs.dense_reward:dense_reward`. An untrained model gives no exact answers: with rewards that
are all 0 no parameter changes, and a comparison of losses compares zeros.
"""

import json

from jaxroll.envs import registry
from jaxroll.protocols import StepResult
from jaxroll.rewards import scorers


@scorers.register("early_letters")
def early_letters(args, answer):
    """The number of letters from the alphabet's first half among the first twelve, as a share of twelve."""
    return min(sum("a" <= letter <= "m" for letter in answer), 12) / 12


@registry.register("dense_reward")
class DenseReward:
    """An environment of one turn with a reward between 0 and 1."""

    def __init__(self, pool, config):
        self.step_limit_s = pool.time_limit_s + 120.0
        self._pool = pool

    async def reset(self, task, seed):
        """The messages that the model sees first."""
        return task.messages

    async def step(self, answer):
        """The reward and the end of the episode."""
        share = await self._pool.score(json.dumps({"scorer": "early_letters"}), answer)
        return StepResult(done=True, reward=share, reward_parts={"early": share})

    async def close(self):
        """Nothing is held."""


@registry.register("graded_reward")
class GradedReward(DenseReward):
    """The same; an answer with any reward is correct, so that held-out accuracy changes while the model learns."""

    async def step(self, answer):
        """The reward and the end of the episode."""
        found = await super().step(answer)
        return StepResult(
            done=True, reward=found.reward, reward_parts={**found.reward_parts, "correct": float(found.reward > 0)}
        )
