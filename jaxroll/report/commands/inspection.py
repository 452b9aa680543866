"""What goes on in a run, read off its log: who is waited for, what is leased, what ended and why. Plain values."""

from __future__ import annotations

import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec

from jaxroll.report.figures.record import store_pid
from jaxroll.store.core.apply import replay
from jaxroll.store.core.holders import resting
from jaxroll.store.core.state import State, conservation_residual, held_bytes, outstanding
from jaxroll.store.core.waits import unreliable, waits
from jaxroll.store.log import reading, state_checkpoints
from jaxroll.store.log.replay import rules

LEASES, GROUPS, FAILURES, CLAIMS, VERSIONS, QUESTIONS, REASONS = (
    30,
    10,
    8,
    6,
    5,
    5,
    20,
)  # rows shown; the JSON has all leases
CAUSES, CAUSE_CHARS, FAILURES_COUNTED = 40, 200, 50_000
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
Facts = dict[str, Any]


def facts(run_dir: Path, db: sqlite3.Connection) -> Facts:
    """Everything, ready for JSON. Times are seconds before now."""
    now = time.time()
    state = _state(db)
    return {
        "run": run_dir.name,
        **_head_facts(run_dir, db, state, now),
        "groups": _groups(db, state, now),
        "head": _unfinished(db, now),
        "leases": _leases_facts(db, now),
        "ended": _ended_facts(db),
        "failures": _failures_facts(db, now),
        "versions": _versions(db, now),
        "lineages": _lineages(db, now),
        "claims": _claims_facts(db, now),
        "questions": _questions_facts(db),
        "disk": _disk_facts(run_dir, db),
    }


def _state(db: sqlite3.Connection) -> State:
    kept = state_checkpoints.newest(db)
    begun = kept[1] if kept else State()
    return replay(begun, (event for _, event in state_checkpoints.events_after(db, begun.position)), 0.0)


def _head_facts(run_dir: Path, db: sqlite3.Connection, state: State, now: float) -> Facts:
    settings = rules(db)
    last = db.execute("SELECT unix_s, kind FROM log ORDER BY position DESC LIMIT 1").fetchone()
    put, acked = (db.execute(_LAST_OF, (kind,)).fetchone() for kind in ("put", "acked"))
    return {
        "store_pid": store_pid(run_dir),
        "closed": state.closed,
        "data_ended": state.data_ended,
        "records": state.position,
        "last_record": None if last is None else {"kind": last[1], "ago_s": now - last[0]},
        "last_put_ago_s": None if put is None else now - put[0],
        "last_ack_ago_s": None if acked is None else now - acked[0],
        "waits": waits(settings, state) if settings else {},
        "resting": resting(settings, state) if settings else {},
        "unreliable": unreliable(state),
        "steps": settings.steps if settings else None,
        "lineage": state.lineage,
        "published": None if state.published is None else str(state.published.version),
        "claims_made": state.next_claim,
        "acked": state.acked,
        "durable": state.durable,
        "issued": state.issued,
        "outstanding": outstanding(state),
        "window": settings.limiter.window(0) if settings else None,
        "retained_bytes": held_bytes(state),
        "retention_bytes": settings.retention_bytes if settings else None,
        "conservation_residual": conservation_residual(state),
    }


_LAST_OF = "SELECT unix_s FROM log WHERE kind = ? ORDER BY position DESC LIMIT 1"


def _rows(db: sqlite3.Connection, sql: str, *values: Any) -> list[Facts]:
    cursor = db.execute(sql, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _groups(db: sqlite3.Connection, state: State, now: float) -> list[Facts]:
    """One row for each state: how many, how long, how far, how old their tokens are."""
    found = _rows(db, "SELECT state, COUNT(*) AS groups, MIN(issued_unix_s) AS since FROM groups GROUP BY state")
    alive = [*state.open.values(), *state.held.values()]
    step = state.published.version.step if state.published else state.acked
    order = ("PENDING", "LEASED", "READY", "CLAIMED", "ACKED", "TRIMMED", "EXPIRED", "DEAD")
    for row in found:
        groups = [group for group in alive if group.state == row["state"]]
        since = row.pop("since")
        row["oldest_s"] = now - since if groups else None
        row["members_done"] = sum(1 for group in groups for _ in group.done())
        row["members_missing"] = sum(1 for group in groups for _ in group.missing())
        row["oldest_token_age"] = max((step - g.oldest_step for g in groups if g.tokens), default=None)
    return sorted(found, key=lambda row: order.index(row["state"]))


def _unfinished(db: sqlite3.Connection, now: float) -> list[Facts]:
    """The oldest groups that miss a member: those in front of the next claim."""
    sql = (
        "SELECT g.id AS 'group', g.state, g.issued_unix_s, g.size, g.reissues, t.messages,"
        " (SELECT COUNT(*) FROM members m WHERE m.group_id = g.id AND m.state = 'done') AS done,"
        " (SELECT GROUP_CONCAT(DISTINCT holder) FROM leases l WHERE l.group_id = g.id) AS holders"
        " FROM groups g LEFT JOIN tasks t ON t.group_id = g.id"
        " WHERE g.ended_unix_s IS NULL AND g.claim_step IS NULL AND g.state != 'READY' ORDER BY g.id LIMIT ?"
    )
    found = _rows(db, sql, GROUPS)
    for row in found:
        row["age_s"] = now - row.pop("issued_unix_s")
        row["question"] = question(row.pop("messages"))
    return found


def question(messages: str | None) -> str:
    """What a task asks, from the JSON of its messages; '' when it is not kept."""
    found = msgspec.json.decode(messages) if messages else []
    return found[-1]["content"] if found else ""


def _leases_facts(db: sqlite3.Connection, now: float) -> list[Facts]:
    found = _rows(db, "SELECT group_id AS 'group', member, attempt, holder, leased_unix_s FROM leases ORDER BY 5")
    for row in found:
        since = row.pop("leased_unix_s")
        row["for_s"] = None if since is None else now - since
    return found


def _ended_facts(db: sqlite3.Connection) -> list[Facts]:
    """Groups that ended untrained, by why; the tokens that went with them."""
    sql = (
        "SELECT state, reason, COUNT(*) AS groups, SUM(tokens) AS tokens, MAX(id) AS last FROM (SELECT g.id, g.state,"
        " g.reason, COALESCE(SUM(m.tokens), 0) AS tokens FROM groups g LEFT JOIN members m ON m.group_id = g.id"
        " WHERE g.state IN ('EXPIRED', 'DEAD') GROUP BY g.id) GROUP BY state, reason ORDER BY groups DESC LIMIT ?"
    )
    return _rows(db, sql, REASONS)


def _failures_facts(db: sqlite3.Connection, now: float) -> Facts:
    sql = "SELECT unix_s, group_id AS 'group', member, attempt, kind, error FROM failures ORDER BY unix_s DESC LIMIT ?"
    last = _rows(db, sql, FAILURES)
    for row in last:
        row["ago_s"] = now - row.pop("unix_s")
    by_kind = dict(db.execute("SELECT kind, COUNT(*) FROM failures GROUP BY kind"))
    return {"by_kind": by_kind, "causes": _causes_facts(db, now), "last": last}


def _causes_facts(db: sqlite3.Connection, now: float) -> list[Facts]:
    """The failures by cause, the most frequent first: errors that differ in numbers only are one cause."""
    sql = "SELECT unix_s, kind, error, group_id FROM failures ORDER BY unix_s DESC LIMIT ?"
    found: dict[tuple[str, str], Facts] = {}
    groups: dict[tuple[str, str], set[int]] = {}
    for unix_s, kind, error, group in db.execute(sql, (FAILURES_COUNTED,)):
        key = (kind, _NUMBER.sub("N", error.split("\n", 1)[0])[:CAUSE_CHARS])
        row = found.setdefault(key, {"kind": kind, "cause": key[1], "failures": 0, "ago_s": now - unix_s})
        row["failures"] += 1
        groups.setdefault(key, set()).add(group)
    for key, row in found.items():
        row["groups"] = len(groups[key])
    return sorted(found.values(), key=lambda row: -row["failures"])[:CAUSES]


def _versions(db: sqlite3.Connection, now: float) -> list[Facts]:
    sql = "SELECT lineage, step, channel, address, unix_s FROM versions ORDER BY unix_s DESC, step DESC LIMIT ?"
    found = _rows(db, sql, VERSIONS)
    for row in found:
        row["ago_s"] = now - row.pop("unix_s")
    return found


def _lineages(db: sqlite3.Connection, now: float) -> list[Facts]:
    found = _rows(db, "SELECT lineage, parent, fork_step, unix_s FROM lineages ORDER BY lineage")
    for row in found:
        row["ago_s"] = now - row.pop("unix_s")
    return found


def _claims_facts(db: sqlite3.Connection, now: float) -> list[Facts]:
    sql = (
        "SELECT lineage, step, groups, waited_s, trained_lineage, durable_lineage, forked_by, unix_s FROM claims"
        " ORDER BY lineage DESC, step DESC LIMIT ?"
    )
    found = _rows(db, sql, CLAIMS)
    for row in found:
        durable, trained = row.pop("durable_lineage"), row.pop("trained_lineage")
        row["state"] = "durable" if durable is not None else "trained" if trained is not None else "in training"
        if (by := row.pop("forked_by")) is not None:
            row["state"] = f"given up by lineage {by}"
        row["ago_s"] = now - row.pop("unix_s")
    return found


def _questions_facts(db: sqlite3.Connection) -> list[Facts]:
    """How hard questions are that were answered: the hardest first."""
    sql = (
        "SELECT question_hash, issued, trained, members, reward_sum / members AS mean_reward FROM questions"
        " WHERE members > 0 ORDER BY mean_reward, members DESC LIMIT ?"
    )
    return _rows(db, sql, QUESTIONS)


def _disk_facts(run_dir: Path, db: sqlite3.Connection) -> Facts:
    path = run_dir / reading.DATABASE
    wal = path.with_name(path.name + "-wal")
    first, last = db.execute("SELECT MIN(position), MAX(position) FROM log").fetchone()
    snapshot = db.execute("SELECT MAX(position) FROM snapshots").fetchone()[0]
    kept, kept_bytes = db.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM retired").fetchone()
    return {
        "database_bytes": path.stat().st_size,
        "wal_bytes": wal.stat().st_size if wal.exists() else 0,
        "free_pages": db.execute("PRAGMA freelist_count").fetchone()[0],
        "history_from": first,
        "history_to": last,
        "snapshot": snapshot,
        "kept_groups": kept,
        "kept_bytes": kept_bytes,
    }
