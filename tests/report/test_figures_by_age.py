"""The report's metrics by token age: sums over the run, and a line per age in the page."""

from __future__ import annotations

from jaxroll.report import work


def age(tokens: int, reward: float, trained: int = 50, **figures: float) -> dict:
    """An entry of `by_age`; a row without computed tokens has no figures."""
    every = {"logprob_delta": 0.1, "kl_behaviour": 0.01, "ratio_max": 1.5, "clip_share": 0.0, "ess": 0.9}
    return {"tokens": tokens, "tokens_trained": trained, "reward": reward} | (every | figures if tokens else {})


STEPS = [
    {"step": 1, "by_age": {"0": age(10, 0.5, trained=60)}},
    {"step": 2, "by_age": {"0": age(30, 0.9, ess=0.5, ratio_max=4.0), "7": age(0, 0.25)}},
    {"step": 3},
]


def test_means_are_weighted_by_tokens_and_the_largest_is_the_largest():
    found = work.totals(STEPS)
    assert list(found) == [0, 7]
    assert found[0]["tokens"] == 40 and found[0]["ratio_max"] == 4.0
    assert found[0]["ess"] == (10 * 0.9 + 30 * 0.5) / 40
    assert found[0]["reward"] == (60 * 0.5 + 50 * 0.9) / 110, "over all trained tokens, computed or not"
    assert found[7] == dict.fromkeys(found[7]) | {"tokens": 0, "reward": 0.25}


def test_a_line_for_each_age_that_has_the_figure():
    drawn = str(work.plot(STEPS, "ess", "effective samples"))
    assert drawn.count("age-0") == 1 and "age-3" not in drawn and "age-7" not in drawn
    older = [*STEPS, {"step": 4, "by_age": {"7": age(5, 0.25)}}]
    assert "age-3" in str(work.plot(older, "ess", "effective samples"))
    assert not work.plot([{"step": 1, "by_age": {"0": age(0, 1.0)}}], "ess", "effective samples")
    assert not work.plot([], "ess", "effective samples")
