"""Who did what to the run, in the table `audit` of its database.

Every begin, publish, ack, durable, close and dead-letter is one row, in the transaction of its decision or the next.
Refused callers are rows too, `AT_ONCE` a minute at most: the others of that minute become one row that counts them,
and only the newest `KEPT` refusals stay, so that nobody fills the disk by knocking. No row holds what a caller showed
as its token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxroll.clock import unix_s
from jaxroll.errors import StoreRefusal

if TYPE_CHECKING:  # readers of the tables need no gRPC
    from jaxroll.rpc.server import Caller

TABLE = """
CREATE TABLE audit (
  id INTEGER PRIMARY KEY, unix_s REAL NOT NULL, who TEXT NOT NULL, role TEXT NOT NULL, peer TEXT NOT NULL,
  what TEXT NOT NULL, detail TEXT NOT NULL, outcome TEXT NOT NULL, times INTEGER NOT NULL DEFAULT 1);
"""
QUERY = "SELECT unix_s, who, role, peer, what, detail, outcome, times FROM audit ORDER BY id"
AT_ONCE, WINDOW_S, KEPT = 20, 60.0, 10_000
_MAX_CHARS = 300
_UNUSUAL = re.compile(r"[^\x20-\x7e]")

Statement = tuple[str, tuple[Any, ...]]
_INSERT = "INSERT INTO audit (unix_s, who, role, peer, what, detail, outcome, times) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_TRIM = (
    "DELETE FROM audit WHERE what = 'refused' AND id <="
    " (SELECT id FROM audit WHERE what = 'refused' ORDER BY id DESC LIMIT 1 OFFSET ?)"
)


class Audit:
    """Writes the rows through the log's `append`. Belongs to the log's event loop."""

    def __init__(self, append: Callable[[Sequence[Statement]], None], now_s: Callable[[], float]) -> None:
        self._append, self._now_s = append, now_s
        self._window_s = now_s()
        self._told = 0
        self._untold = 0

    def record(self, caller: Caller, what: str, detail: str, reply: object) -> None:
        """One row: `caller` did `what`, and the answer was `reply`."""
        outcome = f"{type(reply).__name__}: {reply}" if isinstance(reply, StoreRefusal) else "ok"
        self._write(caller.name, caller.right, caller.peer, what, detail, outcome)

    def by_itself(self, what: str, detail: str) -> None:
        """One row: the store did `what` without being asked to."""
        self._write("store", "store", "", what, detail, "ok")

    def refused(self, peer: str, who: str, why: str) -> None:
        """A caller that was turned away; `who` is what it said it is (role:name)."""
        self.tick()
        if self._told >= AT_ONCE:
            self._untold += 1
            return
        self._told += 1
        role, _, name = who.partition(":")
        self._write(name, role, peer, "refused", "", why)

    def tick(self) -> None:
        """Write down how many were refused and not told of, when their minute is over."""
        if self._now_s() - self._window_s >= WINDOW_S:
            self.flush()

    def flush(self) -> None:
        """The same at once; a new minute begins."""
        self._window_s, self._told = self._now_s(), 0
        if self._untold:
            self._write("", "", "", "refused", "more callers in the same minute", "turned away", self._untold)
            self._append([(_TRIM, (KEPT,))])
            self._untold = 0

    def _write(self, who: str, role: str, peer: str, what: str, detail: str, outcome: str, times: int = 1) -> None:
        texts = (_UNUSUAL.sub("?", text)[:_MAX_CHARS] for text in (who, role, peer, what, detail, outcome))
        self._append([(_INSERT, (unix_s(), *texts, times))])
