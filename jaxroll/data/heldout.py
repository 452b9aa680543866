"""The items kept aside for evaluation, and the check that nothing was trained on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxroll.config import Config
from jaxroll.data.candidates import Candidates
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Task

_TRIES_PER_ITEM = 50  # a task with fewer distinct questions than this finds is too small to hold anything out


def tasks(config: Config, candidates: Candidates | None = None) -> tuple[Task, ...]:
    """`task.heldout_items` tasks with distinct questions, the same for every run seed.

    Raises ConfigError when the held-out range has too few distinct questions.
    """
    wanted = config.task.heldout_items
    candidates = candidates or Candidates(config)
    span = candidates.ranges.heldout
    found: dict[str, Task] = {}
    last_skip = ""
    for index in span[: wanted * _TRIES_PER_ITEM]:
        if len(found) == wanted:
            break
        try:
            task = candidates.at(index).task
        except DataError as error:
            last_skip = f" Last skipped: {error}."
            continue
        found.setdefault(task.question_hash, task)
    if len(found) < wanted:
        raise ConfigError(
            "task.heldout_items",
            wanted,
            f"only {len(found)} distinct questions were found",
            f"Use fewer, or a task with more questions.{last_skip}",
        )
    return tuple(found.values())


def hashes(heldout: Iterable[Task]) -> frozenset[str]:
    """The question hashes of held-out tasks."""
    return frozenset(task.question_hash for task in heldout)


def overlap(heldout: Iterable[Task], question_hashes: Iterable[str]) -> frozenset[str]:
    """The held-out question hashes that also stand in `question_hashes`: 0 of them is what a report should say."""
    return hashes(heldout).intersection(question_hashes)


def check_disjoint(heldout: Sequence[Task], trained_on: Iterable[Task], what: str = "training") -> None:
    """Raises DataError when a task of `trained_on` asks a held-out question, or a held-out question comes twice."""
    if len(hashes(heldout)) < len(heldout):
        raise DataError(f"the held-out set asks {len(heldout) - len(hashes(heldout))} questions twice")
    common = overlap(heldout, (task.question_hash for task in trained_on))
    if common:
        raise DataError(f"{len(common)} held-out questions occur in {what}, as {sorted(common)[0]}")
