"""`benchmarks/faults/neighbours.py`: the difference of its runs, and its results."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest


@pytest.mark.parametrize(
    ("role", "key"),
    [("sampler", "sampler.count"), ("actor", "placement.actors")],
)
def test_runs_differ_in_the_bad_neighbour_alone(role: str, key: str) -> None:
    """An actor brings the sampler room for its members, so that each holder has the same number."""
    neighbours = importlib.import_module("benchmarks.faults.neighbours")
    alone, late = (neighbours.workload(role, fault, 60) for fault in ("", "late"))
    assert (alone.settings[key], late.settings[key]) == (2, 3)
    assert (alone.race.neighbour, late.race.neighbour) == ("", "late")
    room = {"sampler.slots", "sampler.concurrent_episodes"} if role == "actor" else set()
    changed = {name for name in late.settings if late.settings[name] != alone.settings[name]}
    assert changed == {key} | room
    assert replace(late, settings=alone.settings, race=alone.race) == alone


def test_a_run_counts_as_rested_only_if_the_bad_one_and_no_other_rests() -> None:
    compared = importlib.import_module("benchmarks.faults.neighbours").compared

    def run(rate: float, **backoff: str) -> dict:
        found = {name.replace("_", "-"): {"error": error} for name, error in backoff.items()}
        return {"steps_per_s": rate, "dead": 1, "failures": 3, "backoff": found, "cpu_s": 1.0, "seconds": 4.0}

    ours = [run(0.9, sampler_1="broken"), run(0.8, sampler_0="?", sampler_1="broken"), run(1.0)]
    found = compared("sampler", ours, [run(1.0), run(1.0), run(1.0)])
    assert (found["rested"], found["reason"], found["dead"], found["runs"]) == (1, "broken", 3, 3)
    assert found["ratio"] == pytest.approx((0.9 * 0.8) ** (1 / 3)) and found["low"] <= found["ratio"] <= found["high"]
