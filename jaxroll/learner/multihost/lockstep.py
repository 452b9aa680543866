"""Lockstep execution of a learner that spans several processes: process 0 sends each call, the followers repeat it.

Every method below runs programs over the mesh, or reads or writes shards of one checkpoint, so all processes must call
it in the same order. A learner of one process uses a plain Trainer and plain Checkpoints instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxroll import wire
from jaxroll.config import Config
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.multihost.processes import Command, Follower, Leader
from jaxroll.learner.state import Params, TrainState
from jaxroll.learner.trainer import Metrics, Ready, Running, Trainer
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.records import Claim, Version
from jaxroll.sharding.layout import Rules
from jaxroll.transfer import host_snapshot

Send = Callable[[Command], None]


class LeadingTrainer(Trainer):
    """The trainer of process 0. Each call sends the same command to the followers first."""

    def __init__(
        self, send: Send, config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules, *, key: jax.Array
    ) -> None:
        super().__init__(config, spec, mesh, rules, key=key)
        self._send = send

    def set_params(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer. The followers load the run's initial parameters themselves."""
        self._send(Command("set_params"))
        super().set_params(params)

    def set_reference(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer. The followers load the run's initial parameters themselves."""
        self._send(Command("set_reference"))
        super().set_reference(params)

    def warmup(self, progress: Progress | None = None) -> None:
        """See Trainer."""
        self._send(Command("warmup"))
        _meet()
        super().warmup(progress)

    def prepare(self, claim: Claim) -> Ready:
        """See Trainer."""
        self._send(Command("prepare", body=wire.encode(claim)))
        return super().prepare(claim)

    def dispatch_step(self, ready: Ready) -> Running:
        """See Trainer. The followers dispatch the claim that they prepared last."""
        self._send(Command("dispatch_step"))
        return super().dispatch_step(ready)

    def await_step(self, running: Running) -> Metrics:
        """See Trainer."""
        self._send(Command("await_step"))
        return super().await_step(running)

    def publishable_params(self) -> Params:
        """See Trainer. Pass the result to `host_snapshot.begin`, as the followers do."""
        self._send(Command("publishable_params"))
        return super().publishable_params()

    def base_params(self) -> Params:
        """See Trainer. Pass the result to `host_snapshot.begin`, as the followers do."""
        self._send(Command("base_params"))
        return super().base_params()


class LeadingCheckpoints(Checkpoints):
    """The checkpoints of process 0; on each write and read, every process handles its own shards."""

    def __init__(self, send: Send, folder: Path, kept: int) -> None:
        super().__init__(folder, kept)
        self._send = send

    def write(self, version: Version, position: int, state: TrainState, base: str) -> None:
        """See Checkpoints."""
        self._send(Command("write", version, position, base))
        super().write(version, position, state, base)

    def read(self, version: Version, abstract: TrainState) -> TrainState:
        """See Checkpoints."""
        self._send(Command("read", version))
        return super().read(version, abstract)


def checkpoints(folder: Path, kept: int, leader: Leader | None) -> Checkpoints:
    """The checkpoints in `folder`, for process 0 of a learner; `leader` is None if it has only one process."""
    return Checkpoints(folder, kept) if leader is None else LeadingCheckpoints(leader.send, folder, kept)


def run_follower_steps(
    leader: Follower,
    trainer: Trainer,
    checkpoints: Checkpoints,
    start: Callable[[], Mapping[str, np.ndarray]],
    dtype: str,
) -> int:
    """Execute the leader's commands until it sends `end`; return the exit code.

    `start` loads the run's initial parameters; `dtype` is the dtype in which parameters are published.
    """
    ready: Any = None
    running: Any = None
    for command in leader.commands():
        match command.what:
            case "prepare":
                ready = trainer.prepare(wire.decode(command.body, Claim))
            case "dispatch_step":
                running = trainer.dispatch_step(ready)
            case "await_step":
                trainer.await_step(running)
            case "publishable_params":
                host_snapshot.begin(trainer.publishable_params(), dtype)
            case "base_params":
                host_snapshot.begin(trainer.base_params(), dtype)
            case "write":
                checkpoints.write(_version(command), command.position, trainer.state, command.text)
            case "read":
                trainer.state = checkpoints.read(_version(command), trainer.abstract_state())
            case "warmup":
                _meet()
                trainer.warmup()
            case "set_params":
                trainer.set_params(start())
            case "set_reference":
                trainer.set_reference(start())
            case "end":
                return command.code
            case what:
                raise ValueError(f"the leader sent the unknown command {what!r}; all hosts need the same JaxRoll")
    raise AssertionError("the leader's last command is `end`")


def _version(command: Command) -> Version:
    assert command.version is not None
    return command.version


def _meet() -> None:
    """Compile the barrier with which every checkpoint begins, before compilations are counted."""
    multihost_utils.sync_global_devices("warmup")
