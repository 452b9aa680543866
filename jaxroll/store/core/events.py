"""The records of the log: every transition of the run, as facts. `apply` says what they do.

Durations, never clock readings, stand in them. `Awaited`, `Hungry`, `Seen`, `Renewed` and `Extended` move instants of
the clock only and are not logged, for a restart renews every open lease anyway.
"""

from __future__ import annotations

import msgspec

from jaxroll.policy.limiter import Pace
from jaxroll.records import Task, Version, VersionRef, VersionRun


class Issued(msgspec.Struct, frozen=True, array_like=True, tag="issued"):
    """A prompt became a group. `cursor` is the prompt pipeline's state after it (None for a re-issue).

    `ordinal` is the prompt's place in the stream; −1 is the next one. A re-issue carries that of its prompt, and the
    length class of the group that ended. Of its `size` members the first `wanted` to finish count; 0: all of them.
    """

    group: int
    task: Task
    size: int
    reissue_of: int | None = None
    reissues: int = 0
    cursor: bytes | None = None
    ordinal: int = -1
    length: int = 0
    wanted: int = 0


class Skipped(msgspec.Struct, frozen=True, array_like=True, tag="skipped"):
    """The prompts up to `ordinal` were used on this line before a fork and are passed over; `cursor` is after it."""

    ordinal: int
    cursor: bytes


class Leased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """Members (member, attempt) of a group went to a holder."""

    group: int
    members: tuple[tuple[int, int], ...]
    holder: str
    session: str
    request: str
    ttl_s: float


class LeaseEnded(msgspec.Struct, frozen=True, array_like=True, tag="lease_ended"):
    """Leases ended without a put: expired, released, or their holder came back as another process."""

    group: int
    members: tuple[int, ...]
    reason: str


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """A member is there, `took_s` after its lease (0: not known); its payload is in the same transaction.

    `holder_rest_s` is the rest that it brings its holder because that is slow (0: it rests already); None: it is not.
    """

    group: int
    member: int
    attempt: int
    digest: str
    size_bytes: int
    runs: tuple[VersionRun, ...]
    reward: float = 0.0
    took_s: float = 0.0
    holder_rest_s: float | None = None
    is_measured: bool = True  # whether `took_s` counts for the comparison with other holders


class MemberFailed(msgspec.Struct, frozen=True, array_like=True, tag="member_failed"):
    """A member broke (kind INFRA or DATA) and may be leased again after `rest_s`.

    `holder_rest_s` is the rest that this brings its holder (0: none); None: the failure does not count against it.
    """

    group: int
    member: int
    attempt: int
    digest: str
    kind: str
    error: str
    rest_s: float
    holder_rest_s: float | None = None


class Shrunk(msgspec.Struct, frozen=True, array_like=True, tag="shrunk"):
    """A group was closed without these members."""

    group: int
    dropped: tuple[int, ...]
    reason: str


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="aborted"):
    """Redundant members are not needed any more: their group has `enough`, or they `failed` for good."""

    group: int
    members: tuple[int, ...]
    reason: str


class Expired(msgspec.Struct, frozen=True, array_like=True, tag="expired"):
    """A group ended untrained: stale, lineage, surplus, last_batch, or filtered and, after a colon, why.

    A fork may end claimed groups too (lineage).
    """

    group: int
    reason: str


class Died(msgspec.Struct, frozen=True, array_like=True, tag="died"):
    """A group ended because one of its members cannot be produced."""

    group: int
    reason: str


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="claimed"):
    """The batch of `step` is these groups in this order. `masked_tokens` are too old and get loss mask 0.

    The learner worked `worked_s` since the claim before, then waited `waited_s` for this one; 0 is what the store
    cannot know (the first claim after a beginning or a restart). `pace` is the window that follows, if any does.
    """

    step: int
    lineage: int
    groups: tuple[int, ...]
    shuffle_seed: int
    masked_tokens: int = 0
    waited_s: float = 0.0
    worked_s: float = 0.0
    pace: Pace | None = None


class Acked(msgspec.Struct, frozen=True, array_like=True, tag="acked"):
    """The claim of version.step was trained in version.lineage."""

    version: Version


class MadeDurable(msgspec.Struct, frozen=True, array_like=True, tag="durable"):
    """A durable checkpoint holds the effect of all claims below version.step; their groups are trimmed."""

    version: Version


class Published(msgspec.Struct, frozen=True, array_like=True, tag="published"):
    """Samplers can fetch these weights."""

    snapshot: VersionRef


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Where the prompts stood after a claim, so that a fork can go on from there.

    Prompts below `ordinal` had ended by then, and of the later ones those in `passed`; `cursor` is the pipeline's state
    before `ordinal` (None: the beginning).
    """

    ordinal: int = 0
    passed: tuple[int, ...] = ()
    cursor: bytes | None = None


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A learner began at `version`; `parent` is the lineage it left, None when it stayed in its own.

    With a `cut` it is the fork called `fork`: the claims from version.step on are made anew, from the prompts of `cut`.
    """

    version: Version
    learner: str
    parent: int | None = None
    fork: str = ""
    cut: Cut | None = None


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """`name` is now this session."""

    name: str
    session: str


class DataEnded(msgspec.Struct, frozen=True, array_like=True, tag="data_ended"):
    """No further prompts will come."""


class RunClosed(msgspec.Struct, frozen=True, array_like=True, tag="run_closed"):
    """The run is over."""

    reason: str


class RunOpened(msgspec.Struct, frozen=True, array_like=True, tag="run_opened"):
    """A run that was closed before its end goes on."""


class Awaited(msgspec.Struct, frozen=True, array_like=True, tag="awaited"):
    """The learner asked for the claim of `step` before it was ready. Not logged: the claim itself says how long."""

    step: int


class Hungry(msgspec.Struct, frozen=True, array_like=True, tag="hungry"):
    """`name` has `room` (members) and got nothing because the window is full (or, `hungry` False, that is over).

    Not logged.
    """

    name: str
    hungry: bool
    room: int = 0


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="seen"):
    """`name` asked for work that it could do. Not logged."""

    name: str


class Renewed(msgspec.Struct, frozen=True, array_like=True, tag="renewed"):
    """Leases (group, member) last another `ttl_s` from now. Not logged."""

    members: tuple[tuple[int, int], ...]
    ttl_s: float


class Extended(msgspec.Struct, frozen=True, array_like=True, tag="extended"):
    """The store itself stood still for `by_s`: nobody's lease suffers for it. Not logged."""

    by_s: float


Event = (
    Issued | Skipped | Leased | LeaseEnded | Put | MemberFailed | Shrunk | Aborted | Expired | Died | Claimed | Acked
    | MadeDurable | Published | Began | Arrived | DataEnded | RunClosed | RunOpened | Awaited | Hungry | Seen
    | Renewed | Extended
)  # fmt: skip

NOT_LOGGED = (Awaited, Hungry, Seen, Renewed, Extended)
