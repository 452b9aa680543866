"""`jaxroll profile`: a trace of the next steps of one role of a running run, and the shares of host and device in it.

The store passes the order to the role, which records the trace and reports its folder as a row of the metrics. The
table is read from the trace (`.xplane.pb`), which TensorBoard opens; Perfetto opens the `.trace.json.gz` next to it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jaxroll import metrics
from jaxroll.errors import ConfigError, DataError, InfraError, JaxRollError
from jaxroll.report import formats
from jaxroll.run_paths import RunPaths
from jaxroll.store.client import WELCOME_S, StoreClient
from jaxroll.store.messages import ProfileOrder

PATIENCE_S, CALL_S = 5.0, 10.0  # for the store
POLL_S, LOOK_S, NOTICE_S = 0.2, 5.0, 20.0  # between two looks at the rows; at the store; between two lines of progress
LATE_S = 60.0  # for the end of a trace, after its last step
SHOWN = 8  # threads of the host, operations and calls


def add_options(one: argparse.ArgumentParser) -> None:
    """Add the options of `jaxroll profile`."""
    one.add_argument("--role", default="learner", help="learner, sampler-N or evaluator (default: learner)")
    text = "steps of the learner, or dispatches of the engine of the other roles (default: 5)"
    one.add_argument("--steps", type=int, default=5, metavar="N", help=text)
    text = "seconds for the trace to begin and end in (default: 300)"
    one.add_argument("--timeout", type=float, default=300.0, metavar="S", help=text)
    text = "record the calls of Python functions too, which makes the host slower"
    one.add_argument("--python", action="store_true", help=text)


def main(run: Path, options: argparse.Namespace) -> int:
    """Record, read and print; the exit code. Errors: see `record` and `shares`."""
    order = ProfileOrder(options.role, uuid.uuid4().hex, options.steps, options.timeout, options.python)
    try:
        msgspec.convert(msgspec.to_builtins(order), ProfileOrder)
    except msgspec.ValidationError as error:
        given = f"--role={options.role} --steps={options.steps} --timeout={options.timeout:g}"
        raise ConfigError("profile", given, str(error), "`jaxroll profile --help` lists the options.") from error
    row = asyncio.run(record(run, order, options.folder))
    folder = Path(row["folder"])
    if not folder.is_dir():
        text = f"{order.role} runs on {row.get('host')}, and this machine does not see its folder. The trace is there:"
        place = {"role": order.role, "folder": str(folder), "host": row.get("host")}
        print(json.dumps(place) if options.json else f"{text}\n{folder}")
        return 0
    found = shares(folder, row.get("seconds"), row["steps"])
    print(
        json.dumps({"role": order.role, "folder": str(folder), **found.values()})
        if options.json
        else "\n".join([*lines(order.role, found), *_openers(folder)])
    )
    return 0


def _openers(folder: Path) -> list[str]:
    (trace,) = list(folder.rglob("*.trace.json.gz"))[:1] or [folder]
    return [
        "",
        f"trace       {folder}",
        f"TensorBoard tensorboard --logdir={folder} (with xprof)",
        f"Perfetto    https://ui.perfetto.dev, open {trace}",
    ]


# --- the order


async def record(run: Path, order: ProfileOrder, named: str) -> metrics.Row:
    """The row of the finished trace. ConfigError if the run's store does not answer; else as `recorded`."""
    paths = RunPaths(run)
    rows = metrics.RowReader(paths.metrics, at_end=True)
    try:
        if not paths.store_address.is_file():
            raise InfraError(f"{paths.store_address} is not there")
        client = await StoreClient.connect(
            paths.store_address,
            role="supervisor",
            name="profile",
            patience_s=PATIENCE_S,
            welcome_s=WELCOME_S,
            call_s=CALL_S,
        )
    except InfraError as error:
        remedy = f"Only a running run has steps: `jaxroll train {named} --resume` continues it."
        raise ConfigError("RUN", named, f"its store does not answer ({error})", remedy) from error
    try:
        return await recorded(client, rows.rows, order)
    finally:
        await client.aclose()


async def recorded(client: StoreClient, read: Callable[[], list[metrics.Row]], order: ProfileOrder) -> metrics.Row:
    """Give the order, and return the row of the finished trace; `read` returns the rows since the last call.

    StoreRefusal if the store knows no such role or one is under way, InfraError if the role cannot record or makes no
    step in time. If the caller is cancelled, as by Ctrl-C, the order is withdrawn.
    """
    try:
        await client.profile(order)
        return await _row_of(client, read, order)
    except asyncio.CancelledError:
        with contextlib.suppress(JaxRollError):
            await client.profile(msgspec.structs.replace(order, withdrawn=True))
            _say(f"{order.role}: the order is withdrawn")
        raise


async def _row_of(client: StoreClient, read: Callable[[], list[metrics.Row]], order: ProfileOrder) -> metrics.Row:
    _say(f"{order.role}: waiting for its next step")
    now_s = asyncio.get_running_loop().time
    began_s = looked_s = last_line_s = now_s()
    until_s, phase = began_s + order.limit_s, "began no step"
    while now_s() < until_s:
        for row in read():
            if row.get("kind") != "profile" or row["request"] != order.request:
                continue
            if row["state"] == "failed":
                raise InfraError(f"{order.role}: {row.get('reason')}")
            if row["state"] == "ended":
                return row
            until_s, phase = began_s + order.limit_s + LATE_S, "did not end its trace"
            _say(f"{order.role}: records {order.steps} steps")
        if now_s() - looked_s >= LOOK_S:
            looked_s = now_s()
            if (await client.status())["closed"]:  # the last row may be on its way
                until_s = min(until_s, now_s() + LOOK_S)
        if now_s() - last_line_s >= NOTICE_S:
            last_line_s = now_s()
            _say(f"{order.role}: {phase} yet, {now_s() - began_s:.0f} s")
        await asyncio.sleep(POLL_S)
    closed = (await client.status())["closed"]
    reason = f", and the run is closed ({closed})" if closed else ""
    raise InfraError(f"{order.role} {phase} within {now_s() - began_s:.0f} s{reason}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the trace
#
# A TPU or GPU has a plane of its own. That of a TPU has the operations in one line, next to lines that are busy while
# nothing computes: programs, steps, copies in flight. On a CPU the operations are events of the host's threads, with
# the number of their virtual device.

_OPERATIONS = "XLA Ops"
_LABELS = frozenset({"Steps", "XLA Modules", "XLA TraceMe", "Framework Ops", "Framework Name Scope", "Source code"})
_WAITS = re.compile(r"wait|acquire|sleep|select|poll\b|\bget\b|join", re.IGNORECASE)

Event = tuple[float, float, str, str]  # begin and end in nanoseconds, name, its device; "" for a call of the host


@dataclass(frozen=True)
class ProfiledCall:
    """An operation or call: its own time, without that of the ones inside it, and how often it ran."""

    name: str
    seconds: float
    calls: int


@dataclass
class Shares:
    """Busy seconds of each device and of each thread of the host in `seconds` of `steps` steps.

    A device is busy while one of its operations runs. A thread is busy in the calls that JAX and XLA (with `--python`:
    and Python) record, except in those that wait.
    """

    steps: int
    seconds: float
    devices: dict[str, float] = field(default_factory=dict)
    threads: dict[str, float] = field(default_factory=dict)
    operations: list[ProfiledCall] = field(default_factory=list)
    calls: list[ProfiledCall] = field(default_factory=list)

    @property
    def device_share(self) -> float | None:
        """Mean share of the time in which a device is busy; None without operations."""
        return sum(self.devices.values()) / len(self.devices) / self.seconds if self.devices else None

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"device_share": self.device_share}


def shares(folder: Path, seconds: float | None, steps: int) -> Shares:
    """The table of the newest trace in `folder`. DataError if there is none."""
    from jax.profiler import ProfileData

    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise DataError(f"{folder} has no trace (*.xplane.pb)")
    return shares_of(ProfileData.from_file(str(files[-1])), seconds, steps)


def shares_of(trace: Any, seconds: float | None, steps: int) -> Shares:
    """The table of `trace` (`jax.profiler.ProfileData`) over `seconds`; None: from its first event to its last."""
    devices: dict[str, list[tuple[float, float]]] = defaultdict(list)
    operations, calls, threads = (defaultdict[str, float](float) for _ in range(3))
    counts, bounds = Counter[str](), [float("inf"), 0.0]
    for plane in trace.planes:
        is_device = plane.name.startswith("/device:") and "CUSTOM" not in plane.name
        if not is_device and not plane.name.startswith("/host:"):
            continue
        for number, line in enumerate(_lines_of(plane) if is_device else plane.lines):
            events: list[Event] = []
            for event in line.events:
                if event.duration_ns <= 0:
                    continue
                device = plane.name.removeprefix("/device:") if is_device else _cpu_of(event)
                events.append((event.start_ns, event.start_ns + event.duration_ns, event.name, device))
            for begin, end, _, device in events:
                bounds = [min(bounds[0], begin), max(bounds[1], end)]
                if device:
                    devices[device].append((begin, end))
            for name, device, own in own_times(events):
                if device:
                    operations[name] += own
                elif not _WAITS.search(name):
                    calls[name] += own
                    threads[f"{line.name.partition('/')[0]} {number}"] += own
                counts[name] += 1
    if seconds is None:
        seconds = max(0.0, bounds[1] - bounds[0]) / 1e9
    if not (devices or threads) or not seconds:
        raise DataError("the trace has no events")
    return Shares(
        steps,
        seconds,
        {name: union_ns(spans) / 1e9 for name, spans in sorted(devices.items())},
        {name: own / 1e9 for name, own in _longest(threads)},
        _top(operations, counts),
        _top(calls, counts),
    )


def _longest(own: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(own.items(), key=lambda item: item[1], reverse=True)


def _top(own: Mapping[str, float], counts: Mapping[str, int]) -> list[ProfiledCall]:
    return [ProfiledCall(name, value / 1e9, counts[name]) for name, value in _longest(own)[:SHOWN]]


def _lines_of(plane: Any) -> list[Any]:
    """The lines of a device that have its operations."""
    named = [line for line in plane.lines if line.name == _OPERATIONS]
    return named or [line for line in plane.lines if line.name not in _LABELS]


def _cpu_of(event: Any) -> str:
    """The virtual device on which an operation of a CPU runs; "" for a call of the host."""
    stats = dict(event.stats)
    return f"cpu:{stats.get('device_ordinal', 0)}" if "hlo_op" in stats else ""


def union_ns(spans: Iterable[tuple[float, float]]) -> float:
    """The time that the spans cover together."""
    total, until = 0.0, -1.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def own_times(events: Sequence[Event]) -> Iterator[tuple[str, str, float]]:
    """Name and device of each event of one thread, and its time without that of the events inside it."""
    around: list[list[Any]] = []  # name, device, own time, end
    for begin, end, name, device in sorted(events, key=lambda event: (event[0], -event[1])):
        while around and around[-1][3] <= begin:
            yield tuple(around.pop()[:3])
        if around:
            around[-1][2] -= min(end, around[-1][3]) - begin
        around.append([name, device, end - begin, end])
    for one in around:
        yield tuple(one[:3])


# --- the table


def lines(role: str, found: Shares) -> list[str]:
    """The table as lines of text."""
    step_s = found.seconds / max(1, found.steps)
    share = found.device_share
    rows = [f"{role}: {found.steps} steps in {found.seconds:.3f} s, {step_s:.4f} s a step", ""]
    rows.append(f"{'':<8}{'':<44}{'busy':>10}{'share':>9}")
    rows += [_row("device", name, busy, found.seconds) for name, busy in found.devices.items()]
    if share is not None:
        idle_s = found.seconds * (1.0 - share)
        rows.append(_row("device", "idle: it waits for the host, or for work", idle_s, found.seconds))
    rows += [_row("host", f"thread {name}", busy, found.seconds) for name, busy in list(found.threads.items())[:SHOWN]]
    for title, listed in (("operations of the devices", found.operations), ("calls of the host", found.calls)):
        if listed:
            rows += ["", f"{title:<52}{'own time':>10}{'share':>9}{'number':>9}"]
            rows += [f"{_row('', one.name, one.seconds, found.seconds)}{one.calls:>9}" for one in listed]
    return rows


def _row(kind: str, name: str, busy_s: float, seconds: float) -> str:
    shown = name if len(name) <= 43 else f"{name[:42]}…"
    return f"{kind:<8}{shown:<44}{busy_s:>8.3f} s{formats.percent(busy_s / seconds):>9}"
