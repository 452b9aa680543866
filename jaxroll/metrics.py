"""Metrics rows: schema, JSONL writer and reader, TensorBoard writer.

Two processes (store and supervisor) append to the file `RUN/metrics.jsonl`, and any number of processes read it. A
writer may be killed within a line, and rows may come from other programs: readers skip and count lines without a valid
row (`checked_row`), and the next writer starts a new line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from jaxroll import run_paths
from jaxroll.clock import unix_s
from jaxroll.errors import ConfigError

MAX_LINE_BYTES = 4 * 2**20  # the store accepts no larger report
MAX_READ_BYTES = 8 * 2**20  # per call of a follower, so that it does not block its caller for long


def dumps(row: Mapping[str, Any]) -> str:
    """`row` as one line of strict JSON: numpy values become plain numbers, numbers that are not finite become null."""
    return json.dumps(_plain(row), separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def loads(line: bytes | str) -> Row | None:
    """The row in `line`; None when the line is incomplete, not a JSON object, or not a valid row (`checked_row`)."""
    try:
        row = json.loads(line, parse_constant=lambda _: None)  # NaN and Infinity, which JSON does not have
    except (ValueError, RecursionError):  # not JSON, not UTF-8, an integer of thousands of digits; nested too deep
        return None
    return checked_row(run_paths.row(row) if isinstance(row, dict) else row)


def read(path: str | Path) -> list[Row]:
    """All valid rows of the file, in order; none when there is no file; ConfigError when it cannot be read."""
    try:
        return RowReader(path).rows(closed=True)
    except OSError as error:
        raise ConfigError(
            "RUN", str(path), f"unreadable ({error.strerror})", "Restore the file from a copy, or move it away."
        ) from error


class RowReader:
    """Reader of a growing file of rows; each call continues where the previous one stopped.

    A last line without a newline is kept until its rest arrives. A file that shrank or was replaced is read from its
    beginning. A line longer than `MAX_LINE_BYTES` is skipped without being buffered.
    """

    def __init__(self, path: str | Path, *, at_end: bool = False) -> None:
        self._path = Path(path)
        self._offset = self._size_bytes() if at_end else 0
        self._inode: int | None = None
        self._pending = b""
        self._in_long_line = False
        self.skipped = 0  # lines that held no valid row

    def rows(self, *, closed: bool = False) -> list[Row]:
        """The rows completed since the last call, from at most `MAX_READ_BYTES` of the file.

        With `closed`, all of them, including a last line without a newline.
        """
        rows = []
        for line in self._lines(closed):
            if line.strip():
                row = loads(line)
                if row is None:
                    self.skipped += 1
                else:
                    rows.append(row)
        return rows

    def _lines(self, closed: bool) -> Iterator[bytes]:
        read = 0
        while (closed or read < MAX_READ_BYTES) and (data := self._new_bytes()):
            read += len(data)
            *lines, pending = (self._pending + data).split(b"\n")
            if lines and self._in_long_line:  # the first line is the end of the long line
                self._in_long_line, lines = False, lines[1:]
            self._pending = b"" if self._in_long_line else pending
            if len(self._pending) > MAX_LINE_BYTES:
                self._in_long_line, self._pending = True, b""
                self.skipped += 1
            yield from lines
        if closed and not self._in_long_line:
            last, self._pending = self._pending, b""
            yield last

    def _new_bytes(self) -> bytes:
        """The next bytes, fewer than `MAX_LINE_BYTES`; if the file was replaced, pending bytes are dropped."""
        try:
            with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", str(self._path))
                if status.st_size < self._offset or self._inode not in (None, status.st_ino):
                    self._offset, self._pending, self._in_long_line = 0, b"", False
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read(MAX_LINE_BYTES // 4)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def _size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:  # `rows` raises it
            return 0


class Tracker(Protocol):
    """A sink for metrics rows."""

    def log(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """Writer that appends each row with one write, so that writers in other processes never split a line.

    Failures to write metrics do not end a run: rows that cannot be written (disk full or failing) are dropped and
    counted. `warn` is called at the first of them, and a row with their number follows once writing works again.
    """

    def __init__(self, path: str | Path, warn: Callable[[str], object] | None = None) -> None:
        self._path, self._warn = Path(path), warn or _print_error
        self.dropped = 0  # rows since the last one that was written
        self._torn = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"  # a writer was killed within a line

    def written(self) -> list[Row]:
        """All valid rows of the file so far."""
        return read(self._path)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self.log_all([row])

    def log_all(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append all rows with one write, or drop all of them."""
        rows = list(rows)
        if self.dropped:
            text = f"{self.dropped} metrics rows were lost: they could not be written"
            rows = [{"t": unix_s(), "role": "metrics", "kind": "event", "text": text}, *rows]
        data = "".join(dumps(row) + "\n" for row in rows).encode()
        try:
            self._write(b"\n" + data if self._torn and data else data)
        except OSError as error:
            first, self.dropped = not self.dropped, len(rows) - bool(self.dropped) + self.dropped
            if first:
                self._warn(f"{self._path}: {error.strerror}. Metrics rows are dropped until they can be written.")
            return
        self.dropped = 0

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = os.write(self._fd, left)
            left, self._torn = left[written:], left[written - 1] != ord("\n")

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the same disk
        print(text, file=sys.stderr, flush=True)


class Scalars:
    """The numbers of rows for trackers: as `role/kind/name`, or its alias, over the row's step (or its count)."""

    SHOWN = frozenset({"step", "eval", "stats", "store", "warm"})
    NOT_SCALARS = frozenset({"t", "t0", "t1", "step", "lineage"})
    NESTED = frozenset({"by_age", "sources"})  # numbers of each age or source, as `by_age/1/ess`
    LARGEST = 3e38  # TensorBoard's events hold float32

    def __init__(self, aliases: Mapping[str, str] | None = None) -> None:
        self._counts: dict[str, int] = {}
        self._aliases = aliases or {}

    def of(self, row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """The step of the row, and its numbers by name; no numbers for a kind that has none."""
        kind, role = row.get("kind"), str(row.get("role", "run"))
        if kind not in self.SHOWN:
            return 0, {}
        prefix = f"{role}/{kind}"
        self._counts[prefix] = count = self._counts.get(prefix, 0) + 1
        step = row.get("step", count)
        values = {
            self._aliases.get(f"{prefix}/{name}", re.sub(r"[^-/\w.]", "_", f"{prefix}/{name}", flags=re.ASCII)): value
            for name, value in self._flat(row)
            if name not in self.NOT_SCALARS and self._is_number(value)
        }
        return step if isinstance(step, int) and 0 <= step <= 2**53 else count, values

    def _is_number(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= self.LARGEST

    def _flat(self, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in row.items():
            if name not in self.NESTED:
                yield name, value
                continue
            for key, inner in (value or {}).items():
                yield from ((f"{name}/{key}/{each}", number) for each, number in inner.items())


class TensorBoardTracker:
    """Writer of TensorBoard events, with the numbers of `Scalars`.

    `log` raises OSError when an event cannot be written; the file then ends with the previous event.
    """

    # Not tensorboardX's SummaryWriter: a write error ends its thread, and then its queue blocks the caller forever.
    def __init__(self, folder: str | Path, aliases: Mapping[str, str] | None = None) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # slow to import, and only needed by the writing process

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._scalars = Scalars(aliases)
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(unix_s())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (Path(folder) / name).open("ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        try:
            self._append(self._event(wall_time=unix_s(), file_version="brain.Event:2"))
        except OSError:
            self._file.close()
            raise

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the row's numbers, if its kind has any."""
        step, values = self._scalars.of(row)
        if values:
            summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])
            self._append(self._event(wall_time=row.get("t") or unix_s(), step=step, summary=summary))

    def _append(self, event: Any) -> None:
        """Append the event as a record: length and bytes, each followed by a checksum."""
        from tensorboardX.record_writer import masked_crc32c

        data = event.SerializeToString()
        head = struct.pack("<Q", len(data))
        left = memoryview(head + struct.pack("<I", masked_crc32c(head)) + data + struct.pack("<I", masked_crc32c(data)))
        size = self._size + len(left)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size = size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# --- schema: the fields of each kind that readers use; rows may have more fields

Row = dict[str, Any]

Time = Annotated[float, Meta(ge=0, le=1e11)]  # unix seconds that the calendar functions of every platform accept
Number = Annotated[float, Meta(ge=-1e100, le=1e100)]  # finite, and so is its square
Count = Annotated[int, Meta(ge=0, le=2**53)]
Share = Annotated[float, Meta(ge=0, le=1)]
Age = Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")]
Name = Annotated[str, Meta(max_length=128)]
Role = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _Any(msgspec.Struct):
    t: Time | None = None
    kind: Name | None = None
    role: Role | None = None


class _Known(msgspec.Struct):
    t: Time
    role: Role


class _Source(msgspec.Struct):
    reward: Number | None = None
    tokens: Number | None = None
    samples: Count | None = None  # of a step
    episodes: Count | None = None  # of a sampler since its start


class _Step(_Known):
    step: Count
    t0: Time
    t1: Time
    train_s: Number
    wait_s: Number
    publish_s: Number
    age_hist: dict[Age, Count]
    lineage: Count | None = None
    groups: list[Count] = []
    by_age: dict[Age, dict[str, Number | None]] | None = None
    sources: dict[str, _Source] | None = None
    samples: Number | None = None
    tokens_trained: Number | None = None
    tokens_computed: Number | None = None
    reward_mean: Number | None = None
    age_mean: Number | None = None
    age_max: Number | None = None
    logprob_mismatch_max: Number | None = None
    logits_std: Number | None = None
    expert_balance: Number | None = None
    expert_load_max: Number | None = None
    padding_waste: Number | None = None
    compiles: Number | None = None


class _Figures(msgspec.Struct):
    accuracy: Share | None
    n: Count
    samples: Count | None = None
    solved: Share | None = None


class _Eval(_Known):
    step: Count
    n: Count
    correct: Annotated[str, Meta(pattern=r"^[01-]*$")]
    accuracy: Share | None
    samples: Count | None = None
    solved: Share | None = None
    lineage: Count | None = None
    t0: Time | None = None
    t1: Time | None = None
    reward_parts: dict[str, Number | None] | None = None
    examples: list[Any] | None = None
    failed_by_cause: dict[str, dict[str, Count]] | None = None
    env_faults: dict[str, Count] | None = None
    sets: dict[str, _Figures] | None = None
    sources: dict[str, _Figures] | None = None


class _Stats(_Known):
    version: Name | None = None
    tokens_per_s: Number | None = None
    slot_steps_busy: Number | None = None
    slot_steps_total: Number | None = None
    compiles: Number | None = None
    flush_wait_s: Number | None = None
    members_aborted: Count | None = None
    tokens_aborted: Count | None = None
    tokens_aborted_done: Count | None = None
    answers_rejected: dict[str, Count] | None = None
    env_faults: dict[str, Count] | None = None
    env_restored: Count | None = None
    episodes: Count | None = None
    resident_bytes: Count | None = None
    scoring_slow: Count | None = None
    scoring_failed: dict[str, Count] | None = None
    scoring_remote: dict[str, Count] | None = None
    sources: dict[str, _Source] | None = None
    failed_by_source: dict[str, Count] | None = None


class _Span(_Known):
    what: Name
    t0: Time
    t1: Time
    tokens: Number | None = None
    version: Name | None = None


class _Members(_Known):
    rows: list[tuple[int, int, Time, Time, int]]


class _Lengths(msgspec.Struct):
    trained: tuple[Count, Count]
    lost: tuple[Count, Count]


class _Store(_Known):
    in_flight_window: Number | None = None
    in_flight_window_max: Number | None = None
    waits: dict[str, str] | None = None
    shrunk: Count | None = None
    tokens_put: Count | None = None
    tokens_masked: Count | None = None
    tokens_expired: dict[str, Count] | None = None
    lengths: _Lengths | None = None
    prompts_skipped: dict[str, Count] | None = None


class _Compile(_Known):
    what: str
    state: Name
    seconds: Number | None = None


class _Devices(_Known):
    host: Name | None = None
    platform: Name | None = None
    devices: Name | Count | None = None
    mesh: dict[str, Count] | None = None
    attention: dict[str, str] | None = None


class _Warm(_Known):
    step: Count | None = None


class _Restart(_Known):
    process: Name
    pid: int | None = None
    code: int | None = None
    cause: str | None = None
    error: str | None = None


class _Event(_Known):
    text: str


class _Profile(_Known):
    request: Name
    state: Name
    steps: Count
    seconds: Number | None = None
    folder: str | None = None
    host: str | None = None
    reason: str | None = None


KINDS: dict[str, type[msgspec.Struct]] = {
    "step": _Step,
    "eval": _Eval,
    "stats": _Stats,
    "span": _Span,
    "members": _Members,
    "store": _Store,
    "compile": _Compile,
    "devices": _Devices,
    "warm": _Warm,
    "restart": _Restart,
    "event": _Event,
    "profile": _Profile,
}


def checked_row(row: object) -> Row | None:
    """`row` if it is valid for all readers; None when a field that they use is missing or has another type.

    Of a row of an unknown kind, only `t`, `kind` and `role` are checked.
    """
    kind = row.get("kind") if isinstance(row, dict) else None
    try:
        msgspec.convert(row, KINDS.get(kind, _Any) if isinstance(kind, str) else _Any)
    except (msgspec.ValidationError, RecursionError):
        return None
    return row  # type: ignore[return-value]  # `convert` accepts only a dict
