"""Steps that the evaluator scores: multiples of `evaluator.every`, the first version it sees, and the last one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from jaxroll.config import Config
from jaxroll.config.derived import is_evaluated, next_evaluation


def config(every: int, last: int, checkpoint_every: int = 1, keep_best: str = "") -> Config:
    default = Config()
    learner = replace(default.learner, checkpoint_every=checkpoint_every, keep_best=keep_best)
    evaluator = replace(default.evaluator, every=every)
    return replace(default, learner=learner, evaluator=evaluator, schedule=replace(default.schedule, steps=last))


def evaluated(of: Config, published: Iterable[int]) -> list[int]:
    """The steps that an evaluator scores which is never late."""
    due, found = 0, []
    for step in published:
        if is_evaluated(of, step, due):
            found.append(step)
            due = next_evaluation(of, step) or due
    return found


@pytest.mark.parametrize("every", range(1, 8))
def test_every_multiple_and_the_last_step_are_evaluated(every: int) -> None:
    for last in range(1, 16):
        assert evaluated(config(every, last), range(last + 1)) == sorted({*range(0, last, every), last})


@pytest.mark.parametrize(
    ("published", "keep_best", "found"),
    [
        (range(0, 13, 3), "", [0, 6, 9, 12]),  # the first version at or after 4, 8 and 12
        (range(3, 13), "", [3, 4, 8, 12]),  # after a restart the first version at once
        (range(3, 13), "accuracy", [4, 8, 12]),  # only versions with a checkpoint
        ([0, 1, 13], "", [0, 13]),  # `schedule.steps` was lowered: the run is already past its end
    ],
)
def test_versions_that_are_late_or_have_no_checkpoint(published: range, keep_best: str, found: list[int]) -> None:
    assert evaluated(config(4, 12, 2, keep_best), published) == found


def test_nothing_is_due_after_the_last_step() -> None:
    due = {step: next_evaluation(config(5, 12), step) for step in (0, 4, 5, 10, 11, 12, 13)}
    assert due == {0: 5, 4: 5, 5: 10, 10: 12, 11: 12, 12: None, 13: None}
