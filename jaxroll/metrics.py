"""Metrics rows: written as lines of JSON, followed while they grow, shown to TensorBoard.

One file, `RUN/metrics.jsonl`, has two appending processes (store and supervisor) and any number of readers. A writer
may be killed inside a line: readers skip what is not a whole JSON object, and the next writer starts on a fresh line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxroll.protocols import Tracker

Row = dict[str, Any]


def dumps(row: Mapping[str, Any]) -> str:
    """One line of strict JSON for `row`: numpy becomes plain, numbers that are not finite become null."""
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
    """The row that `line` holds; None when it is torn or no JSON object."""
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return row if isinstance(row, dict) else None


def read(path: str | Path) -> list[Row]:
    """All whole rows of the file, in order; none when there is no file."""
    return Follower(path).rows(closed=True)


class Follower:
    """Reads a growing file of rows from where it stopped last time.

    A last line without its newline waits for the rest; a file that shrank or was replaced is read from its beginning.
    """

    def __init__(self, path: str | Path, *, at_end: bool = False) -> None:
        self._path = Path(path)
        self._offset = self._size_bytes() if at_end else 0
        self._inode: int | None = None
        self._pending = b""
        self.skipped = 0  # lines that held no row

    def rows(self, *, closed: bool = False) -> list[Row]:
        """The rows that were completed since the last call; `closed` also takes a last line without a newline."""
        data = self._new_bytes()  # may drop what is pending
        lines = (self._pending + data).split(b"\n")
        self._pending = b"" if closed else lines.pop()
        rows = []
        for line in lines:
            row = loads(line) if line.strip() else None
            if row is not None:
                rows.append(row)
            elif line.strip():
                self.skipped += 1
        return rows

    def _new_bytes(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._offset or self._inode not in (None, status.st_ino):
                    self._offset, self._pending = 0, b""
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def _size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


class JsonlTracker:
    """Appends rows to a file, each with one write, so that appenders in other processes never split a line."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a writer before us was killed inside a line

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self.log_all([row])

    def log_all(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows together."""
        data = memoryview("".join(dumps(row) + "\n" for row in rows).encode())
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class TensorBoardTracker:
    """Writes the numbers of rows as TensorBoard events: `role/kind/name` over the row's step (or its count)."""

    SHOWN = frozenset({"step", "eval", "stats", "store", "warm"})
    NOT_SCALARS = frozenset({"t", "t0", "t1", "step", "lineage"})
    NESTED = frozenset({"by_age"})  # a number for each age: `by_age/1/ess`

    def __init__(self, folder: str | Path) -> None:
        from tensorboardX import SummaryWriter  # heavy, and only the one process that writes events needs it

        self._writer = SummaryWriter(str(folder), flush_secs=10)
        self._counts: dict[str, int] = {}

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the row's numbers; kinds that hold none are left out."""
        kind, role = row.get("kind"), str(row.get("role", "run"))
        if kind not in self.SHOWN:
            return
        prefix = f"{role}/{kind}"
        self._counts[prefix] = count = self._counts.get(prefix, 0) + 1
        step = row.get("step", count)
        for name, value in self._flat(row):
            if name in self.NOT_SCALARS or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            self._writer.add_scalar(f"{prefix}/{name}", value, int(step), walltime=row.get("t"))

    def _flat(self, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in row.items():
            if name not in self.NESTED:
                yield name, value
                continue
            for key, inner in value.items():
                yield from ((f"{name}/{key}/{each}", number) for each, number in inner.items())

    def close(self) -> None:
        """Flush and let go of the files."""
        self._writer.close()


class Fanout:
    """Gives every row to several trackers."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, row: Mapping[str, Any]) -> None:
        """Log to each."""
        for tracker in self._trackers:
            tracker.log(row)

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()


class CallTracker:
    """Hands every row to a function: for tests, and for roles that report through the store."""

    def __init__(self, call: Callable[[Row], None]) -> None:
        self._call = call

    def log(self, row: Mapping[str, Any]) -> None:
        """Call with a copy of the row."""
        self._call(dict(row))

    def close(self) -> None:
        """Nothing is held."""
