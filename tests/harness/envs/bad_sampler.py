"""Environments that are well in the first sampler and ill in the second one, each in its own way.

`task.env=tests.harness.envs.bad_sampler:fails_at_once`, `fails_late` or `slow`. A sampler's process knows which one it
is by its command line.
"""

import asyncio
import sys

from jaxroll.envs import registry
from jaxroll.errors import InfraError
from jaxroll.protocols import StepResult

LATENCY_S = 0.5
ILL = "--index=1" in sys.argv


class Healthy:
    """One question, one answer after a while, a reward for different letters."""

    latency_s = LATENCY_S

    def __init__(self, pool, config):
        pass

    async def reset(self, task, seed):
        """The messages the model sees first."""
        return task.messages

    async def step(self, answer):
        """The end."""
        await asyncio.sleep(self.latency_s)
        return StepResult(done=True, reward=len(set(answer)) / 20)

    async def close(self):
        """Nothing is held."""


@registry.register("fails_at_once")
class FailsAtOnce(Healthy):
    """As where a library of the environment is not installed: a DATA failure."""

    async def reset(self, task, seed):
        """The messages the model sees first; nothing in the second sampler."""
        if ILL:
            raise RuntimeError("a library is missing here")
        return task.messages


@registry.register("fails_late")
class FailsLate(Healthy):
    """As where a judge cannot be reached: an INFRA failure."""

    async def step(self, answer):
        """The end; nothing in the second sampler."""
        result = await super().step(answer)
        if ILL:
            raise InfraError("the judge cannot be reached from here")
        return result


@registry.register("slow")
class Slow(Healthy):
    """As on a machine that is overloaded."""

    latency_s = 10 * LATENCY_S if ILL else LATENCY_S
