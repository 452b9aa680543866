"""Drives the pure core from the log again and checks every record, every snapshot, and the tables at the end.

It begins at the first record when the whole history is kept, else at the oldest snapshot from which all records are.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxroll import wire
from jaxroll.store import events as ev
from jaxroll.store import snapshots
from jaxroll.store.apply import apply
from jaxroll.store.invariants import EDGES, Seen, group_contradicts, impossible, residual, state_name, touched
from jaxroll.store.settings import Settings
from jaxroll.store.state import State, conservation_residual
from jaxroll.store.table_checks import Disagreement, table_checks


@dataclass(frozen=True)
class Violation:
    """Something that cannot be: at which position (None: in a table), in what, and why."""

    position: int | None
    kind: str
    why: str


@dataclass
class Replayed:
    """What was driven and checked. `first` and `last` are positions; `whole` says whether it began with the run."""

    first: int = 1
    last: int = 0
    whole: bool = True
    kinds: Counter[str] = field(default_factory=Counter)
    snapshots: int = 0
    tables: Counter[str] = field(default_factory=Counter)
    largest_age: int = 0
    ages_checked: bool = False
    violations: list[Violation] = field(default_factory=list)

    @property
    def records(self) -> int:
        """How many records were driven."""
        return sum(self.kinds.values())


class _Broken(Exception):
    """The first violation: the state behind it means nothing."""


def replay_log(db: sqlite3.Connection) -> Replayed:
    """Everything checked, in one read transaction of a log. Damage that SQLite itself finds raises sqlite3.Error."""
    found = Replayed()
    state = _begun(db, found)
    seen = Seen(rules(db), set(state.held))
    found.ages_checked = seen.settings is not None
    try:
        _drive(db, state, seen, found)
    except _Broken:
        pass
    else:
        for disagreement in table_checks(db, state, found.tables):
            found.violations.append(_of_table(disagreement))
    found.last, found.largest_age = state.position, seen.largest_age
    return found


def rules(db: sqlite3.Connection) -> Settings | None:
    """The settings the run's store wrote down; None when it did not, or another version did."""
    row = db.execute("SELECT value FROM meta WHERE key = 'rules'").fetchone()
    try:
        return msgspec.json.decode(row[0], type=Settings) if row else None
    except msgspec.MsgspecError:
        return None


def _begun(db: sqlite3.Connection, found: Replayed) -> State:
    """The state from which all records are there."""
    first = db.execute("SELECT MIN(position) FROM log").fetchone()[0]
    marks = snapshots.marks(db)
    if first == 1 or not marks:
        return State()
    start = next((mark for mark in marks if first is not None and mark.position >= first - 1), marks[-1])
    found.first, found.whole = start.position + 1, False
    return snapshots.load(db, start.position)


def _drive(db: sqlite3.Connection, state: State, seen: Seen, found: Replayed) -> None:
    kept = {mark.position for mark in snapshots.marks(db)}
    for position, kind, body, group in db.execute(_SELECT, (state.position,)):
        violation = _record(state, seen, position, kind, body, group)
        if violation is None and position in kept:
            violation = _snapshot(db, state)
            found.snapshots += 1
        if violation is not None:
            found.violations.append(violation)
            raise _Broken
        found.kinds[kind] += 1
    why = conservation_residual(state)
    if why:
        found.violations.append(Violation(state.position, "conservation", f"{why} groups issued are in no state"))
        raise _Broken


_SELECT = "SELECT position, kind, body, group_id FROM log WHERE position > ? ORDER BY position"


def _record(state: State, seen: Seen, position: int, kind: str, body: bytes, group: int | None) -> Violation | None:
    """Checks one record, then applies it."""
    if position != state.position + 1:
        return Violation(position, kind, f"the record before it is {state.position}: records are missing")
    try:
        event = wire.decode(body, ev.Event)  # type: ignore[arg-type]
    except msgspec.MsgspecError as error:
        return Violation(position, kind, f"the record cannot be read: {error}")
    if type(event).__struct_config__.tag != kind or getattr(event, "group", None) != group:
        return Violation(position, kind, "the row's kind or group is not that of its record")
    why = broken_by(state, seen, event)
    return Violation(position, kind, why) if why else None


def broken_by(state: State, seen: Seen, event: ev.Event) -> str:
    """Applies `event`; why it cannot be, or what it breaks, '' when all is well."""
    return impossible(seen, state, event) or _applied(state, seen, event)


def _applied(state: State, seen: Seen, event: ev.Event) -> str:
    """Applies the event; why what came out cannot be."""
    groups = touched(event)
    before = {gid: state_name(state, gid) for gid in groups}
    try:
        apply(state, event, 0.0)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        return f"the record fits no group: {type(error).__name__}: {error}"
    if isinstance(event, ev.Claimed):
        seen.claimed.update(groups)
    for gid in groups:
        was, now = before[gid], state_name(state, gid)
        if was is not None and was != now and (was, now or "ENDED") not in EDGES:
            return f"group {gid} goes from {was} to {now or 'its end'}"
        group = state.find(gid)
        if group is not None and (why := group_contradicts(group)):
            return why
    return f"conservation: {residual(state)} groups too many are issued" if residual(state) else ""


def _snapshot(db: sqlite3.Connection, state: State) -> Violation | None:
    """Compares the snapshot at the state's position with the state."""
    try:
        saved = snapshots.load(db, state.position)
    except msgspec.MsgspecError as error:
        return Violation(state.position, "snapshot", f"cannot be read: {error}")
    where = next(differences(state, saved), None)
    return Violation(state.position, "snapshot", f"differs from the log: {where}") if where else None


def differences(left: Any, right: Any, path: str = "state") -> Iterator[str]:
    """Where two states differ, clock readings (names ending in `_s`) aside."""
    if isinstance(left, msgspec.Struct) and type(left) is type(right):
        for name in left.__struct_fields__:
            if not name.endswith("_s"):
                yield from differences(getattr(left, name), getattr(right, name), f"{path}.{name}")
    elif isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in left.keys() | right.keys():
            yield from differences(left.get(key), right.get(key), f"{path}[{key}]")
    elif isinstance(left, Sequence) and not isinstance(left, (str, bytes)) and len(left) == len(right or ()):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from differences(a, b, f"{path}[{i}]")
    elif left != right:
        yield f"{path} is {left!r:.80} in the log, {right!r:.80} in the snapshot"


def _of_table(found: Disagreement) -> Violation:
    return Violation(None, found.table, found.why)
