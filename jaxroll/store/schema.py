"""RUN/store.db: the log, and tables that say the same in rows a person can query.

`log` (with `snapshot`, the state at some position, when it was compacted) is the truth, from which the store rebuilds
itself. The other tables follow it in the same transaction:

    groups       one row each: question, state, claim, why it ended
    members      one row for each member leased or put; `leases` is the view of those in work
    payloads     the member's bytes (MessagePack of records.Member), gone when its group is trimmed or expired
    claims       one row for each step: the lineages that trained it and made it durable
    claim_groups which groups, in order; a group is in one claim at most, and the schema refuses anything else
    versions lineages failures cursor meta

No group is in two durable steps:

    SELECT group_id FROM claim_groups JOIN claims USING (step) WHERE durable_lineage IS NOT NULL
    GROUP BY group_id HAVING COUNT(*) > 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxroll import wire
from jaxroll.store import events as ev
from jaxroll.store.state import State

SCHEMA_VERSION = 1

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE log (position INTEGER PRIMARY KEY, unix_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), position INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE groups (
  id INTEGER PRIMARY KEY, question_hash TEXT NOT NULL, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
  reason TEXT NOT NULL DEFAULT '', size INTEGER NOT NULL, reissue_of INTEGER, reissues INTEGER NOT NULL,
  claim_step INTEGER, durable_step INTEGER, issued_unix_s REAL NOT NULL, ended_unix_s REAL);
CREATE INDEX groups_by_claim ON groups (claim_step);
CREATE TABLE members (
  group_id INTEGER NOT NULL, member INTEGER NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
  holder TEXT NOT NULL DEFAULT '', digest TEXT NOT NULL DEFAULT '', tokens INTEGER, bytes INTEGER,
  lineage INTEGER, oldest_step INTEGER, newest_step INTEGER, PRIMARY KEY (group_id, member));
CREATE VIEW leases AS SELECT group_id, member, attempt, holder FROM members WHERE state = 'leased';
CREATE TABLE payloads (
  group_id INTEGER NOT NULL, member INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (group_id, member));
CREATE TABLE failures (
  group_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, error TEXT NOT NULL,
  unix_s REAL NOT NULL);
CREATE TABLE claims (
  step INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, shuffle_seed INTEGER NOT NULL, groups INTEGER NOT NULL,
  trained_lineage INTEGER, durable_lineage INTEGER, unix_s REAL NOT NULL);
CREATE TABLE claim_groups (
  step INTEGER NOT NULL, place INTEGER NOT NULL, group_id INTEGER NOT NULL UNIQUE, PRIMARY KEY (step, place));
CREATE TABLE versions (
  lineage INTEGER NOT NULL, step INTEGER NOT NULL, channel TEXT NOT NULL, address TEXT NOT NULL,
  manifest_digest TEXT NOT NULL, unix_s REAL NOT NULL, PRIMARY KEY (lineage, step));
CREATE TABLE lineages (lineage INTEGER PRIMARY KEY, parent INTEGER, fork_step INTEGER NOT NULL, unix_s REAL NOT NULL);
CREATE TABLE cursor (id INTEGER PRIMARY KEY CHECK (id = 1), prompts_issued INTEGER NOT NULL, state BLOB NOT NULL);
"""

Statement = tuple[str, tuple[Any, ...]]


def statements(event: ev.Event, state: State, position: int, unix_s: float) -> list[Statement]:
    """The SQL that logs `event` at `position` and brings the tables to `state`, the state after the whole decision."""
    kind = type(event).__struct_config__.tag
    row: Statement = ("INSERT INTO log VALUES (?, ?, ?, ?)", (position, unix_s, kind, wire.encode(event)))
    follow = _FOLLOW.get(type(event))
    return [row, *(follow(event, state, unix_s) if follow else [])]


def payload(group: int, member: int, body: bytes) -> Statement:
    """The SQL that keeps a member's bytes."""
    return ("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)", (group, member, body))


def compaction(state: State) -> list[Statement]:
    """The SQL that puts `state` in the place of all log records up to its position."""
    return [
        ("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?)", (state.position, wire.encode(state))),
        ("DELETE FROM log WHERE position <= ?", (state.position,)),
    ]


def _issued(e: ev.Issued, state: State, unix_s: float) -> list[Statement]:
    columns = "id, question_hash, prompt_index, state, size, reissue_of, reissues, issued_unix_s"
    values = (e.group, e.task.question_hash, e.task.index, "PENDING", e.size, e.reissue_of, e.reissues, unix_s)
    rows: list[Statement] = [(f"INSERT INTO groups ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)]
    if e.cursor is not None:
        rows.append(("INSERT OR REPLACE INTO cursor VALUES (1, ?, ?)", (state.prompts_issued, e.cursor)))
    return rows


def _leased(e: ev.Leased, state: State, unix_s: float) -> list[Statement]:
    sql = "INSERT OR REPLACE INTO members (group_id, member, state, attempt, holder) VALUES (?, ?, 'leased', ?, ?)"
    rows: list[Statement] = [(sql, (e.group, member, attempt, e.holder)) for member, attempt in e.members]
    return rows + _group_state(e.group, state)


def _group_state(gid: int, state: State) -> list[Statement]:
    group = state.find(gid)
    if group is None:  # it ended in the same decision, whose last event says how
        return []
    sql = "UPDATE groups SET state = ?, reason = ?, claim_step = ? WHERE id = ?"
    return [(sql, (group.state, group.note, group.step, gid))]


def _lease_ended(e: ev.LeaseEnded, state: State, unix_s: float) -> list[Statement]:
    sql = "UPDATE members SET state = ? WHERE group_id = ? AND member = ?"
    rows: list[Statement] = [(sql, (e.reason, e.group, member)) for member in e.members]
    return rows + _group_state(e.group, state)


def _put(e: ev.Put, state: State, unix_s: float) -> list[Statement]:
    steps = [run.version.step for run in e.runs]
    values = (
        e.digest,
        sum(run.count for run in e.runs),
        e.size_bytes,
        e.runs[-1].version.lineage,
        min(steps),
        max(steps),
    )
    sql = (
        "UPDATE members SET state = 'done', digest = ?, tokens = ?, bytes = ?, lineage = ?, oldest_step = ?,"
        " newest_step = ? WHERE group_id = ? AND member = ?"
    )
    rows: list[Statement] = [(sql, (*values, e.group, e.member))]
    group = state.find(e.group)
    return rows + (_group_state(e.group, state) if group is None or group.state != "LEASED" else [])


def _member_failed(e: ev.MemberFailed, state: State, unix_s: float) -> list[Statement]:
    failure = (e.group, e.member, e.attempt, e.kind, e.error, unix_s)
    rows: list[Statement] = [
        ("UPDATE members SET state = 'failed' WHERE group_id = ? AND member = ?", (e.group, e.member)),
        ("INSERT INTO failures VALUES (?, ?, ?, ?, ?, ?)", failure),
    ]
    return rows + _group_state(e.group, state)


def _shrunk(e: ev.Shrunk, state: State, unix_s: float) -> list[Statement]:
    sql = "UPDATE members SET state = 'dropped' WHERE group_id = ? AND member = ?"
    rows: list[Statement] = [(sql, (e.group, member)) for member in e.dropped]
    rows.append(("UPDATE groups SET size = size - ? WHERE id = ?", (len(e.dropped), e.group)))
    return rows + _group_state(e.group, state)


def _ended(gid: int, name: str, reason: str, unix_s: float) -> list[Statement]:
    return [
        ("UPDATE groups SET state = ?, reason = ?, ended_unix_s = ? WHERE id = ?", (name, reason, unix_s, gid)),
        ("UPDATE members SET state = 'ended' WHERE group_id = ? AND state = 'leased'", (gid,)),
        ("DELETE FROM payloads WHERE group_id = ?", (gid,)),
    ]


def _claimed(e: ev.Claimed, state: State, unix_s: float) -> list[Statement]:
    columns = "step, lineage, shuffle_seed, groups, unix_s"
    values = (e.step, e.lineage, e.shuffle_seed, len(e.groups), unix_s)
    rows: list[Statement] = [(f"INSERT INTO claims ({columns}) VALUES (?, ?, ?, ?, ?)", values)]
    for place, gid in enumerate(e.groups):
        rows.append(("INSERT INTO claim_groups VALUES (?, ?, ?)", (e.step, place, gid)))
        rows.append(("UPDATE groups SET state = 'CLAIMED', claim_step = ? WHERE id = ?", (e.step, gid)))
    return rows


def _acked(e: ev.Acked, state: State, unix_s: float) -> list[Statement]:
    return [
        ("UPDATE claims SET trained_lineage = ? WHERE step = ?", (e.version.lineage, e.version.step)),
        ("UPDATE groups SET state = 'ACKED' WHERE claim_step = ?", (e.version.step,)),
    ]


def _made_durable(e: ev.MadeDurable, state: State, unix_s: float) -> list[Statement]:
    step = e.version.step
    done = "claim_step < ? AND durable_step IS NULL"
    return [
        (f"DELETE FROM payloads WHERE group_id IN (SELECT id FROM groups WHERE {done})", (step,)),
        (
            f"UPDATE groups SET state = 'TRIMMED', durable_step = claim_step, ended_unix_s = ? WHERE {done}",
            (unix_s, step),
        ),
        (
            "UPDATE claims SET durable_lineage = ? WHERE step < ? AND durable_lineage IS NULL",
            (e.version.lineage, step),
        ),
    ]


def _published(e: ev.Published, state: State, unix_s: float) -> list[Statement]:
    s = e.snapshot
    values = (s.version.lineage, s.version.step, s.channel, s.address, s.manifest_digest, unix_s)
    return [("INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?)", values)]


def _began(e: ev.Began, state: State, unix_s: float) -> list[Statement]:
    if e.parent is None:
        return []
    step = e.version.step
    return [
        ("INSERT INTO lineages VALUES (?, ?, ?, ?)", (e.version.lineage, e.parent, step, unix_s)),
        ("UPDATE claims SET trained_lineage = NULL WHERE step >= ?", (step,)),
        ("UPDATE groups SET state = 'CLAIMED' WHERE claim_step >= ? AND state = 'ACKED'", (step,)),
        ("UPDATE members SET state = 'fenced', attempt = attempt + 1 WHERE state = 'leased'", ()),
        ("UPDATE groups SET state = 'PENDING' WHERE state = 'LEASED'", ()),
    ]


def _meta(key: str, value: str) -> list[Statement]:
    return [("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))]


_FOLLOW: dict[type, Callable[[Any, State, float], list[Statement]]] = {
    ev.Issued: _issued,
    ev.Leased: _leased,
    ev.LeaseEnded: _lease_ended,
    ev.Put: _put,
    ev.MemberFailed: _member_failed,
    ev.Shrunk: _shrunk,
    ev.Expired: lambda e, state, unix_s: _ended(e.group, "EXPIRED", e.reason, unix_s),
    ev.Died: lambda e, state, unix_s: _ended(e.group, "DEAD", e.reason, unix_s),
    ev.Claimed: _claimed,
    ev.Acked: _acked,
    ev.MadeDurable: _made_durable,
    ev.Published: _published,
    ev.Began: _began,
    ev.DataEnded: lambda e, state, unix_s: _meta("data_ended", "1"),
    ev.RunClosed: lambda e, state, unix_s: _meta("closed", e.reason),
    ev.RunOpened: lambda e, state, unix_s: _meta("closed", ""),
}
