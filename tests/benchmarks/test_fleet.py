"""The benchmark of many samplers: what it compares differs only by the mechanism, and its null cases are null."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import fleet
from jaxroll.config import Config
from jaxroll.sim.costs import Law


@pytest.mark.soak
@pytest.mark.parametrize("case", ["affinity", "order", "repack"])
def test_a_mechanism_changes_runs_where_it_should_and_nothing_in_its_null_case(case: str) -> None:
    """The quick form of the benchmark. Whether there is a gain is a result, not a test."""
    found = fleet.CASES[case](1, 4)
    (name,) = set(found) - {"null"}
    assert found[name]["without"] != found[name]["with"]
    if case != "affinity":
        assert found["null"]["without"] == found["null"]["with"]
    if case == "repack":
        assert found[name]["with"][0]["repacks"] > 3 and not found[name]["without"][0]["repacks"]
    if case == "affinity":
        assert found[name]["with"][0]["own_pool"] > 0.8
    most = 2 if case == "repack" else 1
    assert all(one["age_max"] <= most for runs in found.values() for one in (*runs["without"], *runs["with"]))


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
