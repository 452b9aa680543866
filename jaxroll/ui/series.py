"""Metric rows of a run in columns: read in parts as the file grows, and reduced to the points that a view draws."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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
EVENTS_KEPT, EXAMPLES_KEPT = 2000, 8
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


class Spans:
    """Intervals of one activity, in order of their ends as far as the rows are."""

    def __init__(self) -> None:
        self.starts, self.ends = array("d"), array("d")

    def add(self, start: float, end: float) -> None:
        """Append an interval, in unix seconds."""
        self.starts.append(start)
        self.ends.append(end)

    def shares(self, edges: np.ndarray) -> np.ndarray:
        """float64 [len(edges) - 1]: the share of the time between two edges that the union of the intervals covers."""
        starts, ends = np.array(self.starts), np.array(self.ends)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order]) if len(order) else ends
        starts = np.maximum(starts, np.concatenate([[-np.inf], ends[:-1]]))[: len(ends)]
        lengths = np.maximum(ends - starts, 0.0)
        before = np.cumsum(lengths) - lengths
        # The covered time before an edge: linear within an interval, constant between two.
        points = np.stack([np.minimum(starts, ends), ends], 1).ravel()
        covered = np.stack([before, before + lengths], 1).ravel()
        at = np.interp(edges, points, covered) if len(points) else np.zeros(len(edges))
        return np.clip(np.diff(at) / np.maximum(np.diff(edges), 1e-9), 0.0, 1.0)


@dataclass
class Content:
    """All that is known from the rows of one file."""

    rows: int = 0
    first_t: float | None = None
    last_t: float = 0.0
    tables: dict[tuple[str, str], Table] = field(default_factory=dict)  # by role and kind
    spans: dict[tuple[str, str], Spans] = field(default_factory=dict)  # by role and activity
    waits: dict[str, Spans] = field(default_factory=dict)  # by the process that the run waits for
    reasons: deque[tuple[float, dict[str, str]]] = field(default_factory=lambda: deque(maxlen=50_000))
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    restarts: dict[str, int] = field(default_factory=dict)  # by process
    ages: dict[int, dict[int, int]] = field(default_factory=dict)  # step → age → trained tokens
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
        self.spans.setdefault((role, what), Spans()).add(start, end)

    def _step(self, role: str, row: Row) -> None:
        self._span(role, "wait", row["t0"] - row["wait_s"], row["t0"])
        self._span(role, "train", row["t0"], row["t1"])
        self._span(role, "publish", row["t1"], row["t1"] + row["publish_s"])
        self.ages[row["step"]] = {int(age): count for age, count in row["age_hist"].items()}

    def _store(self, t: float, row: Row) -> None:
        waits = row.get("waits") or {}
        last, self.last_store_t = self.last_store_t, t
        if waits and last is not None and 0 < t - last < 60.0:
            for name in waits:
                if name in self.waits or len(self.waits) < MAX_TABLES:
                    self.waits.setdefault(name, Spans()).add(last, t)
            self.reasons.append((t, waits))


class RunMetrics:
    """The rows of one run, read by one thread (`read`) while others look at `content` under `lock`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = RunPaths(run_dir).metrics
        self.lock = threading.Lock()
        self.content = Content()
        self._follower, self._seen = metrics.Follower(self.path), (0, 0)

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
            self._follower = metrics.Follower(self.path)
            with self.lock:
                self.content = Content()
        self._seen = (status.st_ino, status.st_size)
        rows = self._follower.rows()
        for start in range(0, len(rows), FOLDED):
            with self.lock:
                for row in rows[start : start + FOLDED]:
                    self.content.take(row)
        return bool(rows)


# --- what views draw


def names(content: Content) -> list[str]:
    """The metrics, as `kind/name`, in the order in which they first occurred."""
    found = (f"{kind}/{name}" for (_, kind), table in content.tables.items() for name in table.names())
    return list(dict.fromkeys(found))


def curves(
    content: Content, name: str, x: str, points: int, window: tuple[float | None, float | None]
) -> Iterator[dict[str, Any]]:
    """A curve for each role that reports metric `name`: lists `x` and `y`, and `low`, `high` where points are merged.

    `x` is "step" or "time" (seconds since the first row). Rows without a step are placed between steps by time.
    """
    kind, _, column = name.partition("/")
    for (role, its_kind), table in sorted(content.tables.items()):
        if its_kind == kind and column in table.names():
            xs, ys = _places(content, table, x), table.column(column).astype(np.float64)
            if kind == "step":
                xs, ys = _last_of_each_step(table.steps(), xs, ys)
            keep = np.isfinite(xs) & np.isfinite(ys)
            low, high = window
            keep &= (xs >= (-np.inf if low is None else low)) & (xs <= (np.inf if high is None else high))
            if keep.any():
                yield {"role": role, **reduced(xs[keep], ys[keep], points)}


def _places(content: Content, table: Table, x: str) -> np.ndarray:
    if x == "time":
        return table.times() - (content.first_t or 0.0)
    steps = table.steps()
    if np.isfinite(steps).any() or (learner := _steps(content)) is None:
        return steps
    return np.interp(table.times(), learner.times(), np.maximum.accumulate(learner.steps()))


def _steps(content: Content) -> Table | None:
    return next((table for (_, kind), table in content.tables.items() if kind == "step"), None)


def _last_of_each_step(steps: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows in order of step; of a step that was trained again after a rewind, the last one."""
    if len(steps) < 2 or (np.diff(steps) > 0).all():
        return xs, ys
    _, last = np.unique(steps[::-1], return_index=True)
    last = len(steps) - 1 - last
    return xs[last], ys[last]


def reduced(xs: np.ndarray, ys: np.ndarray, points: int) -> dict[str, Any]:
    """At most `points` points: where there are more, the mean of runs of equal length with their least and largest."""
    order = np.argsort(xs, kind="stable")
    xs, ys = xs[order], ys[order]
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
    return [float(f"{value:.7g}") for value in values]


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
        "from": low, "to": high, "all": span, "first_t": first, "roles": dict(sorted(roles.items(), key=_by_role)),
        "waits": waits, "reasons": _reasons(content, edges),
    }  # fmt: skip


def _by_role(item: tuple[str, Any]) -> tuple[int, str]:
    order = ("learner", "sampler", "actor", "evaluator")
    kind = item[0].partition("-")[0]
    return (order.index(kind) if kind in order else len(order), item[0])


def _short(values: np.ndarray) -> list[float]:
    return [round(float(value), 3) for value in values]


def _reasons(content: Content, edges: np.ndarray) -> list[dict[str, str] | None]:
    """For each part the last reasons within it; None where there are none."""
    found: list[dict[str, str] | None] = [None] * (len(edges) - 1)
    for t, waits in content.reasons:
        if edges[0] <= t <= edges[-1]:
            place = min(int((t - edges[0]) / (edges[-1] - edges[0]) * len(found)), len(found) - 1)
            found[place] = waits
    return found


def age_histogram(content: Content, last: int | None) -> dict[int, int]:
    """Trained tokens by age, of the last steps or of all."""
    steps: Iterable[int] = sorted(content.ages)
    total: dict[int, int] = {}
    for step in list(steps)[-last:] if last else steps:
        for age, count in content.ages[step].items():
            total[age] = total.get(age, 0) + count
    return dict(sorted(total.items()))
