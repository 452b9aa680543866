"""The task of `dense_reward` behind a library that blocks and sometimes never returns.

`task.env=tests.harness.envs.hanging:hanging_env`.
"""

import random
import time

from jaxroll.envs import registry
from jaxroll.protocols import StepResult
from jaxroll.records import Message

ONE_IN = 6  # answers hang
_CHANCE = random.Random()  # a different seed in each process


@registry.register("hanging_env")
class HangingEnv:
    """An environment that blocks like a client of a web service whose connection is lost."""

    place = "thread"
    step_limit_s = 0.3

    def __init__(self, pool, config):
        pass

    def reset(self, task, seed) -> tuple[Message, ...]:
        """The messages that the model sees first."""
        return task.messages

    def step(self, answer) -> StepResult:
        """The end of the episode; sometimes it never returns."""
        if _CHANCE.randrange(ONE_IN) == 0:
            time.sleep(3600.0)
        return StepResult(done=True, reward=len(set(answer)) / 10)

    def close(self) -> None:
        """Nothing is held."""
