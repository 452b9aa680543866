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
from jaxroll.store.core.state import Lineage, on_line


def start_of(
    checkpoints: Checkpoints, lineages: Sequence[Lineage], claims: int, fork: str | None
) -> tuple[Version | None, str]:
    """The checkpoint to restore (None: none) and the name of the fork to make there ("": none).

    `lineages` are the run's, as the store has them, `claims` how many it has made on the newest. ConfigError when
    `fork` names no checkpoint, and when the store does not know what the checkpoints were trained on.
    """
    lines = list(lineages)
    _check_known(checkpoints, lines, claims if fork is None else None)
    if fork is not None:
        where, _, name = fork.partition("@")
        name = name or uuid.uuid4().hex
        if all(line.fork != name for line in lines):
            return checkpoints.at(where), name
    return checkpoints.latest(lambda version: on_line(lines, version)), ""


def _check_known(checkpoints: Checkpoints, lineages: list[Lineage], claims: int | None) -> None:
    """ConfigError when the store's log is not the one under which these checkpoints were written.

    With a log that is missing or was put back from an old copy the run would begin at an older step, and open lineages
    whose numbers are taken: what it writes would look older than what is there, or be taken for it.
    """
    for version in reversed(checkpoints.versions()):
        ahead = claims is not None and version.step > claims and on_line(lineages, version)
        if version.lineage >= len(lineages) or ahead:
            known = f"lineages below {len(lineages)}" + (f" and {claims} claims" if ahead else "")
            raise ConfigError(
                "checkpoints", str(checkpoints.path(version)),
                f"store.db knows only {known}: it is missing, or older than this checkpoint",
                "Put back the store.db that belongs to the checkpoints, or move the newer checkpoints away.",
            )  # fmt: skip


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
