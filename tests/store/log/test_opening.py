"""Opening a log: locks, damaged and foreign files, file systems."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from jaxroll import disk
from jaxroll.errors import ConfigError, InfraError
from jaxroll.store.log import database, schema
from jaxroll.store.log.commit_log import Log
from tests.harness.run_folder import make_run
from tests.harness.store.recorded_log import (
    _child,
    recorded_run,
)


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
    monkeypatch.setattr(disk, "MOUNTINFO", table)
    with pytest.raises(ConfigError, match=r"server:/runs \(nfs4\).*Put the run on a local disk"):
        Log(tmp_path / "far" / "run")
    assert not (tmp_path / "far" / "run" / "store.db").exists()
    asyncio.run(recorded_run(tmp_path / "near"))


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


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("limit", [7, 10])
def test_a_store_with_too_few_descriptors_says_so(tmp_path: Path, limit: int) -> None:
    """The smallest limit is met by an import, the others by files of the log, about which SQLite gives no reason."""
    run = make_run(tmp_path / "run", steps=2)
    command = f'ulimit -n {limit}; exec "$0" -m jaxroll store --run="$1"'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, run], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("error: ") and "`ulimit -n`" in ended.stderr, ended.stderr
