"""Activity of every role: busy intervals read from the metrics rows. Times are unix seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxroll.config.derived import most_episodes

Row = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """The activity of one role: disjoint intervals by kind."""

    role: str
    spans: dict[str, list[Interval]]


def lanes(rows: Sequence[Row], steps: Sequence[Row], acked: frozenset[int]) -> list[Lane]:
    """Learner (with the warm start), samplers, evaluator: those with any activity, compilations included."""
    roles = sorted({str(row.get("role")) for row in rows if row.get("kind") in ("span", "members")})
    samplers = [sampler_lane(rows, role, acked) for role in roles if role.startswith("sampler")]
    evaluator = Lane("evaluator", {"eval": union((row["t0"], row["t1"]) for row in rows if _timed(row, "eval"))})
    learner = learner_lane(steps)
    learner = Lane(learner.role, learner.spans | {"warm": warm_start(rows)})
    compiled = [
        Lane(lane.role, lane.spans | {"compile": compiling(rows, lane.role)})
        for lane in (learner, *samplers, evaluator)
    ]
    return [lane for lane in compiled if any(lane.spans.values())]


def warm_start(rows: Iterable[Row]) -> list[Interval]:
    """The time from the first to the last row of the warm start."""
    times = [row["t"] for row in rows if row.get("role") == "sft" and row.get("t") is not None]
    return union([(min(times), max(times))]) if times else []


def compiling(rows: Iterable[Row], role: str) -> list[Interval]:
    """The time in which the role built and compiled, by its `compile` rows."""
    ended = (row for row in rows if row.get("kind") == "compile" and row.get("role") == role and row.get("seconds"))
    return union((row["t"] - row["seconds"], row["t"]) for row in ended)


def learner_lane(steps: Sequence[Row]) -> Lane:
    """wait, train and publish of every step; publish only where the learner did not compute the next step."""
    publish = union((row["t1"], row["t1"] + (row.get("publish_s") or 0.0)) for row in steps)
    return Lane(
        "learner",
        {
            "wait": difference(union(map(_waiting, steps)), streamed(steps)),
            "train": computing(steps),
            "publish": difference(publish, computing(steps)),
        },
    )


def sampler_lane(rows: Iterable[Row], role: str, acked: frozenset[int]) -> Lane:
    """decode (of groups that were acknowledged), decode_other, and the other spans that the sampler reports."""
    own = [row for row in rows if row.get("role") == role]
    spans: dict[str, list[Interval]] = {}
    for row in own:
        if row.get("kind") == "span":
            spans.setdefault(row["what"], []).append((row["t0"], row["t1"]))
    busy = union(spans.pop("decode", ()))
    useful = intersection(busy, union(_member_spans(own, acked)))
    others = {what: union(found) for what, found in spans.items() if what != "idle"}
    return Lane(role, {"decode": useful, "decode_other": difference(busy, useful), **others})


def _member_spans(rows: Iterable[Row], acked: frozenset[int]) -> Iterable[Interval]:
    for row in rows:
        if row.get("kind") == "members":
            yield from ((t0, t1) for group, _, t0, t1, *_ in row["rows"] if group in acked)


def useful_decoding(rows: Sequence[Row], acked: frozenset[int]) -> list[Interval]:
    """The time in which an engine decoded while a member of an acknowledged group was in its slots."""
    roles = {row["role"] for row in rows if row.get("kind") == "span" and row["what"] == "decode"}
    return union(part for role in roles for part in sampler_lane(rows, role, acked).spans["decode"])


def computing(steps: Sequence[Row]) -> list[Interval]:
    """The time in which the learner computed."""
    return union([*((row["t0"], row["t1"]) for row in steps), *streamed(steps)])


def streamed(steps: Sequence[Row]) -> list[Interval]:
    """The time in which it computed groups before the claims of their steps."""
    return union((start, end) for row in steps for start, end in row.get("streamed") or ())


def _waiting(row: Row) -> Interval:
    """From the learner's first question for a claim to the claim."""
    computed_s = sum(end - start for start, end in row.get("streamed") or ())
    return row["t0"] - (row.get("wait_s") or 0.0) - computed_s, row["t0"]


def training_window(steps: Sequence[Row]) -> Interval | None:
    """From the first step's computation to the end of the last one's publication."""
    if not steps:
        return None
    return (min(row["t0"] for row in steps), max(row["t1"] + (row.get("publish_s") or 0.0) for row in steps))


def clipped(intervals: list[Interval], window: Interval) -> list[Interval]:
    """The part inside the window."""
    return intersection(intervals, [window])


def time_split(lane: Lane, window: Interval, pause_s: float = 0.0) -> dict[str, float]:
    """Seconds of the window by kind of activity, and `rest`: without a report. Pauses are left out."""
    split: dict[str, float] = {}
    taken: list[Interval] = []
    for what, spans in lane.spans.items():
        own = difference(clipped(spans, window), taken)
        split[what] = length_s(own)
        taken = union([*taken, *own])
    return split | {"rest": max(0.0, window[1] - window[0] - pause_s - length_s(taken))}


def _timed(row: Row, kind: str) -> bool:
    return row.get("kind") == kind and row.get("t0") is not None and row.get("t1") is not None


@dataclass(frozen=True)
class RunClock:
    """Seconds of the run: since `origin`, without the pauses between a stop and a resume."""

    origin: float
    pauses: tuple[Interval, ...] = ()

    def __call__(self, t: float) -> float:
        """Seconds the run was up before unix time `t`."""
        return t - self.origin - sum(min(t, end) - start for start, end in self.pauses if start < t)

    def spans(self, intervals: Iterable[Interval]) -> list[Interval]:
        """The intervals on this clock."""
        return [(self(start), self(end)) for start, end in intervals]


# --- sets of time as sorted lists of disjoint (start, end) pairs, in seconds

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; empty and backward ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The time in both of two disjoint sorted lists."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The time in `a` and not in `b`, both disjoint and sorted."""
    left, j = [], 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                left.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            left.append((start, end))
    return left


def closed(intervals: list[Interval], gap_s: float) -> list[Interval]:
    """The same time with gaps of at most `gap_s` filled: fewer intervals, for drawing."""
    merged: list[Interval] = []
    for start, end in intervals:
        if merged and start - merged[-1][1] <= gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length_s(intervals: Iterable[Interval]) -> float:
    """Total seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


# --- the part of a run that limits its speed, and the config key that relieves it

LEAST_STEPS = 8  # the first fill the pipeline
_LEARNER_IDLE = 0.15  # below this share of waiting the learner is the limit
_PARTS = {
    "learner": "learner.micro_batch_rows",
    "store": "store.retention_mb",
    "weight transfer": "schedule.publish_every",
    "sampler slots": "sampler.slots",
    "environments": "sampler.concurrent_episodes",
    "sampler": "sampler.count",
    "age bound": "schedule.alpha",
}


@dataclass(frozen=True)
class Bottleneck:
    """The part that limits the speed of a run, the config key that relieves it, and the measurement as a sentence."""

    part: str
    key: str
    reason: str

    def text(self) -> str:
        """One line for a person."""
        return f"{self.part}: {self.reason} ({self.key})"


def bottleneck(rows: Sequence[Row], config: Mapping[str, Any]) -> Bottleneck | None:
    """The bottleneck by the metric rows of a run, or of its last part; None before `LEAST_STEPS` steps.

    If the learner waits, the first of these that applies is named: the retained groups fill the store's retention, so
    that it grants no lease; weight transfer takes longer than decoding; requests wait for slots during most of the
    decoding; the members in flight are at their limit while slots are free, so they wait for their environments; the
    engines decode all the time. If none applies, samplers have nothing to lease: α keeps them from running ahead.
    """
    steps = [row for row in rows if row.get("kind") == "step"]
    window = training_window(steps)
    if len(steps) < LEAST_STEPS or window is None or window[1] <= window[0]:
        return None
    waited, trained = (sum(row[key] for row in steps[1:]) for key in ("wait_s", "train_s"))
    wait = waited / (waited + trained) if waited + trained > 0 else 0.0
    if wait < _LEARNER_IDLE:
        return _named("learner", f"it computes for {1 - wait:.0%} of its time")
    load = _Load.of(rows, steps, window, config)
    waits = f"the learner waits for {wait:.0%} of its time, and"
    found = [
        ("store", load.retention >= 0.3, f"retained groups fill store.retention_mb in {load.retention:.0%} of reports"),
        ("weight transfer", load.transfer >= max(0.3, load.decode),
         f"publishing, fetching and swapping weights take {load.transfer:.0%} of it"),
        ("sampler slots", load.queued >= 0.5, f"requests wait for a slot during {load.queued:.0%} of decoding"),
        ("environments", load.open >= 0.8 and load.active < 0.5,
         f"samplers hold {load.open:.0%} of the members that they may, but use {load.active:.0%} of their slots"),
        ("sampler", load.decode >= 0.8, f"samplers decode for {load.decode:.0%} of it"),
        ("age bound", True, f"samplers decode for {load.decode:.0%} of it: they may run ahead no further"),
    ]  # fmt: skip
    part, _, reason = next(row for row in found if row[1])
    return _named(part, f"{waits} {reason}")


def reward_by_source(steps: Sequence[Row], count: int = 10) -> dict[str, list[float | None]] | None:
    """For each source: mean rewards of the first and the last `count` steps, mean sampled tokens of the last ones."""
    names = sorted({name for row in steps for name in row.get("sources") or {}})
    first, last = steps[:count], steps[-count:]
    asked = ((first, "reward"), (last, "reward"), (last, "tokens"))
    return {name: [_mean_of_source(part, name, key) for part, key in asked] for name in names} or None


_COLLAPSE, _COLLAPSED_STEPS = 0.1, 10


def collapsed_after(steps: Sequence[Row]) -> int | None:
    """The last step before the reward fell to a tenth of its first ten steps' mean and stayed there; None without.

    It has to stay there for ten steps, to the end.
    """
    rewards = [(row["step"], row["reward_mean"]) for row in steps if row.get("reward_mean") is not None]
    first = [reward for _, reward in rewards[:_COLLAPSED_STEPS]]
    bound = _COLLAPSE * sum(first) / len(first) if first else 0.0
    alive = [step for step, reward in rewards if reward > bound]
    if bound <= 0 or len(rewards) < 2 * _COLLAPSED_STEPS or rewards[-_COLLAPSED_STEPS][0] <= alive[-1]:
        return None
    return alive[-1]


def _mean_of_source(steps: Sequence[Row], name: str, key: str) -> float | None:
    """The mean over all samples of the source; None without any."""
    found = [of for row in steps if (of := (row.get("sources") or {}).get(name))]
    counted = [(of["samples"], of[key]) for of in found if of.get("samples") is not None and of.get(key) is not None]
    samples = sum(count for count, _ in counted)
    return sum(count * value for count, value in counted) / samples if samples else None


def latest(rows: Sequence[Row], count: int = 50) -> list[Row]:
    """The rows since the last `count` steps began."""
    began = [row["t0"] for row in rows if row.get("kind") == "step"][-count:]
    return [row for row in rows if (row.get("t") or 0.0) >= began[0]] if began else []


def _named(part: str, reason: str) -> Bottleneck:
    return Bottleneck(part, _PARTS[part], reason)


@dataclass(frozen=True)
class _Load:
    """Shares between 0 and 1 of the time from the first to the last step, means over samplers.

    `decode`, `transfer`: of the time. `queued`: of the decoded tokens, those decoded while a request waited for a slot.
    `active`: of the slots, those in use. `open`: of the members allowed in flight, those whose episode runs.
    `retention`: of the store's reports, those with full retention.
    """

    decode: float
    transfer: float
    queued: float
    active: float
    open: float
    retention: float

    @classmethod
    def of(cls, rows: Sequence[Row], steps: Sequence[Row], window: Interval, config: Mapping[str, Any]) -> _Load:
        """Measure the shares."""
        inside = [row for row in rows if window[0] <= (row.get("t") or 0.0) <= window[1]]
        spans = [row for row in rows if row.get("kind") == "span" and _is_a(row, "sampler")]
        engines = [row for row in inside if row.get("kind") == "stats" and _is_a(row, "sampler")]
        actors = [row for row in inside if row.get("kind") == "stats" and _is_a(row, "actor")]
        stores = [row for row in inside if row.get("kind") == "store"]
        decoded = sum(row.get("tokens") or 0 for row in spans if row["what"] == "decode" and row["t0"] >= window[0])
        full = 0.95 * 2**20 * (config.get("store", {}).get("retention_mb") or math.inf)
        published_s = sum(row["publish_s"] for row in steps)
        return cls(
            decode=_time_share(spans, ("decode",), window),
            transfer=_time_share(spans, ("fetch", "weight_swap"), window) + published_s / (window[1] - window[0]),
            queued=min(1.0, sum(row.get("slot_steps_busy") or 0 for row in engines) / decoded) if decoded else 0.0,
            active=_mean(engines, "active") / max(1, config["sampler"].get("slots") or 1),
            open=(_mean(actors or engines, "members_in_flight") - _mean(actors or engines, "members_unstored"))
            / _members_allowed(config, len({row["role"] for row in actors})),
            retention=sum((row.get("retained_bytes") or 0) >= full for row in stores) / max(1, len(stores)),
        )


def _is_a(row: Row, role: str) -> bool:
    return str(row.get("role")).startswith(role)


def _time_share(spans: Sequence[Row], names: tuple[str, ...], window: Interval) -> float:
    """The share of the window that samplers spend on the spans of these names, the mean over samplers."""
    roles = {row["role"] for row in spans}
    busy = [
        union((row["t0"], row["t1"]) for row in spans if row["role"] == role and row["what"] in names) for role in roles
    ]
    return sum(length_s(clipped(one, window)) for one in busy) / max(1, len(busy)) / (window[1] - window[0])


def _mean(rows: Sequence[Row], key: str) -> float:
    values = [row[key] for row in rows if isinstance(row.get(key), (int, float))]
    return sum(values) / len(values) if values else 0.0


def _members_allowed(config: Mapping[str, Any], actors: int) -> float:
    """The members that one process may hold in flight: a sampler, or one of so many actors."""
    schedule, sampler = config["schedule"], config["sampler"]
    group = (schedule.get("group_size") or 1) + (schedule.get("redundant_members") or 0)
    each = most_episodes(sampler.get("slots") or 1, sampler.get("concurrent_episodes") or 0, group)
    return max(1, each * (sampler.get("count") or 1) / actors if actors else each)


# --- Memory of the roles that play environments

GROWTH_BYTES = 256 << 20
# Rows of a process, one a second: in the first ones its engine still grows, and so many must follow.
_WARM_ROWS, _LEAST_ROWS = 120, 480


def growths(rows: Sequence[Row]) -> Counter[str]:
    """The processes of samplers and actors whose memory grows as long as they live, each `GROWTH_BYTES` once.

    After two minutes the least memory in each quarter of their life is larger than before, by a tenth of the whole
    growth or more. So peaks do not count, and neither does what an engine takes once. Environments on the loop and in
    threads share the memory of their role, and most engines do not grow for so long.
    """
    lives: dict[str, list[int]] = {}
    found: Counter[str] = Counter()
    episodes: dict[str, int] = {}
    for row in rows:
        if row.get("kind") != "stats" or (held := row.get("resident_bytes")) is None:
            continue
        role, played = row["role"], row.get("episodes") or 0
        if played < episodes.get(role, 0):  # a new process
            found += _growths(role, lives.pop(role, []))
        episodes[role] = played
        lives.setdefault(role, []).append(held)
    return sum((_growths(role, held) for role, held in lives.items()), found)


def _growths(role: str, held: Sequence[int]) -> Counter[str]:
    held = held[_WARM_ROWS:]
    if len(held) < _LEAST_ROWS:
        return Counter()
    size = len(held) // 4
    least = [min(held[start : start + size]) for start in range(0, 4 * size, size)]
    grown = least[-1] - least[0]
    if grown < GROWTH_BYTES or any(after - before < grown / 10 for before, after in pairwise(least)):
        return Counter()
    return Counter({f"{role} holds more and more memory while environments run in it": grown // GROWTH_BYTES})


def slow_scoring_workers(rows: Sequence[Row]) -> dict[str, int]:
    """For each role with a slow scoring worker: how often one became slow in the run; a new process counts from 0."""
    found: Counter[str] = Counter()
    last: dict[str, int] = {}
    for row in rows:
        if row.get("kind") == "stats" and (count := row.get("scoring_slow")) is not None:
            before = last.get(row["role"], 0)
            found[row["role"]] += count - before if count >= before else count
            last[row["role"]] = count
    return {role: count for role, count in sorted(found.items()) if count}
