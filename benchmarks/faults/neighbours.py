"""The rate of whole runs with a bad sampler or actor, over that of the healthy ones alone.

    python -m benchmarks.faults.neighbours [--role=NAME ...] [--fault=NAME ...] [--rounds=3] [--quick] [--resume]

Each run is `jaxroll train` with the smallest model, α = 2 and two healthy samplers or actors; with the bad one it has a
third. The bad one

    at_once  fails in every reset of its environment
    late     fails after the latency of a step
    slow     takes ten times as long

Members wait and do not compute: a step of the environment sleeps N(1.5 s, 0.4 s). So the number of members in progress
limits the rate, and not the cores, which a third process shares. Runs with each bad one and runs without it alternate
in each round, in reversed order in every second one.

Steps per second are those of the steady state: the first steps, with the first failures, do not count. The last line is
one JSON object: {ROLE_FAULT: {"ours", "peer", "ratio", "low", "high", "runs", "dead", "rested", "reason"}, …}, where
`peer` is the rate of the healthy ones alone, `dead` the number of groups that ended DEAD in all runs with the bad one,
and `rested` the number of those at whose end `jaxroll inspect` reports the bad one, and no other, as resting or on
trial, for the `reason`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Runs, arguments, finish, ratio
from benchmarks.schedules.envs import Race
from benchmarks.schedules.runs import SETTLING, Workload, trained

HEALTHY, MEMBERS = 2, 12  # members in progress in each sampler or actor
ROLES = ("sampler", "actor")
FAULTS = ("at_once", "late", "slow")
STEPS, SKIPPED = 60, 20  # the first failures, and the short rests, are within about 20 s
QUICK_STEPS, QUICK_SKIPPED = 12, SETTLING
ROUNDS = 3
LATENCY_S = (1.5, 0.4)


def workload(role: str, fault: str, steps: int) -> Workload:
    """The run of healthy ones of `role`, and with a `fault` ('': none) a bad one."""
    count = HEALTHY + bool(fault)
    members, settings = MEMBERS, {"sampler.count": count}
    if role == "actor":
        members, settings = MEMBERS * count, {"placement.actors": count}
    small = {
        "schedule.groups_per_step": 4, "schedule.group_size": 4, "model.size": "nano", "sft.steps": 5,
        "learner.learning_rate": 1e-6, "sampler.slots": members, "sampler.concurrent_episodes": members,
    }  # fmt: skip
    race, env = Race(LATENCY_S, neighbour=fault), "benchmarks.schedules.envs:lottery"
    return Workload("neighbours", steps, 8, env=env, race=race, settings=small | settings)


def measured(work: Workload, skipped: int, folder: Path, seed: int) -> dict[str, Any]:
    """One run: steps per second after the first `skipped`, dead groups, and the holders that rest at the end."""
    found = trained(work, folder, 2.0, seed, 1)
    late_s = found["step_s"][skipped - SETTLING :]
    return {
        "steps_per_s": len(late_s) / sum(late_s), "dead": found["lost"]["dead_groups"],
        "failures": found["lost"]["failures"], "backoff": found["backoff"], "cpu_s": sum(found["cpu_s"].values()),
        "seconds": found["seconds"],
    }  # fmt: skip


def raced(
    role: str, works: dict[str, Workload], skipped: int, folder: Path, runs: Runs, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """The runs by fault; those of a round have the same seed."""
    folder.mkdir()
    works[""].questions(folder / f"{works[''].name}.jsonl")
    made: dict[str, list[dict[str, Any]]] = {fault: [] for fault in works}
    for number in range(rounds):
        for fault in list(works)[:: 1 if number % 2 == 0 else -1]:
            run = lambda work=works[fault], seed=number: measured(work, skipped, folder, seed)  # noqa: E731
            made[fault].append(runs.run(f"{role} {fault or 'alone'}", number, run))
    return made


def compared(role: str, ours: list[dict[str, Any]], peer: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of one bad neighbour from its runs and those without it."""
    rates = [[run["steps_per_s"] for run in runs] for runs in (ours, peer)]
    found, bad = ratio(rates[0], rates[1]), f"{role}-1"
    reasons = [run["backoff"][bad]["error"] for run in ours if set(run["backoff"]) == {bad}]
    return {
        "ours": statistics.median(rates[0]), "peer": statistics.median(rates[1]), "ratio": found["value"],
        "low": found["low"], "high": found["high"], "runs": len(ours), "dead": sum(run["dead"] for run in ours),
        "failures": [run["failures"] for run in ours], "rested": len(reasons), "reason": next(iter(reasons), ""),
        "cpu_share": [round(run["cpu_s"] / run["seconds"], 2) for run in ours],
    }  # fmt: skip


def main() -> int:
    """Measure."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--role", action="append", choices=ROLES, help="this one; again for more (default: all)")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="this one; again for more (default: all)")
    chosen, started = parser.parse_args(), time.monotonic()
    steps, skipped = (QUICK_STEPS, QUICK_SKIPPED) if chosen.quick else (STEPS, SKIPPED)
    roles, faults = chosen.role or (ROLES[:1] if chosen.quick else ROLES), chosen.fault or FAULTS
    rounds, result = chosen.rounds or (1 if chosen.quick else ROUNDS), {}
    with tempfile.TemporaryDirectory(prefix="neighbours-") as name:
        for role in roles:
            works = {fault: workload(role, fault, steps) for fault in ("", *faults)}
            settings = {fault: asdict(work) for fault, work in works.items()}
            runs = Runs("neighbours", settings, chosen.runs_file, chosen.resume)
            made = raced(role, works, skipped, Path(name) / role, runs, rounds)
            result |= {f"{role}_{fault}": compared(role, made[fault], made[""]) for fault in faults}
    command = " ".join(["python", *sys.orig_argv[1:]])
    finish(result | {"class": "R"}, command=command, started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
