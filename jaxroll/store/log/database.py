"""Open RUN/store.db: lock, connection, schema version and content for its one writer; read transactions for readers."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import quote

import msgspec

from jaxroll import disk, wire
from jaxroll.errors import ConfigError, DataError, InfraError, one_line
from jaxroll.records import Task
from jaxroll.run_paths import RunPaths
from jaxroll.store.core import events as ev
from jaxroll.store.core.events import Recorded
from jaxroll.store.core.machine import replay
from jaxroll.store.core.state import State
from jaxroll.store.log import replay as replays
from jaxroll.store.log import schema

# --- Migration of a database with an older schema, in one transaction
#
# Tables whose definition did not change (in particular the payloads) stay as they are. The others are created again and
# take over the columns that both versions have.

FROM = (1,)


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate from version 1. sqlite3.Error or MsgspecError if the old rows are inconsistent; then nothing changes."""
    wanted = definitions()
    connection.execute("BEGIN IMMEDIATE")
    try:
        old = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        for kind, name in connection.execute("SELECT type, name FROM sqlite_master WHERE type != 'table'").fetchall():
            if not name.startswith("sqlite_"):
                connection.execute(f"DROP {kind} {name}")
        changed = [name for name, sql in wanted["table"].items() if name in old and old[name] != sql]
        for name in changed:
            connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
        for kind in ("table", "index", "view"):
            for name, sql in wanted[kind].items():
                if kind != "table" or name not in old or name in changed:
                    connection.execute(sql)
        for name in changed:
            _take_over(connection, name)
        ordinals = _ordinals(connection)
        _fill_snapshot(connection, ordinals)
        _fill_log(connection, ordinals)
        _fill_tasks(connection)
        _fill_questions(connection)
        for name in (*(f"old_{name}" for name in changed), "snapshot"):
            connection.execute(f"DROP TABLE {name}")
        connection.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except KeyError as missing:
        connection.execute("ROLLBACK")
        raise sqlite3.DatabaseError(f"a row names group {missing}, which is not in the table of groups") from missing
    except BaseException:
        connection.execute("ROLLBACK")
        raise


@functools.cache
def definitions() -> dict[str, dict[str, str]]:
    """The statements that create the current tables, indexes and views, as SQLite stores them."""
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(schema.TABLES)
    found: dict[str, dict[str, str]] = {"table": {}, "index": {}, "view": {}}
    written = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
    for kind, name, sql in fresh.execute(written):
        found[kind][name] = sql
    fresh.close()
    return found


@functools.cache
def current_columns() -> dict[str, frozenset[str]]:
    """The columns of the current tables."""
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(schema.TABLES)
    found = {name: frozenset(_columns(fresh, name)) for name in definitions()["table"]}
    fresh.close()
    return found


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _take_over(connection: sqlite3.Connection, name: str) -> None:
    before = _columns(connection, f"old_{name}")
    shared = [column for column in _columns(connection, name) if column in before]
    source = f"old_{name}"
    values = list(shared)
    if name == "claim_groups" and "lineage" not in before and "lineage" in _columns(connection, name):
        shared, values = [*shared, "lineage"], [*shared, "lineage"]
        source = f"old_{name} JOIN claims USING (step)"
    connection.execute(f"INSERT INTO {name} ({', '.join(shared)}) SELECT {', '.join(values)} FROM {source}")


def _ordinals(connection: sqlite3.Connection) -> dict[int, int]:
    """The position of each group's prompt in the stream. Version 1 had no forks, so new prompts came in order."""
    found: dict[int, int] = {}
    prompts = 0
    for group, original in connection.execute("SELECT id, reissue_of FROM groups ORDER BY id"):
        found[group] = prompts if original is None else found[original]
        prompts += original is None
    return found


def _fill_snapshot(connection: sqlite3.Connection, ordinals: dict[int, int]) -> None:
    """Write the checkpoint of version 1 in parts.

    It was a single value and held only the position of the newest prompt, so the others come from `ordinals`.
    """
    row = connection.execute("SELECT position, body FROM snapshot").fetchone()
    if row is None:
        return
    mark, state = replays.Mark(row[0], 0), wire.decode(row[1], State)
    for group in (*state.open.values(), *state.held.values()):
        group.ordinal = ordinals[group.id]
    state.next_ordinal = state.prompts_issued
    if state.cursor is not None:
        state.stream = {state.next_ordinal - 1: state.cursor}
    for sql, values in replays.rows_of(mark, 0.0, replays.parts(state)):
        connection.execute(sql, values)


def _fill_log(connection: sqlite3.Connection, ordinals: dict[int, int]) -> None:
    """Add the group to each record, and the position of its prompt to each issue."""
    for position, body in connection.execute("SELECT position, body FROM log").fetchall():
        event = wire.decode(body, ev.Event)
        if isinstance(event, ev.Issued):
            body = wire.encode(msgspec.structs.replace(event, ordinal=ordinals[event.group]))
        filled = (getattr(event, "group", None), body, position)
        connection.execute("UPDATE log SET group_id = ?, body = ? WHERE position = ?", filled)


def _fill_questions(connection: sqlite3.Connection) -> None:
    """Fill the table of questions from the checkpoint and the records since; version 1 did not count questions."""
    mark, state = replays.newest(connection) or (replays.Mark(0, 0), State())
    later = connection.execute("SELECT body FROM log WHERE position > ? ORDER BY position", (mark.position,))
    replay(state, (wire.decode(body, ev.Event) for (body,) in later), 0.0)
    for question, known in state.questions.items():
        values = (question, known.issued, known.trained, known.members, known.reward_sum, known.last_step)
        connection.execute(
            "INSERT INTO questions (question_hash, issued, trained, members, reward_sum, last_step)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            values,
        )


def _fill_tasks(connection: sqlite3.Connection) -> None:
    """Fill the table of tasks for the groups alive, from the checkpoint and the records since."""
    found: dict[int, Task] = {}
    if kept := replays.newest(connection):
        found = {gid: g.task for gid, g in (*kept[1].open.items(), *kept[1].held.items())}
    for (body,) in connection.execute("SELECT body FROM log WHERE kind = 'issued'"):
        event = wire.decode(body, ev.Event)
        found[event.group] = event.task
    alive = {gid for (gid,) in connection.execute("SELECT id FROM groups WHERE ended_unix_s IS NULL")}
    for gid in sorted(alive & found.keys()):
        task = found[gid]
        messages = msgspec.json.encode(task.messages).decode()
        connection.execute(schema.INSERT_TASK, (gid, task.env, task.env_args, task.seed, messages))


# --- Open RUN/store.db

BUSY_S = 30.0
WAL_LIMIT_BYTES = 64 * 2**20
_SYNCHRONOUS = "FULL"
# The settings on which the promise "acknowledged means on disk" depends, as the open connection reports them.
_PROMISED = {"journal_mode": "wal", "synchronous": 2}


def check_folder(run_dir: Path) -> None:
    """Raise ConfigError if the folder is on a file system that cannot keep the log's promises."""
    try:
        table = disk.MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux: there is no mount table
        return
    why = disk.unfit(run_dir.resolve(), table)
    if why:
        remedy = "Put the run on a local disk or a block volume and copy it away afterwards."
        raise ConfigError("RUN", str(run_dir), why, remedy)


def locked(path: Path) -> IO[str]:
    """Lock the file and return it; the lock lasts until it is closed or the process ends.

    InfraError names the process that holds the lock; ConfigError if the file system has no locks.
    """
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (held until the log closes)
    try:
        disk.lock(file)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise InfraError(f"{path}: another store (pid {holder}) has this run open; stop it first") from error
    except ConfigError:
        file.close()
        raise
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def connected(path: Path) -> sqlite3.Connection:
    """Open a connection whose commits are on disk when they return; InfraError if SQLite does not guarantee that."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # affects new files only
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS}")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    # Some builds of SQLite overwrite deleted rows with zeros: a quarter more bytes to the disk, without a benefit here.
    connection.execute("PRAGMA secure_delete = OFF")
    for name, wanted in _PROMISED.items():
        found = connection.execute(f"PRAGMA {name}").fetchone()[0]
        if found != wanted:
            connection.close()
            raise InfraError(
                f"{path}: {name} is {found!r} and not {wanted!r}, so an acknowledged put could be lost; "
                "put the run on a local disk that supports SQLite's WAL"
            )
    return connection


def reading(path: Path) -> sqlite3.Connection:
    """Open a read-only connection in the store's process."""
    connection = connected(path)
    connection.execute("PRAGMA query_only = 1")
    return connection


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new file or migrate those of an older version; ConfigError for any other version."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if _is_foreign(connection, version):
        raise ConfigError("RUN", str(path), _FOREIGN, "Name another folder.")
    if version == 0:
        _create(connection)
    elif version in FROM:
        migrate(connection)
    elif version != schema.SCHEMA_VERSION:
        raise ConfigError("RUN", str(path), *unreadable(version))
    elif not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'partials'").fetchone():
        connection.execute(definitions()["table"]["partials"])  # the other tables of version 2 did not change


_FOREIGN = "is a database that JaxRoll did not make"


def _is_foreign(connection: sqlite3.Connection, version: int) -> bool:
    return version == 0 and bool(connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0])


def unreadable(version: int) -> tuple[str, str]:
    """The reason why this program cannot use a database of `version`, and the remedy."""
    reason = f"has schema version {version}, this program reads {schema.SCHEMA_VERSION}"
    if version > schema.SCHEMA_VERSION:
        return reason, "A newer JaxRoll wrote it: use that one (run.json says which)."
    return reason, "It is too old to be migrated: use the JaxRoll that wrote it (run.json says which)."


def _create(connection: sqlite3.Connection) -> None:
    """Create all tables and set the version in one transaction, so that a kill leaves no partial database."""
    script = f"BEGIN; {schema.TABLES}"
    script += f"INSERT INTO meta VALUES ('run_id', '{uuid.uuid4().hex}');"
    script += "INSERT INTO lineages VALUES (0, NULL, 0, strftime('%s', 'now'));"
    script += f"PRAGMA user_version = {schema.SCHEMA_VERSION}; COMMIT;"
    connection.executescript(script)


@dataclass(frozen=True)
class Recovered:
    """Content of the disk: the state of the newest checkpoint (None before the first), the events since, their bytes.

    `before_bytes` is the size of the log records before that checkpoint.
    """

    run_id: str
    state: State | None
    events: tuple[ev.Event, ...]
    log_bytes: int = 0
    before_bytes: int = 0


class CommitLog(Protocol):
    """Commit log as the keeper and the RPC methods use it: `Log` on disk, `MemoryLog` of a simulation.

    `recovered` is the content at the start, `failure` the error of a failed commit. `Log` documents the methods.
    """

    recovered: Recovered
    failure: InfraError | None

    def append(self, statements: Sequence[schema.Statement]) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    async def committed(self) -> None: ...
    def begin(self, state: State) -> None: ...
    def compact(self) -> None: ...
    async def payloads(self, group: int) -> dict[int, bytes]: ...
    async def partials(self, group: int, member: int) -> list[bytes]: ...
    async def recorded(self, group: int, member: int) -> Recorded | None: ...
    async def facts(self) -> dict[str, int | str]: ...
    async def close(self) -> None: ...


def recovered(connection: sqlite3.Connection) -> Recovered:
    """Read the content of a prepared database."""
    run_id = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0]
    kept = replays.newest(connection)
    mark, state = kept or (replays.Mark(0, 0), None)
    found = list(replays.events_after(connection, mark.position))
    size = sum(size for size, _ in found)
    return Recovered(run_id, state, tuple(event for _, event in found), size, mark.log_bytes)


def meta(connection: sqlite3.Connection) -> dict[str, str]:
    """The table `meta`: among others the run's id and, with a standby, the epoch (see `roles.store`)."""
    return dict(connection.execute("SELECT key, value FROM meta"))


def copy(connection: sqlite3.Connection, path: Path, note: schema.Statement) -> None:
    """Execute `note`, and write the content of the database to the new file `path`."""
    connection.execute(*note)
    path.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as target:
        connection.backup(target)


def facts(connection: sqlite3.Connection) -> dict[str, int | str]:
    """Settings of the connection, and the size of the database in pages."""
    names = {
        "synchronous": "synchronous",
        "journal_mode": "journal_mode",
        "page_size": "page_size",
        "pages": "page_count",
    }
    return {key: connection.execute(f"PRAGMA {name}").fetchone()[0] for key, name in names.items()}


# --- read transactions on RUN/store.db, of a live run or a finished one, without blocking the writer
#
# The file may come from an untrusted source. Its tables must be those that a store creates: a view in place of a table
# could run forever. Readers may fail on malformed rows: `damage_named` turns such failures into one kind of error.

WAIT_S = 10.0
VALUE_BYTES = 256 << 20  # limit of one value; the largest is a member, of 8 MB at most


def is_there(run_dir: Path) -> bool:
    """True if a store has created its tables in `run_dir`. DataError for the database of another program."""
    path = RunPaths(run_dir).database
    if not path.exists():
        return False
    connection = _opened(path)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if _is_foreign(connection, version):
            raise DataError(f"{path} {_FOREIGN}. Name the folder of a run.")
        return version != 0
    finally:
        connection.close()


@contextmanager
def transaction(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """Open a read transaction: a snapshot of the database that does not block the store's commits.

    A database with an older schema is read from a migrated copy; DataError for any other version.
    """
    path = RunPaths(run_dir).database
    connection = _opened(path)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version in FROM:
            with _migrated_copy(connection) as copy:
                yield copy
            return
        if _is_foreign(connection, version):
            raise DataError(f"{path} {_FOREIGN}. Name the folder of a run.")
        if version != schema.SCHEMA_VERSION:
            raise DataError(f"{path} {'. '.join(unreadable(version))}")
        connection.execute("BEGIN")
        _check_tables(connection, path)
        yield connection
    finally:
        connection.close()


@contextmanager
def damage_named(run_dir: Path, remedy: str) -> Iterator[None]:
    """Turn the errors that malformed rows cause (wrong type, out of range, beyond the file) into one DataError.

    SQLite cannot read a log on a full disk, or one that another program has locked: the error then has the remedy of
    that instead of `remedy`.
    """
    try:
        yield
    except (
        sqlite3.Error,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        RecursionError,
        MemoryError,
    ) as error:
        named = "" if isinstance(error, (sqlite3.Error, msgspec.MsgspecError)) else f"{type(error).__name__}: "
        path = RunPaths(run_dir).database
        remedy = (isinstance(error, sqlite3.Error) and (disk.remedy(error, run_dir) or _not_opened(error))) or remedy
        raise DataError(one_line(f"{path}: {named}{error}; {remedy}")) from error


def advice(error: BaseException, path: Path) -> str:
    """The remedy for an error that opening the log `path` of a store raised."""
    return disk.remedy(error, path.parent) or _not_opened(error) or "Restore the file from a copy, or start a new run."


def _not_opened(error: BaseException) -> str:
    if "unable to open" not in str(error).lower():
        return ""
    return (
        disk.few_descriptors() or "Move away what is not a file, or change the permissions of the file and its folder."
    )


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DataError if a table is missing, virtual, lacks a column or has a computed one, or if a view differs."""
    found = {(kind, name): sql for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master")}
    wanted = definitions()
    for name in wanted["view"]:
        if found.get(("view", name)) != wanted["view"][name]:
            raise _not_made(path, f"view {name!r}")
    for name, columns in current_columns().items():
        virtual = (found.get(("table", name)) or "CREATE VIRTUAL").startswith("CREATE VIRTUAL")
        hidden = {} if virtual else {row[1]: row[6] for row in connection.execute(f"PRAGMA table_xinfo({name})")}
        if name == "partials" and not any(each == name for _, each in found):
            continue  # a store that opens the file adds it (see `prepared`)
        if virtual or not columns <= hidden.keys() or any(hidden.values()):
            raise _not_made(path, f"table {name!r}")


def _not_made(path: Path, what: str) -> DataError:
    return DataError(f"{path}: its {what} is not the one that a store creates; restore the file from a copy")


@contextmanager
def _migrated_copy(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    with tempfile.TemporaryDirectory(prefix="jaxroll-") as folder:
        copy = sqlite3.connect(Path(folder) / "copy.db", isolation_level=None)
        try:
            connection.backup(copy)
            migrate(copy)
            yield copy
        finally:
            copy.close()


def _opened(path: Path) -> sqlite3.Connection:
    """Open the database for reading; as immutable if it is complete and its folder cannot be written."""
    if not path.exists():
        start = f"jaxroll train {os.path.relpath(path.parent)} --resume"
        raise DataError(f"{path}: there is no such log. The store makes it when the run starts: {start}")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; name the folder of a run")
    address = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro"
    connection = _bounded(sqlite3.connect(address, uri=True, timeout=WAIT_S, isolation_level=None))
    try:
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        return _bounded(sqlite3.connect(address + "&immutable=1", uri=True, isolation_level=None))
    return connection


def _bounded(connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
    return connection
