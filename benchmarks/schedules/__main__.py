"""The gain from asynchrony: whole runs of the same work at α = 0 and at α = 1, 2, 4, on the same two cores.

    python -m benchmarks.schedules [--quick] [--workload=NAME ...] [--alpha=A ...] [--mechanism=NAME ...] [--resume]

Every run is `jaxroll train` as a user starts it, with at most a minute of training, from a warm start that depends only
on the seed. Each run is appended to a file when it ends, and --resume continues from that file. Each arm uses its
fastest settings in trials: if steps compute, slots for all environments or for half of them, so that the next episode
has begun when a slot is free; for the synchronous arm also one or both cores for the active role
(`placement.cpu_threads=2`), and roles in one process or in separate ones. Both arms have the same number of
environments, which never wait for each other within a step.

    rlvr_long_tail   strings to copy, their lengths log-normal (σ = 1), at most eight medians
    constant         strings of one length: overlap is the only gain, and proposition 2 gives its size; evaluated
                     before the first step and after the last, because an evaluation takes a core from a stage
    constant_watched  the same with an evaluation every five steps, for the time to an accuracy
    agentic_latency  a judge that takes N(μ, σ) seconds, cut at 0; σ = 0, μ/2, μ. Here and in constant the model can
                     learn: in the warm start three answers in four are in capitals, which get no reward
    no_training      all rewards are 0, so no gradient is computed and there is nothing to gain
    tail_alone       the same with the lengths of rlvr_long_tail: the effect of the long tail without overlap

Samples per second are measured over the steps after the first four. The ceiling of a workload follows from the times of
the stages alone and at the same time; see `ceiling`. Then follows one row per mechanism
(`benchmarks/schedules/mechanisms.py`): the rate with it over the rate without it, where it should help and where it
cannot. The races are printed as a table; the last line is one JSON object:
{WORKLOAD: {α: {"ratio", "low", "high", …}}, MECHANISM: {"ratio", "low", "high", "null": {…}, …}}.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.figures import Panel, Value, write
from benchmarks.lib.report import Runs, arguments, finish, ratio, say
from benchmarks.schedules.envs import Race
from benchmarks.schedules.mechanisms import MECHANISMS, switched
from benchmarks.schedules.runs import ENVIRONMENTS, Workload, learned, trained

ALPHAS = (1.0, 2.0, 4.0)
SEEDS = 5
_SLOTS = tuple({"sampler.slots": count} for count in (ENVIRONMENTS // 2, ENVIRONMENTS))
TRIAL_STEPS, TRIAL_SEED, TRIAL_ALPHA = 60, 100, 2.0
_CONSTANT = Workload(
    "constant",
    60,
    48,
    evaluations=1,
    target=0.9,
    capitals=0.75,
    settings={"learner.learning_rate": 2e-5, "task.heldout_items": 64},
    choices=_SLOTS,
)
WORKLOADS = [
    Workload("rlvr_long_tail", 240, 8, sigma=1.0, most=64, evaluations=12, target=0.28, choices=_SLOTS),
    _CONSTANT,
    replace(_CONSTANT, name="constant_watched", evaluations=12),
    *(Workload(f"agentic_latency_{name}", 16, 8, race=Race(latency_s=(1.0, deviation)),
               env="benchmarks.schedules.envs:waiting",
               evaluations=16, target=0.8, capitals=0.75, settings={"learner.learning_rate": 2e-4})
      for name, deviation in (("0", 0.0), ("half", 0.5), ("one", 1.0))),
    Workload("no_training", 100, 48, env="benchmarks.schedules.envs:pays_nothing"),
    Workload(
        "tail_alone", 200, 8, sigma=1.0, most=64, env="benchmarks.schedules.envs:pays_nothing", choices=_SLOTS
    ),
]  # fmt: skip


def ceiling(sync: list[dict[str, Any]], ahead: list[dict[str, Any]]) -> float:
    """The largest gain from overlap alone: a synchronous step over the longer stage while both run.

    A synchronous step takes generation plus training. At the same time both are slower (they share memory and cores),
    and a step takes as long as the longer one: ROLL Flash's proposition 2 with the measured stage times.
    """
    mean = lambda runs, key: statistics.mean(run[key] for run in runs)  # noqa: E731
    return (mean(sync, "wait_s") + mean(sync, "train_s")) / max(mean(ahead, "decode_s"), mean(ahead, "train_s"))


def compared(
    sync: list[dict[str, Any]], ahead: list[dict[str, Any]], *, computes: bool = True, target: float = 0.0
) -> dict[str, Any]:
    """The ratio of rates, paired by seed, and what belongs to it; a ceiling where a step only `computes`."""
    found = ratio([run["samples_per_s"] for run in ahead], [run["samples_per_s"] for run in sync])
    result = {
        "ratio": found["value"],
        "low": found["low"],
        "high": found["high"],
        "runs": len(sync),
        "samples_per_s": statistics.median(run["samples_per_s"] for run in ahead),
        "sync_samples_per_s": statistics.median(run["samples_per_s"] for run in sync),
        **({"ceiling": ceiling(sync, ahead)} if computes else {}),
        "age_mean": statistics.mean(run["age_mean"] for run in ahead),
        "age_max": max(run["age_max"] for run in ahead),
        **{
            f"{key}": [statistics.mean(run[key] for run in runs) for runs in (sync, ahead)]
            for key in ("wait_s", "train_s", "decode_s", "decode_tokens_per_s")
        },
    }
    return result | (learned(sync, ahead, target) if sync[0]["accuracy"] else {})


@dataclass(frozen=True)
class Arm:
    """Settings of one arm: threads per role, and settings in addition to the common ones."""

    threads: int
    settings: dict[str, Any]

    def of(self, workload: Workload) -> Workload:
        """`workload` with this arm's settings."""
        return replace(workload, settings=workload.settings | self.settings)


def arms_of(workload: Workload, alpha: float) -> list[Arm]:
    """The settings on trial for the synchronous arm (α = 0), or for the other one."""
    if alpha:
        return [Arm(1, choice) for choice in workload.choices]
    counts = range(1, min(2, os.cpu_count() or 1) + 1)
    together = {"placement.colocated": True}
    found = [Arm(count, choice) for choice in workload.choices for count in counts]
    return found + [Arm(counts[-1], choice | together) for choice in workload.choices]


def fastest(workload: Workload, folder: Path, alpha: float, runs: Runs) -> Arm:
    """The arm of `arms_of` with the fastest short run, evaluated as often; a single one is not tried."""
    tried = arms_of(workload, alpha)
    if len(tried) == 1:
        return tried[0]
    steps = min(workload.steps, TRIAL_STEPS)
    short = replace(workload, steps=steps, evaluations=workload.evaluations * steps // workload.steps)
    rates = []
    for number, arm in enumerate(tried):
        name = f"{workload.name} α={alpha:g}, trial {number}: {arm.threads} threads, {arm.settings}"
        run = runs.run(name, 0, lambda a=arm: trained(a.of(short), folder, alpha, TRIAL_SEED, a.threads))
        rates.append(run["samples_per_s"])
    return tried[int(np.argmax(rates))]


def raced(workload: Workload, folder: Path, runs: Runs, alphas: list[float], seeds: int) -> dict[str, Any]:
    """A workload's results by α, and the chosen `arms`."""
    workload.questions(folder / f"{workload.name}.jsonl")
    arms = {alpha: fastest(workload, folder, alpha, runs) for alpha in (0.0, TRIAL_ALPHA)}
    made: dict[float, list[dict[str, Any]]] = {alpha: [] for alpha in (0.0, *alphas)}
    for seed in range(seeds):
        for alpha in list(made)[:: 1 if seed % 2 == 0 else -1]:
            arm = arms[0.0] if alpha == 0 else arms[TRIAL_ALPHA]
            run = lambda a=alpha, s=seed, of=arm: trained(of.of(workload), folder, a, s, of.threads)  # noqa: E731
            made[alpha].append(runs.run(f"{workload.name} α={alpha:g}", seed, run))
    computes = not workload.race.latency_s[0]
    table = {
        f"{alpha:g}": compared(made[0.0], made[alpha], computes=computes, target=workload.target) for alpha in alphas
    }
    return {"arms": {name: asdict(arm) for name, arm in zip(("sync", "async"), arms.values(), strict=True)}, **table}


def races_in(result: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Workload → α → results, without the other entries."""
    return {
        name: {alpha: of for alpha, of in by.items() if alpha != "arms"}
        for name, by in result.items()
        if name not in MECHANISMS
    }


def table_of(result: dict[str, Any]) -> str:
    """The races as a Markdown table, one line per workload and α."""
    lines = [
        "| workload | α | samples/s synchronous → asynchronous | ratio (95 %) | of the ceiling | time to target | "
        "final accuracy, apart by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, by in races_in(result).items():
        for alpha, of in by.items():
            share = f"{100 * of['ratio'] / of['ceiling']:.1f} % of {of['ceiling']:.2f}" if "ceiling" in of else ""
            sooner = f"{of['time_to_target']['value']:.2f}" if of.get("time_to_target") else ""
            apart = (
                f"{100 * of['accuracy_apart']:+.1f} ± {100 * of['accuracy_apart_half_width']:.1f} points"
                if "accuracy_apart" in of
                else ""
            )
            rates = f"{of['sync_samples_per_s']:.3g} → {of['samples_per_s']:.3g}"
            found = f"{of['ratio']:.2f} ({of['low']:.2f} to {of['high']:.2f})"
            lines.append(f"| `{name}` | {alpha} | {rates} | {found} | {share} | {sooner} | {apart} |")
    return "\n".join(lines)


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw the ratios: by workload and α, and of each mechanism where it helps and where it cannot."""
    races = {name: {f"α = {alpha}": of for alpha, of in by.items()} for name, by in races_in(result).items()}
    bounded = {name: {kind: of for kind, of in by.items() if "ceiling" in of} for name, by in races.items()}
    switches = {
        name: {"where it helps": by, "where it cannot": by.get("null")}
        for name, by in result.items()
        if name in MECHANISMS
    }

    def panel(title: str, rows: dict[str, dict[str, Any]], value: Callable[[dict[str, Any]], Value]) -> Panel:
        return Panel(
            title, {name: {kind: value(of) for kind, of in row.items() if of} for name, row in rows.items()}, 1.0
        )

    ratio_of = lambda of: Value(of["ratio"], of["low"], of["high"])  # noqa: E731
    panels = [
        panel("samples/s over the synchronous arm's (95 %)", races, ratio_of),
        panel("the same over the ceiling of overlap alone", bounded, lambda of: Value(of["ratio"] / of["ceiling"])),
        panel("rate with over rate without (95 %)", switches, ratio_of),
    ]
    write(path, panels, list(dict.fromkeys(kind for by in (races | switches).values() for kind in by)))


def main() -> int:
    """Measure."""
    names = [workload.name for workload in WORKLOADS]
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--workload", action="append", choices=names, help="this one; again for more (default: all)")
    parser.add_argument("--mechanism", action="append", choices=list(MECHANISMS), help="one row; repeat for more")
    parser.add_argument("--alpha", action="append", type=float, help=f"again for more (default: {ALPHAS})")
    parser.add_argument("--seeds", type=int, default=0, help=f"runs of each (default: {SEEDS})")
    chosen, started = parser.parse_args(), time.monotonic()
    seeds = chosen.seeds or chosen.rounds or (1 if chosen.quick else SEEDS)
    alphas = chosen.alpha or ([1.0] if chosen.quick else list(ALPHAS))
    wanted = chosen.workload or ([] if chosen.mechanism else ["constant"] if chosen.quick else names)
    rows = chosen.mechanism or ([] if chosen.workload or chosen.quick else list(MECHANISMS))
    result: dict[str, Any] = {}
    file = chosen.runs_file
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        for workload in (workload for workload in WORKLOADS if workload.name in wanted):
            if chosen.quick:
                workload = replace(workload, steps=8, evaluations=0)
            runs = Runs("sync_vs_async", asdict(workload), chosen.runs_file, chosen.resume)
            file = file or runs.path
            result[workload.name] = raced(workload, Path(folder), runs, alphas, seeds)
            say(json.dumps(result[workload.name]))
        for name in rows:
            runs = Runs("sync_vs_async", MECHANISMS[name].settings(), chosen.runs_file, chosen.resume)
            file = file or runs.path
            result[name] = switched(MECHANISMS[name], Path(folder), runs, seeds)
            say(f"{name}: {json.dumps(result[name])}")
    draw(file.with_suffix(".svg"), result)
    print(table_of(result))
    command = " ".join(["python", *sys.orig_argv[1:]])
    finish(result | {"class": "R"}, command=command, started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
