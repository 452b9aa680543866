"""Metric rows of a run in columns: read in parts as the file grows, and reduced to the points that a view draws."""

from __future__ import annotations

import heapq
import re
import threading
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxroll import metrics
from jaxroll.run_paths import RunPaths

Row = dict[str, Any]
COLUMNS = frozenset({"step", "eval", "stats", "store", "warm"})  # kinds of rows whose numbers become columns
NOT_VALUES = frozenset({"t", "t0", "t1", "step", "lineage"})
MAX_COLUMNS, MAX_TABLES = 512, 256  # of a table, of a run: a file from elsewhere cannot fill the memory with names
EVENTS_KEPT, REASONS_KEPT = 2000, 50_000
FOLDED = 200  # rows that become columns while a view waits
LARGEST = 3e38  # of a float32


class Table:
    """The numbers of all rows of one role and kind: a time and a step per row, and one column per name."""

    def __init__(self) -> None:
        self.t, self.step = array("d"), array("d")
        self._columns: dict[str, array] = {}

    def add(self, row: Row) -> None:
        """Append a row; numbers in its objects become columns `object/key`."""
        size = len(self.t)
        self.t.append(row.get("t") or 0.0)
        self.step.append(row.get("step", np.nan))
        for name, value in _numbers(row, ""):
            if (column := self._columns.get(name)) is None:
                if len(self._columns) == MAX_COLUMNS:
                    continue
                column = self._columns[name] = array("f")
            if (missing := size - len(column)) > 0:
                column.extend([np.nan] * missing)
            column.append(value)

    def has(self, name: str) -> bool:
        """True if a row had a number of this name."""
        return name in self._columns

    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def column(self, name: str) -> np.ndarray:
        """float32 [rows], NaN where a row has no such number; copied, so that the table may grow."""
        found = np.full(len(self.t), np.nan, np.float32)
        if (column := self._columns.get(name)) is not None:
            found[: len(column)] = np.frombuffer(column, np.float32)
        return found

    def times(self) -> np.ndarray:
        """float64 [rows]: unix seconds."""
        return np.array(self.t, np.float64)

    def steps(self) -> np.ndarray:
        """float64 [rows], NaN for rows without a step."""
        return np.array(self.step, np.float64)


def _weights_step(row: Row) -> Row:
    """The step of the weights that a sampler has, as a number."""
    step = str(row.get("version") or "").rpartition(".")[2]
    return {"weights_step": int(step)} if step.isascii() and step.isdecimal() and len(step) < 16 else {}


def _numbers(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        kind = type(value)
        if kind is float or kind is int:
            if name not in NOT_VALUES and -LARGEST <= value <= LARGEST:
                yield prefix + name, value
        elif kind is dict and prefix.count("/") < 2 and name != "age_hist":
            yield from _numbers(value, f"{prefix}{name}/")


# --- Prometheus: the newest numbers of live runs

Sample = tuple[str, str, float]  # metric, labels, value
STOPPED_S = 60.0


def samples(run: str, content: Content) -> list[Sample]:
    """The newest numbers of each process of a run, as `jaxroll_KIND_NAME{run="…",role="…"}`.

    Those of a process that reports each second and has stopped, such as a sampler that left, are left out.
    """
    found: dict[tuple[str, str], float] = {}  # a name is made of few characters: of two that become equal one stays
    for (role, kind), row in content.latest.items():
        has_stopped = kind in ("stats", "store") and (row.get("t") or 0.0) < content.last_t - STOPPED_S
        if kind in COLUMNS and not has_stopped:
            labels = f"run={quoted(run)},role={quoted(role)}"
            step = {"step_number": row["step"]} if isinstance(row.get("step"), int) else {}
            for name, value in _numbers(row | _weights_step(row) | step, ""):
                found.setdefault((re.sub(r"[^a-zA-Z0-9_]", "_", f"jaxroll_{kind}_{name}"), labels), value)
    for process, count in content.restarts.items():
        found["jaxroll_restarts", f"run={quoted(run)},role={quoted(process)}"] = count
    return [(name, labels, value) for (name, labels), value in found.items()]


def exposition(found: Iterable[Sample]) -> str:
    """The samples as gauges in Prometheus' text format 0.0.4, those of one metric together."""
    lines, last = [], ""
    for name, labels, value in sorted(found):
        if name != last:
            lines.append(f"# TYPE {name} gauge\n")
        lines.append(f"{name}{{{labels}}} {value!r}\n")
        last = name
    return "".join(lines)


def quoted(text: str) -> str:
    """`text` as a label's value."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


class ActivitySpans:
    """The union of the intervals of one activity: disjoint, in order of time."""

    def __init__(self) -> None:
        self.starts, self.ends = array("d"), array("d")
        self._in_order = True

    def add(self, start: float, end: float) -> None:
        """Add an interval, in unix seconds. Most come in order; others are put in place before the next look."""
        last = self.ends[-1] if self.ends else -np.inf
        if not self._in_order or (start < last and start < self.starts[-1]):
            self._in_order = False
        elif start <= last:
            self.ends[-1] = max(last, end)
            return
        self.starts.append(start)
        self.ends.append(max(start, end))

    def shares(self, edges: np.ndarray) -> np.ndarray:
        """float64 [len(edges) - 1]: the share of the time between two edges that the intervals cover."""
        if not self._in_order:
            self._put_in_order()
        starts, ends = np.array(self.starts), np.array(self.ends)
        first, last = np.searchsorted(ends, edges[0]), np.searchsorted(starts, edges[-1])
        starts, ends = starts[first:last], ends[first:last]
        if not len(starts):
            return np.zeros(len(edges) - 1)
        before = np.concatenate([[0.0], np.cumsum(ends - starts)])
        place = np.searchsorted(ends, edges)  # intervals that end before the edge
        begun = np.maximum(edges - np.append(starts, np.inf)[place], 0.0)
        return np.clip(np.diff(before[place] + begun) / np.maximum(np.diff(edges), 1e-9), 0.0, 1.0)

    def _put_in_order(self) -> None:
        intervals = sorted(zip(self.starts, self.ends, strict=True))
        self.starts, self.ends, self._in_order = array("d"), array("d"), True
        for start, end in intervals:
            self.add(start, end)


@dataclass
class Content:
    """The content of the rows of one file, as the views need it."""

    rows: int = 0
    first_t: float | None = None
    last_t: float = 0.0
    tables: dict[tuple[str, str], Table] = field(default_factory=dict)  # by role and kind
    spans: dict[tuple[str, str], ActivitySpans] = field(default_factory=dict)  # by role and activity
    waits: dict[str, ActivitySpans] = field(default_factory=dict)  # by the process that the run waits for
    reasons: list[dict[str, str]] = field(default_factory=list)  # of these waits, at `reasons_t`
    reasons_t: array[float] = field(default_factory=lambda: array("d"))
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    restarts: dict[str, int] = field(default_factory=dict)  # by process
    ages: dict[int, dict[int, int]] = field(default_factory=dict)  # step → age → trained tokens
    tokens_by_age: Counter[int] = field(default_factory=Counter)  # of all steps
    latest: dict[tuple[str, str], Row] = field(default_factory=dict)  # the newest row by role and kind
    last_store_t: float | None = None

    def take(self, row: Row) -> None:
        """Take one row."""
        self.rows += 1
        role, kind, t = str(row.get("role", "run")), row.get("kind"), row.get("t") or 0.0
        if t:
            self.first_t = t if self.first_t is None else min(self.first_t, t)
            self.last_t = max(self.last_t, t)
        if not isinstance(kind, str) or len(self.tables) + len(self.spans) > MAX_TABLES:
            return
        if kind in COLUMNS:
            self.tables.setdefault((role, kind), Table()).add(row | _weights_step(row) if kind == "stats" else row)
        if kind in metrics.KINDS and kind not in ("span", "members"):
            self.latest[role, kind] = row
        match kind:
            case "step":
                self._step(role, row)
            case "eval" if row.get("t0") is not None and row.get("t1") is not None:
                self._span(role, "eval", row["t0"], row["t1"])
            case "span" if row["what"] != "idle":
                self._span(role, row["what"], row["t0"], row["t1"])
            case "compile":
                if seconds := row.get("seconds"):
                    self._span(role, "compile", t - seconds, t)
            case "store":
                self._store(t, row)
            case "restart":
                self.restarts[row["process"]] = self.restarts.get(row["process"], 0) + 1
                self.events.append(row)
            case "event":
                self.events.append(row)

    def _span(self, role: str, what: str, start: float, end: float) -> None:
        self.spans.setdefault((role, what), ActivitySpans()).add(start, end)

    def _step(self, role: str, row: Row) -> None:
        streamed = row.get("streamed") or ()
        at = row["t0"] - row["wait_s"] - sum(end - start for start, end in streamed)
        for start, end in (*streamed, (row["t0"], row["t1"])):
            self._span(role, "wait", at, start)
            self._span(role, "train", start, end)
            at = end
        self._span(role, "publish", row["t1"], row["t1"] + row["publish_s"])
        self.tokens_by_age.subtract(self.ages.get(row["step"], {}))  # of a step that is trained again
        self.ages[row["step"]] = ages = {int(age): count for age, count in row["age_hist"].items()}
        self.tokens_by_age.update(ages)

    def _store(self, t: float, row: Row) -> None:
        waits = row.get("waits") or {}
        last, self.last_store_t = self.last_store_t, t
        if waits and last is not None and 0 < t - last < 60.0:
            for name in waits:
                if name in self.waits or len(self.waits) < MAX_TABLES:
                    self.waits.setdefault(name, ActivitySpans()).add(last, t)
            if len(self.reasons) == 2 * REASONS_KEPT:
                del self.reasons[:REASONS_KEPT], self.reasons_t[:REASONS_KEPT]
            self.reasons.append(waits)
            self.reasons_t.append(t)


class RunMetrics:
    """The rows of one run, read by one thread (`read`) while others look at `content` under `lock`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = RunPaths(run_dir).metrics
        self.lock = threading.Lock()
        self.content = Content()
        self._follower, self._seen = metrics.RowReader(self.path), (0, 0)

    @property
    def skipped(self) -> int:
        """Lines without a valid row."""
        return self._follower.skipped

    def read(self) -> bool:
        """Read the next part of the file (`metrics.MAX_READ_BYTES`); True if there were rows."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False
        inode, size = self._seen
        if size > status.st_size or inode not in (0, status.st_ino):  # another file: nothing read so far is in it
            self._follower = metrics.RowReader(self.path)
            with self.lock:
                self.content = Content()
        self._seen = (status.st_ino, status.st_size)
        rows = self._follower.rows()
        for start in range(0, len(rows), FOLDED):
            with self.lock:
                for row in rows[start : start + FOLDED]:
                    self.content.take(row)
        return bool(rows)


# --- data of the views


def names(content: Content) -> list[str]:
    """The metrics, as `kind/name`, in the order in which they first occurred."""
    found = (f"{kind}/{name}" for (_, kind), table in content.tables.items() for name in table.names())
    return list(dict.fromkeys(found))


def curves(
    content: Content, wanted: Sequence[str], x: str, points: int, window: tuple[float | None, float | None]
) -> dict[str, list[dict[str, Any]]]:
    """For each metric in `wanted` a curve per role: lists `x` and `y`, and `low`, `high` where points are merged.

    `x` is "step" or "time" (seconds since the first row). Rows without a step are placed between steps by time.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    low, high = (-np.inf if window[0] is None else window[0]), (np.inf if window[1] is None else window[1])
    for (role, kind), table in sorted(content.tables.items()):
        columns = [name for name in found if name.partition("/")[0] == kind and table.has(name.partition("/")[2])]
        if not columns:
            continue
        xs = _places(content, table, x)
        rows = _last_of_each_step(table.steps()) if kind == "step" else np.arange(len(xs))
        rows = rows[(xs[rows] >= low) & (xs[rows] <= high)]
        rows = rows[np.argsort(xs[rows], kind="stable")]
        for name in columns:
            ys = table.column(name.partition("/")[2]).astype(np.float64)[rows]
            if (known := np.isfinite(ys)).any():
                found[name].append({"role": role, **reduced(xs[rows][known], ys[known], points)})
    return found


def _places(content: Content, table: Table, x: str) -> np.ndarray:
    if x == "time":
        return table.times() - (content.first_t or 0.0)
    steps = table.steps()
    if np.isfinite(steps).any() or (learner := _steps(content)) is None:
        return steps
    return np.interp(table.times(), learner.times(), np.maximum.accumulate(learner.steps()))


def _steps(content: Content) -> Table | None:
    return next((table for (_, kind), table in content.tables.items() if kind == "step"), None)


def _last_of_each_step(steps: np.ndarray) -> np.ndarray:
    """The rows in order of step; of a step that was trained again after a rewind, the last one."""
    if len(steps) < 2 or (np.diff(steps) > 0).all():
        return np.arange(len(steps))
    _, last = np.unique(steps[::-1], return_index=True)
    return len(steps) - 1 - last


def reduced(xs: np.ndarray, ys: np.ndarray, points: int) -> dict[str, Any]:
    """At most `points` points: where there are more, the mean of runs of equal length with their least and largest."""
    if len(xs) <= points:
        return {"x": _rounded(xs), "y": _rounded(ys)}
    edges = np.linspace(0, len(xs), points + 1).astype(int)
    starts, sizes = edges[:-1], np.diff(edges)
    return {
        "x": _rounded(xs[edges[1:] - 1]),
        "y": _rounded(np.add.reduceat(ys, starts) / sizes),
        "low": _rounded(np.minimum.reduceat(ys, starts)),
        "high": _rounded(np.maximum.reduceat(ys, starts)),
    }


def _rounded(values: np.ndarray) -> list[float]:
    """The values with seven significant digits, which is more than a float32 has."""
    size = np.floor(np.log10(np.maximum(np.abs(values), 1e-300)))
    scale = 10.0 ** np.clip(6 - size, -300, 300)
    return (np.round(values * scale) / scale).tolist()


def lanes(content: Content, start: float | None, end: float | None, points: int) -> dict[str, Any]:
    """The activity of every role as shares of `points` equal parts of the time from `start` to `end` (in seconds
    since the first row), and the time in which the run waited for each process, with the reasons at the end of each
    part."""
    first, last = content.first_t or 0.0, content.last_t
    span = max(last - first, 1e-3)
    low = min(max(0.0, start or 0.0), span)
    high = min(max(low + 1e-3, span if end is None else end), max(span, low + 1e-3))
    edges = first + np.linspace(low, high, points + 1)
    roles: dict[str, dict[str, list[float]]] = {}
    for (role, what), spans in content.spans.items():
        if (shares := spans.shares(edges)).any():
            roles.setdefault(role, {})[what] = _short(shares)
    waits = {name: _short(shares) for name, spans in content.waits.items() if (shares := spans.shares(edges)).any()}
    return {
        "from": low,
        "to": high,
        "all": span,
        "first_t": first,
        "roles": dict(sorted(roles.items(), key=_by_role)),
        "waits": waits,
        "reasons": _reasons(content, edges),
    }


def _by_role(item: tuple[str, Any]) -> tuple[int, str]:
    order = ("learner", "sampler", "actor", "evaluator")
    kind = item[0].partition("-")[0]
    return (order.index(kind) if kind in order else len(order), item[0])


def _short(values: np.ndarray) -> list[float]:
    return [round(float(value), 3) for value in values]


def _reasons(content: Content, edges: np.ndarray) -> list[dict[str, str] | None]:
    """For each part the last reasons within it; None where there are none."""
    times = np.array(content.reasons_t)
    places = np.searchsorted(times, edges[1:], side="right") - 1
    return [
        content.reasons[place] if place >= 0 and times[place] >= start else None
        for place, start in zip(places.tolist(), edges[:-1].tolist(), strict=True)
    ]


def age_histogram(content: Content, last: int | None) -> dict[int, int]:
    """Trained tokens by age, of the last steps or of all."""
    total = content.tokens_by_age
    if last:
        total = Counter[int]()
        for step in heapq.nlargest(last, content.ages):
            total.update(content.ages[step])
    return {age: count for age, count in sorted(total.items()) if count}
