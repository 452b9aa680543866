"""Activity of every role: busy intervals read from the metrics rows. Times are unix seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """One role's time: disjoint intervals by what it was at."""

    role: str
    spans: dict[str, list[Interval]]


def lanes(rows: Sequence[Row], steps: Sequence[Row], acked: frozenset[int]) -> list[Lane]:
    """Learner (with the warm start), samplers, evaluator: those that did anything, compilations included."""
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
    """From the first to the last word of the warm start."""
    times = [row["t"] for row in rows if row.get("role") == "sft" and row.get("t") is not None]
    return union([(min(times), max(times))]) if times else []


def compiling(rows: Iterable[Row], role: str) -> list[Interval]:
    """When the role built and compiled, as its reports of the end of it say."""
    ended = (row for row in rows if row.get("kind") == "compile" and row.get("role") == role and row.get("seconds"))
    return union((row["t"] - row["seconds"], row["t"]) for row in ended)


def learner_lane(steps: Sequence[Row]) -> Lane:
    """wait, train and publish of every step; publish where the learner was not at the next one meanwhile."""
    publish = union((row["t1"], row["t1"] + (row.get("publish_s") or 0.0)) for row in steps)
    return Lane(
        "learner",
        {
            "wait": union((row["t0"] - (row.get("wait_s") or 0.0), row["t0"]) for row in steps),
            "train": computing(steps),
            "publish": difference(publish, computing(steps)),
        },
    )


def sampler_lane(rows: Iterable[Row], role: str, acked: frozenset[int]) -> Lane:
    """decode (of groups that were acknowledged), decode_other, and what else the sampler reports spans of."""
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
    """When some engine was busy while a member of an acknowledged group was in its slots."""
    roles = {row["role"] for row in rows if row.get("kind") == "span" and row["what"] == "decode"}
    return union(part for role in roles for part in sampler_lane(rows, role, acked).spans["decode"])


def computing(steps: Sequence[Row]) -> list[Interval]:
    """When the learner computed."""
    return union((row["t0"], row["t1"]) for row in steps)


def training_window(steps: Sequence[Row]) -> Interval | None:
    """From the first step's computation to the end of the last one's publication."""
    if not steps:
        return None
    return (min(row["t0"] for row in steps), max(row["t1"] + (row.get("publish_s") or 0.0) for row in steps))


def clipped(intervals: list[Interval], window: Interval) -> list[Interval]:
    """The part inside the window."""
    return intersection(intervals, [window])


def time_split(lane: Lane, window: Interval, pause_s: float = 0.0) -> dict[str, float]:
    """Seconds of the window by what the role was at, and `rest`: nothing that it reported, pauses left out."""
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
