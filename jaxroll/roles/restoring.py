"""Where a learner starts: the newest checkpoint on the run's line, or the one it was told to fork at.

A fork is named, as STEP@NAME, so that a learner that dies and is started with the same words does not fork again, but
goes on along the fork that the store knows by that name.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from jaxroll.learner.checkpoint import Checkpoints
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
