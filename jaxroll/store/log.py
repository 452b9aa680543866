"""The log on disk: SQLite in WAL mode, synchronous=FULL, one writer thread, group commit.

The event loop appends statements and goes on; the writer thread commits what has gathered in one transaction; whoever
must not answer before its words are on disk awaits `committed()`. A commit that fails ends the log: its users must not
answer any more, and the next store continues from what is on disk. RUN/store.lock keeps a second store out.

Compaction stops nobody: a third thread replays the log from disk and makes the snapshot in small pieces; the writer
thread writes them, and removes what is old, a bounded portion with every commit (`upkeep`).
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jaxroll import disk
from jaxroll.errors import InfraError
from jaxroll.store import events as ev
from jaxroll.store import opening, schema, snapshots
from jaxroll.store.reading import DATABASE
from jaxroll.store.requests import Recorded
from jaxroll.store.snapshots import Mark, Part, Replica
from jaxroll.store.state import State
from jaxroll.store.upkeep import Upkeep

LOCK = "store.lock"
HISTORY_BYTES, KEEP_BYTES = 256 * 2**20, 128 * 2**20
_REST_S = 0.004  # the replaying thread rests this long after every few milliseconds of work: the event loop comes first


@dataclass(frozen=True)
class Recovered:
    """What is on disk: the state at the newest snapshot (None before the first), the events since, and their bytes.

    `before_bytes` of records were behind that snapshot.
    """

    run_id: str
    state: State | None
    events: tuple[ev.Event, ...]
    log_bytes: int = 0
    before_bytes: int = 0


class Log:
    """An open log. All methods belong to one event loop's thread; closing waits for the writer."""

    def __init__(self, run_dir: Path, *, history_bytes: int = HISTORY_BYTES, keep_bytes: int = KEEP_BYTES) -> None:
        """Open (or make) the log in `run_dir`.

        `history_bytes` of old records and `keep_bytes` of trajectories that were trained or expired stay readable.
        InfraError when another store holds it or it cannot be read; ConfigError on a network file system, or when
        another version of JaxRoll wrote it.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        opening.checked_folder(run_dir)
        self.path = run_dir / DATABASE
        self._lock = opening.locked(run_dir / LOCK)
        try:
            self._connection = opening.connected(self.path)
            opening.prepared(self._connection, self.path)
            self._reader, self._replaying = opening.reading(self.path), opening.reading(self.path)
            self.recovered = _read(self._connection)
            self._upkeep = Upkeep(self._connection, history_bytes, keep_bytes)
        except BaseException as error:
            self._lock.close()
            if isinstance(error, (sqlite3.Error, msgspec.MsgspecError)):
                advice = disk.remedy(error, run_dir)
                raise InfraError(f"{self.path}: {error}; the log cannot be used as it is. {advice}".strip()) from error
            raise
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-log")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="store-read")
        self._replayer = ThreadPoolExecutor(1, thread_name_prefix="store-compact")
        self._replica, self._closing = Replica(), threading.Event()
        self._compacting: asyncio.Future[tuple[Mark, list[Part]]] | None = None
        self._gathered: list[schema.Statement] = []
        self._gathering: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None  # those whose statements are in the writer's hands
        self._busy = False  # the writer works, if only on upkeep
        self.failure: InfraError | None = None
        self.commits = 0

    def append(self, statements: Sequence[schema.Statement]) -> None:
        """Commit these soon, in order, all or none. Nothing is written any more once a commit has failed."""
        if not statements or self.failure is not None:
            return
        self._gathered.extend(statements)
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_future()
            self._gathering.add_done_callback(_look_at)
        if not self._busy:
            self._write()

    async def committed(self) -> None:
        """Return when everything appended so far is on disk; InfraError when it will never be."""
        waiting = self._gathering or self._writing
        if waiting is not None:
            await asyncio.shield(waiting)
        if self.failure is not None:
            raise self.failure

    def begin(self, state: State) -> None:
        """`state` is what `recovered` led to; it need not be read from the disk again for the next snapshot.

        Else a store that is killed in every compaction needs ever longer for the next one.
        """
        known, self.recovered = self.recovered, Recovered(self.recovered.run_id, None, ())  # megabytes
        self._replica.begin(state, known.before_bytes + known.log_bytes)

    def compact(self) -> None:
        """Start to put a snapshot in the place of old records, beside everything else; one at a time."""
        if self._compacting is None and self.failure is None:
            loop = asyncio.get_running_loop()
            self._compacting = loop.run_in_executor(self._replayer, self._replica.snapshot, self._replaying, self._rest)
            self._compacting.add_done_callback(self._compacted)

    async def tidy(self) -> None:
        """Return when no compaction and no upkeep is under way."""
        while self.failure is None and (self._busy or self._compacting is not None):
            await asyncio.sleep(0.01)

    async def payloads(self, group: int) -> dict[int, bytes]:
        """The bytes of the group's members; call after `committed()`."""
        return dict(await self._read(_SELECT_PAYLOADS, (group,)))

    async def recorded(self, group: int, member: int) -> Recorded | None:
        """What is known of a member whose group ended: its last finished attempt."""
        await self.committed()
        rows = await self._read(_SELECT_RECORDED, (group, member))
        return Recorded(*rows[0]) if rows else None

    async def facts(self) -> dict[str, int | str]:
        """What the connection that writes says of itself, its size on disk, and the transactions it committed."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._writer, _facts, self._connection)
        wal = self.path.with_name(DATABASE + "-wal")
        return found | {"wal_bytes": wal.stat().st_size if wal.exists() else 0, "commits": self.commits}

    async def close(self) -> None:
        """Commit what is left and let go of the files."""
        self._closing.set()
        try:
            await self.committed()
        finally:
            for threads in (self._replayer, self._reading, self._writer):
                threads.shutdown()
            for connection in (self._replaying, self._reader, self._connection):
                connection.close()
            self._lock.close()

    async def _read(self, sql: str, parameters: tuple) -> list[tuple]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reading, _fetch, self._reader, sql, parameters)
        except sqlite3.Error as error:
            raise InfraError(f"{self.path}: {error}") from error

    def _write(self) -> None:
        """Hand what has gathered to the writer thread; with nothing gathered, a portion of upkeep."""
        statements, self._gathered = self._gathered, []
        self._writing, self._gathering = self._gathering, None
        self._busy = True
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._writer, _commit, self._connection, statements, self._upkeep)
        job.add_done_callback(self._written)

    def _written(self, job: asyncio.Future[bool]) -> None:
        done, self._writing, self._busy = self._writing, None, False
        if error := job.exception():
            self._fail(error, done)
            return
        self.commits += 1
        if done is not None:
            done.set_result(None)
        if self._gathering is not None or (job.result() and not self._closing.is_set()):
            self._write()

    def _fail(self, error: BaseException, *waiting: asyncio.Future[None] | None) -> None:
        advice = disk.remedy(error, self.path.parent)
        self.failure = InfraError(f"{self.path}: {error}; nothing can be made durable any more. {advice}".strip())
        self.failure.__cause__ = error
        for future in (*waiting, self._gathering):
            if future is not None and not future.done():
                future.set_exception(self.failure)
        self._gathered, self._gathering = [], None

    def _compacted(self, job: asyncio.Future[tuple[Mark, list[Part]]]) -> None:
        self._compacting = None
        if self._closing.is_set() or self.failure is not None:
            job.exception()
        elif error := job.exception():
            self._fail(error, self._writing)
        else:
            self._upkeep.offer(*job.result())
            if not self._busy:
                self._write()

    def _rest(self) -> None:
        if self._closing.wait(_REST_S):
            raise InfraError("the log closes")


_SELECT_PAYLOADS = "SELECT member, body FROM payloads WHERE group_id = ? ORDER BY member"
_SELECT_RECORDED = "SELECT attempt, digest FROM members WHERE group_id = ? AND member = ? AND digest != ''"


def _look_at(future: asyncio.Future[None]) -> None:
    """Marks a failure as seen: a batch that nobody waited for must not warn at shutdown."""
    if not future.cancelled():
        future.exception()


def _read(connection: sqlite3.Connection) -> Recovered:
    run_id = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0]
    kept = snapshots.newest(connection)
    mark, state = kept or (snapshots.Mark(0, 0), None)
    found = list(snapshots.events_after(connection, mark.position))
    size = sum(size for size, _ in found)
    return Recovered(run_id, state, tuple(event for _, event in found), size, mark.log_bytes)


def _commit(connection: sqlite3.Connection, statements: Sequence[schema.Statement], upkeep: Upkeep) -> bool:
    """Commits the statements and some upkeep; whether more upkeep is to be done."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for sql, parameters in statements:
            connection.execute(sql, parameters)
        more = upkeep.portion(connection, len(statements))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return more


def _fetch(connection: sqlite3.Connection, sql: str, parameters: tuple) -> list[tuple]:
    return connection.execute(sql, parameters).fetchall()


def _facts(connection: sqlite3.Connection) -> dict[str, int | str]:
    names = {
        "synchronous": "synchronous",
        "journal_mode": "journal_mode",
        "page_size": "page_size",
        "pages": "page_count",
    }
    return {key: connection.execute(f"PRAGMA {name}").fetchone()[0] for key, name in names.items()}
