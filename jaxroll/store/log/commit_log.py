"""Commit log on disk: SQLite in WAL mode, synchronous=FULL, one writer thread, group commit.

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
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from jaxroll import disk
from jaxroll.clock import unix_s
from jaxroll.errors import InfraError
from jaxroll.store.core import events as ev
from jaxroll.store.core.requests import Recorded
from jaxroll.store.core.state import State
from jaxroll.store.log import database, schema, state_checkpoints
from jaxroll.store.log.database import DATABASE
from jaxroll.store.log.state_checkpoints import Mark, StatePart, StateReplica

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
        database.checked_folder(run_dir)
        self.path = run_dir / DATABASE
        self._lock = database.locked(run_dir / LOCK)
        try:
            self._connection = database.connected(self.path)
            database.prepared(self._connection, self.path)
            self._reader, self._replaying = database.reading(self.path), database.reading(self.path)
            self.recovered = _read(self._connection)
            self._upkeep = Maintenance(self._connection, history_bytes, keep_bytes)
        except BaseException as error:
            self._lock.close()
            if isinstance(error, (sqlite3.Error, msgspec.MsgspecError)):
                advice = disk.remedy(error, run_dir)
                raise InfraError(f"{self.path}: {error}; the log cannot be used as it is. {advice}".strip()) from error
            raise
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-log")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="store-read")
        self._replayer = ThreadPoolExecutor(1, thread_name_prefix="store-compact")
        self._replica, self._closing = StateReplica(), threading.Event()
        self._compacting: asyncio.Future[tuple[Mark, list[StatePart]]] | None = None
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

        Otherwise a store that is killed in every compaction needs ever longer for the next one.
        """
        known, self.recovered = self.recovered, Recovered(self.recovered.run_id, None, ())  # megabytes
        self._replica.begin(state, known.before_bytes + known.log_bytes)

    def compact(self) -> None:
        """Start to put a snapshot in place of old records, beside everything else; one at a time."""
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

    def _compacted(self, job: asyncio.Future[tuple[Mark, list[StatePart]]]) -> None:
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
    """Mark a failure as seen: a batch that nobody waited for must not warn at shutdown."""
    if not future.cancelled():
        future.exception()


def _read(connection: sqlite3.Connection) -> Recovered:
    run_id = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0]
    kept = state_checkpoints.newest(connection)
    mark, state = kept or (state_checkpoints.Mark(0, 0), None)
    found = list(state_checkpoints.events_after(connection, mark.position))
    size = sum(size for size, _ in found)
    return Recovered(run_id, state, tuple(event for _, event in found), size, mark.log_bytes)


def _commit(connection: sqlite3.Connection, statements: Sequence[schema.Statement], upkeep: Maintenance) -> bool:
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


# --- background work of the writer thread: a bounded portion with every commit, so that no caller waits long
#
# - write a snapshot that `StateReplica` made, and drop those that are not needed any more;
# - remove the payloads and tasks of groups that ended, oldest first, down to the budget for trajectories;
# - remove log records older than the history that is kept;
# - give pages back to the file system that stayed free from one snapshot to the next (those that come and go with every
#   checkpoint stay in the file, for they would be asked for again at once).
#
# All of it can be read off the tables, so a store that is killed in between goes on after its restart.

PARTS = 8  # of a snapshot, in one commit
PAYLOADS = 16  # and at least as many as the commit has statements
RECORDS = 400
PAGES = 128
SPARE_PAGES = 1024  # free pages that are never worth giving back


class Maintenance:
    """The jobs of one log. `offer` may be called from any thread, everything else belongs to the writer's."""

    def __init__(self, connection: sqlite3.Connection, history_bytes: int, keep_bytes: int) -> None:
        self._history_bytes, self._keep_bytes = history_bytes, keep_bytes
        self._offered: SimpleQueue[tuple[Mark, list[StatePart]]] = SimpleQueue()
        self._snapshot: deque[tuple[str, tuple]] = deque()
        self._retired: deque[tuple[int, int]] = deque()  # (group, bytes)
        self._retired_bytes, self._last_place = 0, 0
        self._base, self._pages_to_free, self._least_free = 0, 0, 0
        self._unkept = True
        if state_checkpoints.marks(connection):
            self._choose_base(connection)

    def offer(self, mark: Mark, parts: list[StatePart]) -> None:
        """Write this snapshot, little by little."""
        self._offered.put((mark, parts))

    def portion(self, connection: sqlite3.Connection, statements: int) -> bool:
        """Do a little inside the open transaction, which has so many statements; whether more is to be done."""
        rows = max(PAYLOADS, statements)
        more = self._write_snapshot(connection)
        more |= self._trim(connection, rows)
        more |= self._prune(connection, max(RECORDS, 2 * statements))
        return self._shrink(connection, idle=not more) or more

    # --- snapshots and history

    def _write_snapshot(self, connection: sqlite3.Connection) -> bool:
        if not self._snapshot:
            try:
                mark, parts = self._offered.get_nowait()
            except Empty:
                return self._drop_unkept(connection)
            self._snapshot.extend(state_checkpoints.rows_of(mark, unix_s(), parts))
        for _ in range(min(PARTS, len(self._snapshot))):
            connection.execute(*self._snapshot.popleft())
        if not self._snapshot:
            self._choose_base(connection)
            self._choose_pages()
        return True

    def _choose_base(self, connection: sqlite3.Connection) -> None:
        first = connection.execute("SELECT MIN(position) FROM log").fetchone()[0]
        kept = state_checkpoints.kept(state_checkpoints.marks(connection), first == 1, self._history_bytes)
        self._base = kept.base
        for mark in state_checkpoints.marks(connection):
            if mark.position not in kept.positions:
                connection.execute("DELETE FROM snapshots WHERE position = ?", (mark.position,))
        self._unkept = True

    def _drop_unkept(self, connection: sqlite3.Connection) -> bool:
        """Remove parts of snapshots that were given up, or never finished."""
        if not self._unkept:
            return False
        gone = connection.execute(_DROP_PARTS, (PARTS,)).rowcount
        self._unkept = gone == PARTS
        return self._unkept

    def _prune(self, connection: sqlite3.Connection, rows: int) -> bool:
        if not self._base:
            return False
        if connection.execute(_PRUNE, (self._base, rows)).rowcount == rows:
            return True
        self._base = 0
        return False

    # --- trajectories

    def _trim(self, connection: sqlite3.Connection, rows: int) -> bool:
        """Remove up to `rows` payloads beyond the budget."""
        self._note_retired(connection.execute(_RETIRED_SINCE, (self._last_place,)))
        while self._retired and self._retired_bytes > self._keep_bytes:
            group, size = self._retired[0]
            gone = connection.execute(_TRIM, (group, rows)).rowcount
            rows -= gone
            if rows <= 0:
                return True
            connection.execute("DELETE FROM tasks WHERE group_id = ?", (group,))
            connection.execute("DELETE FROM retired WHERE group_id = ?", (group,))
            self._retired.popleft()
            self._retired_bytes -= size
            rows -= 1
        return False

    def _note_retired(self, found: Iterable[tuple[int, int, int]]) -> None:
        for place, group, size in found:
            self._retired.append((group, size + _ROW_BYTES))
            self._retired_bytes += size + _ROW_BYTES
            self._last_place = place

    # --- space

    def _shrink(self, connection: sqlite3.Connection, *, idle: bool) -> bool:
        free = connection.execute("PRAGMA freelist_count").fetchone()[0]
        self._least_free = min(self._least_free, free)
        pages = min(self._pages_to_free, free)
        if pages <= 0 or not idle:
            return pages > 0
        for _ in range(min(PAGES, pages)):  # Python's sqlite3 steps this statement once only: one page each
            connection.execute("PRAGMA incremental_vacuum(1)")
        self._pages_to_free = pages - PAGES
        return self._pages_to_free > 0

    def _choose_pages(self) -> None:
        """What was free at every commit since the last snapshot is more than the run needs."""
        self._pages_to_free = max(0, self._least_free - SPARE_PAGES)
        self._least_free = _MANY


_MANY = 2**62
_ROW_BYTES = 200  # what a group's rows take beside its payloads, so that groups without any are bounded too
_DROP_PARTS = (
    "DELETE FROM snapshot_parts WHERE rowid IN (SELECT rowid FROM snapshot_parts WHERE position NOT IN"
    " (SELECT position FROM snapshots) LIMIT ?)"
)
_PRUNE = "DELETE FROM log WHERE position IN (SELECT position FROM log WHERE position <= ? ORDER BY position LIMIT ?)"
_TRIM = "DELETE FROM payloads WHERE rowid IN (SELECT rowid FROM payloads WHERE group_id = ? LIMIT ?)"
_RETIRED_SINCE = "SELECT place, group_id, bytes FROM retired WHERE place > ? ORDER BY place"
