"""The recursion of a schedule over drawn rollouts, where a step can be calculated by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxroll.policy import step_times
from jaxroll.policy.step_times import Engines, Rollouts, Rules

TOKENS, TOKEN_S = 40, 0.1
LASTING_S = TOKENS * TOKEN_S
EVEN = Rollouts(np.full((60, 8), TOKENS), np.zeros((60, 8)), 1.0, 21.0, np.full((60, 8), TOKENS))


def engines(number: int = 2, **changes: float) -> list[Engines]:
    return [Engines(lambda n, context: TOKEN_S, number, 24, 8 / number, **changes)]


@pytest.mark.parametrize(
    ("rules", "step_s"),
    [
        (Rules(0, 3.0, 1.0), 1.0 + LASTING_S + 3.0),
        (Rules(1, 3.0, 1.0), (1.0 + LASTING_S + 3.0) / 2),  # proposition 2 of ROLL Flash has 3 s for these two
        (Rules(1, 3.0, 3.0), (3.0 + LASTING_S + 3.0) / 2),
        (Rules(2, 3.0, 1.0), 3.0),  # training bounds it
        (Rules(1, 3.0, 1.0, drains=True), LASTING_S),  # the weights arrive while the batch before is generated
        (Rules(1, 3.0, 1.0, drains=True, barrier=True), LASTING_S),
        (Rules(1, 3.0, 3.0, drains=True, barrier=True), 3.0 + 3.0),  # the learner waits for the weights, too
        (Rules(1, 0.1, 3.0, drains=True, barrier=True, fetch_s=2.0), LASTING_S + 2.0),  # fetched between two batches
    ],
)
def test_a_step_of_equal_rollouts(rules: Rules, step_s: float) -> None:
    (mean_s, low_s, high_s), _ = EVEN.stepped(engines(), rules, 20)
    assert mean_s == pytest.approx(step_s, rel=1e-3)
    assert low_s == pytest.approx(mean_s) and high_s == pytest.approx(mean_s)


def test_a_step_waits_for_the_longest_rollout_and_an_age_bound_hides_it() -> None:
    drawn = np.random.default_rng(0).exponential(TOKENS, (400, 8))
    uneven = Rollouts(drawn, np.zeros_like(drawn), 1.0, 1.0, drawn)
    longest_s = TOKEN_S * drawn.max(axis=1)
    sync = uneven.stepped(engines(), Rules(0, 1.0), 20)[0]
    ahead = uneven.stepped(engines(), Rules(4, 1.0), 20)[0]
    assert sync[0] == pytest.approx(longest_s.mean() + 1.0, rel=0.02) and sync[1] < sync[0] < sync[2]
    assert longest_s.mean() / 5 < ahead[0] < 0.5 * sync[0]


def test_rollouts_that_run_at_once_slow_each_other() -> None:
    """A decode step takes 0.01 s a sequence: with all eight 3.2 s, and 6.4 s while those of two steps run."""
    step = [Engines(lambda n, context: 0.01 * n, 1, 24, 8.0)]
    sync, ahead = (EVEN.stepped(step, Rules(alpha, 0.0), 20)[0][0] for alpha in (0, 1))
    assert sync == pytest.approx(3.2) and ahead == pytest.approx(3.2, rel=0.02)  # nothing is gained


def test_a_lost_engine_generates_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost at 10 s and at 25 s, for 5 s; after 3 s others take its rollouts."""
    monkeypatch.setattr(random.Random, "expovariate", lambda self, rate: 1 / rate)
    engine = engines(lost_every_s=10.0, down_s=5.0, noticed_s=3.0)[0]
    others, alone = step_times._Losses(engine, 0, 1.0), step_times._Losses(engine, 0, None)
    assert (others.end(2.0, 4.0), alone.end(2.0, 4.0)) == (6.0, 6.0)
    assert (others.end(8.0, 4.0), alone.end(8.0, 4.0)) == (13.0 + 4.0, 15.0 + 4.0)
    assert (others.end(12.0, 4.0), alone.end(12.0, 4.0)) == (13.0 + 4.0, 15.0 + 4.0)
    assert others.end(24.0, 4.0) == 28.0 + 4.0, "the second loss"
    assert others.end(8.0, 40.0) > 10.0 * step_times.RESTARTS, "longer than any time between two losses"


def test_losses_make_steps_longer() -> None:
    safe, lost = (
        EVEN.stepped(engines(lost_every_s=every_s, down_s=20.0, noticed_s=5.0), Rules(0, 1.0), 20)[0][0]
        for every_s in (float("inf"), 50.0)
    )
    assert 1.05 * safe < lost
