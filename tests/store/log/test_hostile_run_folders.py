"""Untrusted run folders: a log, checkpoints and sums that no run wrote, opened by the commands that show runs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxroll import wire
from jaxroll.control import cli
from jaxroll.errors import CheckpointDamaged
from jaxroll.learner import checkpoint_files
from jaxroll.records import Version
from tests.harness.resource_bounds import bounded
from tests.harness.run_folder import write_run_file
from tests.harness.store.recorded_log import ALPHABET, recorded_run

NESTED = "[" * 100_000 + "]" * 100_000
COMMANDS = {
    "inspect": ["inspect"],
    "inspect --json": ["inspect", "--json"],
    "inspect a group": ["inspect", "--group=3"],
    "replay": ["replay"],
    "export": ["export", "--jsonl=OUT"],
    "report": ["report"],
    "checkpoints": ["checkpoints"],
    "list": ["list"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    path.mkdir()
    write_run_file(path)
    (path / "alphabet.json").write_text(json.dumps(ALPHABET))
    asyncio.run(recorded_run(path))
    return path


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def sql(*statements: str) -> Callable[[Path], None]:
    """Run the statements on the run's log, as a person with SQLite could."""

    def change(run_dir: Path) -> None:
        with contextlib.closing(sqlite3.connect(run_dir / "store.db", isolation_level=None)) as db:
            db.execute("PRAGMA writable_schema = ON")
            for statement in statements:
                db.execute(statement)
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    return change


def event(body: bytes, kind: str = "issued") -> Callable[[Path], None]:
    def change(run_dir: Path) -> None:
        with contextlib.closing(sqlite3.connect(run_dir / "store.db", isolation_level=None)) as db:
            db.execute("UPDATE log SET body = ?, kind = ? WHERE position = 2", (body, kind))

    return change


def written(content: bytes) -> Callable[[Path], None]:
    def change(run_dir: Path) -> None:
        for path in run_dir.glob("store.db*"):
            path.unlink()
        (run_dir / "store.db").write_bytes(content)

    return change


def fifo(run_dir: Path) -> None:
    (run_dir / "store.db").unlink()
    os.mkfifo(run_dir / "store.db")


def endless(table: str, columns: str) -> Callable[[Path], None]:
    """A view in place of a table that never ends."""
    return sql(
        f"DROP TABLE {table}",
        f"CREATE VIEW {table} AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
        f" SELECT {columns} FROM n",
    )


HOSTILE: dict[str, Callable[[Path], None]] = {
    "no database": written(b"hello" * 1000),
    "a header only": written(b"SQLite format 3\0" + b"\0" * 84),
    "a pipe": fifo,
    "an endless log": endless("log", "i AS position, 0.0 AS unix_s, 'put' AS kind, x'80' AS body, 1 AS group_id"),
    "endless groups": endless("groups", "i AS id, 'READY' AS state, 0.0 AS issued_unix_s, NULL AS ended_unix_s"),
    "an endless line": sql(
        "DROP VIEW line",
        "CREATE VIEW line AS WITH RECURSIVE n(lineage, upto) AS (SELECT 1, 1 UNION ALL SELECT 1, 1 FROM n)"
        " SELECT lineage, upto FROM n",
    ),
    "another table": sql("DROP TABLE members", "CREATE TABLE members (group_id, member)"),
    "a table less": sql("DROP TABLE claims"),
    "a column that computes": sql("ALTER TABLE claims ADD COLUMN x GENERATED ALWAYS AS (zeroblob(900000000))"),
    "a schema of the future": sql("PRAGMA user_version = 99"),
    "a negative schema": sql("PRAGMA user_version = -7"),
    "a schema that is not SQL": sql("UPDATE sqlite_master SET sql = 'CREATE TABLE log (' WHERE name = 'log'"),
}
TYPES: dict[str, Callable[[Path], None]] = {
    "records that are not records": event(b"\xc1" * 100),
    "records of another kind": event(wire.encode({"type": "code", "run": "x"})),
    "a record that nests": event(b"\x91" * 100_000),
    "a group of 2**62 members": event(wire.encode({"type": "issued", "group": 1, "size": 2**62})),
    "times as text": sql("UPDATE groups SET issued_unix_s = 'yesterday'", "UPDATE members SET leased_unix_s = 'x'"),
    "infinite times": sql("UPDATE log SET unix_s = 9e999", "UPDATE failures SET unix_s = 9e999"),
    "states that there are not": sql("UPDATE groups SET state = 'GONE'"),
    "messages that are not messages": sql("UPDATE tasks SET messages = '[1]'"),
    "messages that nest": sql(f"UPDATE tasks SET messages = '{NESTED}'"),
    "messages that are not UTF-8": sql("UPDATE tasks SET messages = CAST(x'5b22ff225d' AS TEXT)"),
    "payloads as text": sql("UPDATE payloads SET body = 'text'"),
    "errors as blobs": sql("UPDATE failures SET error = x'00ff'"),
    "rewards as text": sql("UPDATE questions SET reward_sum = 'many'"),
    "errors that move the cursor": sql("UPDATE failures SET error = char(27) || '[2J' || char(10) || 'x'"),
    "rules of another type": sql("UPDATE meta SET value = '[]' WHERE key = 'rules'"),
    "no run id": sql("DELETE FROM meta"),
    "no snapshots and no beginning": sql("DELETE FROM snapshots", "DELETE FROM log WHERE position < 5"),
    "snapshot parts of nothing": sql("UPDATE snapshot_parts SET body = x'c1'"),
}


def run(
    command: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch, memory: int | None = None
) -> tuple[int, str]:
    """Exit code and standard error of a command on the run."""
    out, err = io.StringIO(), io.StringIO()
    place = run_dir.parent if command == ["list"] else run_dir
    words = [command[0], str(place), *(word.replace("OUT", str(run_dir.parent / "out")) for word in command[1:])]
    with bounded(memory, 60.0), monkeypatch.context() as patch:
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        code = cli.main(words)
    return code, err.getvalue()


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_log_that_no_store_made_is_refused_in_one_line(
    run_dir: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(run_dir)
    for name, command in COMMANDS.items():
        code, err = run(command, run_dir, monkeypatch, 256 << 20 if name == "replay" else None)
        assert code == 0 or (len(err.splitlines()) == 1 and len(err) < 1500), err[-3000:]
        assert code or command[0] not in ("inspect", "replay", "export"), f"{name} refused nothing"


@pytest.mark.parametrize("make", TYPES.values(), ids=TYPES)
def test_rows_that_no_store_wrote_are_shown_or_refused_in_one_line(
    run_dir: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(run_dir)
    for name, command in COMMANDS.items():
        code, err = run(command, run_dir, monkeypatch, 256 << 20 if name == "replay" else None)
        assert code in (0, 1) and len(err.splitlines()) <= 1 and len(err) < 1500, err[-3000:]


def test_a_database_in_a_folder_of_any_name_is_read(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a%20c", "a?mode=rw", "a#b", "50%", "[x]", "größe", "a b", os.fsdecode(b"\xff")):
        run_dir = Path(shutil.copytree(whole, tmp_path / name))
        assert run(["replay", "--json"], run_dir, monkeypatch)[0] == 0, name
        assert run(["inspect", "--json"], run_dir, monkeypatch)[0] == 0, name


# --- checkpoints


ABOUTS = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"position": "\xff"}',
    "nested": NESTED.encode(),
    "a list": b"[]",
    "no position": b'{"arrays": {}}',
    "a position of 1e400": b'{"position": 1e400, "arrays": {}}',
    "a position of 5000 digits": b'{"position": ' + b"9" * 5000 + b', "arrays": {}}',
    "arrays as a number": b'{"position": 1, "arrays": 3}',
    "arrays as pairs": b'{"position": 1, "arrays": [["a", ["float32", 1]]]}',
    "an array of numbers": b'{"position": 1, "arrays": {"params[\'w\']": 3}}',
    "an array of nothing": b'{"position": 1, "arrays": {"params[\'w\']": []}}',
    "a size as text": b'{"position": 1, "arrays": {"params[\'w\']": ["float32", "x"]}}',
    "a negative size": b'{"position": 1, "arrays": {"params[\'w\']": ["float32", -1]}}',
    "a dtype that there is not": b'{"position": 1, "arrays": {"params[\'w\']": ["code", 1]}}',
    "an object's dtype": b'{"position": 1, "arrays": {"params[\'w\']": ["object", 1]}}',
}


def checkpoint(run_dir: Path) -> Path:
    path = checkpoint_files.path_of(run_dir / "checkpoints", Version(0, 4))
    (path / checkpoint_files.ABOUT).mkdir(parents=True)
    (path / checkpoint_files.ABOUT / "metadata").write_text('{"position": 1, "arrays": {}}')
    checkpoint_files.write(path)
    return path


@pytest.mark.parametrize("content", ABOUTS.values(), ids=ABOUTS)
def test_a_manifest_that_no_learner_wrote_is_damage(
    run_dir: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(run_dir)
    (path / checkpoint_files.ABOUT / "metadata").write_bytes(content)
    with bounded(), pytest.raises(CheckpointDamaged) as damaged:
        checkpoint_files.params(checkpoint_files.about(path))
    assert str(damaged.value).isprintable() and len(str(damaged.value)) < 1500
    code, err = run(["checkpoints", "--verify"], run_dir, monkeypatch)
    assert (code, err) == (1, "")


SUMS = {
    "empty": b"",
    "not UTF-8": b'{"files": {"\xff": ""}}',
    "nested": NESTED.encode(),
    "a list": b"[]",
    "files as a number": b'{"files": 3}',
    "files as text": b'{"files": "ab"}',
    "a file above": b'{"files": {"../../store.db": "00"}}',
    "a file elsewhere": b'{"files": {"/etc/passwd": "00"}}',
    "a sum that is a list": b'{"files": {"about/metadata": [1]}}',
    "pairs of numbers": b'{"files": [[1, 2]]}',
    "names of two kinds": b'{"files": [[1, 2], ["about/metadata", "x"]]}',
    "a name of 10**6 letters": b'{"files": {"' + b"a" * 10**6 + b'": "00"}}',
    "a name that moves the cursor": b'{"files": {"\\u001b[2J\\n": "00"}}',
}


@pytest.mark.parametrize("content", SUMS.values(), ids=SUMS)
def test_sums_that_no_learner_wrote_are_damage(run_dir: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(run_dir)
    (path / checkpoint_files.SUMS).write_bytes(content)
    with bounded():
        problem = checkpoint_files.damage(path)
    assert problem and problem.isprintable() and len(problem) < 1500
    code, err = run(["checkpoints", "--verify"], run_dir, monkeypatch)
    assert (code, err) == (1, "")


def test_sums_do_not_wait_for_a_pipe(run_dir: Path) -> None:
    path = checkpoint(run_dir)
    os.mkfifo(path / "pipe")
    (path / "zero").symlink_to("/dev/zero")
    (path / "loop").symlink_to(path)
    with bounded():
        assert checkpoint_files.damage(path) == ""
    (path / checkpoint_files.SUMS).unlink()
    os.mkfifo(path / checkpoint_files.SUMS)
    with bounded():
        assert "regular" in checkpoint_files.damage(path)
