"""The environment of a run under attack: `task.env=benchmarks.faults.envs:chaos`.

The reward is the share of letters in the alphabet's first half, so that an untrained model learns. A scoring worker
judges two questions of three, an environment in its own process the third. One answer in 200 ends in an exception. In
addition the environment misbehaves once for every file in the folder `CHAOS_ORDERS`, in the way that the file's name
says.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import threading
import time
from typing import cast

from jaxroll.envs import registry
from jaxroll.envs.processes import InProcess, Processes
from jaxroll.errors import InfraError
from jaxroll.protocols import StepResult, Traits
from jaxroll.records import Message
from jaxroll.rewards import scorers

STEP_LIMIT_S = 20.0
RAISES = 1 / 200
FLOOD_LINES = 10_000
SLOW_CLOSE_S = 30.0
_CHANCE = random.Random()
_processes, _leaked = {}, []


def early_share(answer):
    """The number of letters from the alphabet's first half among the first twelve, as a share of twelve."""
    return min(sum("a" <= letter <= "m" for letter in answer), 12) / 12


@scorers.register("chaos_early_letters")
def early_letters(args, answer):
    """`early_share` as a scorer, for the scoring workers."""
    return early_share(answer)


@registry.register("chaos_process")
class ChaosProcess:
    """The environment in its own process."""

    place = "process"
    step_limit_s = STEP_LIMIT_S

    def __init__(self, pool, config):
        """Need neither."""

    def reset(self, task, seed):
        """Show the question."""
        return task.messages

    def step(self, answer):
        """Judge the answer."""
        return StepResult(done=True, reward=early_share(answer), reward_parts={"early": early_share(answer)})

    def close(self):
        """Hold nothing."""


@registry.register("chaos")
class Chaos:
    """The environment on the sampler's event loop."""

    place = "loop"
    step_limit_s = STEP_LIMIT_S

    def __init__(self, pool, config):
        self._pool, self._config, self._inner = pool, config, None
        self._closes_s = 0.0

    async def reset(self, task, seed):
        """Show the question, in a process for every third one."""
        if task.index % 3 == 0:
            loop = asyncio.get_running_loop()
            processes = _processes.setdefault(id(loop), Processes(2, {"": self._config}))
            traits = Traits("process", STEP_LIMIT_S, STEP_LIMIT_S)
            self._inner = InProcess("benchmarks.faults.envs:chaos_process", traits, processes)
            return await self._inner.reset(task, seed)
        return task.messages

    async def step(self, answer):
        """Judge the answer, or misbehave."""
        order = taken_order()
        self._closes_s = SLOW_CLOSE_S * (order == "slow_close")
        if order:
            result = await misbehaved(order, answer)
            if result is not None:
                return result
        if _CHANCE.random() < RAISES:
            raise ValueError("the environment raises now and then")
        if self._inner is not None:
            return await self._inner.step(answer)
        share = await self._pool.score(json.dumps({"scorer": "chaos_early_letters"}), answer)
        return StepResult(done=True, reward=share, reward_parts={"early": share})

    async def close(self):
        """Give the process back."""
        await asyncio.sleep(self._closes_s)
        if self._inner is not None:
            await self._inner.close()


def taken_order():
    """The name of an order that no other episode has taken; empty when there is none."""
    folder = os.environ.get("CHAOS_ORDERS", "")
    for name in sorted(os.listdir(folder)) if folder else ():
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:
            continue
        return name.partition(".")[0]
    return ""


async def misbehaved(order, answer):
    """Do what the order says; the result of the step, or None when it goes on as usual."""
    share = early_share(answer)
    match order:
        case "raise":
            raise ValueError("the environment was ordered to raise")
        case "infra":
            raise InfraError("the environment was ordered to lose its machinery")
        case "exit":
            sys.exit("the environment was ordered to exit")
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "reenter":
            with contextlib.closing(asyncio.sleep(0.0)) as nested:
                asyncio.get_running_loop().run_until_complete(nested)  # from within a callback of this loop
        case "hang":
            await asyncio.sleep(3600)
        case "block":
            time.sleep(3.0)  # on the event loop, where it must not
        case "flood":
            for number in range(FLOOD_LINES):
                print(f"line {number} of an environment that prints too much", file=sys.stderr)
        case "threads":
            for _ in range(20):
                threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()
        case "memory":
            _leaked.append(bytearray(16 << 20))
        case "huge":
            return StepResult(done=False, messages=(Message("user", "much " * 600_000),))
        case "empty":
            return StepResult(done=False, messages=())
        case "surrogate":
            return StepResult(done=False, messages=(Message("user", "half a character: \ud800"),))
        case "type":
            return cast(StepResult, "no result")
        case "bool":
            return StepResult(done=True, reward=share, reward_parts={"early": share > 0})
        case "nan":
            return StepResult(done=True, reward=float("nan"), reward_parts={"early": share})
        case "words":
            return StepResult(done=True, reward=cast(float, "much"), reward_parts={"early\ud800": share})
    return None
