"""The rate of whole runs with a bad sampler, actor or scoring worker, over that of the healthy ones alone.

    python -m benchmarks.faults.neighbours [--role=NAME ...] [--fault=NAME ...] [--rounds=2] [--minutes=12]
                                           [--deadline=120] [--quick] [--resume]

Each run is `jaxroll train` with the smallest model and α = 2. Alone are two healthy samplers or actors, each with one
scoring worker. The bad sampler or actor is a third one. It

    at_once  fails in every reset of its environment
    late     fails after the latency of a step
    slow     takes ten times as long

The bad scoring worker is a second one of each sampler, and every process that replaces it. It ends at each answer, ends
after a second of it, or takes ten times as long.

Members wait and do not compute: a step of the environment sleeps N(0.75 s, 0.2 s). So the number of members in progress
limits the rate, and not the cores, which a third process shares. The runs of a round alternate, in reversed order in
every second round; the one without a bad neighbor is in their middle. A run that takes longer than --deadline seconds
is ended, and so is the benchmark after --minutes: it names the runs that failed, and the cases without a run.

Steps per second are those of the steady state: the first steps, with the first failures, do not count. The last line is
one JSON object: {ROLE_FAULT: {"ours", "peer", "ratio", "low", "high", "runs", "dead", "rested", "reason",
"worker_restarts", "falsely"}, …}, where `peer` is the rate of the healthy ones alone, `dead` the number of groups that
ended DEAD in all runs with the bad one, `rested` the number of those at whose end `jaxroll inspect` reports the bad
one, and no other: a sampler or actor as resting or on trial, for the `reason`, and a scoring worker of each sampler as
slow. `falsely` is the number of runs of healthy ones alone with any such report, and `worker_restarts` that of
restarted scoring workers.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Runs, arguments, finish, ratio, say
from benchmarks.schedules.envs import Race
from benchmarks.schedules.runs import SETTLING, Workload, trained

HEALTHY, MEMBERS = 2, 8  # members in progress in each sampler or actor
ROLES = ("sampler", "scorer", "actor")
FAULTS = ("at_once", "late", "slow")
PEERS = {"sampler": "sampler alone", "scorer": "sampler alone", "actor": "actor alone"}
STEPS, SKIPPED = 60, 30  # the first failures, the short rests and the first slow members are within about 12 s
QUICK_STEPS, QUICK_SKIPPED = 10, SETTLING
ROUNDS, MINUTES, DEADLINE_S = 2, 12.0, 120.0
LEAST_RATIO = 0.9  # of the rate without the bad one
LATENCY_S, SCORE_S = (0.75, 0.2), 0.02


def workload(role: str, fault: str, steps: int) -> Workload:
    """The run of healthy ones of `role`, and with a `fault` ('': none) a bad one."""
    count, workers = (HEALTHY, 1 + bool(fault)) if role == "scorer" else (HEALTHY + bool(fault), 1)
    members, settings = MEMBERS, {"sampler.count": count, "sampler.scoring_workers": workers}
    if role == "actor":
        members, settings = MEMBERS * count, {"placement.actors": count}
    small = {
        "schedule.groups_per_step": 2, "schedule.group_size": 4, "model.size": "nano", "sft.steps": 0,
        "learner.learning_rate": 1e-6, "sampler.slots": members, "sampler.concurrent_episodes": members,
    }  # fmt: skip
    neighbour, worker = ("", fault) if role == "scorer" else (fault, "")
    race = Race(LATENCY_S, neighbour=neighbour, score_s=SCORE_S, worker=worker)
    env = "benchmarks.schedules.envs:lottery"
    return Workload("neighbours", steps, 8, env=env, race=race, settings=small | settings)


def measured(work: Workload, skipped: int, folder: Path, seed: int, deadline_s: float) -> dict[str, Any]:
    """One run: steps per second after the first `skipped`, dead groups, and the holders that rest at the end."""
    found = trained(work, folder, 2.0, seed, 1, deadline_s)
    late_s = found["step_s"][skipped - SETTLING :]
    return {
        "steps_per_s": len(late_s) / sum(late_s), "dead": found["lost"]["dead_groups"],
        "failures": found["lost"]["failures"], "backoff": found["backoff"], "scoring_slow": found["scoring_slow"],
        "cpu_s": sum(found["cpu_s"].values()), "seconds": found["seconds"],
        "worker_restarts": found["scoring_restarts"],
    }  # fmt: skip


def order(roles: tuple[str, ...], faults: tuple[str, ...]) -> list[tuple[str, str]]:
    """The arms of a round, as role and fault. The peer ('': no fault) is in the middle of the arms that it has."""
    arms: list[tuple[str, str]] = []
    for peer in dict.fromkeys(PEERS[role] for role in roles):
        mine = [(role, fault) for role in roles if PEERS[role] == peer for fault in faults]
        arms += [*mine[: len(mine) // 2], (peer.partition(" ")[0], ""), *mine[len(mine) // 2 :]]
    return arms


def name(role: str, fault: str) -> str:
    """The name of an arm."""
    return f"{role} {fault or 'alone'}"


def raced(
    works: Mapping[tuple[str, str], Workload],
    skipped: int,
    folder: Path,
    runs: Runs,
    rounds: int,
    until_s: float,
    deadline_s: float,
) -> tuple[dict[str, dict[int, dict[str, Any]]], list[dict[str, Any]]]:
    """The runs by arm and round, and those that failed; those of a round have the same seed.

    No run lasts beyond `until_s` (monotonic), and none begins that would if it took as long as the longest one before.
    """
    next(iter(works.values())).questions(folder / "neighbours.jsonl")
    made: dict[str, dict[int, dict[str, Any]]] = {name(*arm): {} for arm in works}
    failed, longest_s = [], 0.0
    for number in range(rounds):
        for arm in list(works)[:: 1 if number % 2 == 0 else -1]:
            started_s = time.monotonic()
            left_s = until_s - started_s
            if left_s < max(longest_s, 5.0):
                say(f"{name(*arm)}, round {number}: {left_s:.0f} s are left; not run")
                continue
            limit_s = min(deadline_s, left_s)
            run = lambda work=works[arm], seed=number, limit=limit_s: measured(work, skipped, folder, seed, limit)  # noqa: E731
            say(f"{name(*arm)}, round {number}: starts, {left_s:.0f} s are left")
            try:
                made[name(*arm)][number] = runs.run(name(*arm), number, run)
                longest_s = max(longest_s, time.monotonic() - started_s)
            except (RuntimeError, subprocess.SubprocessError) as error:
                reason = f"longer than {limit_s:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
                failed.append({"run": name(*arm), "round": number, "error": reason[-1000:]})
                say(f"{name(*arm)}, round {number}: FAILED, {reason}")
    return made, failed


def reasons(role: str, runs: list[dict[str, Any]]) -> list[str]:
    """The reason that `jaxroll inspect` gives, for each run in which it reports the bad neighbor and no other."""
    if role == "scorer":
        samplers = {f"sampler-{index}" for index in range(HEALTHY)}
        named = [run for run in runs if set(run["scoring_slow"]) == samplers and not run["backoff"]]
        return ["a scoring worker became slow" for _ in named]
    bad = f"{role}-1"
    alone = [run for run in runs if set(run["backoff"]) == {bad} and not run["scoring_slow"]]
    return [run["backoff"][bad]["error"] for run in alone]


def compared(role: str, ours: Mapping[int, dict[str, Any]], peer: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The result of one bad neighbor from its runs and those without it, by round; {} if no round has both."""
    both = [number for number in ours if number in peer]
    if not both:
        return {}
    rates = [[runs[number]["steps_per_s"] for number in both] for runs in (ours, peer)]
    found, mine = ratio(rates[0], rates[1]), [ours[number] for number in both]
    named = reasons(role, mine)
    return {
        "ours": statistics.median(rates[0]), "peer": statistics.median(rates[1]), "ratio": found["value"],
        "low": found["low"], "high": found["high"], "runs": len(mine), "dead": sum(run["dead"] for run in mine),
        "failures": [run["failures"] for run in mine], "rested": len(named), "reason": next(iter(named), ""),
        "falsely": sum(bool(peer[number]["backoff"] or peer[number]["scoring_slow"]) for number in both),
        "worker_restarts": sum(run["worker_restarts"] for run in mine),
        "cpu_share": [round(run["cpu_s"] / run["seconds"], 2) for run in mine],
    }  # fmt: skip


def main() -> int:
    """Measure. The exit code is 1 if a case has no run, or (not with --quick) less than `LEAST_RATIO` of the rate."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--role", action="append", choices=ROLES, help="this one; again for more (default: all)")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="this one; again for more (default: all)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="all runs end within this time")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds after which a run is ended")
    chosen, started = parser.parse_args(), time.monotonic()
    steps, skipped = (QUICK_STEPS, QUICK_SKIPPED) if chosen.quick else (STEPS, SKIPPED)
    roles = tuple(chosen.role or (ROLES[:1] if chosen.quick else ROLES))
    faults = tuple(chosen.fault or (FAULTS[:1] if chosen.quick else FAULTS))
    works = {arm: workload(*arm, steps) for arm in order(roles, faults)}
    runs = Runs(
        "neighbours", {name(*arm): asdict(work) for arm, work in works.items()}, chosen.runs_file, chosen.resume
    )
    with tempfile.TemporaryDirectory(prefix="neighbours-", ignore_cleanup_errors=True) as folder:
        rounds, until_s = chosen.rounds or (1 if chosen.quick else ROUNDS), started + 60 * chosen.minutes
        made, failed = raced(works, skipped, Path(folder), runs, rounds, until_s, chosen.deadline)
    arms = [arm for arm in works if arm[1]]
    cases = {"_".join(arm): compared(arm[0], made[name(*arm)], made[PEERS[arm[0]]]) for arm in arms}
    result = {case: found for case, found in cases.items() if found}
    missing = [case for case, found in cases.items() if not found]
    slow = [case for case, found in result.items() if found["ratio"] < LEAST_RATIO]
    facts = {"class": "R", "failed_runs": failed, "cases_without_runs": missing, "slow_cases": slow}
    finish(result | facts, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return 1 if missing or (slow and not chosen.quick) else 0


if __name__ == "__main__":
    sys.exit(main())
