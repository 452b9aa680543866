"""The curriculum by hand, and on a simulated population of questions."""

from __future__ import annotations

import itertools
import random

import pytest

from jaxroll.errors import ConfigError
from jaxroll.policy.selection import Curriculum

BAND = Curriculum("band", 0.2, 0.8, explore=0.0)
RISING = Curriculum("easy_to_hard", 0.2, 0.8, explore=0.0, steps=10)


@pytest.mark.parametrize(
    ("rule", "mean", "last", "step", "admitted"),
    [
        (Curriculum(), 0.0, 3, 3, True),
        (BAND, None, None, 0, True),
        (BAND, 0.2, None, 0, False),  # on the bound is not between
        (BAND, 0.5, 9, 9, True),
        (BAND, 0.8, None, 0, False),
        (RISING, 0.79, None, 0, False),
        (RISING, 0.8, None, 0, True),
        (RISING, 0.5, None, 4, False),
        (RISING, 0.5, None, 5, True),
        (RISING, 0.2, None, 99, True),
        (RISING, 0.19, None, 99, False),
        (Curriculum("none", rest=3, explore=0.0), 0.5, 7, 9, False),
        (Curriculum("none", rest=3, explore=0.0), 0.5, 7, 10, True),
        (Curriculum("none", rest=3, explore=0.0), 0.5, None, 0, True),
    ],
)
def test_prompts_by_hand(rule: Curriculum, mean: float | None, last: int | None, step: int, admitted: bool) -> None:
    assert rule.admits(mean, last, step, ordinal=5) is admitted


def test_an_empty_band_is_refused() -> None:
    with pytest.raises(ConfigError, match="curriculum_low"):
        Curriculum("band", 0.5, 0.5)
    assert Curriculum("none", 0.5, 0.5).is_off


def simulate(rule: Curriculum, steps: int = 60, batch: int = 16, seed: int = 0) -> list[list[float]]:
    """The true pass rates of the questions of each claim; of 400 questions, two fifths are never or always solved."""
    draw = random.Random(seed)
    rates = [draw.choice([0.0, 1.0, draw.random(), draw.random(), draw.random()]) for _ in range(400)]
    results: dict[int, list[float]] = {}
    last: dict[int, int] = {}
    stream = itertools.chain.from_iterable(draw.sample(range(400), 400) for _ in itertools.count())
    found: list[list[float]] = []
    ordinals = itertools.count()
    for step in range(steps):
        claim: list[int] = []
        while len(claim) < batch:
            question, ordinal = next(stream), next(ordinals)
            known = results.get(question)
            if rule.admits(known and sum(known) / len(known), last.get(question), step, ordinal):
                claim.append(question)
        for question in claim:
            results.setdefault(question, []).extend(float(draw.random() < rates[question]) for _ in range(8))
            last[question] = step
        found.append([rates[question] for question in claim])
    return found


def useful(claims: list[list[float]]) -> float:
    """The share of questions that are sometimes solved."""
    rates = list(itertools.chain(*claims))
    return sum(0.02 < rate < 0.98 for rate in rates) / len(rates)


def test_a_band_trains_more_questions_that_are_sometimes_solved() -> None:
    plain, band = simulate(Curriculum()), simulate(Curriculum("band", explore=0.05))
    assert useful(band[30:]) > useful(plain[30:]) + 0.2
    assert useful(band[:10]) == useful(plain[:10]), "in the first epoch nothing is known"


def test_easy_questions_come_before_hard_ones() -> None:
    claims = simulate(Curriculum("easy_to_hard", explore=0.02, steps=100), steps=100)
    means = [sum(map(sum, claims[i : i + 25])) / (25 * 16) for i in (25, 50, 75)]
    assert means[0] > means[1] > means[2]


def test_a_rest_spreads_the_training_over_the_questions() -> None:
    rule = Curriculum("band", 0.4, 0.6, explore=0.05, rest=8)
    rested, plain = simulate(rule, steps=120), simulate(Curriculum("band", 0.4, 0.6, explore=0.05), steps=120)
    assert len(set(itertools.chain(*rested[60:]))) > len(set(itertools.chain(*plain[60:])))


def test_a_stream_of_rejected_questions_still_gives_prompts() -> None:
    rule = Curriculum("band", explore=0.1)
    admitted = sum(rule.admits(0.0, 0, 5, ordinal) for ordinal in range(10_000))
    assert 850 < admitted < 1150


def test_equal_histories_give_equal_orders_and_the_seed_matters() -> None:
    def drawn(seed: int) -> list[bool]:
        return [Curriculum("band", seed=seed).admits(0.0, 0, 5, ordinal) for ordinal in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
