"""The log on disk: SQLite in WAL mode, synchronous=FULL, one writer thread, group commit.

The event loop appends statements and goes on; the writer thread commits what has gathered in one transaction; whoever
must not answer before its words are on disk awaits `committed()`. A commit that fails ends the log: its users must not
answer any more, and the next store continues from what is on disk. RUN/store.lock keeps a second store out.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from jaxroll import wire
from jaxroll.errors import InfraError
from jaxroll.store import events as ev
from jaxroll.store import schema
from jaxroll.store.requests import Recorded
from jaxroll.store.state import State

DATABASE, LOCK = "store.db", "store.lock"
_BUSY_S = 30.0
_WAL_LIMIT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Recovered:
    """What is on disk: the state at the last compaction (None before the first) and the events since."""

    run_id: str
    state: State | None
    events: tuple[ev.Event, ...]


class Log:
    """An open log. All methods belong to one event loop's thread; closing waits for the writer."""

    def __init__(self, run_dir: Path) -> None:
        """Open (or make) the log in `run_dir`; InfraError when another store holds it or it cannot be read."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / DATABASE
        self._lock = _locked(run_dir / LOCK)
        try:
            self._connection = _connected(self.path)
            self._reader = _connected(self.path)
            self.recovered = _read(self._connection)
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            self._lock.close()
            raise InfraError(f"{self.path}: {error}; the log cannot be used as it is") from error
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-log")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="store-read")
        self._gathered: list[schema.Statement] = []
        self._gathering: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self.failure: InfraError | None = None

    def append(self, statements: Sequence[schema.Statement]) -> None:
        """Commit these soon, in order, all or none."""
        if not statements:
            return
        self._gathered.extend(statements)
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_future()
            self._gathering.add_done_callback(_look_at)
        if self._writing is None:
            self._write()

    async def committed(self) -> None:
        """Return when everything appended so far is on disk; InfraError when it will never be."""
        waiting = self._gathering or self._writing
        if waiting is not None:
            await asyncio.shield(waiting)
        if self.failure is not None:
            raise self.failure

    async def payloads(self, group: int) -> dict[int, bytes]:
        """The bytes of the group's members; call after `committed()`."""
        return dict(await self._read(_SELECT_PAYLOADS, (group,)))

    async def recorded(self, group: int, member: int) -> Recorded | None:
        """What is known of a member whose group ended: its last finished attempt."""
        await self.committed()
        rows = await self._read(_SELECT_RECORDED, (group, member))
        return Recorded(*rows[0]) if rows else None

    async def close(self) -> None:
        """Commit what is left and let go of the files."""
        try:
            await self.committed()
        finally:
            self._reading.shutdown()
            self._writer.shutdown()
            self._reader.close()
            self._connection.close()
            self._lock.close()

    async def _read(self, sql: str, parameters: tuple) -> list[tuple]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reading, _fetch, self._reader, sql, parameters)
        except sqlite3.Error as error:
            raise InfraError(f"{self.path}: {error}") from error

    def _write(self) -> None:
        """Hand what has gathered to the writer thread."""
        statements, self._gathered = self._gathered, []
        self._writing, self._gathering = self._gathering, None
        job = asyncio.get_running_loop().run_in_executor(self._writer, _commit, self._connection, statements)
        job.add_done_callback(self._written)

    def _written(self, job: asyncio.Future[None]) -> None:
        done, self._writing = self._writing, None
        assert done is not None
        if error := job.exception():
            self.failure = InfraError(f"{self.path}: {error}; nothing can be made durable any more")
            for waiting in (done, self._gathering):
                if waiting is not None:
                    waiting.set_exception(self.failure)
            self._gathered, self._gathering = [], None
            return
        done.set_result(None)
        if self._gathering is not None:
            self._write()


_SELECT_PAYLOADS = "SELECT member, body FROM payloads WHERE group_id = ? ORDER BY member"
_SELECT_RECORDED = "SELECT attempt, digest FROM members WHERE group_id = ? AND member = ? AND digest != ''"


def _look_at(future: asyncio.Future[None]) -> None:
    """Marks a failure as seen: a batch that nobody waited for must not warn at shutdown."""
    if not future.cancelled():
        future.exception()


def _locked(path: Path) -> IO[str]:
    file = open(path, "a+")  # noqa: SIM115 (held until the log closes)
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


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
    return connection


def _read(connection: sqlite3.Connection) -> Recovered:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        _create(connection)
    elif version != schema.SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"schema version {version}, this program reads {schema.SCHEMA_VERSION}")
    run_id = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0]
    kept = connection.execute("SELECT body FROM snapshot").fetchone()
    rows = connection.execute("SELECT body FROM log ORDER BY position")
    state = wire.decode(kept[0], State) if kept else None
    return Recovered(run_id, state, tuple(wire.decode(body, ev.Event) for (body,) in rows))  # type: ignore[arg-type]


def _create(connection: sqlite3.Connection) -> None:
    """All tables and the version in one transaction, so that a store killed here leaves nothing half made."""
    script = f"BEGIN; {schema.TABLES}"
    script += f"INSERT INTO meta VALUES ('run_id', '{uuid.uuid4().hex}');"
    script += "INSERT INTO lineages VALUES (0, NULL, 0, strftime('%s', 'now'));"
    script += f"PRAGMA user_version = {schema.SCHEMA_VERSION}; COMMIT;"
    connection.executescript(script)


def _commit(connection: sqlite3.Connection, statements: Sequence[schema.Statement]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for sql, parameters in statements:
            connection.execute(sql, parameters)
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _fetch(connection: sqlite3.Connection, sql: str, parameters: tuple) -> list[tuple]:
    return connection.execute(sql, parameters).fetchall()
