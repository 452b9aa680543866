"""State checkpoints in small parts, and replay: apply the log to the pure core, check records, checkpoints and tables.

It starts at the first record if the whole history is kept, otherwise at the oldest checkpoint without a gap after it.
"""

from __future__ import annotations

import itertools
import math
import sqlite3
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxroll import wire
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.invariants import EDGES, Known, group_contradicts, impossible, residual, state_name, touched
from jaxroll.store.core.machine import apply
from jaxroll.store.core.state import LEASED, Group, State, conservation_residual, counts
from jaxroll.store.log.schema import Executor

# --- State checkpoints: the state at one log position, in small parts, so that writing and reading it blocks no call
#
# Each row of `snapshot_parts` holds a few dozen entries of one table-like field of `State`; one part (field '') holds
# all other fields. The row in `snapshots` is written last: parts without it belong to an unfinished checkpoint.

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


def marks(connection: Executor) -> list[Mark]:
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


# --- State checkpoints in small parts, and replay


@dataclass(frozen=True)
class Violation:
    """Broken invariant: its log position (None: in a table), the kind of record or table, and the reason."""

    position: int | None
    kind: str
    why: str


@dataclass
class Replayed:
    """Result of a replay. `first` and `last` are positions; `whole` is True if it started at the first record."""

    first: int = 1
    last: int = 0
    whole: bool = True
    kinds: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    tables: Counter[str] = field(default_factory=Counter)
    largest_age: int = 0
    ages_checked: bool = False
    violations: list[Violation] = field(default_factory=list)

    @property
    def records(self) -> int:
        """The number of replayed records."""
        return sum(self.kinds.values())


class _Broken(Exception):
    """First violation: the state after it is meaningless, so the replay stops."""


def replay_log(db: sqlite3.Connection) -> Replayed:
    """Check everything in one read transaction of a log. Damage that SQLite itself detects raises sqlite3.Error."""
    found = Replayed()
    state = _begun(db, found)
    seen = Known(rules(db), set(state.held))
    found.ages_checked = seen.settings is not None
    try:
        _drive(db, state, seen, found)
    except _Broken:
        pass
    else:
        for disagreement in table_checks(db, state, found.tables):
            found.violations.append(Violation(None, disagreement.table, disagreement.why))
    found.last, found.largest_age = state.position, seen.largest_age
    return found


def rules(db: sqlite3.Connection) -> Settings | None:
    """The settings that the run's store recorded; None if there are none or another version recorded them."""
    row = db.execute("SELECT value FROM meta WHERE key = 'rules'").fetchone()
    try:
        return msgspec.json.decode(row[0], type=Settings) if row else None
    except msgspec.MsgspecError:
        return None


def _begun(db: sqlite3.Connection, found: Replayed) -> State:
    """The state from which on no record is missing."""
    first = db.execute("SELECT MIN(position) FROM log").fetchone()[0]
    known = marks(db)
    if first == 1 or not known:
        return State()
    start = next((mark for mark in known if first is not None and mark.position >= first - 1), known[-1])
    found.first, found.whole = start.position + 1, False
    return load(db, start.position)


def _drive(db: sqlite3.Connection, state: State, seen: Known, found: Replayed) -> None:
    kept = {mark.position for mark in marks(db)}
    for position, kind, body, group in db.execute(_SELECT, (state.position,)):
        violation = _record(state, seen, position, kind, body, group)
        if violation is None and position in kept:
            violation = _checkpoint_violation(db, state)
            found.checkpoints += 1
        if violation is not None:
            found.violations.append(violation)
            raise _Broken
        found.kinds[kind] += 1
    why = conservation_residual(state)
    if why:
        found.violations.append(Violation(state.position, "conservation", f"{why} groups issued are in no state"))
        raise _Broken


_SELECT = "SELECT position, kind, body, group_id FROM log WHERE position > ? ORDER BY position"


def _record(state: State, seen: Known, position: int, kind: str, body: bytes, group: int | None) -> Violation | None:
    """Check one record, then apply it."""
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


def broken_by(state: State, seen: Known, event: ev.Event) -> str:
    """Apply `event`; return the reason why it is impossible or the invariant it breaks, '' if there is none."""
    return impossible(seen, state, event) or _applied(state, seen, event)


def _applied(state: State, seen: Known, event: ev.Event) -> str:
    """Apply the event; return the reason why the resulting state is impossible, or ''."""
    groups = touched(event)
    before = {gid: state_name(state, gid) for gid in groups}
    try:
        apply(state, event, 0.0)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        return f"the record matches no group: {type(error).__name__}: {error}"
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


def _checkpoint_violation(db: sqlite3.Connection, state: State) -> Violation | None:
    """Compare the state checkpoint at the state's position with the state."""
    try:
        saved = load(db, state.position)
    except msgspec.MsgspecError as error:
        return Violation(state.position, "state checkpoint", f"cannot be read: {error}")
    difference = next(differences(state, saved), None)
    return Violation(state.position, "state checkpoint", f"differs from the log: {difference}") if difference else None


def differences(left: Any, right: Any, path: str = "state") -> Iterator[str]:
    """Yield the differences between two states, ignoring clock readings (names that end in `_s`)."""
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
        yield f"{path} is {left!r:.80} in the log, {right!r:.80} in the state checkpoint"


# --- comparison of the tables of RUN/store.db with the state, and of payloads with their digests


@dataclass(frozen=True)
class Disagreement:
    """Table that disagrees with the log, and the reason."""

    table: str
    why: str


def table_checks(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    """Yield every disagreement; `checked` counts the compared rows by table."""
    for check in (_pages, _groups, _members, _payloads, _partials, _claims, _lines, _cursor, _questions):
        yield from check(db, state, checked)


def _alive(state: State) -> list[Group]:
    return [*state.open.values(), *state.held.values()]


def _pages(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    checked["pages"] += db.execute("PRAGMA page_count").fetchone()[0]
    result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if result != "ok":
        yield Disagreement("pages", str(result))


def _groups(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    rows = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    checked["groups"] += sum(rows.values())
    wanted = counts(state)
    for name in sorted(rows.keys() | wanted.keys()):
        if rows.get(name, 0) != wanted.get(name, 0):
            yield Disagreement("groups", f"{rows.get(name, 0)} are {name}, {wanted.get(name, 0)} by the log")
    for group in _alive(state):
        row = db.execute("SELECT state, claim_step FROM groups WHERE id = ?", (group.id,)).fetchone()
        if row != (group.state, group.step):
            yield Disagreement("groups", f"group {group.id} is {row}, by the log {(group.state, group.step)}")


def _members(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    for group in _alive(state):
        rows = {m: rest for m, *rest in db.execute(_SELECT_MEMBERS, (group.id,))}
        for member, slot in enumerate(group.slots):
            name, attempt, holder, digest = rows.get(member, ("", 0, "", ""))
            checked["members"] += 1
            if slot.digest and (name, attempt, digest) != ("done", slot.attempt, slot.digest):
                yield Disagreement("members", f"{group.id}.{member} is {name} ({digest}), it was put ({slot.digest})")
            if (name == "leased") != (slot.status == LEASED):
                yield Disagreement("members", f"{group.id}.{member} is {name or 'missing'}, by the log {slot.status}")
            if slot.status == LEASED and (attempt, holder) != (slot.attempt, slot.holder):
                yield Disagreement("members", f"{group.id}.{member} is leased by {holder}, by the log {slot.holder}")


_SELECT_MEMBERS = "SELECT member, state, attempt, holder, digest FROM members WHERE group_id = ?"


def _payloads(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    """Check the payloads one at a time, because together they may exceed memory."""
    for group, member, body, digest, size in db.execute(_SELECT_PAYLOADS):
        checked["payloads"] += 1
        if digest is None:
            yield Disagreement("payloads", f"{group}.{member} has bytes, but was never put")
        elif not wire.is_digest(digest, body) or len(body) != size:
            yield Disagreement("payloads", f"the bytes of {group}.{member} are not those that were put")
    sql = "SELECT member FROM payloads WHERE group_id = ?"
    for group in _alive(state):
        there = {member for (member,) in db.execute(sql, (group.id,))}
        lost = [member for member, _ in group.done() if member not in there]
        if lost:
            yield Disagreement("payloads", f"group {group.id} ({group.state}) lost its members {lost}")


_SELECT_PAYLOADS = (
    "SELECT p.group_id, p.member, p.body, m.digest, m.bytes FROM payloads p LEFT JOIN members m"
    " ON m.group_id = p.group_id AND m.member = p.member"
)


def _partials(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'partials'").fetchone():
        return
    sql = "SELECT group_id, member, MIN(start), MAX(start + tokens), SUM(tokens) FROM partials GROUP BY 1, 2"
    rows = {(gid, m): sizes for gid, m, *sizes in db.execute(sql)}
    wanted = {(g.id, m): s.flushed.tokens for g in _alive(state) for m, s in enumerate(g.slots) if s.flushed}
    checked["partials"] += len(rows)
    for key in sorted(rows.keys() | wanted.keys()):
        if rows.get(key) != [0, wanted.get(key), wanted.get(key)]:
            yield Disagreement("partials", f"{key} has (start, end, tokens) {rows.get(key)}, not {wanted.get(key)}")


def _claims(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    for step, batch in state.batches.items():
        checked["claims"] += 1
        lineage = db.execute("SELECT MAX(lineage) FROM claims WHERE step = ?", (step,)).fetchone()[0]
        sql = "SELECT group_id FROM claim_groups WHERE lineage = ? AND step = ? ORDER BY place"
        found = tuple(gid for (gid,) in db.execute(sql, (lineage, step)))
        if found != batch.groups:
            yield Disagreement("claim_groups", f"claim {step} is {found}, by the log {batch.groups}")
    twice = db.execute(_TRAINED_TWICE).fetchall()
    if twice:
        yield Disagreement("claim_groups", f"groups {[gid for (gid,) in twice]} are in two durable steps")


_TRAINED_TWICE = (
    "SELECT group_id FROM claim_groups JOIN claims USING (lineage, step) WHERE durable_lineage IS NOT NULL"
    " GROUP BY group_id HAVING COUNT(*) > 1"
)


def _lines(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    rows = db.execute("SELECT lineage, parent, fork_step FROM lineages ORDER BY lineage").fetchall()
    wanted = [(i, line.parent, line.fork_step) for i, line in enumerate(state.lineages)]
    checked["lineages"] += len(rows)
    if rows != wanted:
        yield Disagreement("lineages", f"are {rows}, by the log {wanted}")
    if state.published is not None:
        version = state.published.version
        sql = "SELECT manifest_digest FROM versions WHERE lineage = ? AND step = ?"
        row = db.execute(sql, (version.lineage, version.step)).fetchone()
        checked["versions"] += 1
        if row != (state.published.manifest_digest,):
            yield Disagreement("versions", f"{version} is {row}, by the log {state.published.manifest_digest}")


def _questions(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    """Check the questions if the state still has all of them.

    It drops the oldest; a dropped question that is issued again starts from zero in the state, but not in the table.
    """
    rows = {question: rest for question, *rest in db.execute("SELECT * FROM questions")}
    if len(rows) > len(state.questions):
        return
    for question, known in state.questions.items():
        checked["questions"] += 1
        row = rows.get(question, [])
        wanted = [known.issued, known.trained, known.members, known.reward_sum, known.last_step]
        if row[:3] + row[4:] != wanted[:3] + wanted[4:] or not math.isclose(row[3], wanted[3], abs_tol=1e-6):
            yield Disagreement("questions", f"{question} is {row}, by the log {wanted}")


def _cursor(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    row = db.execute("SELECT state FROM cursor").fetchone()
    checked["cursor"] += 1
    if (row[0] if row else None) != state.cursor:
        yield Disagreement("cursor", "is not the state of the prompt pipeline that the log ends with")
    closed = db.execute("SELECT value FROM meta WHERE key = 'closed'").fetchone()
    if (closed[0] if closed else "") != state.closed:
        yield Disagreement("meta", f"closed is {closed}, by the log {state.closed!r}")
