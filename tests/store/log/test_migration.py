"""Logs of an earlier version: migrated with their history, or left as they were."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec
import pytest

from jaxroll import wire
from jaxroll.clock import ManualClock
from jaxroll.errors import InfraError, StaleClient, StoreRefusal
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.machine import apply
from jaxroll.store.core.state import State
from jaxroll.store.log import database, replay
from jaxroll.store.log.commit_log import Log
from jaxroll.store.log.replay import replay_log
from jaxroll.store.server.keeper import Keeper
from tests.harness.store.recorded_log import (
    SETTINGS,
    lease,
    publish,
    put,
    recovered,
)

OLD = Path(__file__).parents[2] / "harness/store/store_v1.sql"  # the eventful history as version 1 kept it


def test_a_log_of_version_1_goes_on(tmp_path: Path) -> None:
    """Its history comes back, its rows stay as they were, and today's checks hold on it."""
    before = sqlite3.connect(":memory:")
    before.executescript(OLD.read_text())
    sqlite3.connect(tmp_path / "store.db").executescript(OLD.read_text()).connection.close()
    with database.transaction(tmp_path) as db:  # readers leave the file as it is
        assert replay_log(db).violations == []
    assert sqlite3.connect(tmp_path / "store.db").execute("PRAGMA user_version").fetchone() == (1,)
    state = recovered(tmp_path).state
    assert (state.position, state.lineage, state.next_claim, state.acked, state.durable) == (65, 1, 3, 2, 1)
    assert (state.closed, state.expired, state.dead, state.cursor) == ("enough", {"lineage": 1}, 2, b"cursor10")
    with database.transaction(tmp_path) as db:
        for table, columns in (
            ("groups", "id, state, reason, claim_step, issued_unix_s"),
            ("claim_groups", "step, place, group_id"),
            ("claims", "step, lineage, trained_lineage, durable_lineage"),
            ("members", "group_id, member, state, attempt, holder, digest"),
            ("payloads", "group_id, member, body"),
        ):
            sql = f"SELECT {columns} FROM {table} ORDER BY {columns}"
            assert db.execute(sql).fetchall() == before.execute(sql).fetchall() != []
        left = "SELECT name FROM sqlite_master WHERE name LIKE 'old_%' OR name = 'snapshot'"
        assert db.execute(left).fetchall() == []
        assert db.execute("SELECT COUNT(*) FROM tasks").fetchone()[0] == len(state.open) + len(state.held)
        assert replay_log(db).violations == []


def _compacted_at_its_end(db: sqlite3.Connection) -> None:
    """As if the store of version 1 had made its snapshot last: without what that version did not know."""
    position, body = db.execute("SELECT position, body FROM snapshot").fetchone()
    state = wire.decode(body, State)
    for (record,) in db.execute("SELECT body FROM log WHERE position > ? ORDER BY position", (position,)):
        apply(state, wire.decode(record, ev.Event), 0.0)
    kept = msgspec.msgpack.decode(wire.encode(state))
    for name in ("questions", "stream", "next_ordinal", "claim_cuts", "cuts", "passed"):
        kept.pop(name, None)
    for group in (*kept["open"].values(), *kept["held"].values()):
        group.pop("ordinal", None)
    db.execute("UPDATE snapshot SET position = ?, body = ?", (state.position, wire.encode(kept)))
    db.execute("DELETE FROM log")
    db.commit()


@pytest.mark.parametrize("compacted", [False, True])
def test_a_fork_of_a_log_of_version_1_is_refused_until_its_prompts_are_known(tmp_path: Path, compacted: bool) -> None:
    """It has the pipeline's state after its newest prompt alone: not before the oldest one that is still open."""
    db = sqlite3.connect(tmp_path / "store.db")
    db.executescript(OLD.read_text() + "DELETE FROM log WHERE position > 63; DELETE FROM meta WHERE key = 'closed';")
    db.executescript("DELETE FROM meta WHERE key = 'data_ended'")  # the run had not ended yet
    if compacted:
        _compacted_at_its_end(db)
    db.close()

    async def play() -> None:
        kept = Keeper(SETTINGS, Log(tmp_path), ManualClock())
        state = kept.state
        assert {group.id: group.ordinal for group in state.open.values()} == {9: 5, 10: 9}, "9 is the prompt of 5 again"
        assert (state.next_ordinal, state.claim_cuts, state.stream[9]) == (10, {}, b"cursor10")
        with database.transaction(tmp_path) as db:
            _, before = replay.newest(db) or (None, state)
        open_then = {group.id: group.ordinal for group in before.open.values()}
        assert open_then == ({9: 5, 10: 9} if compacted else {5: 5, 7: 7, 8: 8})
        version = kept.decide(ev.Begin("L", Version(1, 1)))
        assert isinstance(kept.decide(ev.Begin("M", Version(1, 1), "f")), StaleClient), "not from the beginning"
        publish(kept, version)
        for step in (1, 2, 3):
            for key in lease(kept, 8, Version(version.lineage, step), f"{step}"):
                put(kept, key, Version(version.lineage, step))
            batch = kept.decide(ev.ClaimStep("L", version.lineage, step))
            assert not isinstance(batch, StoreRefusal), batch
            publish(kept, Version(version.lineage, step + 1))
            kept.decide(ev.Ack("L", Version(version.lineage, step)))
        low = min(group.ordinal for group in state.open.values())
        assert 10 <= low == state.claim_cuts[3].ordinal, "all prompts of before have ended"
        forked = kept.decide(ev.Begin("M", Version(version.lineage, 4), "f"))
        assert forked == Version(version.lineage + 1, 4) and state.cursor == b"cursor%d" % low
        await kept.log.close()

    asyncio.run(play())
    with database.transaction(tmp_path) as db:
        assert replay_log(db).violations == []


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "store.db")
    db.executescript(OLD.read_text())
    db.execute("UPDATE snapshot SET body = x'c1'")
    db.commit()
    before = list(db.iterdump())
    with pytest.raises(InfraError):
        Log(tmp_path)
    assert list(db.iterdump()) == before
