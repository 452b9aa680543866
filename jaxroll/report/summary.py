"""The distance that samplers must run ahead to keep the learner busy, compared with α.

A group for claim v + α may be leased when version v is out, P after the training of claim v began (the one before is
published meanwhile) and W later at a sampler that has fetched it; it then takes D until its last member is put. If a
step takes s (its training, and the least that ever lay between two), claim v + α begins α·s after claim v. So the
learner waits unless

    α·s ≥ P + W + D,

with D of the claim's slowest group. docs/store_contract.md, promise 7, has the case D ≤ s.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from jaxroll.config.derived import most_episodes
from jaxroll.policy.limiter import TOLERATED, max_age
from jaxroll.report import activity, record
from jaxroll.report.activity import Interval, intersection, length_s
from jaxroll.report.formats import number
from jaxroll.report.record import ClaimTimes, LogFacts, Run

Row = dict[str, Any]
LEAST_CLAIMS = 4  # after those in which the pipeline fills; fewer say nothing


def alpha_wanted(rows: Sequence[Row], steps: Sequence[Row], history: LogFacts, config: Mapping[str, Any]) -> int | None:
    """The smallest α at which the learner would not wait, at the members' present duration; None if α is not the limit.

    It is None where the learner does not wait, where the window is narrower than α allows, where α is already larger or
    0 (synchronous by choice), and where the samplers could not hold so many members.
    """
    alpha = config["schedule"]["alpha"]
    claims = [one for one in history.claim_times[2 * (max_age(alpha) + 1) :] if one.worked_s > 0]
    if not alpha or not steps or len(claims) < LEAST_CLAIMS or not _waits(claims) or not _window_full(rows):
        return None
    step_s = statistics.median(row["train_s"] for row in steps) + min(row["wait_s"] for row in steps)
    if step_s <= 0:  # the clock was set back
        return None
    made_s = statistics.median(one.made_s for one in claims)
    member_s = statistics.median(one.member_s for one in claims)
    published_s = statistics.median(row["publish_s"] for row in steps)
    wanted = math.ceil((published_s + weight_lag_s(rows, history) + made_s) / step_s)
    return wanted if wanted > alpha and _room(config, member_s / step_s) else None


def words(alpha: float, wanted: int | None) -> str:
    """The sentence of the report; '' if α is not the limit."""
    return f"α = {alpha:g} is too small: the learner waits unless α is at least {wanted}" if wanted else ""


def weight_lag_s(rows: Sequence[Row], history: LogFacts) -> float:
    """Median time from a version's publication until a sampler draws with it; 0 when none is known."""
    published = {version: t for t, version in history.published}
    swaps = [
        row for row in rows if row.get("kind") == "span" and row["what"] == "weight_swap" and row["role"] != "evaluator"
    ]
    lags = [row["t1"] - published[row["version"]] for row in swaps if row.get("version") in published]
    return max(0.0, statistics.median(lags)) if lags else 0.0


def _waits(claims: Sequence[ClaimTimes]) -> bool:
    """True if the learner waited for more of its time than the window's control tolerates."""
    waited = sum(min(one.waited_s, one.worked_s) for one in claims)
    return waited > TOLERATED * (waited + sum(one.worked_s for one in claims))


def _window_full(rows: Sequence[Row]) -> bool:
    """True if the window in force is all that α allows, at the end as far as it is known."""
    last = next((row for row in reversed(rows) if row.get("kind") == "store"), {})
    return last.get("in_flight_window") is None or last["in_flight_window"] >= last["in_flight_window_max"]


def _room(config: Mapping[str, Any], steps: float) -> bool:
    """True if the samplers of the start, or one, can hold the members that the learner consumes in `steps` steps."""
    schedule, sampler = config["schedule"], config["sampler"]
    each = schedule["group_size"] + schedule.get("redundant_members", 0)
    held = (sampler.get("count") or 1) * most_episodes(sampler["slots"], sampler.get("concurrent_episodes") or 0, each)
    return steps * schedule["groups_per_step"] * each <= held


# --- The figures of a run, computed from its metrics rows and its log
#
# `overlap` is the share of the learner's compute time (waiting excluded) in which the sampler decodes tokens of groups
# that the learner later acknowledged. `accuracy_gain_low` is the lower end of the 95 % interval of the gain, from a
# bootstrap over held-out items, paired: the same item before and after. Rates and `seconds` leave out pauses: the time
# between a stop and the `--resume` after it.

BOOTSTRAP_DRAWS = 4000
PAUSE_S = 60.0  # the store writes a row every few seconds: longer silence means that nothing ran
LIVE_S = 30.0


def summary(run: Run) -> dict[str, Any]:
    """One flat JSON object; figures that the run cannot give yet are None."""
    rows, history, config = run.rows, run.history, run.config
    steps = trained_steps(rows)
    return {
        **accuracy(evaluations(rows)),
        "best_checkpoint": record.best_checkpoint(run.path, config),
        **progress(steps, rows, run.created_s),
        **learning(steps),
        "reward_by_source": activity.reward_by_source(steps),
        "collapsed_after": activity.collapsed_after(steps),
        "failed_by_source": counts_by_reason(rows, "failed_by_source"),
        "alpha": config["schedule"]["alpha"],
        "alpha_wanted": alpha_wanted(rows, steps, history, config),
        "bottleneck": asdict(limit) if (limit := activity.bottleneck(rows, config)) else None,
        "overlap": overlap(rows, steps, history.acked_groups),
        "sampler_busy_share": busy_share(rows, steps),
        "tokens_per_s": decoded_per_s(rows, steps),
        "slot_occupancy": occupancy(of_kind(rows, "stats")),
        "compiles_after_warmup": compiles(rows),
        "conservation_residual": history.conservation_residual,
        "groups_trained_twice": trained_twice(steps, history),
        "heldout_in_train": history.heldout_in_train,
        "wasted_tokens": history.wasted_tokens,
        **waste(rows, steps),
        "answers_rejected": counts_by_reason(rows, "answers_rejected"),
        "scoring_failed": counts_by_reason(rows, "scoring_failed"),
        "prompts_skipped": next((r["prompts_skipped"] for r in reversed(rows) if r.get("prompts_skipped")), None),
        "restarts": len(of_kind(rows, "restart")),
        "learner_mesh": config["learner"]["mesh"],
        "sampler_mesh": config["sampler"]["mesh"],
        "steps_wanted": run.steps_wanted,
    }


def of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """The rows of one kind, in order."""
    return [row for row in rows if row.get("kind") == kind]


def trained_steps(rows: Sequence[Row]) -> list[Row]:
    """One row per step: the last one written, so that a replayed step counts once."""
    last = {row["step"]: row for row in of_kind(rows, "step")}
    return [last[step] for step in sorted(last)]


def evaluations(rows: Sequence[Row]) -> list[Row]:
    """One row per evaluated step, in order of steps; the last one written, of those that counted any item."""
    last = {row["step"]: row for row in of_kind(rows, "eval") if row.get("accuracy") is not None}
    return [last[step] for step in sorted(last)]


def numbers(rows: Iterable[Row], key: str) -> list[float]:
    """The values of `key` that are known; what was not finite is null in a row."""
    return [row[key] for row in rows if row.get(key) is not None]


# --- accuracy


def accuracy(evals: Sequence[Row]) -> dict[str, Any]:
    """Held-out accuracy at the first and the last evaluation, and the gain with its 95 % interval."""
    names = (
        "accuracy_start",
        "accuracy_end",
        "accuracy_gain",
        "accuracy_gain_low",
        "accuracy_gain_high",
        "heldout_items",
        "eval_steps",
        "reward_parts_start",
        "reward_parts_end",
        "accuracy_by_set",
        "accuracy_by_source",
    )
    if not evals:
        return dict.fromkeys(names)
    first, last = evals[0], evals[-1]
    low, high = paired_interval(first["correct"], last["correct"], samples=last.get("samples") or 1)
    gain = last["accuracy"] - first["accuracy"]
    figures = (
        first["accuracy"],
        last["accuracy"],
        gain,
        low,
        high,
        last["n"],
        [first["step"], last["step"]],
        first.get("reward_parts"),
        last.get("reward_parts"),
        _by_name(first, last, "sets"),
        _by_name(first, last, "sources"),
    )
    return dict(zip(names, figures, strict=True))


def _by_name(first: Row, last: Row, key: str) -> dict[str, list[float | None]] | None:
    """[accuracy at the first evaluation, at the last one, items] of each held-out set or source."""
    before, after = first.get(key) or {}, last.get(key) or {}
    return {
        name: [before.get(name, {}).get("accuracy"), found["accuracy"], found["n"]] for name, found in after.items()
    } or None


def paired_interval(
    before: str, after: str, seed: int = 0, samples: int = 1
) -> tuple[float, float] | tuple[None, None]:
    """95 % bootstrap interval of the mean difference of two strings of 0 and 1, `samples` characters per item.

    Items without 0 or 1 on a side are left out; (None, None) when none is left or the strings are of different items.
    """
    if len(before) != len(after) or len(before) % samples:
        return (None, None)
    marks = np.ma.masked_equal([[int(c) for c in text.replace("-", "2")] for text in (before, after)], 2)
    difference = np.ma.diff(marks.reshape(2, -1, samples).mean(axis=2), axis=0).compressed()
    if not len(difference):
        return (None, None)
    # There are few different differences, so a resample of n items is a multinomial draw of their counts.
    values = np.unique([-1.0, 0.0, 1.0, *difference])
    shares = [np.mean(difference == value) for value in values]
    counts = np.random.default_rng(seed).multinomial(len(difference), shares, BOOTSTRAP_DRAWS)
    low, high = np.quantile(counts @ values / len(difference), (0.025, 0.975))
    return float(low), float(high)


def wilson(accuracy: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share of `n` (Wilson 1927): (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n)."""
    if n < 1:
        return (0.0, 1.0)
    centre = accuracy + z * z / (2 * n)
    half = z * (accuracy * (1 - accuracy) / n + z * z / (4 * n * n)) ** 0.5
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


# --- time


def pauses(rows: Sequence[Row], steps: Sequence[Row]) -> list[Interval]:
    """The times after the first step in which no process wrote a row: between a stop and a resume."""
    if not steps:
        return []
    times = sorted(row["t"] for row in rows if row.get("t") is not None and row["t"] >= steps[0]["t1"])
    return [(a, b) for a, b in pairwise(times) if b - a > PAUSE_S]


def _up_s(rows: Sequence[Row], steps: Sequence[Row], window: Interval | None) -> float:
    """Seconds of the window without pauses; 0 without a window."""
    return window[1] - window[0] - length_s(intersection(pauses(rows, steps), [window])) if window else 0.0


def progress(steps: Sequence[Row], rows: Sequence[Row], started: float | None) -> dict[str, Any]:
    """Steps, seconds (run made, warm start included, to its last row), samples and trained tokens per second of RL."""
    stopped = pauses(rows, steps)
    last_t = max((row["t"] for row in rows if row.get("t") is not None), default=None)
    window = activity.training_window(steps)
    rl_s = _up_s(rows, steps, window)
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "seconds": last_t - started - length_s(stopped) if started is not None and last_t is not None else None,
        "rl_seconds": rl_s,
        "paused_seconds": length_s(stopped),
        "samples_per_s": _rate(steps, "samples", rl_s),
        "train_tokens_per_s": _rate(steps, "tokens_trained", rl_s),
        "computed_tokens_per_s": _rate(steps, "tokens_computed", rl_s),
        "learner_wait_share": _wait_share(steps, window, rl_s),
    }


def _rate(steps: Sequence[Row], key: str, seconds: float) -> float | None:
    return sum(row.get(key) or 0 for row in steps) / seconds if seconds else None


def _wait_share(steps: Sequence[Row], window: Interval | None, seconds: float) -> float | None:
    if window is None or not seconds:
        return None
    return activity.time_split(activity.learner_lane(steps), window)["wait"] / seconds


def state_of(run: Run, now_s: float | None = None) -> str:
    """finished | live | stopped: whether all steps are trained, else whether a process has the run open.

    A run on another machine is live while its rows are new by this machine's clock.
    """
    steps = trained_steps(run.rows)
    if steps and steps[-1]["step"] >= run.steps_wanted:
        return "finished"
    if record.is_open(run.path):
        return "live"
    last_t = max((row["t"] for row in run.rows if row.get("t") is not None), default=run.created_s or 0.0)
    return "live" if abs((time.time() if now_s is None else now_s) - last_t) < LIVE_S else "stopped"


# --- learner


def learning(steps: Sequence[Row]) -> dict[str, Any]:
    """Ages, mismatch and waste over all trained tokens."""
    histogram = age_histogram(steps)
    tokens = sum(histogram.values())
    mismatch, limit = worst_mismatch(steps)
    return {
        "age_max": max(histogram, default=None),
        "age_mean": sum(age * n for age, n in histogram.items()) / tokens if tokens else None,
        "logprob_mismatch_max": mismatch,
        "logprob_mismatch_limit": limit,
        "padding_waste": _mean(steps, "padding_waste"),
        "reward_first": _mean(steps[:10], "reward_mean"),
        "reward_last": _mean(steps[-10:], "reward_mean"),
        "reward_max": max(numbers(steps, "reward_mean"), default=None),
        "reward_min": min(numbers(steps, "reward_mean"), default=None),
        "tokens_per_step": _mean(steps, "tokens_computed"),
    }


def worst_mismatch(steps: Sequence[Row]) -> tuple[float | None, float | None]:
    """The largest mismatch of log-probs on equal weights, and the tightest bound 1e-4·max(1, σ of the logits)."""
    measured = [row for row in steps if row.get("logprob_mismatch_max") is not None]
    limits = [1e-4 * max(1.0, row.get("logits_std") or 0.0) for row in measured]
    return max(numbers(measured, "logprob_mismatch_max"), default=None), min(limits, default=None)


def age_histogram(steps: Sequence[Row]) -> dict[int, int]:
    """Trained tokens by age."""
    total: dict[int, int] = {}
    for row in steps:
        for age, count in row["age_hist"].items():
            total[int(age)] = total.get(int(age), 0) + count
    return dict(sorted(total.items()))


def trained_twice(steps: Sequence[Row], history: LogFacts) -> int | None:
    """Groups trained in two steps of the surviving line, by the log or by what the learner says it trained on."""
    if history.groups_trained_twice is None and not steps:
        return None
    times = Counter(group for row in steps for group in row.get("groups", ()))
    return max(history.groups_trained_twice or 0, sum(n > 1 for n in times.values()))


# --- sampler


def overlap(rows: Sequence[Row], steps: Sequence[Row], acked: frozenset[int]) -> float | None:
    """Share of learner compute time in which tokens are decoded that end in acknowledged groups."""
    computing = activity.computing(steps)
    if not computing:
        return None
    return length_s(intersection(computing, activity.useful_decoding(rows, acked))) / length_s(computing)


def busy_share(rows: Sequence[Row], steps: Sequence[Row]) -> float | None:
    """Share of the RL time in which a sampler decodes, the mean over samplers."""
    window = activity.training_window(steps)
    lanes = [lane for lane in activity.lanes(rows, steps, frozenset()) if lane.role.startswith("sampler")]
    seconds = _up_s(rows, steps, window)
    if window is None or not lanes or not seconds:
        return None
    busy = [length_s(activity.clipped(lane.spans["decode_other"], window)) for lane in lanes]
    return sum(busy) / len(busy) / seconds


def decoded_per_s(rows: Sequence[Row], steps: Sequence[Row]) -> float | None:
    """Tokens that all samplers decoded per second of RL, from spans that began in it."""
    window = activity.training_window(steps)
    seconds = _up_s(rows, steps, window)
    if window is None or not seconds:
        return None
    spans = [row for row in of_kind(rows, "span") if row["what"] == "decode" and window[0] <= row["t0"] < window[1]]
    return sum(row.get("tokens") or 0 for row in spans) / seconds


def occupancy(stats: Sequence[Row]) -> float | None:
    """Busy slot-steps over all slot-steps while requests were waiting."""
    total = sum(row.get("slot_steps_total") or 0 for row in stats)
    return sum(row.get("slot_steps_busy") or 0 for row in stats) / total if total else None


def compiles(rows: Sequence[Row]) -> int | None:
    """Programs compiled after warm-up, the most any role saw; None before any role is warm."""
    counted = numbers((row for row in rows if row.get("kind") in ("step", "stats")), "compiles")
    return int(max(counted)) if counted else None


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = numbers(rows, key)
    return float(np.mean(values)) if values else None


# --- waste: sampled and not trained, by reason and by length


def waste(rows: Sequence[Row], steps: Sequence[Row]) -> dict[str, Any]:
    """The figures on waste, from the store's last row and the samplers' counters; None where a run cannot say."""
    stores = [row for row in rows if row.get("kind") == "store"]
    last = stores[-1] if stores else {}
    members, tokens = counted(rows, "members_aborted"), _tokens_aborted(rows)
    return {
        "wasted_by_reason": by_reason(last),
        "stragglers_closed": last.get("shrunk"),
        "length_bias": length_bias(last.get("lengths"), members, tokens),
        "aborted_members": members,
        "aborted_tokens": tokens,
        "aborted_length": _relative(tokens, members, steps),
    }


def length_bias(lengths: Mapping[str, Sequence[int]] | None, members: int | None, tokens: int | None) -> float | None:
    """Mean length of the trained members over that of all: 1 is unbiased, less favors short answers.

    All are the trained ones, the finished ones that were lost (both in `lengths`: members, tokens), and `members` that
    were aborted, which count with the tokens that they had: the result is at least the true bias.
    """
    if lengths is None or members is None or tokens is None:
        return None
    (trained, trained_tokens), (lost, lost_tokens) = lengths["trained"], lengths["lost"]
    total = trained_tokens + lost_tokens + tokens
    return trained_tokens / trained / (total / (trained + lost + members)) if trained and total else None


def by_reason(last: Row) -> dict[str, float] | None:
    """Shares of all sampled tokens that were put, by why they were not trained on."""
    put = last.get("tokens_put")
    if not put:
        return None
    lost = dict(last.get("tokens_expired") or {})
    if last.get("tokens_masked"):
        lost["masked"] = last["tokens_masked"]
    return {reason: count / put for reason, count in sorted(lost.items())}


def counted(rows: Sequence[Row], key: str) -> int | None:
    """The sum over samplers of a counter in their `stats` rows, which starts at 0 with every process of a sampler."""
    known = [row for row in rows if row.get("kind") == "stats" and row.get(key) is not None]
    if not known:
        return None
    total, last = 0, {}
    for row in known:
        before = last.get(row["role"], 0)
        total += row[key] - before if row[key] >= before else row[key]
        last[row["role"]] = row[key]
    return total


def counts_by_reason(rows: Sequence[Row], key: str) -> dict[str, int] | None:
    """The counts of the table `key` of the samplers' rows, by reason; None when no sampler reported any."""
    tables = [row for row in rows if row.get("kind") == "stats" and row.get(key) is not None]
    reasons = sorted({reason for row in tables for reason in row[key]})
    flat = {reason: [row | {"count": row[key].get(reason, 0)} for row in tables] for reason in reasons}
    return {reason: counted(flat[reason], "count") or 0 for reason in reasons} if tables else None


def environment_faults(rows: Sequence[Row]) -> dict[str, int]:
    """Faults of environments by cause, in the episodes of samplers, actors and evaluators."""
    found = Counter(counts_by_reason(rows, "env_faults"))
    for row in of_kind(rows, "eval"):
        found.update(row.get("env_faults") or {})
    return dict(sorted((found + activity.growths(rows)).items()))


def evaluation_failures(rows: Sequence[Row], now: float) -> list[dict[str, Any]]:
    """Failed items of evaluations by cause, the most frequent first; `ago_s` is the time since the newest, at `now`."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in of_kind(rows, "eval"):
        for kind, causes in (row.get("failed_by_cause") or {}).items():
            for cause, count in causes.items():
                known = {"kind": kind, "cause": cause, "failures": 0, "evaluations": 0}
                entry = found.setdefault((kind, cause), known)
                entry["failures"] += count
                entry["evaluations"] += 1
                entry["ago_s"] = now - row["t"]
    return sorted(found.values(), key=lambda entry: -entry["failures"])


def warnings(f: Mapping[str, Any]) -> list[str]:
    """Sentences about a run that ended in order but cannot have learned: its reward never changed, or collapsed."""
    if (step := f.get("collapsed_after")) is not None:
        return [f"The reward collapsed after step {step}: lower learner.learning_rate, or set learner.kl_coef."]
    if not f["steps"] or f["reward_max"] is None or f["reward_max"] != f["reward_min"]:
        return []
    reasons = ", ".join(f"{count} {reason}" for reason, count in (f["answers_rejected"] or {}).items())
    found = f"Every step had the mean reward {number(f['reward_max'])}, so the policy had nothing to learn from."
    if f["reward_max"] == 0:
        found += " No answer was right: look at some with `jaxroll inspect RUN --group=ID`."
        found += " Check task.prompt_style and the scorer."
    return [found + (f" The scorer's guard rejected answers: {reasons}." if reasons else "")]


def _tokens_aborted(rows: Sequence[Row]) -> int | None:
    """Tokens of aborted members: of the answer that an engine was at, and of those before it."""
    parts = [counted(rows, key) for key in ("tokens_aborted", "tokens_aborted_done")]
    return sum(part for part in parts if part is not None) if any(part is not None for part in parts) else None


def _relative(tokens: int | None, members: int | None, steps: Sequence[Row]) -> float | None:
    """Mean tokens of an aborted member over those of a trained one."""
    trained = sum(row.get("samples") or 0 for row in steps)
    length = sum(row.get("tokens_trained") or 0 for row in steps) / trained if trained else 0
    return tokens / members / length if tokens is not None and members and length else None
