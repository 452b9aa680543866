"""The state at one position, as rows: in pieces, so that neither writing nor reading it holds anybody up.

`snapshot_parts` holds a few dozen entries of one field of `State` each, and one part with all that is no table
(field ''). The row in `snapshots` is written last: parts without it are those of a snapshot that was never finished.
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
from jaxroll.store.core.apply import apply
from jaxroll.store.core.state import State

ENTRIES = 64  # of one field in one part
_ROWS = 200  # of the log between two chances for others

_REST = ""
_TABLES = {name: kind for name, kind in typing.get_type_hints(State).items() if typing.get_origin(kind) is dict}


class StatePart(typing.NamedTuple):
    """Some entries of one field of the state, or (field '') everything else."""

    field: str
    number: int
    body: bytes


class Mark(typing.NamedTuple):
    """A snapshot by its position, and how many bytes of log records stood before it."""

    position: int
    log_bytes: int


def parts(state: State) -> Iterator[StatePart]:
    """`state` in pieces; it must not change meanwhile."""
    yield StatePart(_REST, 0, wire.encode(msgspec.structs.replace(state, **{name: {} for name in _TABLES})))
    for name in _TABLES:
        entries = iter(getattr(state, name).items())
        number = 0
        while some := dict(itertools.islice(entries, ENTRIES)):
            yield StatePart(name, number, wire.encode(some))
            number += 1


def assembled(pieces: Iterable[StatePart]) -> State:
    """The state whose `parts` these are, in order of their numbers."""
    state, tables = State(), {name: {} for name in _TABLES}
    for piece in pieces:
        if piece.field == _REST:
            state = wire.decode(piece.body, State)
        elif piece.field in tables:
            tables[piece.field] |= wire.decode(piece.body, _TABLES[piece.field])
    return msgspec.structs.replace(state, **tables)


def marks(connection: sqlite3.Connection) -> list[Mark]:
    """The snapshots there are, oldest first."""
    return [Mark(*row) for row in connection.execute("SELECT position, log_bytes FROM snapshots ORDER BY position")]


def load(connection: sqlite3.Connection, position: int) -> State:
    """The state of the snapshot at `position`."""
    sql = "SELECT field, part, body FROM snapshot_parts WHERE position = ? ORDER BY field, part"
    return assembled(StatePart(*row) for row in connection.execute(sql, (position,)))


def newest(connection: sqlite3.Connection) -> tuple[Mark, State] | None:
    """The newest snapshot; None before the first."""
    found = marks(connection)
    return (found[-1], load(connection, found[-1].position)) if found else None


def events_after(connection: sqlite3.Connection, position: int) -> Iterator[tuple[int, ev.Event]]:
    """The log's records behind `position`, in order: (bytes of the record, event)."""
    for (body,) in connection.execute("SELECT body FROM log WHERE position > ? ORDER BY position", (position,)):
        yield len(body), wire.decode(body, ev.Event)  # type: ignore[arg-type]


def rows_of(mark: Mark, unix_s: float, pieces: Iterable[StatePart]) -> Iterator[tuple[str, tuple]]:
    """The SQL that keeps a snapshot, its mark last."""
    for piece in pieces:
        yield "INSERT OR REPLACE INTO snapshot_parts VALUES (?, ?, ?, ?)", (mark.position, *piece)
    yield "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", (mark.position, unix_s, mark.log_bytes)


# --- what is kept of the history


@dataclass(frozen=True)
class KeptCheckpoints:
    """`base` is the position at which the history begins (0: the run's beginning); `positions` the snapshots kept."""

    base: int
    positions: frozenset[int]


def kept(found: Sequence[Mark], whole: bool, budget_bytes: int) -> KeptCheckpoints:
    """What to keep of snapshots `found` (oldest first, one at least) so that the log behind `base` fits the budget.

    The newest is always kept: the store starts from it. Between it and the base stay the few (half a budget apart)
    at which the history may begin when it has outgrown its budget. `whole` says whether the log begins at 0.
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


# --- making one beside the running store


class StateReplica:
    """The state as the log on disk tells it, kept up by replaying: a snapshot is made of it, never of the live one."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._mark = Mark(0, 0)

    def begin(self, state: State, before_bytes: int) -> None:
        """Go on from `state`, as the log tells it up to here; before_bytes of records made it."""
        self._state, self._mark = wire.decode(wire.encode(state), State), Mark(state.position, before_bytes)

    def snapshot(self, connection: sqlite3.Connection, pause: Callable[[], None]) -> tuple[Mark, list[StatePart]]:
        """The newest committed state and its pieces. `pause` is called every few milliseconds, and may raise."""
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
