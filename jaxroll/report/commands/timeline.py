"""`jaxroll export RUN --perfetto=FILE`: the timeline of a run as trace events, for https://ui.perfetto.dev.

The format is Chrome's Trace Event Format (JSON), which Perfetto and chrome://tracing read: one process per role with
the activities of the report as threads, the members of each sampler as slices, events and restarts as instants, and
the learner's ages and the window of the store as counters. Times are microseconds since the first row.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxroll.report.figures import activity, record
from jaxroll.report.figures.summary import trained_steps

Event = dict[str, Any]
Row = Mapping[str, Any]
_COUNTERS = (
    ("step", "age of trained tokens", ("age_mean", "age_max")), ("step", "reward", ("reward_mean",)),
    ("stats", "tokens per second", ("tokens_per_s",)),
    ("store", "groups in flight", ("groups_in_flight", "in_flight_window")),
)  # fmt: skip


def write(run_dir: Path, file: Path) -> int:
    """Write the trace of the run; the number of its events."""
    run = record.load(run_dir)
    lanes = activity.lanes(run.rows, trained_steps(run.rows), run.history.acked_groups)
    found = events(run.rows, lanes)
    trace = {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"run": run.name}}
    file.write_text(json.dumps(trace), encoding="utf-8")
    return len(found)


def events(rows: Sequence[Row], lanes: Sequence[activity.Lane]) -> list[Event]:
    """The trace events of `rows` and `lanes`; none without rows."""
    times = [row[key] for row in rows for key in ("t0", "t") if isinstance(row.get(key), int | float)]
    times += [start for lane in lanes for spans in lane.spans.values() for start, _ in spans]
    if not times:
        return []
    origin = min(times)
    roles = sorted({str(row.get("role")) for row in rows} | {lane.role for lane in lanes})
    pids = {role: number for number, role in enumerate(roles, 1)}
    found = [_named("process_name", role, pids[role], 0) for role in roles]
    for lane in lanes:
        for thread, (kind, spans) in enumerate(lane.spans.items(), 1):
            if spans:
                found.append(_named("thread_name", kind, pids[lane.role], thread))
            found += (_slice(kind, start, end, pids[lane.role], thread, origin) for start, end in spans)
    for role in roles:
        own = [row for row in rows if str(row.get("role")) == role]
        found += _members(own, pids[role], origin)
        found += _instants(own, pids[role], origin)
        found += _counters(own, pids[role], origin)
    return found


_FIRST_MEMBER_THREAD = 100


def _members(rows: Sequence[Row], pid: int, origin: float) -> Iterator[Event]:
    """Members in the engine, each on the first thread that is free: the threads are as many as members overlapped."""
    members = sorted((each for row in rows if row.get("kind") == "members" for each in row["rows"]), key=lambda m: m[2])
    busy: list[tuple[float, int]] = []  # (end, thread)
    free: list[int] = []
    threads = 0
    for group, member, start, end, tokens in members:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            thread = heapq.heappop(free)
        else:
            thread, threads = _FIRST_MEMBER_THREAD + threads, threads + 1
            yield _named("thread_name", f"member {threads}", pid, thread)
        heapq.heappush(busy, (end, thread))
        args = {"group": group, "member": member, "tokens": tokens}
        yield _slice(f"{group}.{member}", start, end, pid, thread, origin) | {"args": args}


def _instants(rows: Sequence[Row], pid: int, origin: float) -> Iterator[Event]:
    for row in rows:
        if row.get("kind") not in ("event", "restart") or not isinstance(row.get("t"), int | float):
            continue
        text = row.get("text") or f"{row.get('process')} starts again"
        yield {"ph": "i", "s": "p", "name": str(text)[:200], "pid": pid, "tid": 0, "ts": _us(row["t"], origin)}


def _counters(rows: Sequence[Row], pid: int, origin: float) -> Iterator[Event]:
    for row in rows:
        for kind, name, keys in _COUNTERS:
            values = {key: row[key] for key in keys if isinstance(row.get(key), int | float)}
            if row.get("kind") == kind and values and isinstance(row.get("t"), int | float):
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(row["t"], origin), "args": values}


def _named(what: str, name: str, pid: int, thread: int) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": thread, "args": {"name": name}}


def _slice(name: str, start: float, end: float, pid: int, thread: int, origin: float) -> Event:
    at = _us(start, origin)
    return {"ph": "X", "name": name, "pid": pid, "tid": thread, "ts": at, "dur": max(_us(end, origin) - at, 0)}


def _us(unix_s: float, origin: float) -> int:
    return round((unix_s - origin) * 1e6)
