"""The comparison of the planner's pick with real runs, without the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import place_real
from benchmarks.lib.report import ROOT
from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.control import preflight
from jaxroll.sim import place
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, SamplerCosts, TransferCosts, Workload

# Seconds as a run on a core may have them, and those of the judge.
COSTS = {"waits": (0.3, Law("normal", 2.0, 1.0)), "trains": (4.0, Law())}


def config(name: str, folder: Path, changes: list[str]) -> Config:
    """The config of a run of the benchmark."""
    workload = place_real.WORKLOADS[name]
    values = workload.overrides(folder, 0.0, 0, 1) | dict(change.split("=", 1) for change in changes)
    return configs.load(ROOT / "configs" / "rlvr_tiny.py", [f"{key}={value}" for key, value in values.items()])


def planner(name: str, folder: Path) -> place.Planner:
    train_s, judge_s = COSTS[name]
    cluster = Cluster(
        "made up",
        SamplerCosts(0.02, 0.05),
        LearnerCosts(step_overhead_s=train_s),
        TransferCosts(publish_s=0.1),
        Workload(Law(mean=12), Law("normal", 10, 2, 1), env_s=judge_s),
    )
    return place.Planner(config(name, folder, []), place_real.hardware(cluster))


@pytest.mark.parametrize(("name", "pick"), [("waits", "bounded"), ("trains", "shared")])
def test_the_workloads_want_different_placements_and_all_of_them_can_run(tmp_path: Path, name: str, pick: str) -> None:
    made = planner(name, tmp_path)
    ranked = place.ranked(made, "cost")
    assert ranked[0][0].schedule == pick and {one.schedule for one, _ in ranked} == set(place_real.SCHEDULES)
    for one, _ in ranked:
        changed = config(name, tmp_path, place.overrides(made, one))
        preflight.check_described(changed)
        assert changed.placement.colocated == (one.schedule == "shared") and sum(one.used()) <= 2


def test_the_gap_is_that_of_the_medians() -> None:
    predicted = {"bounded": 1.0, "shared": 1.2}
    found = place_real.compared(predicted, {"bounded": [1.1, 1.0, 1.2], "shared": [1.0, 1.3, 1.0]})
    assert (found["pick"], found["best"]) == ("bounded", "shared") and found["gap"] == pytest.approx(0.1)
    assert not found["within_aim"] and found["gap_of_rounds"] == pytest.approx([0.1, 0.0, 0.2])
    assert found["rows"]["bounded"]["error"] == pytest.approx(1 / 1.1 - 1)
