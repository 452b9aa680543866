"""The schema of metrics rows: for each kind, the fields that readers use. Further fields may hold anything."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Row = dict[str, Any]

Time = Annotated[float, Meta(ge=0, le=1e11)]  # unix seconds, as far as the calendar functions of every platform go
Number = Annotated[float, Meta(ge=-1e100, le=1e100)]  # finite, and so is its square
Count = Annotated[int, Meta(ge=0, le=2**53)]
Share = Annotated[float, Meta(ge=0, le=1)]
Age = Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")]
Name = Annotated[str, Meta(max_length=128)]
Role = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _Any(msgspec.Struct):
    t: Time | None = None
    kind: Name | None = None
    role: Role | None = None


class _Known(msgspec.Struct):
    t: Time
    role: Role


class _Step(_Known):
    step: Count
    t0: Time
    t1: Time
    train_s: Number
    wait_s: Number
    publish_s: Number
    age_hist: dict[Age, Count]
    lineage: Count | None = None
    groups: list[Count] = []
    by_age: dict[Age, dict[str, Number | None]] | None = None
    samples: Number | None = None
    tokens_trained: Number | None = None
    tokens_computed: Number | None = None
    reward_mean: Number | None = None
    age_mean: Number | None = None
    age_max: Number | None = None
    logprob_mismatch_max: Number | None = None
    logits_std: Number | None = None
    padding_waste: Number | None = None
    compiles: Number | None = None


class _Eval(_Known):
    step: Count
    n: Count
    correct: Annotated[str, Meta(pattern=r"^[01-]*$")]
    accuracy: Share | None
    lineage: Count | None = None
    t0: Time | None = None
    t1: Time | None = None
    reward_parts: dict[str, Number | None] | None = None
    examples: list[Any] | None = None


class _Stats(_Known):
    version: Name | None = None
    tokens_per_s: Number | None = None
    slot_steps_busy: Number | None = None
    slot_steps_total: Number | None = None
    compiles: Number | None = None
    members_aborted: Count | None = None
    tokens_aborted: Count | None = None
    tokens_let_go: Count | None = None


class _Span(_Known):
    what: Name
    t0: Time
    t1: Time
    tokens: Number | None = None
    version: Name | None = None


class _Members(_Known):
    rows: list[tuple[int, int, Time, Time, int]]


class _Lengths(msgspec.Struct):
    trained: tuple[Count, Count]
    lost: tuple[Count, Count]


class _Store(_Known):
    window: Number | None = None
    window_full: Number | None = None
    waits: dict[str, str] | None = None
    shrunk: Count | None = None
    tokens_put: Count | None = None
    tokens_masked: Count | None = None
    tokens_expired: dict[str, Count] | None = None
    lengths: _Lengths | None = None


class _Compile(_Known):
    what: str
    state: Name
    seconds: Number | None = None


class _Devices(_Known):
    platform: Name | None = None
    devices: Name | Count | None = None
    mesh: dict[str, Count] | None = None
    attention: dict[str, str] | None = None


class _Warm(_Known):
    step: Count | None = None


class _Restart(_Known):
    who: Name
    pid: int | None = None
    code: int | None = None


class _Event(_Known):
    text: str


KINDS: dict[str, type[msgspec.Struct]] = {
    "step": _Step, "eval": _Eval, "stats": _Stats, "span": _Span, "members": _Members, "store": _Store,
    "compile": _Compile, "devices": _Devices, "warm": _Warm, "restart": _Restart, "event": _Event,
}  # fmt: skip


def checked_row(row: object) -> Row | None:
    """`row` if every reader can work with it; None when a field that readers use is missing or of another type.

    A row of an unknown kind has no such fields, except `t` and `role`.
    """
    kind = row.get("kind") if isinstance(row, dict) else None
    try:
        msgspec.convert(row, KINDS.get(kind, _Any) if isinstance(kind, str) else _Any)
    except (msgspec.ValidationError, RecursionError):
        return None
    return row  # type: ignore[return-value]  # `convert` accepts nothing but a dict
