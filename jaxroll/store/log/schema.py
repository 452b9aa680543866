"""Schema of RUN/store.db: the log, tables of the same facts in rows that a person can query, and the audit trail.

The store restores its state from `log` and the newest of `snapshots` (the state at a position, in `snapshot_parts`).
The other tables follow the log in the same transaction; docs/store_schema.md describes every column.

    groups       one row per group: question, state, claim, reason of its end
    members      one row per member leased or put; the view `leases` shows the leased ones
    payloads     the member's bytes (MessagePack of records.Member); tasks: the prompt of its group
    partials     the flushed tokens of unfinished members (MessagePack of records.Partial), in order of `start`
    retired      groups that ended, in that order, whose payloads and tasks are still kept (`commit_log.Maintenance`)
    claims       one row for each step of the lineage that claimed it (a fork claims its steps again): the lineages that
                 trained it and made it durable, and the fork that dropped it before it was durable
    claim_groups the groups of each claim, in order; the schema refuses a group in two claims
    questions    the difficulty of each question: groups issued and trained, members, sum of their rewards
    line         view of the newest lineage's ancestry: `claims` below `upto` of `lineage` belong to it
    versions lineages failures cursor meta

No step is durable twice along the line, and no group in two durable steps:

    SELECT step FROM claims JOIN line ON line.lineage = durable_lineage AND step < upto
    GROUP BY step HAVING COUNT(*) > 1
    SELECT group_id FROM claim_groups JOIN claims USING (lineage, step) WHERE durable_lineage IS NOT NULL
    GROUP BY group_id HAVING COUNT(*) > 1
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxroll.clock import unix_s
from jaxroll.errors import InfraError, StoreRefusal
from jaxroll.metrics import checked_row
from jaxroll.records import Cut

if TYPE_CHECKING:  # readers of the tables do not need the RPC package
    from jaxroll.rpc.server import Caller
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import FILTERED
from jaxroll.store.core.state import State

# --- Audit trail: changes to the run by caller, in the table `audit`; metric rows that a caller may write
#
# Every begin, publish, ack, durable, control, close and dead group is one row, in the transaction of its decision or
# the next. Refused callers are rows too, at most `AT_ONCE` per minute: one further row counts the others of that
# minute, and only the newest `KEPT` refusals are kept, so that refused callers cannot fill the disk. No row contains a
# caller's token.

TABLE = """
CREATE TABLE audit (
  id INTEGER PRIMARY KEY, unix_s REAL NOT NULL, who TEXT NOT NULL, role TEXT NOT NULL, peer TEXT NOT NULL,
  what TEXT NOT NULL, detail TEXT NOT NULL, outcome TEXT NOT NULL, times INTEGER NOT NULL DEFAULT 1);
"""
AT_ONCE, WINDOW_S, KEPT = 20, 60.0, 10_000
_MAX_CHARS = 300
_UNUSUAL = re.compile(r"[^\x20-\x7e]")

Statement = tuple[str, tuple[Any, ...]]


class Executor(Protocol):
    """A database connection that executes statements."""

    def execute(self, sql: str, parameters: tuple = (), /) -> sqlite3.Cursor: ...


class Recording:
    """A connection that notes the statements by which the content changes."""

    def __init__(self, connection: sqlite3.Connection, executed: list[Statement]) -> None:
        self._connection, self._executed = connection, executed

    def execute(self, sql: str, parameters: tuple = (), /) -> sqlite3.Cursor:
        if not sql.startswith(("SELECT", "PRAGMA")):
            self._executed.append((sql, parameters))
        return self._connection.execute(sql, parameters)


class Replication(Protocol):
    """Delivery of every commit to another store, which has it on disk before it is acknowledged."""

    def ship(self, executed: Sequence[Statement], done: asyncio.Future[None] | None) -> None:
        """Deliver the statements of a commit, and then set the result of `done`; commits are delivered in order."""
        ...

    def abandon(self, error: InfraError) -> None:
        """Deliver nothing any more; futures that wait get `error`."""
        ...


_INSERT = "INSERT INTO audit (unix_s, who, role, peer, what, detail, outcome, times) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_TRIM = (
    "DELETE FROM audit WHERE what = 'refused' AND id <="
    " (SELECT id FROM audit WHERE what = 'refused' ORDER BY id DESC LIMIT 1 OFFSET ?)"
)


class Audit:
    """Audit rows, written through the log's `append`. Use it from the log's event loop."""

    def __init__(self, append: Callable[[Sequence[Statement]], None], now_s: Callable[[], float]) -> None:
        self._append, self._now_s = append, now_s
        self._window_s = now_s()
        self._written = 0
        self._suppressed = 0

    def record(self, caller: Caller, what: str, detail: str, reply: object) -> None:
        """Add a row: `caller` did `what`, and the answer was `reply`."""
        outcome = f"{type(reply).__name__}: {reply}" if isinstance(reply, StoreRefusal) else "ok"
        self._write(caller.name, caller.right, caller.peer, what, detail, outcome)

    def by_itself(self, what: str, detail: str) -> None:
        """Add a row: the store did `what` on its own."""
        self._write("store", "store", "", what, detail, "ok")

    def add_refusal(self, peer: str, who: str, why: str) -> None:
        """Add a row for a refused caller; `who` is its own claim (role:name)."""
        self.tick()
        if self._written >= AT_ONCE:
            self._suppressed += 1
            return
        self._written += 1
        role, _, name = who.partition(":")
        self._write(name, role, peer, "refused", "", why)

    def tick(self) -> None:
        """Add the row that counts the suppressed refusals once their minute is over."""
        if self._now_s() - self._window_s >= WINDOW_S:
            self.flush()

    def flush(self) -> None:
        """Add that row now and start a new minute."""
        self._window_s, self._written = self._now_s(), 0
        if self._suppressed:
            self._write("", "", "", "refused", "more callers in the same minute", "refused", self._suppressed)
            self._append([(_TRIM, (KEPT,))])
            self._suppressed = 0

    def _write(self, who: str, role: str, peer: str, what: str, detail: str, outcome: str, times: int = 1) -> None:
        texts = (_UNUSUAL.sub("?", text)[:_MAX_CHARS] for text in (who, role, peer, what, detail, outcome))
        self._append([(_INSERT, (unix_s(), *texts, times))])


# --- metric rows: each role may write only its own kinds

_ALL = frozenset({"span", "compile", "devices", "warm", "event", "profile", "restart"})
# Right of the caller → kinds that it may report. The store and the supervisor write theirs without a call.
KINDS: Mapping[str, frozenset[str]] = {
    "learner": _ALL | {"step"},
    "sampler": _ALL | {"stats", "members"},
    "observer": _ALL | {"eval"},
    "admin": _ALL | {"step", "stats", "members", "eval"},
}
KNOWN = frozenset().union(*KINDS.values()) | {"store"}
_ROLES: Mapping[str, frozenset[str]] = {  # right of the caller → roles that a row may name; admin: any
    "learner": frozenset({"learner"}),
    "sampler": frozenset({"sampler", "actor"}),
    "observer": frozenset({"evaluator", "observer", "report"}),
}


def rows_of(lines: Iterable[bytes], right: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The well-formed rows in `lines`, and the reasons why the others are left out.

    StoreRefusal (for all of them) if one is not a JSON object, or a caller with this right may not write it.
    """
    rows, left_out = [], []
    for place, line in enumerate(lines):
        row = _row(line, place, right)
        if checked_row(row) is not None:
            rows.append(row)
        else:
            left_out.append(f"a {row.get('kind')!r:.40} row lacks a field, or has one of another type")
    return rows, left_out


def _row(line: bytes, place: int, right: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line, type=dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise StoreRefusal(f"row {place} of a report is not a JSON object: {error}") from error
    kind, role = row.get("kind"), row.get("role")
    if isinstance(kind, str) and kind in KNOWN and kind not in KINDS[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write {kind} rows")
    if role is not None and right in _ROLES and str(role).partition("-")[0] not in _ROLES[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write as {role!r:.40}")
    if kind == "restart" and right in _ROLES and row.get("process") != role:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write of others")
    return row


# --- Schema of RUN/store.db

SCHEMA_VERSION = 2

TABLES = (
    """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE log (position INTEGER PRIMARY KEY, unix_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL,
  group_id INTEGER);
CREATE TABLE snapshots (position INTEGER PRIMARY KEY, unix_s REAL NOT NULL, log_bytes INTEGER NOT NULL);
CREATE TABLE snapshot_parts (
  position INTEGER NOT NULL, field TEXT NOT NULL, part INTEGER NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (position, field, part));
CREATE TABLE groups (
  id INTEGER PRIMARY KEY, question_hash TEXT NOT NULL, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
  reason TEXT NOT NULL DEFAULT '', size INTEGER NOT NULL, reissue_of INTEGER, reissues INTEGER NOT NULL,
  claim_step INTEGER, durable_step INTEGER, issued_unix_s REAL NOT NULL, ended_unix_s REAL);
CREATE INDEX groups_alive ON groups (claim_step) WHERE ended_unix_s IS NULL;
CREATE TABLE tasks (
  group_id INTEGER PRIMARY KEY, env TEXT NOT NULL, env_args TEXT NOT NULL, seed INTEGER NOT NULL,
  messages TEXT NOT NULL);
CREATE TABLE members (
  group_id INTEGER NOT NULL, member INTEGER NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
  holder TEXT NOT NULL DEFAULT '', digest TEXT NOT NULL DEFAULT '', tokens INTEGER, bytes INTEGER,
  lineage INTEGER, oldest_step INTEGER, newest_step INTEGER, reward REAL, leased_unix_s REAL,
  ended_unix_s REAL, PRIMARY KEY (group_id, member));
CREATE VIEW leases AS SELECT group_id, member, attempt, holder, leased_unix_s FROM members
  WHERE state = 'leased' AND group_id IN (SELECT id FROM groups WHERE ended_unix_s IS NULL);
CREATE TABLE payloads (
  group_id INTEGER NOT NULL, member INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (group_id, member));
CREATE TABLE partials (
  group_id INTEGER NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL, tokens INTEGER NOT NULL,
  body BLOB NOT NULL, PRIMARY KEY (group_id, member, start));
CREATE TABLE retired (
  place INTEGER PRIMARY KEY AUTOINCREMENT, group_id INTEGER NOT NULL UNIQUE, bytes INTEGER NOT NULL);
CREATE TABLE failures (
  group_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, error TEXT NOT NULL,
  unix_s REAL NOT NULL);
CREATE TABLE claims (
  lineage INTEGER NOT NULL, step INTEGER NOT NULL, shuffle_seed INTEGER NOT NULL, groups INTEGER NOT NULL,
  waited_s REAL NOT NULL DEFAULT 0, worked_s REAL NOT NULL DEFAULT 0, trained_lineage INTEGER, durable_lineage INTEGER,
  forked_by INTEGER, unix_s REAL NOT NULL, PRIMARY KEY (lineage, step));
CREATE TABLE claim_groups (
  lineage INTEGER NOT NULL, step INTEGER NOT NULL, place INTEGER NOT NULL, group_id INTEGER NOT NULL UNIQUE,
  PRIMARY KEY (lineage, step, place));
CREATE TABLE questions (
  question_hash TEXT PRIMARY KEY, issued INTEGER NOT NULL DEFAULT 0, trained INTEGER NOT NULL DEFAULT 0,
  members INTEGER NOT NULL DEFAULT 0, reward_sum REAL NOT NULL DEFAULT 0, last_step INTEGER);
CREATE TABLE versions (
  lineage INTEGER NOT NULL, step INTEGER NOT NULL, channel TEXT NOT NULL, address TEXT NOT NULL,
  manifest_digest TEXT NOT NULL, unix_s REAL NOT NULL, PRIMARY KEY (lineage, step));
CREATE TABLE lineages (lineage INTEGER PRIMARY KEY, parent INTEGER, fork_step INTEGER NOT NULL, unix_s REAL NOT NULL);
CREATE VIEW line AS WITH RECURSIVE line (lineage, upto) AS (
  SELECT MAX(lineage), 9223372036854775807 FROM lineages
  UNION ALL SELECT parent, MIN(upto, fork_step) FROM line JOIN lineages USING (lineage) WHERE parent IS NOT NULL)
  SELECT lineage, upto FROM line;
CREATE TABLE cursor (id INTEGER PRIMARY KEY CHECK (id = 1), prompts_issued INTEGER NOT NULL, state BLOB NOT NULL);
"""
    + TABLE
)

# --- rows of rare events and of the learner: failures, ends of groups, reports, versions, forks

WITHOUT_PARTIALS = "DELETE FROM partials WHERE group_id = ? AND member = ?"
INSERT_TASK = "INSERT INTO tasks VALUES (?, ?, ?, ?, ?)"  # group, environment, its arguments, seed, messages as JSON
_SMALLER = "UPDATE groups SET size = size - ? WHERE id = ?"
_ALIVE = "ended_unix_s IS NULL"
_LIVE = "durable_lineage IS NULL AND forked_by IS NULL"  # claims that may still be trained


def _without_partials(group: int, members: Iterable[int]) -> list[Statement]:
    return [(WITHOUT_PARTIALS, (group, member)) for member in members]


def partial(request: ev.Flush, body: bytes | memoryview) -> Statement:
    """The SQL that stores the flushed tokens of a member."""
    values = (request.group, request.member, request.start, request.count, body)
    return ("INSERT OR REPLACE INTO partials VALUES (?, ?, ?, ?, ?)", values)


def rules(text: str) -> list[Statement]:
    """The SQL that stores the rules of the run (JSON of `Settings`), for readers without the config."""
    return _meta("rules", text)


def _lease_ended(e: ev.LeaseEnded, state: State, unix_s: float) -> list[Statement]:
    sql = "UPDATE members SET state = ?, ended_unix_s = ? WHERE group_id = ? AND member = ?"
    return [(sql, (e.reason, unix_s, e.group, member)) for member in e.members]


def _member_failed(e: ev.MemberFailed, state: State, unix_s: float) -> list[Statement]:
    failure = (e.group, e.member, e.attempt, e.kind, e.error, unix_s)
    sql = "UPDATE members SET state = 'failed', ended_unix_s = ? WHERE group_id = ? AND member = ?"
    return [
        (sql, (unix_s, e.group, e.member)),
        ("INSERT INTO failures VALUES (?, ?, ?, ?, ?, ?)", failure),
        *_without_partials(e.group, [e.member]),
    ]


def _shrunk(e: ev.Shrunk, state: State, unix_s: float) -> list[Statement]:
    sql = "UPDATE members SET state = 'dropped', ended_unix_s = ? WHERE group_id = ? AND member = ?"
    rows: list[Statement] = [(sql, (unix_s, e.group, member)) for member in e.dropped]
    rows += _without_partials(e.group, e.dropped)
    return [*rows, (_SMALLER, (len(e.dropped), e.group))]


def _aborted(e: ev.Aborted, state: State, unix_s: float) -> list[Statement]:
    sql = "UPDATE members SET state = 'surplus', ended_unix_s = ? WHERE group_id = ? AND member = ?"
    surplus = e.members if e.reason == "enough" else ()  # the rows of the others already record their failure
    rows: list[Statement] = [(sql, (unix_s, e.group, member)) for member in surplus]
    rows += _without_partials(e.group, e.members)
    return [*rows, (_SMALLER, (len(e.members), e.group))]


# Payloads are deleted later, in bounded portions: a transaction that deletes those of many groups would delay puts.
_RETIRE = (
    "INSERT OR IGNORE INTO retired (group_id, bytes) SELECT id, (SELECT COALESCE(SUM(bytes), 0) FROM members"
    " WHERE group_id = groups.id AND members.state = 'done') FROM groups WHERE {} ORDER BY id"
)


def _ended(gid: int, name: str, reason: str, unix_s: float) -> list[Statement]:
    return [
        ("UPDATE groups SET state = ?, reason = ?, ended_unix_s = ? WHERE id = ?", (name, reason, unix_s, gid)),
        ("UPDATE members SET state = 'ended' WHERE group_id = ? AND state = 'leased'", (gid,)),
        ("DELETE FROM partials WHERE group_id = ?", (gid,)),
        (_RETIRE.format("groups.id = ?"), (gid,)),
    ]


def _expired(e: ev.Expired, state: State, unix_s: float) -> list[Statement]:
    rejected = e.reason.partition(":")[0] == FILTERED
    judged: list[Statement] = [(_QUESTION_KNOWN, (e.group,)), (_QUESTION_JUDGED, (e.group,) * 3)] if rejected else []
    return [*judged, *_ended(e.group, "EXPIRED", e.reason, unix_s)]


_QUESTION_KNOWN = "INSERT OR IGNORE INTO questions (question_hash) SELECT question_hash FROM groups WHERE id = ?"
# For a group that the filter rejects; it is no longer in the state.
_QUESTION_JUDGED = (
    "UPDATE questions SET"
    " members = members + (SELECT COUNT(*) FROM members AS m WHERE m.group_id = ? AND m.state = 'done'),"
    " reward_sum = reward_sum + (SELECT TOTAL(reward) FROM members AS m WHERE m.group_id = ? AND m.state = 'done')"
    " WHERE question_hash = (SELECT question_hash FROM groups WHERE id = ?)"
)


def _acked(e: ev.Acked, state: State, unix_s: float) -> list[Statement]:
    return [
        (f"UPDATE claims SET trained_lineage = ? WHERE step = ? AND {_LIVE}", (e.version.lineage, e.version.step)),
        ("UPDATE groups SET state = 'ACKED' WHERE claim_step = ? AND ended_unix_s IS NULL", (e.version.step,)),
    ]


def _made_durable(e: ev.MadeDurable, state: State, unix_s: float) -> list[Statement]:
    step = e.version.step
    done = "claim_step < ? AND ended_unix_s IS NULL"
    return [
        (_RETIRE.format(done), (step,)),
        (
            f"UPDATE groups SET state = 'TRIMMED', durable_step = claim_step, ended_unix_s = ? WHERE {done}",
            (unix_s, step),
        ),
        (
            f"UPDATE claims SET durable_lineage = ? WHERE step < ? AND {_LIVE}",
            (e.version.lineage, step),
        ),
    ]


def _published(e: ev.Published, state: State, unix_s: float) -> list[Statement]:
    s = e.ref
    values = (s.version.lineage, s.version.step, s.channel, s.address, s.manifest_digest, unix_s)
    return [("INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?)", values)]


def _began(e: ev.Began, state: State, unix_s: float) -> list[Statement]:
    if e.parent is None:
        return []
    step, earlier = e.version.step, e.log.lines if e.log is not None else ()
    lines = [*((line, *left) for line, left in enumerate(earlier) if line), (e.version.lineage, e.parent, step)]
    return [
        *(("INSERT INTO lineages VALUES (?, ?, ?, ?)", (*line, unix_s)) for line in lines),
        *(_forked(e.version.lineage, e.cut, state) if e.cut is not None else []),
        (f"UPDATE claims SET trained_lineage = NULL WHERE step >= ? AND {_LIVE}", (step,)),
        (f"UPDATE groups SET state = 'CLAIMED' WHERE claim_step >= ? AND state = 'ACKED' AND {_ALIVE}", (step,)),
        (
            "UPDATE members SET state = 'fenced', ended_unix_s = ? WHERE state = 'leased'"
            f" AND group_id IN (SELECT id FROM groups WHERE {_ALIVE})",
            (unix_s,),
        ),
        (f"UPDATE groups SET state = 'PENDING' WHERE state = 'LEASED' AND {_ALIVE}", ()),
        ("DELETE FROM partials", ()),
    ]


def _forked(lineage: int, cut: Cut, state: State) -> list[Statement]:
    rows: list[Statement] = [
        (f"UPDATE claims SET forked_by = ? WHERE {_LIVE}", (lineage,)),
        ("DELETE FROM meta WHERE key IN ('closed', 'data_ended')", ()),
    ]
    if cut.cursor is None:
        return [*rows, ("DELETE FROM cursor", ())]
    return [*rows, ("INSERT OR REPLACE INTO cursor VALUES (1, ?, ?)", (state.prompts_issued, cut.cursor))]


def _skipped(e: ev.Skipped, state: State, unix_s: float) -> list[Statement]:
    return [("INSERT OR REPLACE INTO cursor VALUES (1, ?, ?)", (state.prompts_issued, e.cursor))]


def _meta(key: str, value: str) -> list[Statement]:
    return [("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))]


# The rows of an event, without its log record and its group's state. `commit_log` adds these, and has the other events.
Follow = Callable[[Any, State, float], list[Statement]]
ROWS: Mapping[type, Follow] = {
    ev.Skipped: _skipped,
    ev.LeaseEnded: _lease_ended,
    ev.Flushed: lambda e, state, unix_s: [] if e.start else _without_partials(e.group, [e.member]),
    ev.MemberFailed: _member_failed,
    ev.Shrunk: _shrunk,
    ev.Aborted: _aborted,
    ev.Expired: _expired,
    ev.Died: lambda e, state, unix_s: _ended(e.group, "DEAD", e.reason, unix_s),
    ev.Acked: _acked,
    ev.MadeDurable: _made_durable,
    ev.Published: _published,
    ev.Began: _began,
    ev.DataEnded: lambda e, state, unix_s: _meta("data_ended", "1"),
    ev.RunClosed: lambda e, state, unix_s: _meta("closed", e.reason),
    ev.RunOpened: lambda e, state, unix_s: _meta("closed", ""),
}
