"""Compaction while the store runs: nothing is lost, no call waits, and the disk use stays bounded."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from jaxroll.clock import ManualClock
from jaxroll.errors import InfraError
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.machine import replay
from jaxroll.store.core.state import State
from jaxroll.store.log import commit_log, database, schema
from jaxroll.store.log import replay as replays
from jaxroll.store.log.commit_log import Log
from jaxroll.store.log.replay import Mark, differences, kept, replay_log
from jaxroll.store.server import keeper
from jaxroll.store.server.keeper import Keeper
from tests.harness.store.recorded_log import SETTINGS, eventful_history, lease, long_run, publish, put, recorded_run


def state_on_disk(run_dir: Path) -> State:
    with database.transaction(run_dir) as db:
        found = replays.newest(db)
        begun = found[1] if found else State()
        return replay(begun, (event for _, event in replays.events_after(db, begun.position)), 0.0)


def test_a_state_in_pieces_is_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = asyncio.run(recorded_run(tmp_path)).state
    for entries in (1, 3, 1000):
        monkeypatch.setattr(replays, "ENTRIES", entries)
        pieces = list(replays.parts(state))
        assert len({(p.field, p.number) for p in pieces}) == len(pieces)
        again = replays.assembled(pieces)
        assert again == state
        assert list(again.open) == list(state.open)
    assert len(list(replays.parts(state))) < len(pieces) + 1


def test_every_snapshot_is_the_state_at_its_position(tmp_path: Path) -> None:
    asyncio.run(recorded_run(tmp_path, compact_every=5, history_bytes=2000))
    with database.transaction(tmp_path) as db:
        found = replay_log(db)
        assert found.violations == [] and not found.whole
        assert found.checkpoints >= 1, "one inside the kept history was compared, too"


async def compacted_while_writing(run_dir: Path, release: threading.Event) -> tuple[State, int]:
    """The state of a run whose compaction was suspended in the middle, while everything else continued."""
    clock = ManualClock()
    kept_run = Keeper(SETTINGS, Log(run_dir, history_bytes=0, keep_bytes=0), clock)
    rest = kept_run.log._rest
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(started.set)
        assert release.wait(20)
        rest()

    kept_run.log._rest = hold  # type: ignore[method-assign]
    acknowledged = 0
    for i, _ in enumerate(eventful_history(kept_run, clock)):
        await kept_run.log.committed()
        if i == 8:
            kept_run.log.compact()
            await started.wait()
        acknowledged += 1
    assert not release.is_set(), "every commit succeeded while the compaction was suspended"
    release.set()
    await kept_run.log.tidy()
    await kept_run.log.close()
    return kept_run.state, acknowledged


def test_puts_go_on_while_a_compaction_is_stopped(tmp_path: Path) -> None:
    state, acknowledged = asyncio.run(compacted_while_writing(tmp_path, threading.Event()))
    assert acknowledged > 20
    assert next(differences(state, state_on_disk(tmp_path)), None) is None
    with database.transaction(tmp_path) as db:
        (position,) = db.execute("SELECT position FROM snapshots").fetchone()
        assert 0 < position < state.position
        assert db.execute("SELECT MIN(position) FROM log").fetchone() == (position + 1,)
        assert replay_log(db).violations == []


def test_the_first_compaction_of_a_new_life_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the whole log since the last checkpoint: a store killed in every compaction would never complete one."""
    asyncio.run(recorded_run(tmp_path))
    replayed = []
    real = replays.apply
    monkeypatch.setattr(replays, "apply", lambda *of: (replayed.append(of[1]), real(*of)))

    async def again() -> State:
        kept_run = Keeper(SETTINGS, Log(tmp_path, history_bytes=0), ManualClock())
        kept_run.decide(ev.Open())
        await kept_run.log.committed()
        kept_run.log.compact()
        await kept_run.log.tidy()
        await kept_run.log.close()
        return kept_run.state

    state = asyncio.run(again())
    assert [type(event) for event in replayed] == [ev.RunOpened]
    monkeypatch.setattr(replays, "apply", real)
    assert next(differences(state, state_on_disk(tmp_path)), None) is None
    with database.transaction(tmp_path) as db:
        whole = db.execute("SELECT position, log_bytes FROM snapshots").fetchall()
        assert [position for position, _ in whole] == [state.position] and whole[0][1] > 2000
        assert replay_log(db).violations == []


def test_a_store_killed_between_any_two_portions_comes_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the files after every commit of a compaction in the smallest portions."""
    for name in ("PARTS", "PAYLOADS", "RECORDS"):
        monkeypatch.setattr(commit_log, name, 1)
    monkeypatch.setattr(replays, "ENTRIES", 2)
    copies = []
    real = commit_log.Maintenance.portion

    async def run() -> State:
        clock = ManualClock()
        kept_run = Keeper(SETTINGS, Log(tmp_path / "run", history_bytes=0, keep_bytes=0), clock)
        history = eventful_history(kept_run, clock)
        for _ in itertools.islice(history, 22):
            await kept_run.log.committed()
        await kept_run.log.tidy()

        def copying(self, connection, statements):
            copies.append(shutil.copytree(tmp_path / "run", tmp_path / f"copy{len(copies)}"))
            return real(self, connection, 0)

        monkeypatch.setattr(commit_log.Maintenance, "portion", copying)
        kept_run.log.compact()
        await kept_run.log.tidy()
        monkeypatch.setattr(commit_log.Maintenance, "portion", real)
        await kept_run.log.close()
        return kept_run.state

    state = asyncio.run(run())
    assert len(copies) > 30, "many commits"

    async def opened(run_dir: Path) -> None:
        log = Log(run_dir, history_bytes=0, keep_bytes=0)
        log.append([("UPDATE meta SET value = value", ())])
        await log.tidy()
        await log.close()

    for copy in copies:
        assert next(differences(state, state_on_disk(copy)), None) is None
    for copy in copies[::4]:
        asyncio.run(opened(copy))
        with database.transaction(copy) as db:
            assert db.execute("SELECT COUNT(DISTINCT position) FROM snapshot_parts").fetchone()[0] <= 1
            marks = replays.marks(db)
            floor = marks[0].position if marks else 0
            assert db.execute("SELECT MIN(position) FROM log").fetchone()[0] in (None, floor + 1)
            assert replay_log(db).violations == []


def size(run_dir: Path) -> int:
    return sum((run_dir / name).stat().st_size for name in ("store.db", "store.db-wal") if (run_dir / name).exists())


def test_disk_is_bounded_by_what_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the steps, hardly more disk: what grows is one row a group and a member, kept for questions."""
    monkeypatch.setattr(keeper, "COMPACT_EVERY", 300)
    sizes, rows = {}, {}
    for steps in (12, 120):
        run_dir = tmp_path / str(steps)
        asyncio.run(long_run(run_dir, steps, tokens=2000, history_bytes=50_000, keep_bytes=200_000))
        sizes[steps] = size(run_dir)
        with database.transaction(run_dir) as db:
            rows[steps] = db.execute("SELECT COUNT(*) FROM members").fetchone()[0]
            assert db.execute("SELECT SUM(bytes) <= 200000 FROM retired").fetchone() == (1,)
            assert db.execute("SELECT SUM(LENGTH(body)) FROM log").fetchone()[0] < 50_000 + 300 * 120
            assert db.execute("SELECT COUNT(*) FROM groups WHERE state = 'TRIMMED'").fetchone()[0] > 3 * steps - 30
            assert replay_log(db).violations == []
            (live,) = db.execute("SELECT SUM(LENGTH(body)) FROM payloads").fetchone()
            marked = {position for (position,) in db.execute("SELECT position FROM snapshots")}
            assert {p for (p,) in db.execute("SELECT DISTINCT position FROM snapshot_parts")} == marked
    assert sizes[120] < sizes[12] + 700 * (rows[120] - rows[12]) + 100_000
    assert live < 300_000


def test_pages_that_stay_free_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "SPARE_PAGES", 16)

    async def burst() -> tuple[int, int]:
        kept_run = Keeper(SETTINGS, Log(tmp_path, history_bytes=0, keep_bytes=0), ManualClock())
        log, connection = kept_run.log, kept_run.log._connection
        publish(kept_run, kept_run.decide(ev.Begin("L", None)))
        log.append([("INSERT INTO payloads VALUES (?, 0, ?)", (10**6 + i, bytes(40_000))) for i in range(100)])
        await log.committed()
        full = connection.execute("PRAGMA page_count").fetchone()[0]
        log.append([("DELETE FROM payloads", ())])
        for name in "ab":  # what is free at every commit between two snapshots is never asked for again
            lease(kept_run, 2, Version(0, 0), name)
            log.compact()
            await log.tidy()
        log.append([("UPDATE meta SET value = value", ())])
        await log.tidy()
        small = connection.execute("PRAGMA page_count").fetchone()[0]
        await log.close()
        return full, small

    full, small = asyncio.run(burst())
    assert full > 1000
    assert small < 200
    assert size(tmp_path) < 200 * 4096 + 40_000


def test_a_compaction_that_fails_ends_the_store(tmp_path: Path) -> None:
    """A log that cannot be replayed could not be recovered either: better to say so now."""

    async def broken() -> None:
        kept_run = Keeper(SETTINGS, Log(tmp_path), ManualClock())
        publish(kept_run, kept_run.decide(ev.Begin("L", None)))
        kept_run.log.append([("UPDATE log SET body = x'c1' WHERE position = 1", ())])
        await kept_run.log.committed()
        kept_run.log.compact()
        await kept_run.log.tidy()
        with pytest.raises(InfraError, match="nothing can be made durable any more"):
            await kept_run.log.committed()
        with pytest.raises(InfraError):
            await kept_run.log.close()

    asyncio.run(broken())


def test_what_is_kept_of_a_long_history() -> None:
    """Against the rule itself: the newest always; a base within the budget whenever any start allows; few snapshots."""
    chance = random.Random(7)
    for budget in (0, 100, 1000, 10_000):
        marks, whole, written, position = [], True, 0, 0
        for _ in range(400):
            written += chance.randrange(1, 120)
            position += chance.randrange(1, 10)
            marks.append(Mark(position, written))
            found = kept(marks, whole, budget)
            assert position in found.positions
            assert len(found.positions) <= 4
            starts = ([0] if whole else []) + [m.log_bytes for m in marks]
            base_bytes = 0 if found.base == 0 else next(m.log_bytes for m in marks if m.position == found.base)
            assert written - base_bytes <= budget or found.base == position
            assert all(written - start > budget for start in starts if start < base_bytes)
            if budget >= 1000 and written > budget:
                assert written - base_bytes >= budget / 2 - 240, "half of the budget is always used"
            whole = whole and found.base == 0
            marks = [m for m in marks if m.position in found.positions]


def test_the_budget_for_trajectories_drops_the_oldest_first(tmp_path: Path) -> None:
    asyncio.run(long_run(tmp_path, 16, tokens=500, keep_bytes=40_000))
    with database.transaction(tmp_path) as db:
        assert db.execute("SELECT SUM(bytes) <= 40000, COUNT(*) > 2 FROM retired").fetchone() == (1, 1)
        kept_groups = {g for (g,) in db.execute("SELECT group_id FROM retired")}
        gone = {g for (g,) in db.execute("SELECT id FROM groups WHERE ended_unix_s IS NOT NULL")} - kept_groups
        assert gone and max(gone) < min(kept_groups)
        with_bytes = {g for (g,) in db.execute("SELECT DISTINCT group_id FROM payloads")}
        alive = {g for (g,) in db.execute("SELECT id FROM groups WHERE ended_unix_s IS NULL AND state != 'PENDING'")}
        assert with_bytes == kept_groups | alive
        assert {g for (g,) in db.execute("SELECT group_id FROM tasks")} >= with_bytes


def test_what_is_acknowledged_while_upkeep_runs_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of another connection sees every put as soon as it is acknowledged."""
    monkeypatch.setattr(keeper, "COMPACT_EVERY", 25)

    async def run() -> None:
        kept_run = Keeper(SETTINGS, Log(tmp_path, history_bytes=0, keep_bytes=0), ManualClock())
        version = kept_run.decide(ev.Begin("L", None))
        publish(kept_run, version)
        other = sqlite3.connect(f"{(tmp_path / 'store.db').absolute().as_uri()}?mode=ro", uri=True)
        for step in range(6):
            for key in lease(kept_run, 8, version, f"r{step}"):
                put(kept_run, key, version)
                await kept_run.log.committed()
                sql = "SELECT 1 FROM payloads WHERE group_id = ? AND member = ?"
                assert other.execute(sql, key[:2]).fetchone()
            kept_run.decide(ev.ClaimStep("L", 0, step))
            version = Version(0, step + 1)
            publish(kept_run, version)
            kept_run.decide(ev.Ack("L", Version(0, step)))
            kept_run.decide(ev.Durable("L", version))
        other.close()
        await kept_run.log.tidy()
        await kept_run.log.close()

    asyncio.run(run())
    assert (tmp_path / "store.db").exists() and os.path.getsize(tmp_path / "store.db") > 0
    assert schema.SCHEMA_VERSION == 2
