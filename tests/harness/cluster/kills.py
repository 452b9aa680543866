"""SIGKILL at an exact point: before or after a call of the victim, some time into its work, during a checkpoint."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.harness.cluster.real_roles import START_S, World
from tests.harness.cluster.rpc_calls import claim_of, publish_of
from tests.harness.cluster.rpc_tap import Call, Forward, Lost


class Dying:
    """A kill of `name` at its first `wanted` call to `method`: before the store receives the call or, with `answered`,
    before the caller receives the answer. `done` is set after the kill.
    """

    def __init__(
        self, world: World, name: str, method: str, wanted: Callable[[Call], bool], *, answered: bool = False
    ) -> None:
        self._world, self._name, self._method = world, name, method
        self._wanted, self._answered = wanted, answered
        self.done = threading.Event()
        world.tap.on(name, method, self._call)

    def die(self) -> None:
        """Kill now, unless that has happened: a later process of the same name is another one."""
        if self.done.is_set():
            return
        self._world.kill(self._name)  # without await: the death of a caller cancels its call, and this task with it
        self.done.set()

    def wait(self) -> None:
        """Wait for the kill; afterwards calls pass unchanged."""
        self._world.until(self.done.is_set, f"the death of the {self._name} at {self._method}")
        assert self._world.processes[self._name].wait(20) == -signal.SIGKILL
        self._world.tap.on(self._name, self._method, None)

    async def _call(self, call: Call, forward: Forward) -> bytes:
        if self.done.is_set() or not self._wanted(call):
            return await forward(call.body)
        if self._answered:
            await forward(call.body)
        self.die()
        raise Lost


def waiting(world: World, step: int, delay_s: float) -> Dying:
    """A kill of the learner `delay_s` after it requested the claim of `step`, which is not ready yet."""
    dying = in_step(world, step, 0.0)

    async def claim(call: Call, forward: Forward) -> bytes:
        if claim_of(call) != step or dying.done.is_set():
            return await forward(call.body)
        held = asyncio.ensure_future(forward(call.body))
        await asyncio.wait([held], timeout=delay_s)
        dying.die()
        raise Lost

    world.tap.on("learner", "Claim", claim)
    return dying


def in_step(world: World, step: int, delay_s: float) -> Dying:
    """A kill of the learner `delay_s` after it received the claim of `step`, at the latest when it publishes."""
    dying = Dying(world, "learner", "Publish", lambda call: publish_of(call).step == step + 1)

    async def claim(call: Call, forward: Forward) -> bytes:
        answer = await forward(call.body)
        if claim_of(call) == step and not dying.done.is_set():
            asyncio.get_running_loop().call_later(delay_s, dying.die)
        return answer

    world.tap.on("learner", "Claim", claim)
    return dying


def in_checkpoint(world: World) -> str:
    """Kill the learner while it writes a checkpoint; return the name that the checkpoint would have had.

    The learner is stopped as soon as the unfinished folder exists; if it renamed the folder first, the next one counts.
    """
    folder, learner = world.run_dir / "checkpoints", world.processes["learner"]
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and learner.poll() is None:
        for unfinished in folder.glob("*.orbax-checkpoint-tmp*"):
            learner.send_signal(signal.SIGSTOP)
            name = ".".join(unfinished.name.split(".")[:2])
            if unfinished.exists() and not (folder / name).exists():
                world.kill("learner")
                return name
            learner.send_signal(signal.SIGCONT)
        time.sleep(0.0005)  # a poll for another process's folder, with a deadline
    pytest.fail(f"no checkpoint was seen being written\n{world.logs()}", pytrace=False)
