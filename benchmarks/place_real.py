"""The planner's pick against the measured best of all placements of two processor cores, for two real workloads.

    python -m benchmarks.place_real [--quick] [--rounds=N] [--workload=NAME ...] [--keep=FOLDER]

The objective is the price of a trained token, and each core has the same price, so that both placements below can win.

    waits    a judge that takes N(2 s, 1 s), short answers, small batches: processes of their own with an age bound hide
             the judge
    trains   answers are judged at once and batches are four times as large: one process for all roles leaves no core
             idle

A placement is one of `shared` (one process on one core, α = 0), `sync`, `one_step` and `bounded` with α = 2 (a learner
and a sampler with a core each). For each workload the planner gets costs that are measured in one run of `sync` with
another seed, and nothing else. Then all placements are run in alternating rounds. `gap` is how much more a token costs
with the pick than with the measured best (aim: 0.05), `gap_of_rounds` the same for each round, `error` that of the
predicted price. `differ` says whether the measured bests of the workloads differ: if not, the comparison shows nothing.

Class R; both cores should be free. The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks import simulator
from benchmarks.lib.report import arguments, finish, say, spread
from benchmarks.schedules.envs import Race
from benchmarks.schedules.runs import Workload
from benchmarks.simulator import Case, Recorded, Run
from jaxroll.sim import costs, place, simulate
from jaxroll.sim.costs import DeviceType, Hardware, Space

AIM, CALIBRATION_SEED = 0.05, 100
SCHEDULES = ("shared", "sync", "one_step", "bounded")
_SETTINGS = {"learner.learning_rate": 1e-6, "sft.steps": 40, "sampler.concurrent_episodes": 0}
WORKLOADS = {
    "waits": Workload("waits", 30, 8, env=simulator.LOTTERY, race=Race((2.0, 1.0)), settings=_SETTINGS),
    "trains": Workload(
        "trains", 30, 8, env=simulator.LOTTERY, settings=_SETTINGS | {"schedule.groups_per_step": 32}
    ),
}  # fmt: skip


def hardware(cluster: costs.Cluster) -> Hardware:
    """Two cores of equal price with the costs of a calibrated cluster, for one core a role."""
    measured = {each.name: getattr(cluster, each.name) for each in fields(cluster)}
    search = Space(SCHEDULES, (2.0,), (1,), (1,))
    return Hardware(**measured, devices=(DeviceType("core", 2, 2, price_per_hour=1.0),), search=search)


def recorded_run(workload: Workload, label: str, seed: int, changes: list[str], folder: Path, steps: int) -> Recorded:
    """A run of the workload with these changes of its config, or the one that is in the folder already."""
    settings = workload.settings | dict(change.split("=", 1) for change in changes)
    run = Run(seed, 0.0)
    return simulator.recorded(Case(label, run, run, replace(workload, settings=settings)), run, folder, steps)


def price(found: simulate.Figures, cores: int) -> float:
    """Seconds of a core for a trained token."""
    return cores / found["tokens_per_s"]


def measured_placements(workload: Workload, folder: Path, steps: int, rounds: int, most: int) -> dict[str, Any]:
    """All placements of a workload: predicted and measured prices, the pick and its gap."""
    calibration = recorded_run(workload, f"{workload.name}-calibration", CALIBRATION_SEED, [], folder, steps)
    planner = place.Planner(calibration.config, hardware(costs.calibrated(calibration.run_dir)))
    ranked = place.ranked(planner, "cost")[:most]
    prices: dict[str, list[float]] = {one.schedule: [] for one, _ in ranked}
    loads: list[float] = list(calibration.loads)
    for number in range(rounds):
        for one, _ in ranked if number % 2 == 0 else reversed(ranked):
            changes = place.overrides(planner, one)
            run = recorded_run(workload, f"{workload.name}-{one.schedule}-{number}", number, changes, folder, steps)
            prices[one.schedule].append(price(run.figures, sum(one.used())))
            loads += run.loads
            say(f"{workload.name}, round {number}, {one.schedule}: {prices[one.schedule][-1] * 1e3:.3g} ms a token")
    return compared(
        {one.schedule: predicted.cost_per_million_tokens * 3600 / 1e6 for one, predicted in ranked}, prices
    ) | {"load": [min(loads), max(loads)]}  # fmt: skip


def compared(predicted: dict[str, float], prices: dict[str, list[float]]) -> dict[str, Any]:
    """The pick, the measured best and the gap between both. The first of `predicted` is the pick."""
    middle = {name: statistics.median(each) for name, each in prices.items()}
    pick, best = next(iter(predicted)), min(middle, key=lambda name: middle[name])
    every = list(zip(*prices.values(), strict=True))
    own = list(prices).index(pick)
    gap = middle[pick] / middle[best] - 1
    return {
        "pick": pick,
        "best": best,
        "gap": gap,
        "within_aim": gap <= AIM,
        "gap_of_rounds": [each[own] / min(each) - 1 for each in every],
        "rows": {
            name: {
                "predicted_s": predicted[name],
                "measured_s": spread(each),
                "error": predicted[name] / middle[name] - 1,
            }
            for name, each in prices.items()
        },
    }


def main() -> int:
    """Measure."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="one; repeatable (default: all)")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the runs, and from which they are taken again")
    chosen, started = parser.parse_args(), time.monotonic()
    rounds, most = (1, 2) if chosen.quick else (chosen.rounds or 3, len(SCHEDULES))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="place-real-") as temporary:
        folder = (chosen.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for name in chosen.workload or list(WORKLOADS)[: 1 if chosen.quick else None]:
            steps = 12 if chosen.quick else WORKLOADS[name].steps
            found[name] = measured_placements(WORKLOADS[name], folder, steps, rounds, most)
            say(json.dumps({name: found[name]}))
    result = {
        "class": {"measured_s": "R", "predicted_s": "S"},
        "rounds": rounds,
        "within_aim": all(row["within_aim"] for row in found.values()),
        "differ": len({row["best"] for row in found.values()}) > 1,
        "workloads": found,
    }
    finish(result, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
