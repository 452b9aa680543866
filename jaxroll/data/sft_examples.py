"""Questions with what a teacher answers, for the warm start."""

from __future__ import annotations

from jaxroll.config import Config
from jaxroll.data import splits, tasks
from jaxroll.data.tasks import MAX_SKIPPED_IN_A_ROW, Candidates, Skipped
from jaxroll.errors import ConfigError
from jaxroll.records import Message, Task


def examples(config: Config, count: int) -> list[tuple[Task, tuple[Message, ...]]]:
    """`count` tasks, each with a worked conversation, in the order that `run.seed` decides.

    A conversation is what the model should have said, and between two answers what the environment replied.
    They come from the warm start's own range and never ask a held-out question; questions may repeat.
    """
    candidates = Candidates(config)
    kept_aside = tasks.hashes(tasks.tasks(config, candidates))
    found: list[tuple[Task, tuple[Message, ...]]] = []
    skipped = 0
    indices = iter(splits.in_this_thread(splits.shuffled(candidates.ranges.sft, config.run.seed, "sft")))
    while len(found) < count:
        candidate = candidates.trainable(next(indices), kept_aside, taught=True)
        if not isinstance(candidate, Skipped):
            found.append((candidate.task, candidate.worked))
            skipped = 0
        elif (skipped := skipped + 1) == MAX_SKIPPED_IN_A_ROW:
            raise ConfigError(
                "sft.steps",
                config.sft.steps,
                f"{skipped} items in a row cannot serve the warm start, the last because {candidate.reason}",
                "Set sft.steps=0, or use a task with worked answers.",
            )
    return found
