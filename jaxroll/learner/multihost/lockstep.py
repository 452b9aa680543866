"""What all processes of a learner do alike, in one order: said by process 0 with each call, done by the others.

Every method below runs programs over the mesh or writes parts of one checkpoint. On a learner of one process none of
this is used: it has a plain Trainer and plain Checkpoints.
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
    """The trainer of process 0: what it does, the followers are told to do first."""

    def __init__(
        self, tell: Send, config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules, *, key: jax.Array
    ) -> None:
        super().__init__(config, spec, mesh, rules, key=key)
        self._tell = tell

    def set_params(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer. The others load what the run starts from themselves."""
        self._tell(Command("set_params"))
        super().set_params(params)

    def set_reference(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer. The others load what the run starts from themselves."""
        self._tell(Command("set_reference"))
        super().set_reference(params)

    def warmup(self, progress: Progress | None = None) -> None:
        """See Trainer."""
        self._tell(Command("warmup"))
        _meet()
        super().warmup(progress)

    def prepare(self, claim: Claim) -> Ready:
        """See Trainer."""
        self._tell(Command("prepare", body=wire.encode(claim)))
        return super().prepare(claim)

    def dispatch_step(self, ready: Ready) -> Running:
        """See Trainer. What was prepared last is started."""
        self._tell(Command("dispatch_step"))
        return super().dispatch_step(ready)

    def await_step(self, running: Running) -> Metrics:
        """See Trainer."""
        self._tell(Command("await_step"))
        return super().await_step(running)

    def publishable_params(self) -> Params:
        """See Trainer. To be given to `snapshot.begin`, as the others do."""
        self._tell(Command("publishable_params"))
        return super().publishable_params()

    def base_params(self) -> Params:
        """See Trainer. To be given to `snapshot.begin`, as the others do."""
        self._tell(Command("base_params"))
        return super().base_params()


class LeadingCheckpoints(Checkpoints):
    """The checkpoints as process 0 writes and reads them: every process its own parts."""

    def __init__(self, tell: Send, folder: Path, kept: int) -> None:
        super().__init__(folder, kept)
        self._tell = tell

    def write(self, version: Version, position: int, state: TrainState, base: str) -> None:
        """See Checkpoints."""
        self._tell(Command("write", version, position, base))
        super().write(version, position, state, base)

    def read(self, version: Version, abstract: TrainState) -> TrainState:
        """See Checkpoints."""
        self._tell(Command("read", version))
        return super().read(version, abstract)


def checkpoints(folder: Path, kept: int, leader: Leader | None) -> Checkpoints:
    """The checkpoints in `folder`, as the process that speaks for the learner has them."""
    return Checkpoints(folder, kept) if leader is None else LeadingCheckpoints(leader.send, folder, kept)


def run_follower_steps(
    leader: Follower,
    trainer: Trainer,
    checkpoints: Checkpoints,
    start: Callable[[], Mapping[str, np.ndarray]],
    dtype: str,
) -> int:
    """Do what the leader says until its end; the exit code.

    `start` loads what the run starts from, `dtype` is that in which parameters are published.
    """
    ready: Any = None
    running: Any = None
    for word in leader.commands():
        match word.what:
            case "prepare":
                ready = trainer.prepare(wire.decode(word.body, Claim))
            case "dispatch_step":
                running = trainer.dispatch_step(ready)
            case "await_step":
                trainer.await_step(running)
            case "publishable_params":
                host_snapshot.begin(trainer.publishable_params(), dtype)
            case "base_params":
                host_snapshot.begin(trainer.base_params(), dtype)
            case "write":
                checkpoints.write(_version(word), word.position, trainer.state, word.text)
            case "read":
                trainer.state = checkpoints.read(_version(word), trainer.abstract_state())
            case "warmup":
                _meet()
                trainer.warmup()
            case "set_params":
                trainer.set_params(start())
            case "set_reference":
                trainer.set_reference(start())
            case "end":
                return word.code
            case what:
                raise ValueError(f"the leader says {what!r}, of which this process knows nothing")
    raise AssertionError("the words end with an end")


def _version(word: Command) -> Version:
    assert word.version is not None
    return word.version


def _meet() -> None:
    """Compile the meeting of all processes that a checkpoint begins with, before compilations are counted."""
    multihost_utils.sync_global_devices("warmup")
