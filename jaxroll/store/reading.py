"""RUN/store.db for readers: of a live run or a finished one, in one transaction, never in the way of the writer."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from jaxroll.errors import DataError
from jaxroll.store import migration, opening, schema

DATABASE = "store.db"
WAIT_S = 10.0


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
        yield connection
    finally:
        connection.close()


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
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=WAIT_S, isolation_level=None)
    try:
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        return sqlite3.connect(address + "&immutable=1", uri=True, isolation_level=None)
    return connection
