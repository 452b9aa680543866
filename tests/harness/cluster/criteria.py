"""Criteria after every fault (docs/store_contract.md): of the store, of RUN/store.db, and of the other roles' records.

`judge` checks a scripted cluster against all of them; tests with a real learner use the single functions.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxroll import wire
from tests.harness.cluster.cluster import Cluster

LATE_S = 1.0  # an RPC may exceed its deadline by this much
WHOLE = 0.9  # share of a deadline that counts as the whole at the other end, where gRPC rounds it up
TERMINAL = frozenset({"TRIMMED", "EXPIRED", "DEAD"})
STATES = frozenset({"PENDING", "LEASED", "READY", "CLAIMED", "ACKED"}) | TERMINAL
Journal = Iterable[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A row of the table of faults. `lost` counts acknowledged puts, `trained_twice` groups, `max_age` versions."""

    fault: str
    injected: int
    survived: str
    lost: int
    trained_twice: int
    max_age: int | None


def judge(
    cluster: Cluster, fault: str, injected: int, *, survived: str = "", went_on_from: int | None = None, errors: int = 0
) -> Row:
    """End the cluster's processes, assert all common criteria, and return the row of `fault`.

    Either the run continued (it acknowledged more than `went_on_from` steps) or it ended with the cause in `survived`.
    `errors` is the number of roles that must end with an error.
    """
    if went_on_from is not None:
        assert cluster.acked() > went_on_from, f"no step since {went_on_from}: the run did not go on"
        survived = f"{survived}+{cluster.acked() - went_on_from} steps"
    assert survived, "neither did the run go on nor did it end with a named cause"
    for role in (*cluster.samplers(), *cluster.learners()):
        if role.alive:  # a process that has just started does not handle SIGTERM yet
            begun = lambda role=role: any(row["pid"] == role.process.pid for row in role.said("life"))  # noqa: E731
            cluster.until(lambda role=role, begun=begun: begun() or not role.alive, f"the arrival of {role.name}")
            assert role.stop() == 0, f"{role.name} did not leave in order"
    if cluster.store.alive:
        status = cluster.status()
        cluster.store.stop()
        assert status["conservation_residual"] == 0, status
        assert status["counts"] == counts(cluster.run_dir), "the tables differ from the store's status"
    assert conservation_residual(cluster.run_dir) == 0
    learned, sampled = cluster.learned(), cluster.sampled()
    assert overdue([*learned, *sampled]) == []
    failures = [row["text"] for row in (*learned, *sampled) if row["kind"] == "error"]
    assert len(failures) == errors, failures
    twice = trained_twice(cluster.weights()) | durable_twice(cluster.run_dir)
    assert not twice, f"groups in two durable steps: {twice}"
    age = max((row["max_age"] for row in learned if row["kind"] == "claim"), default=0)
    assert age <= math.ceil(cluster.config.schedule.alpha), f"a token of age {age} was trained"
    assert unlike_what_was_sent(learned, sampled) == []
    lost = lost_puts(cluster.run_dir, sampled)
    assert lost == [], f"lost acknowledged puts: {lost}"
    return Row(fault, injected, survived, len(lost), len(twice), age)


def opened(run_dir: Path) -> contextlib.closing[sqlite3.Connection]:
    """RUN/store.db of a store that has ended; opening merges its WAL."""
    return contextlib.closing(sqlite3.connect(run_dir / "store.db", timeout=30.0))


def counts(run_dir: Path) -> dict[str, int]:
    """The number of groups by state in the tables."""
    with opened(run_dir) as db:
        found = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    return {state: found.get(state, 0) for state in STATES}


def conservation_residual(run_dir: Path) -> int:
    """The number of issued groups minus those in a state of the contract. Ids count from 0."""
    with opened(run_dir) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        issued = db.execute("SELECT COALESCE(MAX(id) + 1, 0) FROM groups").fetchone()[0]
        unexplained = db.execute("SELECT id FROM groups WHERE state IN ('EXPIRED', 'DEAD') AND reason = ''").fetchall()
    assert unexplained == [], f"groups that ended without a reason: {unexplained}"
    return issued - sum(counts(run_dir).values())


def overdue(journal: Journal) -> list[dict[str, Any]]:
    """Attempts of RPCs that exceeded their deadline by more than a second, without the time of a stopped caller.

    All outcomes count, also attempts that have not ended.
    """
    attempts = (row for row in journal if row["kind"] == "rpc")
    return [row for row in attempts if row["took_s"] - row["stood_s"] > row["deadline_s"] + LATE_S]


def unanswered(journal: Journal) -> list[dict[str, Any]]:
    """Attempts of RPCs without an answer within the deadline, without the time that the caller was stopped.

    There may be none in a test in which no store died and no connection was cut: the store answers a call that it holds
    before its deadline, if only with "nothing yet".
    """
    attempts = (row for row in journal if row["kind"] == "rpc" and row["outcome"] != "OK")
    return [row for row in attempts if row["took_s"] - row["stood_s"] > WHOLE * row["deadline_s"]]


def trained_twice(trained: Sequence[tuple[int, Sequence[int]]]) -> set[int]:
    """Groups that occur more than once in the weights of these (step, groups); asserts that steps are 0, 1, 2, …"""
    assert [step for step, _ in trained] == list(range(len(trained))), "a step is missing, or is there twice"
    times = Counter(group for _, groups in trained for group in groups)
    return {group for group, n in times.items() if n > 1}


def durable_twice(run_dir: Path) -> set[int]:
    """Groups in two durable steps, from the tables."""
    sql = (
        "SELECT group_id FROM claim_groups JOIN claims USING (lineage, step) WHERE durable_lineage IS NOT NULL "
        "GROUP BY group_id HAVING COUNT(*) > 1"
    )
    with opened(run_dir) as db:
        return {group for (group,) in db.execute(sql)}


def acknowledged(sampled: Journal) -> dict[tuple[int, int, int], str]:
    """Finished members by key whose put was answered OK, with the digest of their bytes."""
    puts = (row for row in sampled if row["kind"] == "put" and row["finished"] and row["answer"] == "OK")
    return {tuple(row["key"]): row["digest"] for row in puts}


def lost_puts(run_dir: Path, sampled: Journal) -> list[str]:
    """The acknowledged puts that are not stored as sent and whose group did not end for a reason, as text."""
    with opened(run_dir) as db:
        members = {
            (group, member, attempt): digest
            for group, member, attempt, digest in db.execute("SELECT group_id, member, attempt, digest FROM members")
        }
        groups = {gid: (state, reason) for gid, state, reason in db.execute("SELECT id, state, reason FROM groups")}
        bodies = {
            (group, member): wire.digest(body)
            for group, member, body in db.execute("SELECT group_id, member, body FROM payloads")
        }
    lost = []
    for key, digest in acknowledged(sampled).items():
        state, reason = groups.get(key[0], ("no such group", ""))
        if members.get(key) != digest:
            lost.append(f"{key}: not in the table of members ({state})")
        elif state not in TERMINAL and bodies.get(key[:2]) != digest:
            lost.append(f"{key}: its bytes are missing, its group is {state}")
        elif state in ("EXPIRED", "DEAD") and not reason:
            lost.append(f"{key}: its group is {state} without a reason")
    return lost


def unlike_what_was_sent(learned: Journal, sampled: Journal) -> list[str]:
    """Members in claims that no sampler sent with those bytes (for runs that do not mask)."""
    sent = {(*row["key"], row["digest"]) for row in sampled if row["kind"] == "send"}
    found = []
    for claim in (row for row in learned if row["kind"] == "claim"):
        for group, members in claim["groups"]:
            found += [f"{group}.{m}.{a}" for m, a, digest in members if (group, m, a, digest) not in sent]
    return found


def replays(learned: Journal) -> dict[int, list[list]]:
    """All claims by step, repeated ones included: a replayed claim must equal the first."""
    by_step: dict[int, list[list]] = {}
    for row in learned:
        if row["kind"] == "claim":
            by_step.setdefault(row["step"], []).append(row["groups"])
    return by_step


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines with aligned columns."""
    head = ("fault", "injected", "survived", "lost", "trained twice", "max age")
    cells = [
        head,
        *((r.fault, str(r.injected), r.survived, str(r.lost), str(r.trained_twice), str(r.max_age)) for r in rows),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _place(row: Row) -> tuple[int, str]:
    """By the number the fault has in docs/store_contract.md."""
    number = row.fault.split()[0]
    return (int(number) if number.isdecimal() else 99, row.fault)
