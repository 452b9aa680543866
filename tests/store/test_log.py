"""The log: what was committed comes back whole, wherever the file was cut; the tables agree with the state."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest

from jaxroll.clock import ManualClock
from jaxroll.errors import InfraError, StoreRefusal
from jaxroll.records import Snapshot, Task, Version, VersionRun
from jaxroll.schedule.limiter import AgeLimiter
from jaxroll.store import keeper, schema
from jaxroll.store import requests as rq
from jaxroll.store.core import Core
from jaxroll.store.keeper import Keeper
from jaxroll.store.log import Log
from jaxroll.store.settings import Settings
from jaxroll.store.state import conservation_residual, counts

SETTINGS = Settings(AgeLimiter(1.0, 2), group_size=2, steps=6, straggler_deadline_s=5.0, data_retries=0)


def ask(kept: Keeper, request: rq.Request, payload: bytes | None = None):
    statement = None
    if isinstance(request, rq.PutMember) and payload is not None:
        statement = schema.payload(request.group, request.member, payload)
    return kept.decide(request, statement)


def lease(kept: Keeper, members: int, version: Version, request: str) -> list[tuple[int, int, int]]:
    fed = kept.state.prompts_issued
    offered = tuple((Task(i, (), "e", "{}", 0, f"{i:016x}"), b"cursor%d" % (i + 1)) for i in range(fed, fed + members))
    reply = ask(kept, rq.Lease("S", "S-1", version, members, request, offered))
    return [] if isinstance(reply, StoreRefusal) else [(g.group, m, a) for g in reply.grants for m, a in g.members]


def publish(kept: Keeper, version: Version) -> None:
    ask(kept, rq.Publish("L", Snapshot(version, "tcp", "here", "d")))


def put(kept: Keeper, key: tuple[int, int, int], version: Version) -> None:
    ask(kept, rq.PutMember(*key, f"{key}", 3, (VersionRun(version, 4),)), b"%d.%d" % key[:2])


def eventful_history(kept: Keeper, clock: ManualClock) -> Iterable[None]:
    """A run with every kind of event; pauses between requests."""
    v = ask(kept, rq.Begin("L", None))
    publish(kept, v)
    yield
    for key in lease(kept, 6, v, "a"):
        put(kept, key, v)
        yield
    for step in (0, 1):
        ask(kept, rq.ClaimStep("L", 0, step))
        publish(kept, Version(0, step + 1))
        ask(kept, rq.Ack("L", Version(0, step)))
        yield
        for i, key in enumerate(lease(kept, 4, Version(0, step + 1), f"b{step}")):
            failure = rq.PutMember(*key, "f", 3, (), ("DATA", "x"))
            ask(kept, failure) if i == 3 else put(kept, key, Version(0, step + 1))
            yield
    ask(kept, rq.Durable("L", Version(0, 1)))
    lease(kept, 3, Version(0, 2), "c")
    yield
    clock.advance(SETTINGS.lease_s)
    ask(kept, rq.Tick())
    yield
    v = ask(kept, rq.Begin("L", Version(0, 1)))
    publish(kept, v)
    ask(kept, rq.ClaimStep("L", 1, 1))
    publish(kept, Version(1, 2))
    ask(kept, rq.Ack("L", Version(1, 1)))
    yield
    ask(kept, rq.Arrive("S", "S-1"))
    for key in lease(kept, 8, Version(1, 2), "d")[:5]:
        put(kept, key, Version(1, 2))
        yield
    clock.advance(6.0)
    ask(kept, rq.ClaimStep("L", 1, 2))
    ask(kept, rq.EndData())
    ask(kept, rq.Close("enough"))
    yield


async def recorded_run(run_dir: Path) -> Core:
    """The machine at the end of the history whose log is in `run_dir`."""
    clock = ManualClock()
    kept = Keeper(SETTINGS, Log(run_dir), clock)
    for _ in eventful_history(kept, clock):
        await kept.log.committed()
    await kept.log.close()
    return kept.core


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
    state = asyncio.run(recorded_run(tmp_path)).state
    db = sqlite3.connect(tmp_path / "store.db")
    rows = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    assert rows == {name: n for name, n in counts(state).items() if n}
    for group in (*state.open.values(), *state.held.values()):
        assert db.execute("SELECT state FROM groups WHERE id = ?", (group.id,)).fetchone() == (group.state,)
        done = {m for m, _ in group.done()}
        assert {m for (m,) in db.execute("SELECT member FROM payloads WHERE group_id = ?", (group.id,))} == done
        sql = "SELECT member, attempt, digest FROM members WHERE group_id = ? AND state = 'done'"
        assert set(db.execute(sql, (group.id,))) == {(m, s.attempt, s.digest) for m, s in group.done()}
        leased = {(m, s.attempt, s.holder) for m, s in enumerate(group.slots) if s.status == "leased"}
        assert set(db.execute("SELECT member, attempt, holder FROM leases WHERE group_id = ?", (group.id,))) == leased
    alive = len(state.open) + len(state.held)
    assert db.execute("SELECT COUNT(DISTINCT group_id) FROM payloads").fetchone()[0] <= alive
    assert db.execute("SELECT step, trained_lineage, durable_lineage FROM claims").fetchall() == [
        (0, 0, 0), (1, 1, None), (2, None, None),
    ]  # fmt: skip
    twice = (
        "SELECT group_id FROM claim_groups JOIN claims USING (step) WHERE durable_lineage IS NOT NULL "
        "GROUP BY group_id HAVING COUNT(*) > 1"
    )
    assert db.execute(twice).fetchall() == []
    assert db.execute("SELECT prompts_issued, state FROM cursor").fetchone() == (state.prompts_issued, state.cursor)
    assert db.execute("SELECT lineage, fork_step FROM lineages").fetchall() == [(0, 0), (1, 1)]
    with pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO claim_groups SELECT 99, place, group_id FROM claim_groups LIMIT 1")


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


def test_compaction_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = asyncio.run(recorded_run(tmp_path / "plain"))
    monkeypatch.setattr(keeper, "COMPACT_EVERY", 7)
    compacted = asyncio.run(recorded_run(tmp_path / "compacted"))
    assert facts(compacted) == facts(core) == facts(recovered(tmp_path / "compacted"))
    db = sqlite3.connect(tmp_path / "compacted" / "store.db")
    assert db.execute("SELECT COUNT(*) FROM log").fetchone()[0] < 20 < core.state.position
    assert db.execute("SELECT position FROM snapshot").fetchone()[0] > 0


def test_leases_of_the_former_life_are_renewed_once(tmp_path: Path) -> None:
    async def leased() -> None:
        kept = Keeper(SETTINGS, Log(tmp_path), ManualClock(1e6))
        publish(kept, ask(kept, rq.Begin("L", None)))
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


@pytest.mark.parametrize("content", [b"not a database at all" * 100, None])
def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        sqlite3.connect(tmp_path / "store.db").execute("PRAGMA user_version = 99").connection.close()
    else:
        (tmp_path / "store.db").write_bytes(content)
    with pytest.raises(InfraError, match=r"store\.db"):
        Log(tmp_path)


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
