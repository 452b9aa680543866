"""The best checkpoint: chosen by hand, and kept in random runs of a learner and a slower evaluator."""

from __future__ import annotations

import random

import pytest

from jaxroll.policy import selection
from jaxroll.records import Version

ROWS = [
    {"kind": "eval", "step": 0, "lineage": 0, "accuracy": 0.1, "sets": {"a.b": {"accuracy": 0.9, "n": 3}}},
    {"kind": "step", "step": 5, "lineage": 0, "accuracy": 1.0},
    {"kind": "eval", "step": 20, "lineage": 0, "accuracy": 0.2},
    {"kind": "eval", "step": 20, "lineage": 0, "accuracy": 0.7, "sets": {"a.b": {"accuracy": None, "n": 0}}},
    {"kind": "eval", "step": 40, "lineage": 1, "accuracy": 0.7, "sets": {"a.b": {"accuracy": 0.3, "n": 3}}},
    {"kind": "eval", "step": 60, "lineage": 1, "accuracy": None},
]


def version(text: str) -> Version:
    lineage, step = text.split(".")
    return Version(int(lineage), int(step))


def test_the_last_row_of_a_version_counts_and_unknown_values_do_not() -> None:
    assert selection.measured(ROWS, "accuracy") == {version("0.0"): 0.1, version("0.20"): 0.7, version("1.40"): 0.7}
    assert selection.measured(ROWS, "sets.a.b.accuracy") == {version("0.0"): 0.9, version("1.40"): 0.3}


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        (["0.0", "0.20", "1.40", "1.60"], "0.20"),  # of equal ones the earliest
        (["0.0", "1.40", "1.60"], "1.40"),  # only those with a checkpoint, of any lineage
        (["1.60"], None),
        ([], None),
    ],
)
def test_the_best_has_the_highest_value_among_checkpoints(versions: list[str], found: str | None) -> None:
    values = selection.measured(ROWS, "accuracy")
    assert selection.best(values, [version(text) for text in versions]) == (found and version(found))


def test_the_newest_stay_and_so_do_the_spared() -> None:
    steps = [Version(0, step) for step in (0, 2, 4, 6)]
    assert selection.removable(steps, Version(0, 6), 2) == steps[:2]
    assert selection.removable(steps, Version(0, 6), 2, spared=steps[:1]) == steps[1:2]
    assert selection.removable(steps, Version(0, 2), 3) == [], "newer ones do not count"


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all_measured_versions_is_kept_however_late_the_evaluator_is(seed: int) -> None:
    """A learner with two checkpoints, and an evaluator that takes any of the last two versions for any time."""
    draw = random.Random(seed)
    every, last = draw.choice([1, 2, 5]), 60
    versions, values, measuring, until = [Version(0, 0)], {}, None, 0
    for step in range(1, last + 1):
        if measuring is not None and step >= until:
            values[measuring], measuring = draw.random(), None
        if measuring is None and (step == last or draw.random() < 0.5):
            behind = [
                old for old in (step - 1, step) if selection.is_kept(old, every, last) and Version(0, old) not in values
            ]
            if behind:
                measuring, until = Version(0, behind[0]), step + draw.randint(1, 25)
        if selection.is_kept(step, every, last):
            versions.append(durable := Version(0, step))
            spared = {selection.best(values, versions), measuring}
            for old in selection.removable(versions, durable, 2, spared):
                versions.remove(old)
            assert len(versions) <= 4
    if measuring is not None:
        values[measuring] = draw.random()
    assert selection.best(values, versions) == max(values, key=lambda one: values[one])
