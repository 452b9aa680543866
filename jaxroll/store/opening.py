"""Opens RUN/store.db for its one writer: lock, connection, version. Nothing is changed before all of it is in order."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import uuid
from pathlib import Path
from typing import IO

from jaxroll.errors import ConfigError, InfraError
from jaxroll.store import filesystem, migration, schema

BUSY_S = 30.0
WAL_LIMIT_BYTES = 64 * 2**20
_SYNCHRONOUS = "FULL"
# What the promise "acknowledged means on disk" stands on, as the live connection says it.
_PROMISED = {"journal_mode": "wal", "synchronous": 2}


def checked_folder(run_dir: Path) -> None:
    """ConfigError when the folder is on a file system that cannot keep the log's promises."""
    try:
        table = filesystem.MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux: nothing to read it from
        return
    why = filesystem.unfit(run_dir.resolve(), table)
    if why:
        raise ConfigError("--run", str(run_dir), why)


def locked(path: Path) -> IO[str]:
    """The lock file, held until it is closed or the process ends; InfraError naming the process that holds it."""
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (held until the log closes)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise InfraError(f"{path}: another store (pid {holder}) has this run open; stop it first") from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def connected(path: Path) -> sqlite3.Connection:
    """A connection whose commits are on disk when they return; InfraError when SQLite would not have it so."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file; an old one keeps what it has
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS}")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    # Some builds of SQLite write zeros over what is deleted: a quarter more bytes to the disk, for nobody's good.
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
    """A connection of the same process that only reads."""
    connection = connected(path)
    connection.execute("PRAGMA query_only = 1")
    return connection


def prepared(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new file, bring those of an older version up to date; ConfigError for any other."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0 and connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
        raise ConfigError("--run", str(path), "is a database that JaxRoll did not make", "Name another folder.")
    if version == 0:
        _create(connection)
    elif version in migration.FROM:
        migration.migrate(connection)
    elif version != schema.SCHEMA_VERSION:
        raise ConfigError("--run", str(path), *unreadable(version))


def unreadable(version: int) -> tuple[str, str]:
    """Why this program cannot use a database of `version`, and what to do."""
    reason = f"has schema version {version}, this program reads {schema.SCHEMA_VERSION}"
    if version > schema.SCHEMA_VERSION:
        return reason, "A newer JaxRoll wrote it: use that one (run.json says which)."
    return reason, "It is too old to be brought up to date: use the JaxRoll that wrote it (run.json says which)."


def _create(connection: sqlite3.Connection) -> None:
    """All tables and the version in one transaction, so that a store killed here leaves nothing half made."""
    script = f"BEGIN; {schema.TABLES}"
    script += f"INSERT INTO meta VALUES ('run_id', '{uuid.uuid4().hex}');"
    script += "INSERT INTO lineages VALUES (0, NULL, 0, strftime('%s', 'now'));"
    script += f"PRAGMA user_version = {schema.SCHEMA_VERSION}; COMMIT;"
    connection.executescript(script)
