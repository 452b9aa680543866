"""What the store's log says about a run, read from RUN/store.db without disturbing the store that may be writing it.

Everything is read in one transaction. The figures come from the tables (`jaxroll.store.log.schema`); what stands in no
table (masked tokens, the conservation residual) comes from the state that the log replays to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxroll.store.core import state
from jaxroll.store.core.apply import replay
from jaxroll.store.log import reading, state_checkpoints

FAILURES_KEPT = 20


@dataclass(frozen=True)
class Failure:
    """A member that broke. `error` may hold what a model wrote."""

    unix_s: float
    group: int
    member: int
    kind: str
    error: str


@dataclass(frozen=True)
class ClaimTimes:
    """Of one claim: how long the learner waited for it and worked before, and how long its slowest group was in work,
    from its first lease to its last put, and its members in the mean."""

    waited_s: float
    worked_s: float
    made_s: float
    member_s: float


@dataclass(frozen=True)
class History:
    """Facts of the log.

    `groups_by_state` counts issued groups and `reasons` those that ended untrained, by why; `wasted_tokens` is the
    share of all sampled tokens that expired with their group or were masked. `published` is (unix seconds, version).
    """

    acked_groups: frozenset[int] = frozenset()
    groups_by_state: dict[str, int] | None = None
    groups_trained_twice: int | None = None
    heldout_in_train: int | None = None
    wasted_tokens: float | None = None
    conservation_residual: int | None = None
    reasons: dict[str, int] | None = None
    lineages: tuple[state.Lineage, ...] = ()
    published: tuple[tuple[float, str], ...] = ()
    failures: tuple[Failure, ...] = ()
    failed_members: int = 0
    claim_times: tuple[ClaimTimes, ...] = ()
    closed: str = ""


def read(run_dir: Path, heldout_hashes: Collection[str] | None) -> History:
    """The history of the run; an empty one before the store has made its log. DataError when it cannot be read."""
    with reading.damage_named(run_dir, "the report needs a whole log"):
        if not reading.is_there(run_dir):  # or just being made
            return History()
        with reading.transaction(run_dir) as db:
            return _history(db, heldout_hashes)


def _history(db: sqlite3.Connection, heldout_hashes: Collection[str] | None) -> History:
    replayed = _replayed(db)
    by_state = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    ended = "SELECT reason, COUNT(*) FROM groups WHERE state IN ('EXPIRED', 'DEAD') GROUP BY reason"
    failed = "SELECT unix_s, group_id, member, kind, error FROM failures ORDER BY unix_s DESC LIMIT ?"
    closed = db.execute("SELECT value FROM meta WHERE key = 'closed'").fetchone()
    return History(
        acked_groups=frozenset(_column(db, "SELECT id FROM groups WHERE state IN ('ACKED', 'TRIMMED')")),
        groups_by_state=by_state,
        groups_trained_twice=trained_twice(db),
        heldout_in_train=None if heldout_hashes is None else _heldout_issued(db, frozenset(heldout_hashes)),
        wasted_tokens=_wasted_share(db, replayed.tokens_masked),
        conservation_residual=residual(replayed, by_state),
        reasons=dict(db.execute(ended)),
        lineages=tuple(replayed.lineages),
        published=tuple((t, f"{lineage}.{step}") for t, lineage, step in db.execute(_PUBLISHED)),
        failures=tuple(Failure(*row) for row in db.execute(failed, (FAILURES_KEPT,))),
        failed_members=db.execute("SELECT COUNT(*) FROM failures").fetchone()[0],
        claim_times=tuple(ClaimTimes(*row) for row in db.execute(_CLAIM_TIMES)),
        closed=closed[0] if closed else "",
    )


_CLAIM_TIMES = """
SELECT waited_s, worked_s, MAX(made_s), SUM(taken_s) / SUM(done)
FROM claims JOIN claim_groups USING (lineage, step) JOIN (
  SELECT group_id, MAX(ended_unix_s) - MIN(leased_unix_s) AS made_s, TOTAL(ended_unix_s - leased_unix_s) AS taken_s,
  COUNT(*) AS done FROM members WHERE state = 'done' GROUP BY group_id) USING (group_id)
GROUP BY lineage, step ORDER BY lineage, step
"""
_PUBLISHED = "SELECT unix_s, lineage, step FROM versions ORDER BY unix_s"


def _column(db: sqlite3.Connection, sql: str) -> Iterator[int]:
    return (row[0] for row in db.execute(sql))


def _replayed(db: sqlite3.Connection) -> state.State:
    """The store's state, rebuilt the way the store rebuilds it."""
    kept = state_checkpoints.newest(db)
    begun = kept[1] if kept else state.State()
    return replay(begun, (event for _, event in state_checkpoints.events_after(db, begun.position)), 0.0)


def residual(replayed: state.State, by_state: dict[str, int]) -> int:
    """Groups issued less groups accounted for, and groups on which the tables and the log disagree; 0 is right."""
    said = {name: count for name, count in state.counts(replayed).items() if count}
    disagreeing = sum(abs(said.get(name, 0) - by_state.get(name, 0)) for name in said.keys() | by_state.keys())
    return abs(state.conservation_residual(replayed)) + disagreeing


def trained_twice(db: sqlite3.Connection) -> int:
    """Groups that stand in two durable steps of the surviving line, or twice in one."""
    return db.execute(
        "SELECT COUNT(*) FROM (SELECT group_id FROM claim_groups JOIN claims USING (lineage, step)"
        " WHERE durable_lineage IS NOT NULL GROUP BY group_id HAVING COUNT(*) > 1)"
    ).fetchone()[0]


def _heldout_issued(db: sqlite3.Connection, hashes: frozenset[str]) -> int:
    return sum(hash_ in hashes for (hash_,) in db.execute("SELECT question_hash FROM groups"))


def _wasted_share(db: sqlite3.Connection, masked_tokens: int) -> float:
    """(tokens of groups that ended untrained + masked tokens) / all sampled tokens put; 0 before the first put."""
    put, lost = db.execute(
        "SELECT TOTAL(tokens), TOTAL(tokens * (groups.state IN ('EXPIRED', 'DEAD')))"
        " FROM members JOIN groups ON groups.id = members.group_id WHERE digest != ''"
    ).fetchone()
    return (lost + masked_tokens) / put if put else 0.0
