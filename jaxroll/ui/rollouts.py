"""Groups and rollouts of a run from the store's tables, in pages that SQL limits, and one rollout token by token."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxroll import wire
from jaxroll.errors import ConfigError
from jaxroll.records import Finished, Member
from jaxroll.report import inspect, trajectory
from jaxroll.report.trajectory import Decoder

Facts = dict[str, Any]
PAGE, LONGEST_PAGE = 50, 200
EVENTS_SHOWN, FAILURES_SHOWN, CAUSES_READ, VERSIONS_SHOWN = 60, 50, 5_000, 1_000
MAX_TOKENS = 20_000  # sent of one member; of the others only their number
QUESTION_CHARS = 300
SEARCH_S = 0.15  # for the text of answers, which is in no index
CONTEXT = 6  # tokens before one that its text may depend on


@dataclass(frozen=True)
class Search:
    """Conditions on groups; empty ones do not restrict. `text` is found in prompts, reasons, question hashes, numbers
    of groups and errors; `answer` in sampled text."""

    text: str = ""
    answer: str = ""
    state: str = ""
    holder: str = ""
    step: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    order: str = "newest"
    offset: int = 0
    limit: int = PAGE


ORDERS: Mapping[str, str] = {
    "newest": "g.id DESC",
    "oldest": "g.id",
    "reward": "reward DESC, g.id DESC",
    "low reward": "reward, g.id DESC",
    "longest": "tokens DESC, g.id DESC",
    "most failures": "failures DESC, g.id DESC",
}
_BY_REWARD = ("reward", "low reward", "longest")


def page(db: sqlite3.Connection, search: Search, decode: Decoder | None = None) -> Facts:
    """A page of the groups that match, the number of all that match, and groups by state.

    For an answer, also how many rollouts were `searched` of all that are `kept`: the newest, as far as `SEARCH_S` goes.
    """
    where, values = _conditions(search)
    answers = _answers(db, search.answer, decode) if search.answer else None
    if answers is not None:
        where += f" AND g.id IN ({','.join(map(str, answers.pop('groups')))})"
    joins = "groups g LEFT JOIN tasks t ON t.group_id = g.id"
    by_members = f" LEFT JOIN ({_OF_MEMBERS}) m ON m.group_id = g.id"
    if search.reward_from is not None or search.reward_to is not None:
        joins, by_members = joins + by_members, ""
    total = db.execute(f"SELECT COUNT(*) FROM {joins} WHERE {where}", values).fetchone()[0]
    if search.order in _BY_REWARD:
        joins += by_members
    if search.order == "most failures":
        joins += " LEFT JOIN (SELECT group_id, COUNT(*) AS failures FROM failures GROUP BY group_id) f"
        joins += " ON f.group_id = g.id"
    sql = (
        "SELECT g.id, g.state, g.reason, g.size, g.claim_step, g.reissues, g.issued_unix_s, g.ended_unix_s, t.messages"
        f" FROM {joins} WHERE {where} ORDER BY {ORDERS.get(search.order, ORDERS['newest'])} LIMIT ? OFFSET ?"
    )
    limit = min(max(1, search.limit), LONGEST_PAGE)
    found = _rows(db, sql, *values, limit, max(0, search.offset))
    for row in found:
        row["state"] = trajectory.shown_state(row["state"])
        row["question"] = inspect.question(row.pop("messages"))[:QUESTION_CHARS]
        row["members"] = _summaries(db, row["id"])
    states = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    return (answers or {}) | {
        "total": total,
        "offset": search.offset,
        "limit": limit,
        "groups": found,
        "states": {trajectory.shown_state(state): count for state, count in states.items()},
    }


_OF_MEMBERS = (
    "SELECT group_id, AVG(reward) AS reward, TOTAL(tokens) AS tokens FROM members"
    " WHERE state = 'done' GROUP BY group_id"
)


def _conditions(search: Search) -> tuple[str, list[Any]]:
    where, values = ["1"], list[Any]()
    if search.text:
        inside = json.dumps(search.text, ensure_ascii=False)[1:-1]  # as in the JSON of the messages
        likes = [_like(inside), _like(search.text), search.text, search.text, _like(search.text)]
        where.append(
            "(t.messages LIKE ? ESCAPE '\\' OR g.reason LIKE ? ESCAPE '\\' OR g.question_hash = ? OR g.id = ?"
            " OR g.id IN (SELECT group_id FROM failures WHERE error LIKE ? ESCAPE '\\'))"
        )
        values += likes
    if search.state:
        where.append("g.state = ?")
        values.append("TRIMMED" if search.state == "DURABLE" else search.state)
    if search.holder:
        where.append("g.id IN (SELECT group_id FROM members WHERE holder = ?)")
        values.append(search.holder)
    if search.step is not None:
        where.append("g.claim_step = ?")
        values.append(search.step)
    for sign, bound in ((">=", search.reward_from), ("<=", search.reward_to)):
        if bound is not None:
            where.append(f"m.reward {sign} ?")
            values.append(bound)
    return " AND ".join(where), values


def _answers(db: sqlite3.Connection, text: str, decode: Decoder | None) -> Facts:
    """The newest groups in which the model has written `text`, and how many rollouts were read for it."""
    found, searched, until_s = dict[int, None](), 0, time.monotonic() + SEARCH_S
    kept = db.execute("SELECT COUNT(*) FROM payloads").fetchone()[0]
    bodies = db.execute("SELECT group_id, body FROM payloads ORDER BY group_id DESC, member")
    while decode is not None and time.monotonic() < until_s and (row := bodies.fetchone()) is not None:
        searched += 1
        if row[0] not in found and text in _sampled_text(row[1], decode):
            found[row[0]] = None
    return {"groups": list(found), "searched": searched, "kept": kept}


def _sampled_text(body: bytes, decode: Decoder) -> str:
    outcome = wire.decode(body, Member).outcome
    segments = outcome.segments if isinstance(outcome, Finished) else ()
    return "\n".join(decode(one.tokens[one.sampled_mask].tolist()) for one in segments if one.sampled_mask.any())


def _like(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _summaries(db: sqlite3.Connection, group: int) -> list[Facts]:
    sql = "SELECT member, state, reward, tokens, holder, oldest_step, newest_step FROM members WHERE group_id = ?"
    return _rows(db, sql + " ORDER BY member", group)


def _rows(db: sqlite3.Connection, sql: str, *values: Any) -> list[Facts]:
    cursor = db.execute(sql, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


# --- one group, and one of its members


def group_facts(db: sqlite3.Connection, group: int) -> Facts:
    """The group with its task, claim, members (without tokens), failures and newest events; ConfigError if unknown."""
    now = time.time()
    rows = _rows(db, "SELECT * FROM groups WHERE id = ?", group)
    if not rows:
        raise ConfigError("group", group, "there is no such group", "The list of rollouts has the groups of the run.")
    found = rows[0] | {"state": trajectory.shown_state(rows[0]["state"])}
    members = _rows(db, "SELECT * FROM members WHERE group_id = ? ORDER BY member", group)
    kept = {member for (member,) in db.execute("SELECT member FROM payloads WHERE group_id = ?", (group,))}
    mean = _mean([row["reward"] for row in members if row["state"] == "done" and row["reward"] is not None])
    for row in members:
        row["kept"] = row["member"] in kept
        row["advantage"] = None if mean is None or row["reward"] is None else row["reward"] - mean
    events = list(trajectory.event_facts(db, group, now))
    return {
        "group": found,
        "task": trajectory.task_facts(db, group),
        "claim": trajectory.claim_facts(db, group, now),
        "members": members,
        "failures": trajectory.failure_facts(db, group, now)[:FAILURES_SHOWN],
        "events": events[-EVENTS_SHOWN:],
        "events_left_out": max(0, len(events) - EVENTS_SHOWN),
        "neighbours": [
            db.execute(f"SELECT {what}(id) FROM groups WHERE id {sign} ?", (group,)).fetchone()[0]
            for what, sign in (("MAX", "<"), ("MIN", ">"))
        ],
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def member_facts(db: sqlite3.Connection, group: int, member: int, decode: Decoder | None) -> Facts:
    """A finished member token by token; ConfigError if its tokens are not kept."""
    found = db.execute("SELECT body FROM payloads WHERE group_id = ? AND member = ?", (group, member)).fetchone()
    outcome = None if found is None else wire.decode(found[0], Member).outcome
    if not isinstance(outcome, Finished):
        raise ConfigError(
            "member",
            member,
            "its tokens are not kept",
            "Raise store.keep_trajectories_mb to keep the tokens of more groups.",
        )
    steps = [run.version.step for run in outcome.versions for _ in range(min(run.count, MAX_TOKENS))]
    versions = [str(run.version) for run in outcome.versions for _ in range(min(run.count, MAX_TOKENS))]
    left, place, segments = MAX_TOKENS, 0, []
    for segment in outcome.segments:
        sampled, count = segment.sampled_mask, min(len(segment.tokens), left)
        ids = segment.tokens[:count].tolist()
        left -= count
        kept = sampled[:count]
        number = np.cumsum(kept) - 1 + place  # of every sampled token, among all of the member
        segments.append(
            {
                "source": "model" if sampled.any() else "shown",
                "branch": segment.branch,
                "left_out": len(segment.tokens) - count,
                "pieces": None if decode is None else pieces(ids, decode),
                "tokens": ids,
                "logprobs": [
                    _short(value) if is_sampled else None
                    for value, is_sampled in zip(segment.logprobs[:count], kept, strict=True)
                ],
                "trained": segment.loss_mask[:count].tolist(),
                "versions": [
                    _at(versions, i) if is_sampled else None for i, is_sampled in zip(number, kept, strict=True)
                ],
                "steps": [_at(steps, i) if is_sampled else None for i, is_sampled in zip(number, kept, strict=True)],
            }
        )
        place += int(sampled.sum())
    return {
        "group": group,
        "member": member,
        "finish": outcome.finish,
        "reward": outcome.reward,
        "reward_parts": outcome.reward_parts,
        "extracted": outcome.extracted,
        "segments": segments,
    }


def _at(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _short(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None


def pieces(ids: list[int], decode: Decoder) -> list[str]:
    """The text that each token adds to those before it; joined, they are the text except where a character has
    several tokens."""
    found = []
    for place in range(len(ids)):
        before = ids[max(0, place - CONTEXT) : place]
        start, whole = decode(before), decode([*before, ids[place]])
        found.append(whole[len(start) :] if whole.startswith(start) else decode([ids[place]]))
    return found


# --- failures, ended groups, versions: newest first, each with a limit


def faults(db: sqlite3.Connection) -> Facts:
    """Failures by cause and the newest ones, groups that ended untrained by reason, lineages, refused callers."""
    now = time.time()
    newest = (
        "SELECT unix_s, group_id AS 'group', member, attempt, kind, error FROM failures ORDER BY rowid DESC LIMIT ?"
    )
    return {
        "causes": inspect.causes(db, now, CAUSES_READ),
        "failures": _rows(db, newest, FAILURES_SHOWN),
        "failures_total": db.execute("SELECT COUNT(*) FROM failures").fetchone()[0],
        "ended": _rows(db, _ENDED),
        "lineages": _rows(db, "SELECT lineage, parent, fork_step, unix_s FROM lineages ORDER BY lineage"),
        "refused": _rows(
            db,
            "SELECT unix_s, who, role, what, detail, outcome, times FROM audit"
            " WHERE outcome != 'ok' ORDER BY id DESC LIMIT 30",
        ),
    }


_ENDED = (
    "SELECT state, reason, COUNT(*) AS groups, MAX(id) AS last FROM groups WHERE state IN ('EXPIRED', 'DEAD')"
    " GROUP BY state, reason ORDER BY groups DESC LIMIT 40"
)


def versions(db: sqlite3.Connection) -> list[Facts]:
    """The newest published versions, in order of time."""
    sql = "SELECT lineage, step, channel, unix_s FROM versions ORDER BY unix_s DESC, step DESC LIMIT ?"
    return _rows(db, sql, VERSIONS_SHOWN)[::-1]


def holders(db: sqlite3.Connection) -> Iterator[tuple[str, int]]:
    """The processes that hold leases, each with the number of its members."""
    yield from db.execute("SELECT holder, COUNT(*) FROM leases GROUP BY holder ORDER BY holder")


def summary(db: sqlite3.Connection) -> Facts:
    """The reason why the run was closed ('' if it is open), and the steps that were claimed and trained."""
    closed = db.execute("SELECT value FROM meta WHERE key = 'closed'").fetchone()
    trained = db.execute("SELECT MAX(step) + 1 FROM claims WHERE trained_lineage IS NOT NULL").fetchone()[0]
    return {"closed": closed[0] if closed else "", "trained": trained or 0}
