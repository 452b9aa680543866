"""Costs and workload of a cluster, measured in the records of a run (`jaxroll sim calibrate RUN`).

Nothing is fitted to step times or rates. The engine: a decode step takes the median inter-token latency, and an
admission the median of what a generation took beyond its decode steps. The learner: least squares of the step's time
over its micro-batches. Transfers: medians of their spans. The workload: recorded answers and environment times.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxroll.errors import ConfigError
from jaxroll.report.figures import record
from jaxroll.run_paths import RunPaths
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, SamplerCosts, TransferCosts, Workload

VALUES = 1000  # recorded values kept for a law, as quantiles
SETTLING = 3  # steps that compile or wait for the first weights

Row = Mapping[str, Any]


def calibrated(run_dir: Path) -> Cluster:
    """The cluster on which the run in `run_dir` was recorded. ConfigError if it has too few records."""
    run = record.load(run_dir)
    samplers = [row for row in run.rows if str(row.get("role")).startswith("sampler")]
    steps = [row for row in run.rows if row.get("kind") == "step"][SETTLING:]
    generations = [tuple(each) for row in samplers if row.get("kind") == "members" for each in row["rows"]]
    latencies = [row["itl_p50_s"] for row in samplers if row.get("itl_p50_s")]
    if not (steps and generations and latencies):
        raise ConfigError("RUN", str(run_dir), "has too few steps or generations to measure costs",
                          "Calibrate on a run of ten steps or more.")  # fmt: skip
    chunk = int(run.config["sampler"].get("decode_chunk", 1))
    step_s = statistics.median(latencies)
    beyond_s = [t1 - t0 - math.ceil((tokens - 1) / chunk) * chunk * step_s for _, _, t0, t1, tokens in generations]
    learner = learner_costs([row.get("micro_batches", 1) for row in steps], [row["train_s"] for row in steps])
    return Cluster(
        source=f"measured in the run {run.name}, commit {run.about.get('commit', '')[:12] or 'unknown'}",
        sampler=SamplerCosts(
            step_overhead_s=step_s, prefill_overhead_s=max(0.0, statistics.median(beyond_s)),
            swap_s=min(_spans(samplers, "weight_swap"), default=0.0),
        ),
        learner=learner,
        transfer=TransferCosts(
            publish_s=statistics.median(row["publish_s"] for row in steps),
            latency_s=statistics.median(_spans(samplers, "fetch") or [0.0]),
        ),
        workload=workload(run_dir, run.rows),
    )  # fmt: skip


def learner_costs(micro_batches: Sequence[int], seconds: Sequence[float]) -> LearnerCosts:
    """Overhead and time per micro-batch by least squares; the median as overhead where the numbers do not differ."""
    if len(set(micro_batches)) > 1:
        slope, start = np.polyfit(micro_batches, seconds, 1)
        if slope >= 0 and start >= 0:
            return LearnerCosts(step_overhead_s=float(start), micro_batch_overhead_s=float(slope))
    return LearnerCosts(step_overhead_s=statistics.median(seconds))


def workload(run_dir: Path, rows: Iterable[Row]) -> Workload:
    """Answers and environment times as recorded: a member's time from its first generation to its end, without its
    generations. The wait for a slot before that is left out, because the simulation has its own.
    """
    started: dict[tuple[int, int], float] = {}
    generated: dict[tuple[int, int], float] = {}
    counts: dict[tuple[int, int], int] = {}
    tokens: list[float] = []
    rewards: list[float] = []
    for row in rows:
        if row.get("kind") == "step" and row.get("reward_mean") is not None:
            rewards.append(row["reward_mean"])
        for group, member, t0, t1, count in row["rows"] if row.get("kind") == "members" else ():
            started[group, member] = min(t0, started.get((group, member), t0))
            generated[group, member] = generated.get((group, member), 0.0) + t1 - t0
            counts[group, member] = counts.get((group, member), 0) + 1
            tokens.append(count)
    waits = []
    select = "SELECT group_id, member, ended_unix_s FROM members WHERE state = 'done'"
    with contextlib.closing(sqlite3.connect(f"file:{RunPaths(run_dir).database}?mode=ro", uri=True)) as db:
        for group, member, ended_s in db.execute(select):
            if ended_s is not None and (key := (group, member)) in started:
                waits.append(max(0.0, ended_s - started[key] - generated[key]) / counts[key])
    return Workload(
        answer_tokens=recorded(tokens), env_s=recorded(waits), turns=recorded(list(map(float, counts.values()))),
        rewarded=min(1.0, max(0.0, statistics.fmean(rewards))) if rewards else 0.5,
    )  # fmt: skip


def recorded(values: Sequence[float]) -> Law:
    """The law of recorded values, of at most `VALUES` quantiles; a constant where they are equal."""
    if len(set(values)) <= 1:
        return Law(mean=values[0] if values else 0.0)
    kept = values if len(values) <= VALUES else np.quantile(values, (np.arange(VALUES) + 0.5) / VALUES)
    return Law("recorded", mean=float(np.mean(values)), values=tuple(round(float(value), 6) for value in kept))


def _spans(rows: Iterable[Row], what: str) -> list[float]:
    """Seconds of the spans of this name."""
    return [row["t1"] - row["t0"] for row in rows if row.get("kind") == "span" and row.get("what") == what]
