"""Write path of RUN/store.db: the rows of an event, group commit by one writer thread, and maintenance.

The event loop appends statements and continues; the writer thread commits all gathered statements in one transaction;
a caller that must not answer before its statements are on disk awaits `committed()`. A failed commit ends the log: the
store must not answer any more, and its next process continues from what is on disk.

Compaction does not block calls: a third thread replays the log from disk and encodes a state checkpoint in small
parts; the writer thread writes these and deletes old rows, a bounded portion with every commit (`Maintenance`).
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from jaxroll import disk, wire
from jaxroll.clock import unix_s
from jaxroll.errors import InfraError
from jaxroll.run_paths import RunPaths
from jaxroll.store.core import events as ev
from jaxroll.store.core.events import Recorded
from jaxroll.store.core.state import Group, State
from jaxroll.store.log import database, replay, schema
from jaxroll.store.log.database import Recovered
from jaxroll.store.log.replay import Mark, StatePart, StateReplica
from jaxroll.store.log.schema import Executor, Recording, Replication, Statement

HISTORY_BYTES, KEEP_BYTES = 256 * 2**20, 128 * 2**20
_REST_S = 0.004  # the replaying thread sleeps this long after every few milliseconds of work, for the event loop's sake


class Log:
    """Commit log on disk. Call all methods from one event loop's thread; closing waits for the writer."""

    def __init__(self, run_dir: Path, *, history_bytes: int = HISTORY_BYTES, keep_bytes: int = KEEP_BYTES) -> None:
        """Open the log in `run_dir`, or create it.

        `history_bytes` of old records and `keep_bytes` of trajectories that were trained or expired stay readable.
        InfraError if another store holds the log or it cannot be read; ConfigError on a network file system, or if
        another version of JaxRoll wrote it.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        database.check_folder(run_dir)
        self.path = RunPaths(run_dir).database
        self._lock = database.locked(RunPaths(run_dir).store_lock)
        try:
            self._connection = database.connected(self.path)
            database.prepare(self._connection, self.path)
            self._reader, self._replaying = database.reading(self.path), database.reading(self.path)
            self.recovered, self.meta = database.recovered(self._connection), database.meta(self._connection)
            self._upkeep = Maintenance(self._connection, history_bytes, keep_bytes)
        except BaseException as error:
            self._lock.close()
            if isinstance(error, (sqlite3.Error, msgspec.MsgspecError)):
                advice = database.advice(error, self.path)
                raise InfraError(f"{self.path}: {error}; the log cannot be used as it is. {advice}") from error
            raise
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-log")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="store-read")
        self._replayer = ThreadPoolExecutor(1, thread_name_prefix="store-compact")
        self._replica, self._closing = StateReplica(), threading.Event()
        self._compacting: asyncio.Future[tuple[Mark, list[StatePart]]] | None = None
        self._gathered: list[Statement] = []
        self._gathering: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None  # done when the writer has committed its current batch
        self._busy = False  # the writer works, even if only on maintenance
        self.replication: Replication | None = None  # set: commits are acknowledged when it has delivered them
        self._executed: list[Statement] | None = None  # by the current commit, for the replication
        self._shipped: asyncio.Future[None] | None = None  # done when the other store has the last commit
        self.failure: InfraError | None = None
        self.commits = 0

    @property
    def is_idle(self) -> bool:
        """True if everything appended so far is on this disk, and no maintenance is due."""
        return not self._busy and self._gathering is None

    def append(self, statements: Sequence[Statement]) -> None:
        """Queue statements for the next commit, in order, all or none. Once a commit has failed, nothing is written."""
        if not statements or self.failure is not None:
            return
        self._gathered.extend(statements)
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_future()
            self._gathering.add_done_callback(_look_at)
        if not self._busy:
            self._write()

    def fail(self, error: BaseException) -> None:
        """Write nothing any more and let `committed` raise because of `error`, so that nothing is acknowledged."""
        if self.failure is None:
            self._fail(error)

    async def committed(self) -> None:
        """Wait until everything appended so far is on disk, with a standby on both disks; InfraError if that fails."""
        waiting = self._gathering or self._writing or self._shipped
        if waiting is not None:
            await asyncio.shield(waiting)
        if self.failure is not None:
            raise self.failure

    async def copy(self, path: Path, note: Statement, mark: Callable[[], None]) -> None:
        """Execute `note` and copy the database to `path` between two commits; `mark` is called between their ends."""
        values = (database.copy, self._connection, path, note)
        job = asyncio.get_running_loop().run_in_executor(self._writer, *values)
        job.add_done_callback(lambda done: done.exception() or mark())
        await asyncio.shield(job)

    def begin(self, state: State) -> None:
        """Take over `state`, to which `recovered` led, so that compaction need not read it from disk again.

        Without it, a store that is killed during each compaction would need longer for every next one.
        """
        known, self.recovered = self.recovered, Recovered(self.recovered.run_id, None, ())  # frees megabytes
        self._replica.begin(state, known.before_bytes + known.log_bytes)

    def compact(self) -> None:
        """Start to replace old records by a state checkpoint, in the background; one compaction at a time."""
        if self._compacting is None and self.failure is None:
            loop = asyncio.get_running_loop()
            self._compacting = loop.run_in_executor(self._replayer, self._replica.snapshot, self._replaying, self._rest)
            self._compacting.add_done_callback(self._compacted)

    async def tidy(self) -> None:
        """Wait until no compaction or maintenance is running."""
        while self.failure is None and (self._busy or self._compacting is not None):
            await asyncio.sleep(0.01)

    async def payloads(self, group: int) -> dict[int, bytes]:
        """Read the bytes of the group's members, by member number; call after `committed()`."""
        return dict(await self._read(SELECT_PAYLOADS, (group,)))

    async def partials(self, group: int, member: int) -> list[bytes]:
        """Read the flushed tokens of a member, in order."""
        await self.committed()
        return [body for (body,) in await self._read(SELECT_PARTIALS, (group, member))]

    async def recorded(self, group: int, member: int) -> Recorded | None:
        """Read the last finished attempt of a member whose group has ended; None if there is none."""
        await self.committed()
        rows = await self._read(SELECT_RECORDED, (group, member))
        return Recorded(*rows[0]) if rows else None

    async def facts(self) -> dict[str, int | str]:
        """Settings of the writing connection, size of the database on disk, and number of committed transactions."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._writer, database.facts, self._connection)
        wal = self.path.with_name(self.path.name + "-wal")
        return found | {"wal_bytes": wal.stat().st_size if wal.exists() else 0, "commits": self.commits}

    async def close(self) -> None:
        """Commit the remaining statements and close the files."""
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
        """Pass the gathered statements to the writer thread; without any, it does a portion of maintenance."""
        statements, self._gathered = self._gathered, []
        self._writing, self._gathering = self._gathering, None
        self._busy = True
        loop, self._executed = asyncio.get_running_loop(), None if self.replication is None else []
        work = (self._connection, statements, self._upkeep, self._executed)
        job = loop.run_in_executor(self._writer, commit, *work)
        job.add_done_callback(self._written)

    def _written(self, job: asyncio.Future[bool]) -> None:
        done, self._writing, self._busy = self._writing, None, False
        if error := job.exception():
            self._fail(error, done)
            return
        self.commits += 1
        if self.replication is not None and self._executed is not None and self.failure is None:
            self._shipped = done or self._shipped
            self.replication.ship(self._executed, done)
        elif done is not None:
            done.set_result(None)
        if self._gathering is not None or (job.result() and not self._closing.is_set()):
            self._write()

    def _fail(self, error: BaseException, *waiting: asyncio.Future[None] | None) -> None:
        advice = disk.remedy(error, self.path.parent)
        self.failure = InfraError(
            f"{self.path}: {str(error) or type(error).__name__}; nothing can be made durable any more. {advice}".strip()
        )
        self.failure.__cause__ = error
        for future in (*waiting, self._gathering):
            if future is not None and not future.done():
                future.set_exception(self.failure)
        self._gathered, self._gathering = [], None
        if self.replication is not None:
            self.replication.abandon(self.failure)

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


SELECT_PAYLOADS = "SELECT member, body FROM payloads WHERE group_id = ? ORDER BY member"
SELECT_PARTIALS = "SELECT body FROM partials WHERE group_id = ? AND member = ? ORDER BY start"
SELECT_RECORDED = "SELECT attempt, digest FROM members WHERE group_id = ? AND member = ? AND digest != ''"


def _look_at(future: asyncio.Future[None]) -> None:
    """Retrieve the future's exception, so that a failed batch without a waiting call does not warn at shutdown."""
    if not future.cancelled():
        future.exception()


def commit(
    connection: sqlite3.Connection,
    statements: Sequence[Statement],
    upkeep: Maintenance | None,
    executed: list[Statement] | None = None,
) -> bool:
    """Commit the statements and a portion of maintenance; note them in `executed`; True if more maintenance is due."""
    connection.execute("BEGIN IMMEDIATE")
    target: Executor = connection if executed is None else Recording(connection, executed)
    try:
        for sql, parameters in statements:
            target.execute(sql, parameters)
        more = upkeep is not None and upkeep.portion(target, len(statements))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return more


def _fetch(connection: sqlite3.Connection, sql: str, parameters: tuple) -> list[tuple]:
    return connection.execute(sql, parameters).fetchall()


# --- rows of an event: its log record, and the tables that follow it
#
# Issues, leases, puts and claims are here; `schema.ROWS` has the other events.


def statements(event: ev.Event, state: State, position: int, unix_s: float) -> list[Statement]:
    """The SQL that logs `event` at `position` and updates the tables to `state`, the state after the whole decision."""
    kind = type(event)
    values = (position, unix_s, kind.__struct_config__.tag, wire.encode(event), getattr(event, "group", None))
    row: Statement = ("INSERT INTO log (position, unix_s, kind, body, group_id) VALUES (?, ?, ?, ?, ?)", values)
    follow = _ROWS.get(kind)
    rows = [row, *(follow(event, state, unix_s) if follow else [])]
    return rows + _group_state(event.group, state) if isinstance(event, _CHANGES_MEMBERS) else rows


def record_bytes(row: Statement) -> int:
    """The size in bytes of the log record, the first row of `statements`."""
    return len(row[1][3])


def payload(group: int, member: int, body: bytes | memoryview) -> Statement:
    """The SQL that stores a member's bytes."""
    return ("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)", (group, member, body))


def _group_state(gid: int, state: State) -> list[Statement]:
    group = state.find(gid)
    if group is None:  # it ended in the same decision; the last event gives the reason
        return []
    sql = "UPDATE groups SET state = ?, reason = ?, claim_step = ? WHERE id = ?"
    return [(sql, (group.state, group.note, group.step, gid))]


def _issued(e: ev.Issued, state: State, unix_s: float) -> list[Statement]:
    columns = "id, question_hash, prompt_index, state, size, reissue_of, reissues, issued_unix_s"
    values = (e.group, e.task.question_hash, e.task.index, "PENDING", e.size, e.reissue_of, e.reissues, unix_s)
    rows: list[Statement] = [(f"INSERT INTO groups ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)]
    messages = msgspec.json.encode(e.task.messages).decode()
    rows.append((schema.INSERT_TASK, (e.group, e.task.env, e.task.env_args, e.task.seed, messages)))
    rows.append((_QUESTION_ISSUED, (e.task.question_hash,)))
    if e.cursor is not None:
        rows.append(("INSERT OR REPLACE INTO cursor VALUES (1, ?, ?)", (state.prompts_issued, e.cursor)))
    return rows


_QUESTION_ISSUED = (
    "INSERT INTO questions (question_hash, issued) VALUES (?, 1) ON CONFLICT DO UPDATE SET issued = issued + 1"
)


def _leased(e: ev.Leased, state: State, unix_s: float) -> list[Statement]:
    columns = "group_id, member, state, attempt, holder, leased_unix_s"
    sql = f"INSERT OR REPLACE INTO members ({columns}) VALUES (?, ?, 'leased', ?, ?, ?)"
    rows: list[Statement] = [(sql, (e.group, member, attempt, e.holder, unix_s)) for member, attempt in e.members]
    resumed = {member for member, _ in e.resumed}
    again = [member for member, attempt in e.members if attempt > 1 and member not in resumed]
    return rows + [(schema.WITHOUT_PARTIALS, (e.group, member)) for member in again]


def _put(e: ev.Put, state: State, unix_s: float) -> list[Statement]:
    steps, tokens = [run.version.step for run in e.runs], sum(run.count for run in e.runs)
    sampled = (tokens, e.size_bytes, e.runs[-1].version.lineage, min(steps), max(steps))
    sql = (
        "UPDATE members SET state = 'done', digest = ?, tokens = ?, bytes = ?, lineage = ?, oldest_step = ?,"
        " newest_step = ?, reward = ?, ended_unix_s = ? WHERE group_id = ? AND member = ?"
    )
    key, group = (e.group, e.member), state.find(e.group)
    rows: list[Statement] = [(sql, (e.digest, *sampled, e.reward, unix_s, *key)), (schema.WITHOUT_PARTIALS, key)]
    return rows + (_group_state(e.group, state) if group is not None and group.state != "LEASED" else [])


def _claimed(e: ev.Claimed, state: State, unix_s: float) -> list[Statement]:
    columns = "lineage, step, shuffle_seed, groups, waited_s, worked_s, unix_s"
    values = (e.lineage, e.step, e.shuffle_seed, len(e.groups), e.waited_s, e.worked_s, unix_s)
    rows: list[Statement] = [(f"INSERT INTO claims ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)]
    for place, gid in enumerate(e.groups):
        rows.append(("INSERT INTO claim_groups VALUES (?, ?, ?, ?)", (e.lineage, e.step, place, gid)))
        rows.append(("UPDATE groups SET state = 'CLAIMED', claim_step = ? WHERE id = ?", (e.step, gid)))
        rows.append(_question_trained(e.step, state.held[gid]))
    return rows


def _question_trained(step: int, group: Group) -> Statement:
    rewards = [slot.reward for _, slot in group.done()]
    sql = (
        "INSERT INTO questions (question_hash, trained, members, reward_sum, last_step) VALUES (?, 1, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET trained = trained + 1, members = members + excluded.members,"
        " reward_sum = reward_sum + excluded.reward_sum, last_step = excluded.last_step"
    )
    return (sql, (group.task.question_hash, len(rewards), sum(rewards), step))


_ROWS: Mapping[type, schema.Follow] = {
    **schema.ROWS, ev.Issued: _issued, ev.Leased: _leased, ev.Put: _put, ev.Claimed: _claimed
}  # fmt: skip
_CHANGES_MEMBERS = (ev.Leased, ev.LeaseEnded, ev.MemberFailed, ev.Shrunk)  # `Aborted` follows a put or a failure


# --- maintenance by the writer thread: a bounded portion with every commit, so that no caller waits long
#
# - write the checkpoint that `StateReplica` made, and delete checkpoints that are not needed any more;
# - delete the payloads and tasks of groups that ended, oldest first, down to the budget for trajectories;
# - delete log records older than the history that is kept;
# - return pages to the file system that stayed free from one checkpoint to the next (the others would be allocated
#   again at once).
#
# The tables hold everything that this work needs, so it continues after a kill and restart.

PARTS = 8  # parts of a checkpoint in one commit
PAYLOADS = 16  # payloads deleted in one commit, or as many as it has statements if these are more
RECORDS = 400
PAGES = 128
SPARE_PAGES = 1024  # free pages that always stay in the file


class Maintenance:
    """Maintenance of one log. `offer` may be called from any thread, all other methods from the writer's only."""

    def __init__(self, connection: sqlite3.Connection, history_bytes: int, keep_bytes: int) -> None:
        self._history_bytes, self._keep_bytes = history_bytes, keep_bytes
        self._offered: SimpleQueue[tuple[Mark, list[StatePart]]] = SimpleQueue()
        self._snapshot: deque[tuple[str, tuple]] = deque()
        self._retired: deque[tuple[int, int]] = deque()  # (group, bytes)
        self._retired_bytes, self._last_place = 0, 0
        self._base, self._pages_to_free, self._least_free = 0, 0, 0
        self._unkept = True
        if replay.marks(connection):
            self._choose_base(connection)

    def offer(self, mark: Mark, parts: list[StatePart]) -> None:
        """Queue a checkpoint, to be written a few parts per commit."""
        self._offered.put((mark, parts))

    def portion(self, connection: Executor, statements: int) -> bool:
        """Do a bounded portion inside the open transaction of `statements` statements; return True if more is due."""
        rows = max(PAYLOADS, statements)
        more = self._write_snapshot(connection)
        more |= self._trim(connection, rows)
        more |= self._prune(connection, max(RECORDS, 2 * statements))
        return self._shrink(connection, idle=not more) or more

    # --- state checkpoints and history

    def _write_snapshot(self, connection: Executor) -> bool:
        if not self._snapshot:
            try:
                mark, parts = self._offered.get_nowait()
            except Empty:
                return self._drop_unkept(connection)
            self._snapshot.extend(replay.rows_of(mark, unix_s(), parts))
        for _ in range(min(PARTS, len(self._snapshot))):
            connection.execute(*self._snapshot.popleft())
        if not self._snapshot:
            self._choose_base(connection)
            self._choose_pages()
        return True

    def _choose_base(self, connection: Executor) -> None:
        first = connection.execute("SELECT MIN(position) FROM log").fetchone()[0]
        kept = replay.kept(replay.marks(connection), first == 1, self._history_bytes)
        self._base = kept.base
        for mark in replay.marks(connection):
            if mark.position not in kept.positions:
                connection.execute("DELETE FROM snapshots WHERE position = ?", (mark.position,))
        self._unkept = True

    def _drop_unkept(self, connection: Executor) -> bool:
        """Delete parts of checkpoints that are not kept or were never completed."""
        if not self._unkept:
            return False
        gone = connection.execute(_DROP_PARTS, (PARTS,)).rowcount
        self._unkept = gone == PARTS
        return self._unkept

    def _prune(self, connection: Executor, rows: int) -> bool:
        if not self._base:
            return False
        if connection.execute(_PRUNE, (self._base, rows)).rowcount == rows:
            return True
        self._base = 0
        return False

    # --- trajectories

    def _trim(self, connection: Executor, rows: int) -> bool:
        """Delete up to `rows` payloads beyond the budget."""
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

    def _shrink(self, connection: Executor, *, idle: bool) -> bool:
        free = connection.execute("PRAGMA freelist_count").fetchone()[0]
        self._least_free = min(self._least_free, free)
        pages = min(self._pages_to_free, free)
        if pages <= 0 or not idle:
            return pages > 0
        for _ in range(min(PAGES, pages)):  # Python's sqlite3 steps this statement once only, so one page per call
            connection.execute("PRAGMA incremental_vacuum(1)")
        self._pages_to_free = pages - PAGES
        return self._pages_to_free > 0

    def _choose_pages(self) -> None:
        """Mark the pages that stayed free at every commit since the last checkpoint, which the run does not need."""
        self._pages_to_free = max(0, self._least_free - SPARE_PAGES)
        self._least_free = _MANY


_MANY = 2**62
_ROW_BYTES = 200  # size of a group's rows without payloads, so that groups without payloads are bounded too
_DROP_PARTS = (
    "DELETE FROM snapshot_parts WHERE rowid IN (SELECT rowid FROM snapshot_parts WHERE position NOT IN"
    " (SELECT position FROM snapshots) LIMIT ?)"
)
_PRUNE = "DELETE FROM log WHERE position IN (SELECT position FROM log WHERE position <= ? ORDER BY position LIMIT ?)"
_TRIM = "DELETE FROM payloads WHERE rowid IN (SELECT rowid FROM payloads WHERE group_id = ? LIMIT ?)"
_RETIRED_SINCE = "SELECT place, group_id, bytes FROM retired WHERE place > ? ORDER BY place"
