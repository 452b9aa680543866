"""RUN/store.db for readers: of a live run or a finished one, in one transaction, never in the way of the writer.

The file may come from a stranger. Its tables must be those that a store makes: a view in the place of a table could run
for ever. What its rows hold is believed only as far as the readers get: `damage_named` makes one error of the rest.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec

from jaxroll.errors import DataError, one_line
from jaxroll.store.log import migration, opening, schema

DATABASE = "store.db"
WAIT_S = 10.0
VALUE_BYTES = 256 << 20  # of one value; the largest that a store writes is a member of 64 MB


def is_there(run_dir: Path) -> bool:
    """Whether a store has made its tables in `run_dir`."""
    path = run_dir / DATABASE
    if not path.exists():
        return False
    connection = _opened(path)
    try:
        return connection.execute("PRAGMA user_version").fetchone()[0] != 0
    finally:
        connection.close()


@contextmanager
def transaction(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """One read transaction: what the store commits meanwhile is not seen, and it is not held up by it.

    A log of an older schema is read from a copy that is brought up to date; DataError for any other version.
    """
    path = run_dir / DATABASE
    connection = _opened(path)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version in migration.FROM:
            with _migrated_copy(connection) as copy:
                yield copy
            return
        if version != schema.SCHEMA_VERSION:
            raise DataError(" ".join((str(path), *opening.unreadable(version))))
        connection.execute("BEGIN")
        _check_tables(connection, path)
        yield connection
    finally:
        connection.close()


@contextmanager
def damage_named(run_dir: Path, remedy: str) -> Iterator[None]:
    """Makes a DataError of whatever rows raise that no store wrote: of another type, out of range, beyond the file."""
    try:
        yield
    except (sqlite3.Error, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError,
            RecursionError, MemoryError) as error:  # fmt: skip
        named = "" if isinstance(error, (sqlite3.Error, msgspec.MsgspecError)) else f"{type(error).__name__}: "
        raise DataError(one_line(f"{run_dir / DATABASE}: {named}{error}; {remedy}")) from error


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """DataError when a table of the store is none here or lacks a column or computes one, or a view is another one."""
    found = {(kind, name): sql for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master")}
    wanted = migration.definitions()
    for name in wanted["view"]:
        if found.get(("view", name)) != wanted["view"][name]:
            raise _not_made(path, f"view {name!r}")
    for name, columns in migration.columns().items():
        virtual = (found.get(("table", name)) or "CREATE VIRTUAL").startswith("CREATE VIRTUAL")
        hidden = {} if virtual else {row[1]: row[6] for row in connection.execute(f"PRAGMA table_xinfo({name})")}
        if virtual or not columns <= hidden.keys() or any(hidden.values()):
            raise _not_made(path, f"table {name!r}")


def _not_made(path: Path, what: str) -> DataError:
    return DataError(f"{path}: its {what} is not what a store makes; restore the file from a copy")


@contextmanager
def _migrated_copy(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    with tempfile.TemporaryDirectory(prefix="jaxroll-") as folder:
        copy = sqlite3.connect(Path(folder) / DATABASE, isolation_level=None)
        try:
            connection.backup(copy)
            migration.migrate(copy)
            yield copy
        finally:
            copy.close()


def _opened(path: Path) -> sqlite3.Connection:
    """The database for reading; a finished one in a folder that cannot be written is opened as immutable."""
    if not path.exists():
        raise DataError(f"{path}: there is no such log; the store of a run makes it when it starts")
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
