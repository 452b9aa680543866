"""Audit trail: changes to the run by caller, in the table `audit` of its database; metric rows that a caller may write.

Every begin, publish, ack, durable, control, close and dead group is one row, in the transaction of its decision or the
next. Refused callers are rows too, at most `AT_ONCE` per minute: one further row counts the others of that minute, and
only the newest `KEPT` refusals are kept, so that refused callers cannot fill the disk. No row contains a caller's
token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxroll.clock import unix_s
from jaxroll.errors import StoreRefusal
from jaxroll.metrics import checked_row

if TYPE_CHECKING:  # readers of the tables do not need the RPC package
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
    """Audit rows, written through the log's `append`. Use it from the log's event loop."""

    def __init__(self, append: Callable[[Sequence[Statement]], None], now_s: Callable[[], float]) -> None:
        self._append, self._now_s = append, now_s
        self._window_s = now_s()
        self._written = 0
        self._suppressed = 0

    def record(self, caller: Caller, what: str, detail: str, reply: object) -> None:
        """Add a row: `caller` did `what`, and the answer was `reply`."""
        outcome = f"{type(reply).__name__}: {reply}" if isinstance(reply, StoreRefusal) else "ok"
        self._write(caller.name, caller.right, caller.peer, what, detail, outcome)

    def by_itself(self, what: str, detail: str) -> None:
        """Add a row: the store did `what` on its own."""
        self._write("store", "store", "", what, detail, "ok")

    def refused(self, peer: str, who: str, why: str) -> None:
        """Add a row for a refused caller; `who` is its own claim (role:name)."""
        self.tick()
        if self._written >= AT_ONCE:
            self._suppressed += 1
            return
        self._written += 1
        role, _, name = who.partition(":")
        self._write(name, role, peer, "refused", "", why)

    def tick(self) -> None:
        """Add the row that counts the suppressed refusals once their minute is over."""
        if self._now_s() - self._window_s >= WINDOW_S:
            self.flush()

    def flush(self) -> None:
        """Add that row now and start a new minute."""
        self._window_s, self._written = self._now_s(), 0
        if self._suppressed:
            self._write("", "", "", "refused", "more callers in the same minute", "refused", self._suppressed)
            self._append([(_TRIM, (KEPT,))])
            self._suppressed = 0

    def _write(self, who: str, role: str, peer: str, what: str, detail: str, outcome: str, times: int = 1) -> None:
        texts = (_UNUSUAL.sub("?", text)[:_MAX_CHARS] for text in (who, role, peer, what, detail, outcome))
        self._append([(_INSERT, (unix_s(), *texts, times))])


# --- metric rows: each role may write only its own kinds

_ALL = frozenset({"span", "compile", "devices", "warm", "event"})
# Right of the caller → kinds that it may report. The store and the supervisor write theirs without a call.
KINDS: Mapping[str, frozenset[str]] = {
    "learner": _ALL | {"step"},
    "sampler": _ALL | {"stats", "members"},
    "observer": _ALL | {"eval"},
    "admin": _ALL | {"step", "stats", "members", "eval", "restart"},
}
KNOWN = frozenset().union(*KINDS.values()) | {"store"}
_ROLES: Mapping[str, frozenset[str]] = {  # right of the caller → roles that a row may name; admin: any
    "learner": frozenset({"learner"}),
    "sampler": frozenset({"sampler", "actor"}),
    "observer": frozenset({"evaluator", "observer", "report"}),
}


def rows_of(lines: Iterable[bytes], right: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The well-formed rows in `lines`, and the reasons why the others are left out.

    StoreRefusal (for all of them) if one is not a JSON object, or a caller with this right may not write it.
    """
    rows, left_out = [], []
    for place, line in enumerate(lines):
        row = _row(line, place, right)
        if checked_row(row) is not None:
            rows.append(row)
        else:
            left_out.append(f"a {row.get('kind')!r:.40} row lacks a field, or has one of another type")
    return rows, left_out


def _row(line: bytes, place: int, right: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line, type=dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise StoreRefusal(f"row {place} of a report is not a JSON object: {error}") from error
    kind, role = row.get("kind"), row.get("role")
    if isinstance(kind, str) and kind in KNOWN and kind not in KINDS[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write {kind} rows")
    if role is not None and right in _ROLES and str(role).partition("-")[0] not in _ROLES[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write as {role!r:.40}")
    return row
