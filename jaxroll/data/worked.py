"""Questions with their answers, for the warm start."""

from __future__ import annotations

from jaxroll.config import Config
from jaxroll.data import heldout, order
from jaxroll.data.candidates import MAX_SKIPPED_IN_A_ROW, Candidates
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Task


def examples(config: Config, count: int) -> list[tuple[Task, str]]:
    """`count` tasks with what the model should have answered, in the order that `run.seed` decides.

    They come from the warm start's own range and never ask a held-out question; questions may repeat.
    """
    candidates = Candidates(config)
    kept_aside = heldout.hashes(heldout.tasks(config, candidates))
    found: list[tuple[Task, str]] = []
    skipped, reason = 0, ""
    indices = iter(order.in_this_thread(order.shuffled(candidates.ranges.sft, config.run.seed, "sft")))
    while len(found) < count:
        candidate, reason = _usable(candidates, next(indices), kept_aside)
        if candidate is not None:
            found.append(candidate)
            skipped = 0
        elif (skipped := skipped + 1) == MAX_SKIPPED_IN_A_ROW:
            raise ConfigError(
                "sft.steps",
                config.sft.steps,
                f"{skipped} items in a row cannot serve the warm start, the last because {reason}",
                "Set sft.steps=0, or use a task with worked answers.",
            )
    return found


def _usable(candidates: Candidates, index: int, kept_aside: frozenset[str]) -> tuple[tuple[Task, str] | None, str]:
    """The example at `index`, or None and the reason why it is none."""
    try:
        candidate = candidates.at(index)
    except DataError as error:
        return None, str(error)
    if candidate.answer is None:
        return None, f"item {index} has no answer"
    if candidate.task.question_hash in kept_aside:
        return None, f"item {index} is held out"
    return (candidate.task, candidate.answer), ""
