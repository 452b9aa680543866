"""The log: what was committed comes back whole, wherever the file was cut; the tables agree with the state."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from jaxroll import wire
from jaxroll.clock import ManualClock
from jaxroll.errors import ConfigError, InfraError, StaleClient, StoreRefusal
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core import requests as rq
from jaxroll.store.core.apply import apply
from jaxroll.store.core.machine import Core
from jaxroll.store.core.state import State, conservation_residual, counts
from jaxroll.store.log import database, schema, state_checkpoints
from jaxroll.store.log.commit_log import Log
from jaxroll.store.log.replay import replay_log
from jaxroll.store.server.keeper import Keeper
from tests.store.made_log import SETTINGS, eventful_history, lease, publish, put, recorded_run

OLD = Path(__file__).with_name("store_v1.sql")  # the eventful history as version 1 kept it


def recovered(run_dir: Path) -> Core:
    async def read() -> Core:
        log = Log(run_dir)
        core = Core.recovered(SETTINGS, log.recovered.state, log.recovered.events, 0.0)
        await log.close()
        return core

    return asyncio.run(read())


def facts(core: Core) -> dict:
    """The state without its clock."""
    state = core.state
    groups = {
        g.id: (g.state, g.note, g.step, [(s.status, s.attempt, s.digest) for s in g.slots])
        for g in (*state.open.values(), *state.held.values())
    }
    names = ("position", "next_group", "next_claim", "acked", "durable", "lineages", "published", "cursor", "closed",
             "expired", "dead", "trimmed", "receipts", "data_ended", "learner", "tokens_put")  # fmt: skip
    return {name: getattr(state, name) for name in names} | {"groups": groups}


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

        def noting(request: rq.Request, payload: schema.Statement | None = None):
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
        publish(kept, kept.decide(rq.Begin("L", None)))
        assert len(lease(kept, 2, Version(0, 0), "a")) == 2
        await kept.log.close()

    asyncio.run(leased())
    core = recovered(tmp_path)
    assert {s.deadline_s for s in core.state.open[0].slots} == {SETTINGS.lease_s}


def test_a_second_store_is_kept_out(tmp_path: Path) -> None:
    async def both() -> None:
        log = Log(tmp_path)
        with pytest.raises(InfraError, match=r"another store \(pid \d+\) has this run open"):
            Log(tmp_path)
        await log.close()
        await Log(tmp_path).close()

    asyncio.run(both())


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(InfraError, match=r"store\.db"):
        Log(tmp_path)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}", "A newer JaxRoll wrote it"),
        ("CREATE TABLE cats (name)", "a database that JaxRoll did not make"),
    ],
)
def test_another_database_is_refused_by_name_and_left_alone(tmp_path: Path, script: str, said: str) -> None:
    db = sqlite3.connect(tmp_path / "store.db")
    db.execute(script)
    db.commit()
    before = list(db.iterdump())
    with pytest.raises(ConfigError, match=said):
        Log(tmp_path)
    assert list(db.iterdump()) == before


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
            _, before = state_checkpoints.newest(db) or (None, state)
        open_then = {group.id: group.ordinal for group in before.open.values()}
        assert open_then == ({9: 5, 10: 9} if compacted else {5: 5, 7: 7, 8: 8})
        version = kept.decide(rq.Begin("L", Version(1, 1)))
        assert isinstance(kept.decide(rq.Begin("M", Version(1, 1), "f")), StaleClient), "not from the beginning"
        publish(kept, version)
        for step in (1, 2, 3):
            for key in lease(kept, 8, Version(version.lineage, step), f"{step}"):
                put(kept, key, Version(version.lineage, step))
            batch = kept.decide(rq.ClaimStep("L", version.lineage, step))
            assert not isinstance(batch, StoreRefusal), batch
            publish(kept, Version(version.lineage, step + 1))
            kept.decide(rq.Ack("L", Version(version.lineage, step)))
        low = min(group.ordinal for group in state.open.values())
        assert 10 <= low == state.claim_cuts[3].ordinal, "all prompts of before have ended"
        forked = kept.decide(rq.Begin("M", Version(version.lineage, 4), "f"))
        assert forked == Version(version.lineage + 1, 4) and state.cursor == b"cursor%d" % low
        await kept.log.close()

    asyncio.run(play())
    with database.transaction(tmp_path) as db:
        assert replay_log(db).violations == []


def test_a_fork_of_a_finished_run_opens_it_in_the_tables_too(tmp_path: Path) -> None:
    async def play() -> None:
        clock = ManualClock()
        kept = Keeper(SETTINGS, Log(tmp_path), clock)
        for _ in eventful_history(kept, clock):
            await kept.log.committed()
        assert kept.state.closed and kept.state.data_ended
        assert kept.decide(rq.Begin("M", Version(1, 2), "f")) == Version(2, 2)
        assert not kept.state.closed and not kept.state.data_ended
        await kept.log.close()

    asyncio.run(play())
    with database.transaction(tmp_path) as db:
        assert db.execute("SELECT key FROM meta WHERE key IN ('closed', 'data_ended')").fetchall() == []
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


def test_the_live_connection_is_asked_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def facts_of_open_log() -> dict:
        log = Log(tmp_path)
        found = await log.facts()
        await log.close()
        return found

    found = asyncio.run(facts_of_open_log())
    assert (found["synchronous"], found["journal_mode"]) == (2, "wal")
    monkeypatch.setattr(database, "_SYNCHRONOUS", "NORMAL")
    with pytest.raises(InfraError, match="synchronous is 1 and not 2"):
        Log(tmp_path)


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {tmp_path}/far rw - nfs4 server:/runs rw\n")
    monkeypatch.setattr(database, "MOUNTINFO", table)
    with pytest.raises(ConfigError, match=r"server:/runs \(nfs4\).*Put the run on a local disk"):
        Log(tmp_path / "far" / "run")
    assert not (tmp_path / "far" / "run" / "store.db").exists()
    asyncio.run(recorded_run(tmp_path / "near"))


def test_a_commit_that_fails_ends_the_promises_and_keeps_what_was(tmp_path: Path) -> None:
    async def failing() -> None:
        log = Log(tmp_path)
        log.append([("INSERT INTO meta VALUES ('a', '1')", ())])
        await log.committed()
        log.append([("INSERT INTO meta VALUES ('b', '1')", ()), ("INSERT INTO no_such_table VALUES (1)", ())])
        with pytest.raises(InfraError, match="nothing can be made durable"):
            await log.committed()
        with pytest.raises(InfraError):
            await log.committed()
        with pytest.raises(InfraError):
            await log.close()

    asyncio.run(failing())
    keys = {key for (key,) in sqlite3.connect(tmp_path / "store.db").execute("SELECT key FROM meta")}
    assert {"a"} <= keys
    assert "b" not in keys


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


def test_nothing_is_written_after_a_commit_that_failed(tmp_path: Path) -> None:
    """Else the log would have a hole: the lost decision's records, and later ones behind them."""

    async def failing() -> None:
        log = Log(tmp_path)
        log.append([("INSERT INTO no_such_table VALUES (1)", ())])
        with pytest.raises(InfraError):
            await log.committed()
        log.append([("INSERT INTO meta VALUES ('later', '1')", ())])
        with pytest.raises(InfraError):
            await log.committed()
        with pytest.raises(InfraError):
            await log.close()

    asyncio.run(failing())
    assert sqlite3.connect(tmp_path / "store.db").execute("SELECT 1 FROM meta WHERE key = 'later'").fetchall() == []


def test_a_full_disk_ends_the_log_with_its_cause_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    async def until_full() -> list[tuple[int, int]]:
        kept = Keeper(SETTINGS, Log(tmp_path), ManualClock())
        version = kept.decide(rq.Begin("L", None))
        publish(kept, version)
        await kept.log.committed()
        pages = kept.log._connection.execute("PRAGMA page_count").fetchone()[0]
        kept.log._connection.execute(f"PRAGMA max_page_count = {pages + 12}")
        acknowledged = []
        with pytest.raises(InfraError, match=r"full; nothing can be made durable.*MB are free at .*: make room, then"):
            for key in lease(kept, 8, version, "a"):
                put(kept, key, version, tokens=900)
                await kept.log.committed()
                acknowledged.append(key[:2])
        with pytest.raises(InfraError):
            await kept.log.close()
        return acknowledged

    acknowledged = asyncio.run(until_full())
    assert acknowledged
    assert [(g.id, m) for g in recovered(tmp_path).state.open.values() for m, _ in g.done()] == acknowledged
    with database.transaction(tmp_path) as db:
        assert replay_log(db).violations == []


FULL_FILE = """
import asyncio, resource, signal, sys
from pathlib import Path
from jaxroll import lifeline
from jaxroll.clock import ManualClock
from jaxroll.errors import InfraError
from jaxroll.store.core import requests as rq
from tests.store.made_log import *

async def main():
    kept = Keeper(SETTINGS, Log(Path(sys.argv[1])), ManualClock())
    version = kept.decide(rq.Begin("L", None))
    publish(kept, version)
    await kept.log.committed()
    size = Path(sys.argv[1], "store.db-wal").stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 120_000, size + 120_000))
    for key in lease(kept, 8, version, "a"):
        put(kept, key, version, tokens=900)
        await kept.log.committed()
        print(key[0], key[1], flush=True)

lifeline.bind(int(sys.argv[2]))
try:
    asyncio.run(main())
except InfraError as error:
    print(error, file=sys.stderr)
    sys.exit(7)
"""


def _child(script: str, run_dir: Path) -> subprocess.Popen:
    words = [sys.executable, "-c", script, str(run_dir), str(os.getpid())]
    root = Path(__file__).parents[2]
    return subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.process
@pytest.mark.timeout(60)
def test_a_file_that_may_not_grow_ends_the_log_with_its_cause(tmp_path: Path) -> None:
    """The same with a limit of the operating system: the write itself fails, in the middle of a commit."""
    said, error = _child(FULL_FILE, tmp_path).communicate(timeout=30)
    acknowledged = [tuple(map(int, line.split())) for line in said.splitlines()]
    assert "nothing can be made durable" in error and "make room" in error
    assert 0 < len(acknowledged) < 8
    there = [(g.id, m) for g in recovered(tmp_path).state.open.values() for m, _ in g.done()]
    assert there[: len(acknowledged)] == acknowledged


HOLDER = """
import asyncio, sys
from pathlib import Path
from jaxroll import lifeline
from jaxroll.store.log.commit_log import Log

async def main():
    log = Log(Path(sys.argv[1]))
    print("open", flush=True)
    await asyncio.sleep(60)

lifeline.bind(int(sys.argv[2]))
asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.timeout(60)
def test_the_lock_of_a_killed_store_is_free(tmp_path: Path) -> None:
    holder = _child(HOLDER, tmp_path)
    assert holder.stdout is not None and holder.stdout.readline() == "open\n"
    with pytest.raises(InfraError, match=rf"another store \(pid {holder.pid}\)"):
        Log(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=10)
    assert (tmp_path / "store.lock").read_text() == f"{holder.pid}\n", "the stale file is there"
    asyncio.run(recorded_run(tmp_path))


def test_the_log_cut_at_every_byte_of_its_last_record(tmp_path: Path) -> None:
    """A last record of 1 KB: with all of it the record is there, with a byte less it never was."""
    cut = tmp_path / "cut"

    async def interrupted() -> None:
        kept = Keeper(SETTINGS, Log(tmp_path / "run"), ManualClock())
        publish(kept, kept.decide(rq.Begin("L", None)))
        await kept.log.committed()
        kept.log._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        kept.decide(rq.Close("x" * 1024))
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
