"""pass@k, mean@n and intervals, compared with brute force and known values."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from jaxroll.rewards.parts import counts
from jaxroll.rollout import episode
from jaxroll.tools import generate


@dataclass(frozen=True)
class Answer:
    right: bool
    pinned: bool = True


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < c for i in range(n)], k))
        assert generate.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased() -> None:
    """The mean estimate over many draws is 1 − (1 − p)^k; the plug-in 1 − (1 − c/n)^k is too low."""
    draw, p, n, k = random.Random(0), 0.2, 8, 4
    rights = [sum(draw.random() < p for _ in range(n)) for _ in range(20_000)]
    wanted = 1 - (1 - p) ** k
    assert generate.mean([generate.pass_at_k(n, c, k) for c in rights]) == pytest.approx(wanted, abs=0.006)
    assert generate.mean([1 - (1 - c / n) ** k for c in rights]) < wanted - 0.02


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_pass_at_k_of_too_few_samples_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        generate.pass_at_k(n, c, k)


def test_bootstrap_intervals_cover_the_mean() -> None:
    draw, covered = random.Random(1), 0
    for _ in range(100):
        low, high = generate.bootstrap([float(draw.random() < 0.3) for _ in range(80)])
        covered += low <= 0.3 <= high
    assert 88 <= covered <= 100
    assert generate.bootstrap([0.0, 1.0, 1.0], seed=3) == generate.bootstrap([0.0, 1.0, 1.0], seed=3)
    assert generate.bootstrap([1.0] * 5) == (1.0, 1.0)


def test_answers_that_do_not_count_are_left_out() -> None:
    yes, no, lost = Answer(True), Answer(False), Answer(True, pinned=False)
    found = counts([[yes, no, lost], [no, no, lost], [yes, lost, lost]])
    assert found == [(3, 2), (2, 0)]
    table = generate.table(found, (1, 3))
    assert [table["mean@3"][0], table["pass@1"][0]] == pytest.approx([1 / 3, 1 / 3])
    assert table["pass@3"][0] == 1.0, "the second item has only two answers"


def test_groups_of_one_nameless_source_are_none() -> None:
    assert episode.grouped([1, 2], lambda value: "") == {}
    assert episode.grouped([1, 2, 3], lambda value: "ba"[value % 2]) == {"a": [1, 3], "b": [2]}
