"""The log: what was committed comes back whole, wherever the file was cut; the tables agree with the state."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from jaxroll.clock import ManualClock
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.state import conservation_residual, counts
from jaxroll.store.log import database, schema
from jaxroll.store.log.commit_log import Log
from jaxroll.store.log.replay import replay_log
from jaxroll.store.server.keeper import Keeper
from tests.harness.store.recorded_log import (
    SETTINGS,
    eventful_history,
    facts,
    lease,
    publish,
    recorded_run,
    recovered,
)


def test_what_was_committed_comes_back(tmp_path: Path) -> None:
    core = asyncio.run(recorded_run(tmp_path))
    assert facts(recovered(tmp_path)) == facts(core)
    assert core.state.lineage == 1
    assert core.state.dead == 2
    assert core.state.shrunk + core.state.next_claim > 2


def test_the_tables_say_what_the_state_says(tmp_path: Path) -> None:
    state = asyncio.run(recorded_run(tmp_path, keep_bytes=0)).state
    db = sqlite3.connect(tmp_path / "store.db")
    rows = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    assert rows == {name: n for name, n in counts(state).items() if n}
    for group in (*state.open.values(), *state.held.values()):
        assert db.execute("SELECT state FROM groups WHERE id = ?", (group.id,)).fetchone() == (group.state,)
        done = {m for m, _ in group.done()}
        assert db.execute("SELECT messages FROM tasks WHERE group_id = ?", (group.id,)).fetchone()
        assert {m for (m,) in db.execute("SELECT member FROM payloads WHERE group_id = ?", (group.id,))} == done
        sql = "SELECT member, attempt, digest FROM members WHERE group_id = ? AND state = 'done'"
        assert set(db.execute(sql, (group.id,))) == {(m, s.attempt, s.digest) for m, s in group.done()}
        leased = {(m, s.attempt, s.holder) for m, s in enumerate(group.slots) if s.status == "leased"}
        assert set(db.execute("SELECT member, attempt, holder FROM leases WHERE group_id = ?", (group.id,))) == leased
    alive = len(state.open) + len(state.held)
    assert db.execute("SELECT COUNT(DISTINCT group_id) FROM payloads").fetchone()[0] <= alive
    claims = "SELECT step, trained_lineage, durable_lineage FROM claims ORDER BY step"
    assert db.execute(claims).fetchall() == [(0, 0, 0), (1, 1, None), (2, None, None)]
    assert db.execute("SELECT prompts_issued, state FROM cursor").fetchone() == (state.prompts_issued, state.cursor)
    assert db.execute("SELECT lineage, fork_step FROM lineages").fetchall() == [(0, 0), (1, 1)]
    with pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO claim_groups SELECT 0, 99, place, group_id FROM claim_groups LIMIT 1")


def test_the_log_cut_anywhere_is_a_prefix_of_the_history(tmp_path: Path) -> None:
    """Real files of a store that was not closed, its WAL cut at many lengths, and in its last records at every 97th."""

    async def interrupted(copy: Path) -> set[int]:
        clock, ends = ManualClock(), {0}
        kept = Keeper(SETTINGS, Log(tmp_path / "run"), clock)
        decide = kept.decide

        def noting(request: ev.Request, payload: schema.Statement | None = None):
            reply = decide(request, payload)
            ends.add(kept.state.position)
            return reply

        kept.decide = noting
        for _ in eventful_history(kept, clock):
            await kept.log.committed()
        shutil.copytree(tmp_path / "run", copy)
        await kept.log.close()
        return ends

    original, cut_dir = tmp_path / "original", tmp_path / "cut"
    ends = asyncio.run(interrupted(original))
    wal = (original / "store.db-wal").read_bytes()
    cuts = sorted({*range(0, len(wal), len(wal) // 25), *range(len(wal) - 12_000, len(wal), 97), len(wal)})
    seen = []
    for cut in cuts:
        shutil.rmtree(cut_dir, ignore_errors=True)
        cut_dir.mkdir()
        shutil.copy(original / "store.db", cut_dir)
        (cut_dir / "store.db-wal").write_bytes(wal[:cut])
        core = recovered(cut_dir)
        assert core.state.position in ends, "part of a decision came back"
        assert conservation_residual(core.state) == 0
        seen.append(core.state.position)
    assert seen == sorted(seen)
    assert seen[-1] == max(ends)
    assert len(set(seen)) > 10


def test_compaction_loses_nothing(tmp_path: Path) -> None:
    core = asyncio.run(recorded_run(tmp_path / "plain"))
    compacted = asyncio.run(recorded_run(tmp_path / "compacted", compact_every=5, history_bytes=0))
    assert facts(compacted) == facts(core) == facts(recovered(tmp_path / "compacted"))
    with database.transaction(tmp_path / "compacted") as db:
        assert db.execute("SELECT COUNT(*) FROM log").fetchone()[0] < 20 < core.state.position
        assert db.execute("SELECT COUNT(*), MIN(position) > 0 FROM snapshots").fetchone() == (1, 1)


def test_leases_of_the_former_life_are_renewed_once(tmp_path: Path) -> None:
    async def leased() -> None:
        kept = Keeper(SETTINGS, Log(tmp_path), ManualClock(1e6))
        publish(kept, kept.decide(ev.Begin("L", None)))
        assert len(lease(kept, 2, Version(0, 0), "a")) == 2
        await kept.log.close()

    asyncio.run(leased())
    core = recovered(tmp_path)
    assert {s.deadline_s for s in core.state.open[0].slots} == {SETTINGS.lease_s}


def test_a_fork_of_a_finished_run_opens_it_in_the_tables_too(tmp_path: Path) -> None:
    async def play() -> None:
        clock = ManualClock()
        kept = Keeper(SETTINGS, Log(tmp_path), clock)
        for _ in eventful_history(kept, clock):
            await kept.log.committed()
        assert kept.state.closed and kept.state.data_ended
        assert kept.decide(ev.Begin("M", Version(1, 2), "f")) == Version(2, 2)
        assert not kept.state.closed and not kept.state.data_ended
        await kept.log.close()

    asyncio.run(play())
    with database.transaction(tmp_path) as db:
        assert db.execute("SELECT key FROM meta WHERE key IN ('closed', 'data_ended')").fetchall() == []
        assert replay_log(db).violations == []


def test_many_appends_share_commits(tmp_path: Path) -> None:
    async def burst() -> int:
        log = Log(tmp_path)
        commits = []
        log._connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
        for i in range(500):
            log.append([("INSERT INTO meta VALUES (?, '')", (str(i),))])
            if i % 50 == 0:
                await asyncio.sleep(0)
        await log.committed()
        await log.close()
        return len(commits)

    assert 1 <= asyncio.run(burst()) < 50
    assert sqlite3.connect(tmp_path / "store.db").execute("SELECT COUNT(*) FROM meta").fetchone()[0] >= 500


def test_the_log_cut_at_every_byte_of_its_last_record(tmp_path: Path) -> None:
    """A last record of 1 KB: with all of it the record is there, with a byte less it never was."""
    cut = tmp_path / "cut"

    async def interrupted() -> None:
        kept = Keeper(SETTINGS, Log(tmp_path / "run"), ManualClock())
        publish(kept, kept.decide(ev.Begin("L", None)))
        await kept.log.committed()
        kept.log._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        kept.decide(ev.Close("x" * 1024))
        await kept.log.committed()
        shutil.copytree(tmp_path / "run", cut)
        await kept.log.close()

    asyncio.run(interrupted())
    wal = cut / "store.db-wal"
    content = wal.read_bytes()
    place = content.rindex(b"x" * 1024)
    sizes = {
        *range(place, place + 1024),
        *range(64),
        *range(len(content) - 64, len(content)),
        *range(0, len(content), 97),
    }

    def position(size: int) -> int:
        (cut / "store.db-shm").unlink(missing_ok=True)
        os.truncate(wal, size)
        with database.transaction(cut) as db:
            return db.execute("SELECT MAX(position) FROM log").fetchone()[0]

    assert position(len(content)) == 3
    assert {position(size) for size in sorted(sizes, reverse=True)} == {2}
    wal.write_bytes(content)
    (cut / "store.db-shm").unlink(missing_ok=True)
    assert recovered(cut).state.closed == "x" * 1024
