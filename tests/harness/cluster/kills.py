"""kill -9 at an exact place: before or after a call of the victim, so long into its work, inside a checkpoint."""

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
    """The death of `name` at its first `wanted` call to `method`: before the store hears of it or, with `answered`,
    before it hears the store's answer. `done` is set when it has happened.
    """

    def __init__(
        self, world: World, name: str, method: str, wanted: Callable[[Call], bool], *, answered: bool = False
    ) -> None:
        self._world, self._name, self._method = world, name, method
        self._wanted, self._answered = wanted, answered
        self.done = threading.Event()
        world.tap.on(name, method, self._call)

    def die(self) -> None:
        """Now, unless it died before: whoever has its name then is another life."""
        if self.done.is_set():
            return
        self._world.kill(self._name)  # without await: the death of a caller cancels its call, and this task with it
        self.done.set()

    def wait(self) -> None:
        """Until it is dead; its calls pass unhindered from then on."""
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
    """The learner's death `delay_s` after it asked for the claim of `step`, which is not there yet."""
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
    """The learner's death `delay_s` after it was given the claim of `step`; at the latest when it would publish it."""
    dying = Dying(world, "learner", "Publish", lambda call: publish_of(call).step == step + 1)

    async def claim(call: Call, forward: Forward) -> bytes:
        answer = await forward(call.body)
        if claim_of(call) == step and not dying.done.is_set():
            asyncio.get_running_loop().call_later(delay_s, dying.die)
        return answer

    world.tap.on("learner", "Claim", claim)
    return dying


def in_checkpoint(world: World) -> str:
    """Kill the learner while it writes a checkpoint; the name that this checkpoint would have had.

    It is stopped as soon as its unfinished folder is seen; if it renamed the folder first, the next one is tried.
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
