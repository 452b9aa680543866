"""The figures about waste, on rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from jaxroll.report.summary import waste

LENGTHS = {"trained": [10, 200], "lost": [0, 0]}
STORE = {"kind": "store", "role": "store", "shrunk": 2, "lengths": LENGTHS, "tokens_put": 1000, "tokens_masked": 10}
STEPS = [{"samples": 4, "tokens_trained": 100}, {"samples": 6, "tokens_trained": 100}]  # 20 tokens per member


def stats(role: str, members: int, tokens: int, whole: int = 0) -> dict[str, Any]:
    counts = {"members_aborted": members, "tokens_aborted": tokens, "tokens_aborted_done": whole}
    return {"kind": "stats", "role": role, **counts}


def test_waste_by_reason_is_a_share_of_put_tokens_from_the_last_row() -> None:
    rows = [STORE | {"tokens_expired": {"stale": 1}}, STORE | {"tokens_expired": {"filtered": 50, "surplus": 20}}]
    figures = waste(rows, STEPS)
    assert figures["wasted_by_reason"] == {"filtered": 0.05, "surplus": 0.02, "masked": 0.01}
    assert figures["stragglers_closed"] == 2


def test_lost_long_members_are_a_length_bias() -> None:
    nobody = stats("sampler-0", 0, 0)
    assert waste([STORE, nobody], STEPS)["length_bias"] == 1.0
    lost = STORE | {"lengths": {"trained": [4, 40], "lost": [1, 70]}}
    assert waste([lost, nobody], STEPS)["length_bias"] == pytest.approx(10 / (110 / 5))


def test_stragglers_that_were_dropped_count_with_the_tokens_they_had() -> None:
    """Two of twelve members, the long ones, are dropped: one in its environment, one during an answer."""
    figures = waste([STORE, stats("sampler-0", 2, 60, whole=100)], STEPS)
    assert figures["aborted_tokens"] == 160
    assert figures["length_bias"] == pytest.approx((200 / 10) / ((200 + 160) / (10 + 2)))


def test_an_actor_counts_the_members_and_whole_answers_and_its_sampler_the_rest() -> None:
    actor = {"kind": "stats", "role": "actor-0", "members_aborted": 2, "tokens_aborted_done": 100}
    sampler = {"kind": "stats", "role": "sampler-0", "tokens_aborted": 60}
    assert waste([STORE, actor, sampler], STEPS) == waste([STORE, stats("sampler-0", 2, 60, whole=100)], STEPS)


def test_aborted_members_are_summed_over_samplers_and_their_restarts() -> None:
    rows = [stats("sampler-0", 1, 30), stats("sampler-1", 2, 60), stats("sampler-0", 3, 90), stats("sampler-0", 1, 30)]
    figures = waste(rows, STEPS)
    assert (figures["aborted_members"], figures["aborted_tokens"]) == (3 + 1 + 2, 90 + 30 + 60)
    assert figures["aborted_length"] == pytest.approx(30 / 20), "of the kept members' length"


def test_a_run_with_little_data_reports_none() -> None:
    assert set(waste([], []).values()) == {None}
    assert waste([stats("sampler-0", 0, 0)], STEPS)["aborted_length"] is None
