"""Metrics rows that a caller may append: of a form that every reader can work with, and about its own work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from jaxroll.errors import StoreRefusal
from jaxroll.metrics import checked_row

_ALL = frozenset({"span", "compile", "devices", "warm", "event"})
# The kinds that a caller with this right may report. Those of the store and the supervisor are written without a call.
KINDS: Mapping[str, frozenset[str]] = {
    "learner": _ALL | {"step"},
    "sampler": _ALL | {"stats", "members"},
    "observer": _ALL | {"eval"},
    "admin": _ALL | {"step", "stats", "members", "eval", "restart"},
}
KNOWN = frozenset().union(*KINDS.values()) | {"store"}
_ROLES: Mapping[str, frozenset[str]] = {  # the roles whose name a row may carry, by right; admin: any
    "learner": frozenset({"learner"}),
    "sampler": frozenset({"sampler", "actor"}),
    "observer": frozenset({"evaluator", "observer", "report"}),
}


def rows_of(lines: Iterable[bytes], right: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows in `lines` that every reader can work with, and why the others are left out.

    StoreRefusal when one is no JSON object, or is not for a caller with this right to write: then none is taken.
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
        raise StoreRefusal(f"row {place} of a report is no JSON object: {error}") from error
    kind, role = row.get("kind"), row.get("role")
    if isinstance(kind, str) and kind in KNOWN and kind not in KINDS[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write {kind} rows")
    if role is not None and right in _ROLES and str(role).partition("-")[0] not in _ROLES[right]:
        raise StoreRefusal(f"row {place} of a report: a caller with the right of {right} may not write as {role!r:.40}")
    return row
