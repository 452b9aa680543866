"""Environments that work in the first sampler and fail or are slow in the second one.

`task.env=tests.harness.envs.bad_sampler:fails_at_once`, `fails_late` or `slow`. The environment reads from its
process's command line which sampler it is in.
"""

import asyncio
import sys

from jaxroll.envs import registry
from jaxroll.errors import InfraError
from jaxroll.protocols import StepResult

LATENCY_S = 0.5
ILL = "--index=1" in sys.argv


class Healthy:
    """An environment of one turn that takes a while and rewards different letters."""

    latency_s = LATENCY_S
    step_limit_s = 60.0

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
    """A DATA failure in the second sampler, as if a library of the environment was not installed."""

    async def reset(self, task, seed):
        """The messages that the model sees first; raises in the second sampler."""
        if ILL:
            raise RuntimeError("a library is missing here")
        return task.messages


@registry.register("fails_late")
class FailsLate(Healthy):
    """An INFRA failure in the second sampler, as if a judge could not be reached."""

    async def step(self, answer):
        """The end of the episode; raises in the second sampler."""
        result = await super().step(answer)
        if ILL:
            raise InfraError("the judge cannot be reached from here")
        return result


@registry.register("slow")
class Slow(Healthy):
    """Slow in the second sampler, as on an overloaded machine."""

    latency_s = 10 * LATENCY_S if ILL else LATENCY_S
