"""Costs and workload of a cluster, measured in the records of a run (`jaxroll sim calibrate RUN`).

Nothing is fitted to step times or rates. The engine: least squares of its busy time over decode steps and prefills. The
learner: least squares of the step's time over its micro-batches. Transfers: medians of their spans. The workload:
recorded lengths, rewards and environment times.
"""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxroll import wire
from jaxroll.errors import ConfigError
from jaxroll.records import Finished, Member
from jaxroll.report.figures import record
from jaxroll.run_paths import RunPaths
from jaxroll.sim import costs
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, SamplerCosts, TransferCosts, Workload

VALUES = 1000  # recorded values kept for a law, as quantiles
PAYLOADS = 2000  # rollouts whose prompts and replies are measured
SETTLING = 3  # steps that compile or wait for the first weights

Row = Mapping[str, Any]


def calibrated(run_dir: Path) -> Cluster:
    """The cluster on which the run in `run_dir` was recorded. ConfigError if it has too few records."""
    run = record.load(run_dir)
    samplers = [row for row in run.rows if str(row.get("role")).startswith("sampler")]
    steps = [row for row in run.rows if row.get("kind") == "step"][SETTLING:]
    engine = engine_costs(samplers)
    if not (steps and engine):
        raise ConfigError("RUN", str(run_dir), "has too few steps or generations to measure costs",
                          "Calibrate on a run of ten steps or more.")  # fmt: skip
    learner = learner_costs([row.get("micro_batches", 1) for row in steps], [row["train_s"] for row in steps])
    return Cluster(
        source=f"measured in the run {run.name}, commit {run.about.get('commit', '')[:12] or 'unknown'}",
        sampler=replace(engine, swap_s=min(_spans(samplers, "weight_swap"), default=0.0)),
        learner=learner,
        transfer=TransferCosts(
            publish_s=statistics.median(row["publish_s"] for row in steps),
            latency_s=statistics.median(_spans(samplers, "fetch") or [0.0]),
        ),
        workload=workload(run_dir, run.rows),
    )  # fmt: skip


def engine_costs(rows: Iterable[Row]) -> SamplerCosts | None:
    """Seconds of a decode step and of a prefill, from the counters that samplers report; None if they decoded nothing.

    The split is the least squares over reports, the sum that of the records.
    """
    last: dict[str, np.ndarray] = {}
    found = []
    for row in rows:
        if row.get("kind") == "stats" and "decode_steps" in row:
            now = np.array([row["decode_steps"], row["prefills"], row["step_s"]], float)
            before, last[row["role"]] = last.get(row["role"]), now
            if before is not None and now[0] > before[0]:  # otherwise it is idle, or a new process
                found.append(now - before)
    if not found:
        return None
    counts, seconds = np.array(found)[:, :2], np.array(found)[:, 2]
    step_s, prefill_s = np.linalg.lstsq(counts, seconds, rcond=None)[0]
    if prefill_s < 0 or step_s < 0 or not counts[:, 1].any():
        step_s, prefill_s = seconds.sum() / counts[:, 0].sum(), 0.0
    scale = seconds.sum() / (counts @ (step_s, prefill_s)).sum()
    return SamplerCosts(step_overhead_s=float(step_s * scale), prefill_overhead_s=float(prefill_s * scale))


def learner_costs(micro_batches: Sequence[int], seconds: Sequence[float]) -> LearnerCosts:
    """Overhead and time per micro-batch by least squares; the median as overhead where the numbers do not differ."""
    if len(set(micro_batches)) > 1:
        slope, start = np.polyfit(micro_batches, seconds, 1)
        if slope >= 0 and start >= 0:
            return LearnerCosts(step_overhead_s=float(start), micro_batch_overhead_s=float(slope))
    return LearnerCosts(step_overhead_s=statistics.median(seconds))


def workload(run_dir: Path, rows: Iterable[Row]) -> Workload:
    """Lengths, rewards and environment times as recorded. The environment's: a member's time from its first generation
    to its end, without its generations. The wait for a slot before that is left out: the simulation has its own.
    """
    started: dict[tuple[int, int], float] = {}
    generated: dict[tuple[int, int], float] = {}
    counts: dict[tuple[int, int], int] = {}
    tokens: list[float] = []
    groups: list[int] = []
    for row in rows:
        for group, member, t0, t1, count in row["rows"] if row.get("kind") == "members" else ():
            started[group, member] = min(t0, started.get((group, member), t0))
            generated[group, member] = generated.get((group, member), 0.0) + t1 - t0
            counts[group, member] = counts.get((group, member), 0) + 1
            tokens.append(count)
            groups.append(group)
    waits, rewards = [], defaultdict[int, list[float]](list)
    prompts, replies = list[float](), list[float]()
    select = "SELECT group_id, member, ended_unix_s, reward FROM members WHERE state = 'done'"
    with contextlib.closing(sqlite3.connect(f"file:{RunPaths(run_dir).database}?mode=ro", uri=True)) as db:
        for group, member, ended_s, reward in db.execute(select):
            if reward is not None:
                rewards[group].append(reward)
            if ended_s is not None and (key := (group, member)) in started:
                waits.append(max(0.0, ended_s - started[key] - generated[key]) / counts[key])
        for (body,) in db.execute("SELECT body FROM payloads LIMIT ?", (PAYLOADS,)):
            if isinstance(outcome := wire.decode(body, Member).outcome, Finished):
                given = [float(len(one.tokens)) for one in outcome.segments if not one.loss_mask.any()]
                prompts += given[:1]
                replies += given[1:]
    default = Workload()
    return Workload(
        prompt_tokens=recorded(prompts) if prompts else default.prompt_tokens,
        answer_tokens=recorded(tokens), reply_tokens=recorded(replies) if replies else default.reply_tokens,
        env_s=recorded(waits), turns=recorded(list(map(float, counts.values()))),
        rewarded=recorded([min(1.0, max(0.0, statistics.fmean(each))) for each in rewards.values()] or [0.5]),
        answers_alike=alike(groups, tokens),
    )  # fmt: skip


def alike(groups: Sequence[int], values: Sequence[float]) -> float:
    """The correlation between the values of a group, in [0, 1]: that of their normal scores (analysis of variance)."""
    order = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    # Equal values get the score of their middle rank.
    _, which, sizes = np.unique(values, return_inverse=True, return_counts=True)
    rank = np.bincount(which, order) / sizes
    scores = np.array([costs.NORMAL.inv_cdf((float(rank[each]) + 0.5) / len(values)) for each in which])
    _, which, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(sizes) < 2 or len(values) == len(sizes) or not scores.std():
        return 0.0
    means = np.bincount(which, scores) / sizes
    within = ((scores - means[which]) ** 2).sum() / (len(values) - len(sizes))
    between = (sizes * (means - scores.mean()) ** 2).sum() / (len(sizes) - 1)
    typical = (len(values) - (sizes**2).sum() / len(values)) / (len(sizes) - 1)
    variance = max(0.0, (between - within) / typical)
    return float(variance / (variance + within))


def recorded(values: Sequence[float]) -> Law:
    """The law of recorded values, of at most `VALUES` quantiles; a constant where they are equal."""
    if len(set(values)) <= 1:
        return Law(mean=values[0] if values else 0.0)
    kept = sorted(values) if len(values) <= VALUES else np.quantile(values, (np.arange(VALUES) + 0.5) / VALUES)
    return Law("recorded", mean=float(np.mean(values)), values=tuple(round(float(value), 6) for value in kept))


def _spans(rows: Iterable[Row], what: str) -> list[float]:
    """Seconds of the spans of this name."""
    return [row["t1"] - row["t0"] for row in rows if row.get("kind") == "span" and row.get("what") == what]
