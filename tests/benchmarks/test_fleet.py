"""The benchmark of many samplers: what it compares differs only by the mechanism, and its null cases are null."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import fleet
from jaxroll.config import Config
from jaxroll.sim.costs import Law

LENGTHS = Law("lognormal", mean=100, deviation=60, least=16, most=256)


def small(flush_tokens: int) -> Config:
    made = fleet.config(0, flush_tokens, 4)
    schedule = replace(made.schedule, groups_per_step=4, group_size=2)
    return replace(made, schedule=schedule, sampling=replace(made.sampling, max_tokens=256))


@pytest.mark.soak
def test_flushes_save_tokens_where_samplers_are_killed_and_change_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "KILLS_EVERY_S", 2.0)
    monkeypatch.setattr(fleet, "DOWN_S", 1.0)
    calm, storm = (fleet.cluster(0, LENGTHS, kills) for kills in (False, True))
    without, with_ = fleet.run(small(0), storm), fleet.run(small(16), storm)
    assert without["tokens_flushed"] == without["tokens_resumed"] == 0
    assert with_["members_resumed"] > 5 and with_["decoded_ratio"] < without["decoded_ratio"] - 0.02
    quiet = fleet.run(small(16), calm)
    assert quiet["tokens_flushed"] > 0 and quiet["decoded_ratio"] == pytest.approx(1.0, abs=1e-9)
