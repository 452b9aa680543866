"""The figures on waste against rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from jaxroll.report.waste import waste

STORE = {"kind": "store", "role": "store", "shrunk": 2, "length_bias": 0.8, "tokens_put": 1000, "tokens_masked": 10}
STEPS = [{"samples": 4, "tokens_trained": 100}, {"samples": 6, "tokens_trained": 100}]  # 20 tokens a member


def stats(role: str, members: int, tokens: int) -> dict[str, Any]:
    return {"kind": "stats", "role": role, "members_aborted": members, "tokens_aborted": tokens}


def test_waste_by_reason_is_a_share_of_what_was_put_and_the_last_row_counts() -> None:
    rows = [STORE | {"tokens_expired": {"stale": 1}}, STORE | {"tokens_expired": {"filtered": 50, "surplus": 20}}]
    figures = waste(rows, STEPS)
    assert figures["wasted_by_reason"] == {"filtered": 0.05, "surplus": 0.02, "masked": 0.01}
    assert (figures["stragglers_closed"], figures["length_bias"]) == (2, 0.8)


def test_what_was_let_go_is_summed_over_samplers_and_their_lives() -> None:
    rows = [stats("sampler-0", 1, 30), stats("sampler-1", 2, 60), stats("sampler-0", 3, 90), stats("sampler-0", 1, 30)]
    figures = waste(rows, STEPS)
    assert (figures["aborted_members"], figures["aborted_tokens"]) == (3 + 1 + 2, 90 + 30 + 60)
    assert figures["aborted_length"] == pytest.approx(30 / 20), "longer than what was kept, when cut"


def test_a_run_of_which_little_is_known_says_none() -> None:
    assert set(waste([], []).values()) == {None}
    assert waste([stats("sampler-0", 0, 0)], STEPS)["aborted_length"] is None
