"""State checkpoints: the state at one log position, in small parts, so that writing and reading it blocks no call.

Each row of `snapshot_parts` holds a few dozen entries of one table-like field of `State`; one part (field '') holds
all other fields. The row in `snapshots` is written last: parts without it belong to an unfinished checkpoint.
"""

from __future__ import annotations

import itertools
import sqlite3
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from jaxroll import wire
from jaxroll.store.core import events as ev
from jaxroll.store.core.machine import apply
from jaxroll.store.core.state import State

ENTRIES = 64  # entries of a field in one part
_ROWS = 200  # log records between two pauses

_REST = ""
_TABLES = {name: kind for name, kind in typing.get_type_hints(State).items() if typing.get_origin(kind) is dict}


class StatePart(typing.NamedTuple):
    """Some entries of one field of the state, or (field '') all other fields."""

    field: str
    number: int
    body: bytes


class Mark(typing.NamedTuple):
    """Position of a checkpoint, and the bytes of log records before it."""

    position: int
    log_bytes: int


def parts(state: State) -> Iterator[StatePart]:
    """Yield `state` in parts; it must not change meanwhile."""
    yield StatePart(_REST, 0, wire.encode(msgspec.structs.replace(state, **{name: {} for name in _TABLES})))
    for name in _TABLES:
        entries = iter(getattr(state, name).items())
        number = 0
        while some := dict(itertools.islice(entries, ENTRIES)):
            yield StatePart(name, number, wire.encode(some))
            number += 1


def assembled(pieces: Iterable[StatePart]) -> State:
    """The state made of these `parts`, which come in the order of their numbers."""
    state, tables = State(), {name: {} for name in _TABLES}
    for piece in pieces:
        if piece.field == _REST:
            state = wire.decode(piece.body, State)
        elif piece.field in tables:
            tables[piece.field] |= wire.decode(piece.body, _TABLES[piece.field])
    return msgspec.structs.replace(state, **tables)


def marks(connection: sqlite3.Connection) -> list[Mark]:
    """The checkpoints in the database, oldest first."""
    return [Mark(*row) for row in connection.execute("SELECT position, log_bytes FROM snapshots ORDER BY position")]


def load(connection: sqlite3.Connection, position: int) -> State:
    """The state of the checkpoint at `position`."""
    sql = "SELECT field, part, body FROM snapshot_parts WHERE position = ? ORDER BY field, part"
    return assembled(StatePart(*row) for row in connection.execute(sql, (position,)))


def newest(connection: sqlite3.Connection) -> tuple[Mark, State] | None:
    """The newest checkpoint; None before the first."""
    found = marks(connection)
    return (found[-1], load(connection, found[-1].position)) if found else None


def events_after(connection: sqlite3.Connection, position: int) -> Iterator[tuple[int, ev.Event]]:
    """Yield the log's records after `position`, in order: (bytes of the record, event)."""
    for (body,) in connection.execute("SELECT body FROM log WHERE position > ? ORDER BY position", (position,)):
        yield len(body), wire.decode(body, ev.Event)  # type: ignore[arg-type]


def rows_of(mark: Mark, unix_s: float, pieces: Iterable[StatePart]) -> Iterator[tuple[str, tuple]]:
    """Yield the SQL that stores a checkpoint, its mark last."""
    for piece in pieces:
        yield "INSERT OR REPLACE INTO snapshot_parts VALUES (?, ?, ?, ?)", (mark.position, *piece)
    yield "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", (mark.position, unix_s, mark.log_bytes)


# --- retention of the history


@dataclass(frozen=True)
class KeptCheckpoints:
    """Retained history: `base` is its first position (0: that of the run), `positions` are the checkpoints to keep."""

    base: int
    positions: frozenset[int]


def kept(found: Sequence[Mark], whole: bool, budget_bytes: int) -> KeptCheckpoints:
    """Choose the checkpoints to keep from `found` (oldest first, at least one), so that the log after `base` fits.

    The newest is always kept, because the store starts from it. Between it and the base a few are kept, half a budget
    apart, as later starts of the history. `whole`: the log begins with the first record of the run.
    """
    newest_mark = found[-1]
    starts = ([Mark(0, 0)] if whole else []) + list(found)
    base = next((m for m in starts if newest_mark.log_bytes - m.log_bytes <= budget_bytes), newest_mark)
    positions, last = {newest_mark.position, base.position} - {0}, base
    for mark in starts:
        if mark.position > base.position and mark.log_bytes - last.log_bytes >= budget_bytes / 2:
            positions.add(mark.position)
            last = mark
    return KeptCheckpoints(base.position, frozenset(positions))


# --- creating a checkpoint while the store runs


class StateReplica:
    """Copy of the state, updated by replaying the log on disk, from which checkpoints are made."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._mark = Mark(0, 0)

    def begin(self, state: State, before_bytes: int) -> None:
        """Start from a copy of `state`; the log records up to it have `before_bytes` bytes."""
        self._state, self._mark = wire.decode(wire.encode(state), State), Mark(state.position, before_bytes)

    def snapshot(self, connection: sqlite3.Connection, pause: Callable[[], None]) -> tuple[Mark, list[StatePart]]:
        """Return the newest committed position and its state in parts. `pause` is called every few ms and may raise."""
        state = self._begun(connection, pause)
        log_bytes = self._mark.log_bytes
        while True:
            rows = connection.execute(_SELECT_SOME, (state.position, _ROWS)).fetchall()
            for position, body in rows:
                apply(state, wire.decode(body, ev.Event), 0.0)  # type: ignore[arg-type]
                assert state.position == position
                log_bytes += len(body)
            self._mark = Mark(state.position, log_bytes)
            if len(rows) < _ROWS:
                break
            pause()
        made = []
        for piece in parts(state):
            made.append(piece)
            pause()
        return self._mark, made

    def _begun(self, connection: sqlite3.Connection, pause: Callable[[], None]) -> State:
        if self._state is None:
            self._state = State()
            if found := marks(connection):
                self._mark, pieces = found[-1], []
                for row in connection.execute(_SELECT_PARTS, (self._mark.position,)):
                    pieces.append(StatePart(*row))
                self._state = _assembled_slowly(pieces, pause)
        return self._state


_SELECT_SOME = "SELECT position, body FROM log WHERE position > ? ORDER BY position LIMIT ?"
_SELECT_PARTS = "SELECT field, part, body FROM snapshot_parts WHERE position = ? ORDER BY field, part"


def _assembled_slowly(pieces: Iterable[StatePart], pause: Callable[[], None]) -> State:
    def with_pauses() -> Iterator[StatePart]:
        for piece in pieces:
            yield piece
            pause()

    return assembled(with_pauses())
