"""What the writer thread does beside committing puts: a bounded portion with every commit, so that nothing waits long.

- write a snapshot that `snapshots.Replica` made, and drop those that are not needed any more;
- remove the payloads and tasks of groups that ended, oldest first, down to the budget for trajectories;
- remove log records older than the history that is kept;
- give pages back to the file system that stayed free from one snapshot to the next (those that come and go with every
  checkpoint stay in the file, for they would be asked for again at once).

All of it can be read off the tables, so a store that is killed in between goes on after its restart.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue

from jaxroll.clock import unix_s
from jaxroll.store import snapshots
from jaxroll.store.snapshots import Mark, Part

PARTS = 8  # of a snapshot, in one commit
PAYLOADS = 16  # and at least as many as the commit has statements
RECORDS = 400
PAGES = 128
SPARE_PAGES = 1024  # free pages that are never worth giving back


class Upkeep:
    """The jobs of one log. `offer` may be called from any thread, everything else belongs to the writer's."""

    def __init__(self, connection: sqlite3.Connection, history_bytes: int, keep_bytes: int) -> None:
        self._history_bytes, self._keep_bytes = history_bytes, keep_bytes
        self._offered: SimpleQueue[tuple[Mark, list[Part]]] = SimpleQueue()
        self._snapshot: deque[tuple[str, tuple]] = deque()
        self._retired: deque[tuple[int, int]] = deque()  # (group, bytes)
        self._retired_bytes, self._last_place = 0, 0
        self._base, self._pages_to_free, self._least_free = 0, 0, 0
        self._unkept = True
        if snapshots.marks(connection):
            self._choose_base(connection)

    def offer(self, mark: Mark, parts: list[Part]) -> None:
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
            self._snapshot.extend(snapshots.rows_of(mark, unix_s(), parts))
        for _ in range(min(PARTS, len(self._snapshot))):
            connection.execute(*self._snapshot.popleft())
        if not self._snapshot:
            self._choose_base(connection)
            self._choose_pages()
        return True

    def _choose_base(self, connection: sqlite3.Connection) -> None:
        first = connection.execute("SELECT MIN(position) FROM log").fetchone()[0]
        kept = snapshots.kept(snapshots.marks(connection), first == 1, self._history_bytes)
        self._base = kept.base
        for mark in snapshots.marks(connection):
            if mark.position not in kept.positions:
                connection.execute("DELETE FROM snapshots WHERE position = ?", (mark.position,))
        self._unkept = True

    def _drop_unkept(self, connection: sqlite3.Connection) -> bool:
        """Removes parts of snapshots that were given up, or never finished."""
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
        """Removes up to `rows` payloads beyond the budget."""
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
