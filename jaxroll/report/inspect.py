"""The state of a run from its log: what it waits for, leases, and ended groups with reasons. Plain values."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from jaxroll import metrics
from jaxroll.errors import ConfigError
from jaxroll.report import activity, trajectory
from jaxroll.report.formats import UNKNOWN, Section, duration, number, short, show
from jaxroll.report.record import best_checkpoint, restart_words, store_pid
from jaxroll.report.summary import counts_by_reason, environment_faults, evaluation_failures, trained_steps
from jaxroll.run_paths import RunPaths
from jaxroll.store.core.admission import pool_facts, resting, unreliable, waits
from jaxroll.store.core.machine import replay
from jaxroll.store.core.state import State, conservation_residual, held_bytes, outstanding
from jaxroll.store.log import database
from jaxroll.store.log import replay as replays
from jaxroll.store.log.replay import rules

LEASES, GROUPS, FAILURES, JOINS = 30, 10, 8, 10  # rows shown; the JSON has all leases
CLAIMS, VERSIONS, QUESTIONS, REASONS = 6, 5, 5, 20
CAUSES, CAUSE_CHARS, FAILURES_COUNTED = 40, 200, 50_000
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_POOL = "{samplers}; {waiting} members wait, {leased} are leased, {leased_elsewhere} of them by other pools"
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
    kept = replays.newest(db)
    begun = kept[1] if kept else State()
    return replay(begun, (event for _, event in replays.events_after(db, begun.position)), 0.0)


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
        "backoff": resting(settings, state) if settings else {},
        "unreliable": unreliable(state),
        "pools": pool_facts(settings, state) if settings else {},
        "steps": settings.steps if settings else None,
        "lineage": state.lineage,
        "published": None if state.published is None else str(state.published.version),
        "claims_made": state.next_claim,
        "acked": state.acked,
        "durable": state.durable,
        "issued": state.issued,
        "curriculum_skipped": state.curriculum_skipped,
        "groups_in_flight": outstanding(state),
        "in_flight_window": settings.limiter.window(0) if settings else None,
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
    """One row per state: groups, age of the oldest one, finished and missing members, age of the oldest token."""
    found = _rows(db, "SELECT state, COUNT(*) AS groups, MIN(issued_unix_s) AS since FROM groups GROUP BY state")
    alive = [*state.open.values(), *state.held.values()]
    step = state.published.version.step if state.published else state.acked
    order = ("PENDING", "LEASED", "READY", "CLAIMED", "ACKED", "DURABLE", "EXPIRED", "DEAD")
    for row in found:
        groups = [group for group in alive if group.state == row["state"]]
        row["state"] = trajectory.shown_state(row["state"])
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
    """The question of a task, from the JSON of its messages; '' when it is not kept."""
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
    return {"by_kind": by_kind, "causes": causes(db, now, FAILURES_COUNTED), "last": last}


def causes(db: sqlite3.Connection, now: float, limit: int) -> list[Facts]:
    """The last `limit` failures by cause, the most frequent first: errors that differ in numbers only are one cause."""
    sql = "SELECT unix_s, kind, error, group_id FROM failures ORDER BY unix_s DESC LIMIT ?"
    found: dict[tuple[str, str], Facts] = {}
    groups: dict[tuple[str, str], set[int]] = {}
    for unix_s, kind, error, group in db.execute(sql, (limit,)):
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
    """The difficulty of answered questions, the hardest first, with their texts as far as those are kept."""
    sql = (
        "SELECT question_hash, issued, trained, members, reward_sum / members AS mean_reward, (SELECT messages FROM"
        " groups JOIN tasks ON tasks.group_id = groups.id WHERE groups.question_hash = questions.question_hash LIMIT 1)"
        " AS messages FROM questions WHERE members > 0 ORDER BY mean_reward, members DESC LIMIT ?"
    )
    found = _rows(db, sql, QUESTIONS)
    for row in found:
        row["question"] = question(row.pop("messages"))
    return found


def _disk_facts(run_dir: Path, db: sqlite3.Connection) -> Facts:
    path = RunPaths(run_dir).database
    wal = path.with_name(path.name + "-wal")
    first, last = db.execute("SELECT MIN(position), MAX(position) FROM log").fetchone()
    checkpoint = db.execute("SELECT MAX(position) FROM snapshots").fetchone()[0]
    kept, kept_bytes = db.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM retired").fetchone()
    return {
        "database_bytes": path.stat().st_size,
        "wal_bytes": wal.stat().st_size if wal.exists() else 0,
        "free_pages": db.execute("PRAGMA freelist_count").fetchone()[0],
        "history_from": first,
        "history_to": last,
        "state_checkpoint": checkpoint,
        "ended_groups_kept": kept,
        "kept_bytes": kept_bytes,
    }


# --- `jaxroll inspect RUN`: state of a live or finished run; `--group=ID` shows one trajectory group in full


def main(
    run_dir: Path, config: dict[str, Any], *, group: int | None, as_json: bool, console: Console | None = None
) -> int:
    """Print the state of the run or of one group; 0. DataError if there is no log or it cannot be read."""
    decode, why = trajectory.decoder(run_dir, config) if group is not None else (None, "")
    with database.damage_named(run_dir, "`jaxroll replay` says what is wrong with it"):
        with database.transaction(run_dir) as db:
            found = facts(run_dir, db) if group is None else trajectory.facts(db, group, decode)
            if group is None:
                found |= _by_metrics(run_dir, config)
        text = json.dumps(found, indent=2) if as_json else ""
        sections = [] if as_json else _run_sections(found) if group is None else trajectory.sections(found, why)
    if as_json:
        print(text)
        return 0
    show(sections, console or Console())
    return 0


def _by_metrics(run_dir: Path, config: dict[str, Any]) -> Facts:
    """Facts from the metric rows: bottleneck, best checkpoint, joins, leaves, plans, failed evaluations, faults."""
    with contextlib.suppress(ConfigError):  # no metrics can be read: the log is enough for all else
        rows = metrics.read(RunPaths(run_dir).metrics)
        found = activity.bottleneck(activity.latest(rows), config)
        return {
            "bottleneck": asdict(found) if found else None,
            "best_checkpoint": best_checkpoint(run_dir, config),
            "joins_and_leaves": _joins_and_leaves(rows, time.time()),
            "evaluation_failures": evaluation_failures(rows, time.time())[:CAUSES],
            "env_faults": environment_faults(rows),
            "scoring_slow": activity.slow_scoring_workers(rows),
            "reward_by_source": activity.reward_by_source(trained_steps(rows)),
            "failed_by_source": counts_by_reason(rows, "failed_by_source"),
        }
    lists = ("joins_and_leaves", "evaluation_failures")
    return {"bottleneck": None, "best_checkpoint": None, "env_faults": {}} | {name: [] for name in lists}


def _joins_and_leaves(rows: Sequence[Mapping[str, Any]], now: float) -> list[Facts]:
    """The newest joins and leaves of samplers and actors, plans of their number, and restarts, the newest first."""
    found = []
    for row in rows:
        if row.get("kind") == "event" and row.get("what") in ("join", "leave", "plan"):
            found.append({"name": row["role"], "what": row["text"], "ago_s": now - row["t"]})
        elif row.get("kind") == "restart":
            found.append({"name": row["process"], "what": restart_words(row), "ago_s": now - row["t"]})
    return found[: -JOINS - 1 : -1]


def _run_sections(f: Facts) -> list[Section]:
    causes = _causes("failures by cause", f["failures"]["causes"], "groups")
    unscored = _causes("failures in evaluations by cause", f.get("evaluation_failures", ()), "evaluations")
    return [_now(f), _waits(f), _by_state(f), _head(f), _leases(f), _ended(f), causes, _failures(f), unscored,
            _faults(f), _holders(f), _joins(f), _claims(f), _weights(f), _questions(f), _disk(f)]  # fmt: skip


def _now(f: Facts) -> Section:
    alive = f"store process {f['store_pid']}" if f["store_pid"] else "no store is running on this machine"
    state = f"closed: {f['closed']}" if f["closed"] else "open"
    last, best = f["last_record"], f.get("best_checkpoint")
    rows = [
        ("state", f"{state}; {alive}"),
        ("last record", f"{duration(last['ago_s'])} ago ({last['kind']})" if last else UNKNOWN),
        ("last put, last step", f"{_ago(f['last_put_ago_s'])}, {_ago(f['last_ack_ago_s'])}"),
        ("steps", f"{f['acked']} trained, {f['claims_made']} claimed, {f['durable']} durable, of {number(f['steps'])}"),
        ("weights", f"{f['published'] or 'none'} in lineage {f['lineage']}"),
        ("in flight", f"{f['groups_in_flight']} groups of a window of {number(f['in_flight_window'])}"),
        ("retained", f"{_mb(f['retained_bytes'])} of {_mb(f['retention_bytes'])} MB"),
        *((f"pool {name}", _POOL.format(**pool)) for name, pool in f["pools"].items()),
        *(
            (f"source {name}", f"reward {number(a)} → {number(b)}, {number(n)} tokens")
            for name, (a, b, n) in (f.get("reward_by_source") or {}).items()
        ),
        *((f"failed, {name}", f"{n} members") for name, n in (f.get("failed_by_source") or {}).items()),
        ("unaccounted", f"{f['conservation_residual']} groups of {f['issued']}"),
        *([("best checkpoint", f"{best['version']}: {best['metric']} {number(best['value'])}")] if best else []),
        ("bottleneck", activity.Bottleneck(**f["bottleneck"]).text() if f.get("bottleneck") else UNKNOWN),
    ]
    return Section(f["run"], (), rows)


def _ago(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{duration(seconds)} ago"


def _mb(size: float | None) -> str:
    return UNKNOWN if size is None else f"{size / 2**20:.1f}"


def _waits(f: Facts) -> Section:
    return Section("the run waits for", ("role or holder", "reason"), sorted(f["waits"].items()))


def _by_state(f: Facts) -> Section:
    rows = [
        (
            row["state"],
            number(row["groups"]),
            number(row["members_done"]),
            number(row["members_missing"]),
            duration(row["oldest_s"]),
            number(row["oldest_token_age"]),
        )
        for row in f["groups"]
    ]
    headings = ("state", "groups", "members done", "missing", "oldest", "oldest token, steps")
    return Section("groups by state", headings, rows, right=frozenset({1, 2, 3, 5}))


def _head(f: Facts) -> Section:
    rows = [
        (
            str(row["group"]),
            row["state"],
            duration(row["age_s"]),
            f"{row['done']} of {row['size']}",
            row["holders"] or "",
            short(row["question"]),
        )
        for row in f["head"]
    ]
    headings = ("group", "state", "issued", "done", "held by", "question")
    return Section("unfinished groups, those before the next claim first", headings, rows, right=frozenset({0}))


def _leases(f: Facts) -> Section:
    holders: dict[str, list[Facts]] = {}
    for row in f["leases"]:
        holders.setdefault(row["holder"], []).append(row)
    rows = [
        (holder, str(len(some)), duration(some[0]["for_s"]), short(", ".join(map(_key, some)), 70))
        for holder, some in holders.items()
    ]
    return Section("open leases", ("holder", "members", "longest", "group.member"), rows, right=frozenset({1}))


def _key(row: Facts) -> str:
    return f"{row['group']}.{row['member']}"


def _ended(f: Facts) -> Section:
    rows = [
        (row["state"], number(row["groups"]), number(row["tokens"]), str(row["last"]), short(row["reason"], 80))
        for row in f["ended"]
    ]
    if f["curriculum_skipped"]:
        rows.append(("SKIPPED", number(f["curriculum_skipped"]), "0", "", "prompts that the curriculum did not admit"))
    headings = ("state", "groups", "tokens", "newest", "reason")
    return Section("ended untrained", headings, rows, right=frozenset({1, 2, 3}))


def _causes(title: str, found: Sequence[Facts], where: str) -> Section:
    """Failures by cause; `where` is the key of the number of groups or evaluations."""
    rows = [
        (number(row["failures"]), number(row[where]), row["kind"], _ago(row["ago_s"]), short(row["cause"], 80))
        for row in found
    ]
    return Section(title, ("failures", where, "kind", "newest", "cause"), rows, right=frozenset({0, 1}))


def _failures(f: Facts) -> Section:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(f["failures"]["by_kind"].items()))
    rows = [
        (
            duration(row["ago_s"]),
            f"{row['group']}.{row['member']}.{row['attempt']}",
            row["kind"],
            short(row["error"], 80),
        )
        for row in f["failures"]["last"]
    ]
    return Section(f"failures: {kinds}" if kinds else "", ("ago", "member", "kind", "error"), rows)


def _faults(f: Facts) -> Section:
    """Misbehavior of environments that may leave the outcome of the member as it is."""
    rows = [(number(count), short(cause, 80)) for cause, count in f.get("env_faults", {}).items()]
    rows += [(number(n), f"a scoring worker of {role} became slow") for role, n in f.get("scoring_slow", {}).items()]
    return Section("faults of environments and scoring workers", ("times", "cause"), rows, right=frozenset({0}))


def _holders(f: Facts) -> Section:
    """Holders that get fewer leases, or none, because of their failures."""
    resting, unreliable = f["backoff"], f["unreliable"]
    rows = []
    for name in sorted(resting | unreliable):
        rest = resting.get(name, {})
        share = f"{unreliable[name]:.0%}" if name in unreliable else ""
        length = duration(rest["left_s"]) if rest else ""
        rows.append((name, share, number(rest.get("rests")) if rest else "", length, short(rest.get("error", ""), 80)))
    headings = ("holder", "failed lately", "rests", "rest", "last error")
    return Section("holders in back-off or with failures", headings, rows, right=frozenset({1, 2, 3}))


def _joins(f: Facts) -> Section:
    rows = [(f"{duration(row['ago_s'])} ago", row["name"], row["what"]) for row in f.get("joins_and_leaves", ())]
    return Section("newest joins and leaves", ("when", "process", "what"), rows)


def _claims(f: Facts) -> Section:
    rows = [
        (
            f"{row['lineage']}.{row['step']}",
            row["state"],
            str(row["groups"]),
            duration(row["waited_s"]),
            duration(row["ago_s"]),
        )
        for row in f["claims"]
    ]
    return Section("newest claims", ("claim", "state", "groups", "learner waited", "ago"), rows, right=frozenset({2}))


def _weights(f: Facts) -> Section:
    rows = [
        (f"{row['lineage']}.{row['step']}", row["channel"], row["address"], duration(row["ago_s"]))
        for row in f["versions"]
    ]
    lines = "; ".join(
        f"lineage {row['lineage']} left {row['parent']} at step {row['fork_step']}, {duration(row['ago_s'])} ago"
        for row in f["lineages"]
        if row["parent"] is not None
    )
    return Section("newest weights", ("version", "channel", "address", "ago"), rows, lines)


def _questions(f: Facts) -> Section:
    numbers = ("mean_reward", "members", "issued", "trained")
    rows = [
        (short(row["question"]) or trajectory.NO_TEXT, *(number(row[name]) for name in numbers))
        for row in f["questions"]
    ]
    headings = ("question", "mean reward", "answers", "issued", "trained")
    return Section("hardest questions", headings, rows, right=frozenset({1, 2, 3, 4}))


def _disk(f: Facts) -> Section:
    disk = f["disk"]
    rows = [
        ("store.db, its WAL", f"{_mb(disk['database_bytes'])} MB, {_mb(disk['wal_bytes'])} MB"),
        ("records", f"{number(disk['history_from'])} to {number(disk['history_to'])} are kept; state checkpoint at "
                    f"{number(disk['state_checkpoint'])}"),
        ("trajectories", f"{disk['ended_groups_kept']} groups that ended are kept ({_mb(disk['kept_bytes'])} MB)"),
    ]  # fmt: skip
    return Section("on disk", (), rows)
