"""Whether the tables of RUN/store.db say what the state says, and whether the payloads are the bytes that were put."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jaxroll import wire
from jaxroll.store.groups import LEASED, Group
from jaxroll.store.state import State, counts


@dataclass(frozen=True)
class Disagreement:
    """A table and what is wrong in it."""

    table: str
    why: str


def table_checks(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    """Every disagreement; `checked` counts the rows compared, by table."""
    for check in (_pages, _groups, _members, _payloads, _claims, _lines, _cursor, _questions):
        yield from check(db, state, checked)


def _alive(state: State) -> list[Group]:
    return [*state.open.values(), *state.held.values()]


def _pages(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    checked["pages"] += db.execute("PRAGMA page_count").fetchone()[0]
    said = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if said != "ok":
        yield Disagreement("pages", str(said))


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
                yield Disagreement("members", f"{group.id}.{member} is {name or 'not there'}, by the log {slot.status}")
            if slot.status == LEASED and (attempt, holder) != (slot.attempt, slot.holder):
                yield Disagreement("members", f"{group.id}.{member} is leased by {holder}, by the log {slot.holder}")


_SELECT_MEMBERS = "SELECT member, state, attempt, holder, digest FROM members WHERE group_id = ?"


def _payloads(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    """One at a time: the payloads may be larger than memory."""
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


def _claims(db: sqlite3.Connection, state: State, checked: Counter[str]) -> Iterator[Disagreement]:
    for step, batch in state.batches.items():
        checked["claims"] += 1
        lineage = db.execute("SELECT MAX(lineage) FROM claims WHERE step = ?", (step,)).fetchone()[0]
        sql = "SELECT group_id FROM claim_groups WHERE lineage = ? AND step = ? ORDER BY place"
        said = tuple(gid for (gid,) in db.execute(sql, (lineage, step)))
        if said != batch.groups:
            yield Disagreement("claim_groups", f"claim {step} is {said}, by the log {batch.groups}")
    twice = db.execute(_TRAINED_TWICE).fetchall()
    if twice:
        yield Disagreement("claim_groups", f"groups {[gid for (gid,) in twice]} stand in two durable steps")


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
    """Of those that the state has; it forgets, and one that it forgot begins there again and not in the table."""
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
