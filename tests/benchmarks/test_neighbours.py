"""`benchmarks/faults/neighbours.py`: the difference of its runs, their order and deadlines, and its results."""

from __future__ import annotations

import importlib
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def neighbours() -> Any:
    return importlib.import_module("benchmarks.faults.neighbours")


@pytest.mark.parametrize(
    ("role", "key", "counts"),
    [
        ("sampler", "sampler.count", (2, 3)),
        ("scorer", "sampler.scoring_workers", (1, 2)),
        ("actor", "placement.actors", (2, 3)),
    ],
)
def test_runs_differ_in_the_bad_neighbour_alone(neighbours: Any, role: str, key: str, counts: tuple[int, int]) -> None:
    """An actor brings the sampler room for its members, so that each holder has the same number."""
    alone, late = (neighbours.workload(role, fault, 60) for fault in ("", "late"))
    assert (alone.settings[key], late.settings[key]) == counts
    faults = ("", "late") if role == "scorer" else ("late", "")
    assert (alone.race.neighbour, alone.race.worker) == ("", "")
    assert (late.race.neighbour, late.race.worker) == faults
    room = {"sampler.slots", "sampler.concurrent_episodes"} if role == "actor" else set()
    changed = {name for name in late.settings if late.settings[name] != alone.settings[name]}
    assert changed == {key} | room
    assert replace(late, settings=alone.settings, race=alone.race) == alone
    peer, fault = neighbours.PEERS[role].split()
    assert fault == "alone" and neighbours.workload(peer, "", 60) == alone, "they have the same peer"


def test_each_arm_is_in_a_round_once_and_a_peer_in_the_middle_of_its_own(neighbours: Any) -> None:
    arms = [neighbours.name(*arm) for arm in neighbours.order(neighbours.ROLES, neighbours.FAULTS)]
    assert len(arms) == len(set(arms)) == 11
    assert arms.index("sampler alone") == 3 and arms[4] == "scorer at_once" and arms.index("actor alone") == 8
    assert neighbours.order(("actor",), ("slow",)) == [("actor", ""), ("actor", "slow")]


def a_run(rate: float, restarts: int = 0, **backoff: str) -> dict[str, Any]:
    found = {name.replace("_", "-"): {"error": error} for name, error in backoff.items()}
    return {
        "steps_per_s": rate, "dead": 1, "failures": 3, "backoff": found, "scoring_slow": {}, "cpu_s": 1.0,
        "seconds": 4.0, "worker_restarts": restarts,
    }  # fmt: skip


def test_a_run_counts_as_rested_only_if_the_bad_one_and_no_other_rests(neighbours: Any) -> None:
    ours = [a_run(0.9, sampler_1="broken"), a_run(0.8, 2, sampler_0="?", sampler_1="broken"), a_run(1.0)]
    peer = [a_run(1.0), a_run(1.0), a_run(1.0)]
    found = neighbours.compared("sampler", dict(enumerate(ours)), dict(enumerate(peer)))
    assert (found["rested"], found["reason"], found["dead"], found["runs"]) == (1, "broken", 3, 3)
    assert found["worker_restarts"] == 2
    assert found["ratio"] == pytest.approx((0.9 * 0.8) ** (1 / 3)) and found["low"] <= found["ratio"] <= found["high"]


def test_a_bad_scoring_worker_is_reported_if_each_sampler_has_one_and_no_sampler_rests(neighbours: Any) -> None:
    both = {"sampler-0": 1, "sampler-1": 2}
    ours = [a_run(1.0) | {"scoring_slow": slow} for slow in (both, {"sampler-0": 3}, {}, both)]
    ours[3] |= a_run(1.0, sampler_1="broken") | {"scoring_slow": both}
    peer = [a_run(1.0), a_run(1.0) | {"scoring_slow": {"sampler-0": 1}}, a_run(1.0, sampler_0="?"), a_run(1.0)]
    found = neighbours.compared("scorer", dict(enumerate(ours)), dict(enumerate(peer)))
    assert (found["rested"], found["reason"], found["falsely"]) == (1, "a scoring worker became slow", 2)
    found = neighbours.compared("sampler", {0: a_run(1.0, sampler_1="broken") | {"scoring_slow": both}}, {0: peer[0]})
    assert (found["rested"], found["falsely"]) == (0, 0)


def test_only_rounds_with_both_runs_are_compared(neighbours: Any) -> None:
    found = neighbours.compared("actor", {0: a_run(0.5), 1: a_run(0.9)}, {1: a_run(1.0), 2: a_run(9.0)})
    assert (found["runs"], found["ratio"], found["peer"]) == (1, pytest.approx(0.9), 1.0)
    assert neighbours.compared("actor", {0: a_run(0.5)}, {1: a_run(1.0)}) == {}


@pytest.fixture
def clock(neighbours: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Runs of `took_s` seconds each on a clock of their own; the limits that they were given, and who fails."""
    at = SimpleNamespace(now_s=0.0, took_s=40.0, limits=[], fails={})

    def measured(work: Any, skipped: int, folder: Path, seed: int, deadline_s: float) -> dict[str, Any]:
        at.limits.append(deadline_s)
        at.now_s += min(at.took_s, deadline_s)
        if at.took_s > deadline_s:
            raise subprocess.TimeoutExpired("jaxroll", deadline_s)
        if (error := at.fails.get(len(at.limits))) is not None:
            raise error
        return a_run(1.0)

    monkeypatch.setattr(neighbours, "measured", measured)
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: at.now_s)
    return at


def runs_of(neighbours: Any, folder: Path, until_s: float, deadline_s: float = 90.0) -> Any:
    works = {arm: neighbours.workload(*arm, 60) for arm in neighbours.order(("sampler",), neighbours.FAULTS)}
    runs = neighbours.Runs("neighbours", {}, folder / "runs.jsonl", resume=False)
    return neighbours.raced(works, 30, folder, runs, 3, until_s, deadline_s)


def test_the_benchmark_ends_at_its_time_and_keeps_what_it_has(
    neighbours: Any, clock: SimpleNamespace, tmp_path: Path
) -> None:
    made, failed = runs_of(neighbours, tmp_path, until_s=230.0)
    assert clock.now_s == 200.0, "the next run would last longer"
    assert {arm: list(runs) for arm, runs in made.items()} == {
        "sampler at_once": [0], "sampler alone": [0], "sampler late": [0], "sampler slow": [0, 1],
    }  # fmt: skip
    assert failed == []


def test_a_run_that_hangs_or_fails_is_named_and_the_others_go_on(
    neighbours: Any, clock: SimpleNamespace, tmp_path: Path
) -> None:
    clock.fails = {2: RuntimeError("jaxroll train ended with 1"), 5: subprocess.TimeoutExpired("jaxroll", 90.0)}
    made, failed = runs_of(neighbours, tmp_path, until_s=1e9)
    assert [(run["run"], run["round"], run["error"]) for run in failed] == [
        ("sampler alone", 0, "jaxroll train ended with 1"), ("sampler slow", 1, "longer than 90 s"),
    ]  # fmt: skip
    assert sum(map(len, made.values())) == 12 - 2 and set(clock.limits) == {90.0}


def test_no_run_lasts_beyond_the_end(neighbours: Any, clock: SimpleNamespace, tmp_path: Path) -> None:
    clock.took_s = 1e6
    made, failed = runs_of(neighbours, tmp_path, until_s=100.0)
    assert clock.now_s <= 100.0 and clock.limits == [90.0, 10.0][: len(clock.limits)]
    assert not any(made.values()) and failed


@pytest.mark.parametrize(
    ("fault", "slept", "ends"),
    [("", [1.0] * 3, 0), ("slow", [1.0, 10.0, 10.0], 0), ("at_once", [1.0, 0, 0], 2), ("late", [1.0, 1, 1], 2)],
)
def test_all_scoring_workers_of_a_process_but_one_have_the_fault(
    fault: str, slept: list[float], ends: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sound one keeps the file's lock; a second one and its successor, here other open files, have the fault."""
    envs = importlib.import_module("benchmarks.schedules.envs")
    (sound := tmp_path / "sound").touch()
    found: list[float] = []
    monkeypatch.setattr(envs.time, "sleep", found.append)

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(envs.os, "_exit", ended)
    monkeypatch.setattr(envs, "_locks", envs._locks.__wrapped__)  # it would remember the first worker's answer
    args, exits = {"seconds": 1.0, "fault": fault, "sound": str(sound)}, 0
    for _ in range(3):
        try:
            assert envs.raced(args, "abc") == 1.0
        except SystemExit:
            exits += 1
    assert (found, exits) == (slept, ends)
