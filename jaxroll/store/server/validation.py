"""Validation of metric rows that callers send, and masking of stale tokens in claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.errors import StoreRefusal
from jaxroll.metrics import checked_row
from jaxroll.records import Finished, Member, ages


def masked(body: bytes, step: int, max_age: int) -> bytes:
    """Return `body` with loss mask 0 for tokens older than `max_age` at `step`; unchanged if there are none.

    A changed member gets the field `sampled`: with loss mask 0, stale tokens would look like prompt tokens.
    """
    member = wire.decode(body, Member)
    outcome = member.outcome
    if not isinstance(outcome, Finished):
        return body
    stale = ages(outcome.versions, step) > max_age
    if not stale.any():
        return body
    segments, start = [], 0
    for segment in outcome.segments:
        mask = segment.loss_mask.copy()
        sampled = np.flatnonzero(mask)
        mask[sampled[stale[start : start + sampled.size]]] = 0
        start += sampled.size
        segments.append(msgspec.structs.replace(segment, loss_mask=mask, sampled=segment.loss_mask))
    kept = msgspec.structs.replace(outcome, segments=tuple(segments))
    return wire.encode(msgspec.structs.replace(member, outcome=kept))


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
