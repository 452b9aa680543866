"""What was sampled and not trained on, and whom that favours: by reason, by length, by what was let go early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def waste(rows: Sequence[Row], steps: Sequence[Row]) -> dict[str, Any]:
    """The figures on waste, from the store's last row and the samplers' counters; None where a run cannot say."""
    stores = [row for row in rows if row.get("kind") == "store"]
    last = stores[-1] if stores else {}
    members, tokens = counted(rows, "members_aborted"), _tokens_let_go(rows)
    return {
        "wasted_by_reason": by_reason(last),
        "stragglers_closed": last.get("shrunk"),
        "length_bias": length_bias(last.get("lengths"), members, tokens),
        "aborted_members": members,
        "aborted_tokens": tokens,
        "aborted_length": _relative(tokens, members, steps),
    }


def length_bias(lengths: Mapping[str, Sequence[int]] | None, members: int | None, tokens: int | None) -> float | None:
    """Mean length of the trained members over that of all: 1 favours nobody, less favours short answers.

    All are the trained ones, the finished ones that were lost (both in `lengths`: members, tokens), and `members` that
    were let go, for each of which only the tokens count that it had: what comes back is the true bias or more.
    """
    if lengths is None or members is None or tokens is None:
        return None
    (trained, trained_tokens), (lost, lost_tokens) = lengths["trained"], lengths["lost"]
    total = trained_tokens + lost_tokens + tokens
    return trained_tokens / trained / (total / (trained + lost + members)) if trained and total else None


def by_reason(last: Row) -> dict[str, float] | None:
    """Shares of all sampled tokens that were put, by why they were not trained on."""
    put = last.get("tokens_put")
    if not put:
        return None
    lost = dict(last.get("tokens_expired") or {})
    if last.get("tokens_masked"):
        lost["masked"] = last["tokens_masked"]
    return {reason: count / put for reason, count in sorted(lost.items())}


def counted(rows: Sequence[Row], key: str) -> int | None:
    """The sum over samplers of a counter in their `stats` rows, which begins at 0 with every life of a sampler."""
    known = [row for row in rows if row.get("kind") == "stats" and row.get(key) is not None]
    if not known:
        return None
    total, last = 0, {}
    for row in known:
        before = last.get(row["role"], 0)
        total += row[key] - before if row[key] >= before else row[key]
        last[row["role"]] = row[key]
    return total


def _tokens_let_go(rows: Sequence[Row]) -> int | None:
    """Tokens that members had when they were let go: of the answer that an engine was at, and of those before it."""
    parts = [counted(rows, key) for key in ("tokens_aborted", "tokens_let_go")]
    return sum(part for part in parts if part is not None) if any(part is not None for part in parts) else None


def _relative(tokens: int | None, members: int | None, steps: Sequence[Row]) -> float | None:
    """Mean tokens of an aborted member over those of a trained one."""
    trained = sum(row.get("samples") or 0 for row in steps)
    length = sum(row.get("tokens_trained") or 0 for row in steps) / trained if trained else 0
    return tokens / members / length if tokens is not None and members and length else None
