"""Where a learner starts: the newest checkpoint on the run's line, or the one it was told to fork at.

A fork is named, as STEP@NAME, so that a learner that dies and is started with the same words does not fork again, but
goes on along the fork that the store knows by that name.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxroll.config import Config
from jaxroll.errors import ConfigError
from jaxroll.learner import weights
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.models import pretrained
from jaxroll.models.families import ModelSpec
from jaxroll.records import Version
from jaxroll.store.state import Lineage, on_line


def start_of(checkpoints: Checkpoints, lineages: Sequence[Lineage], fork: str | None) -> tuple[Version | None, str]:
    """The checkpoint to restore (None: none) and the name of the fork to make there ("": none).

    `lineages` are the run's, as the store has them. ConfigError when `fork` names no checkpoint.
    """
    lines = list(lineages)
    if fork is not None:
        where, _, name = fork.partition("@")
        name = name or uuid.uuid4().hex
        if all(line.fork != name for line in lines):
            return checkpoints.at(where), name
    return checkpoints.latest(lambda version: on_line(lines, version)), ""


def first_params(config: Config, run_dir: Path, spec: ModelSpec) -> Mapping[str, np.ndarray] | None:
    """What a run starts from (host arrays): the warm start, or the model of the path. None for a fresh init.

    ConfigError when the config asks for a warm start and there is none: roles do not make it, `jaxroll train` does.
    """
    if (warm := run_dir / "warm").is_dir():
        return weights.load(warm)
    if config.sft.steps:
        raise ConfigError("sft.steps", config.sft.steps, f"the warm start is not in {warm}",
                          f"Run `jaxroll sft --config=FILE --run={run_dir}` first, or set sft.steps=0.")  # fmt: skip
    return pretrained.weights(config.model, spec) if config.model.path else None
