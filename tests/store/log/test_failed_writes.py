"""Writes that fail: nothing acknowledged is lost, nothing is written after them."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from jaxroll.clock import ManualClock
from jaxroll.errors import InfraError
from jaxroll.store.core import events as ev
from jaxroll.store.log import commit_log, database, schema
from jaxroll.store.log.commit_log import Log
from jaxroll.store.log.replay import replay_log
from jaxroll.store.server.keeper import Keeper
from tests.harness.store.recorded_log import (
    SETTINGS,
    _child,
    lease,
    publish,
    put,
    recovered,
)


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


def test_nothing_is_written_after_a_commit_that_failed(tmp_path: Path) -> None:
    """Otherwise the log would have a hole: the lost decision's records, and later ones behind them."""

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
        version = kept.decide(ev.Begin("L", None))
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
from jaxroll.store.core import events as rq
from tests.harness.store.recorded_log import *

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


def test_a_put_that_ran_out_of_memory_is_not_acknowledged_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state has the put and the log has not: the store must end, so that a new one reads the log."""

    async def job() -> None:
        log = Log(tmp_path)
        kept = Keeper(SETTINGS, log, ManualClock())
        version = kept.decide(ev.Begin("L", None))
        publish(kept, version)
        (key,) = lease(kept, 1, version, "a")
        await log.committed()

        def no_memory(*_: object) -> list[schema.Statement]:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(commit_log, "statements", no_memory)
            with pytest.raises(MemoryError):
                put(kept, key, version)
        put(kept, key, version)
        with pytest.raises(InfraError, match="MemoryError; nothing can be made durable any more"):
            await log.committed()
        with pytest.raises(InfraError):
            await log.close()

    asyncio.run(job())
    assert recovered(tmp_path).state.tokens_put == 0
