"""Requests to the state machine, its answers, and the events that it logs; `machine` defines their effects.

Events hold durations, never clock readings. `NOT_LOGGED` ones change only times: a restart renews all leases anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from jaxroll.policy.limiter import Pace
from jaxroll.records import Cut, Grant, LogStart, Task, Version, VersionRef, VersionRun

# --- Requests to the state machine, and its answers other than refusals (`jaxroll.errors`)
Key = tuple[int, int, int]  # (group, member, attempt)


@dataclass(frozen=True)
class Arrive:
    """First request of a process called `name` in `pool`; leases of an earlier process with that name end."""

    name: str
    session: str
    pool: str = ""


@dataclass(frozen=True)
class Leave:
    """Last request of a process called `name`: all its leases end, those of lost replies included."""

    name: str
    session: str


@dataclass(frozen=True)
class Lease:
    """Request for up to `max_members` leases by a sampler at `version`. `prompts` are those that the feeder has ready.

    A retry with the same `request` id (after a lost reply) gets the same grants. `reserved`: only those kept for it.
    """

    name: str
    session: str
    version: Version
    max_members: int
    request: str
    prompts: tuple[tuple[Task, bytes], ...] = ()
    reserved: bool = False


@dataclass(frozen=True)
class Leases:
    """The answer to Lease. `prompts_used` prompts became groups; without grants they were skipped: offer later ones."""

    grants: tuple[Grant, ...]
    prompts_used: int


@dataclass(frozen=True)
class Renew:
    """Renewal of leases. Answer: those that are lost."""

    session: str
    members: tuple[Key, ...]


@dataclass(frozen=True)
class Release:
    """Return of leases. For a while only the holder `to` may lease them, if it is not '' and present.

    The holder `away`, if not '', leases none for a while: no other one waits for it or yields to it.
    """

    members: tuple[Key, ...]
    to: str = ""
    away: str = ""


@dataclass(frozen=True)
class Recorded:
    """The log's record of a member whose group is no longer alive."""

    attempt: int
    digest: str


@dataclass(frozen=True)
class PutMember:
    """A put of one member: finished with token `runs`, or failed with (kind, error).

    `recorded` is the log's record of the member if its group is no longer alive. Answer: OK or SURPLUS.
    """

    group: int
    member: int
    attempt: int
    digest: str
    size_bytes: int
    runs: tuple[VersionRun, ...] = ()
    failure: tuple[str, str] | None = None
    recorded: Recorded | None = None
    reward: float = 0.0


@dataclass(frozen=True)
class Flush:
    """Tokens `start` to `start` + `count` of a leased member that goes on. `runs` are their versions.

    Answer: the number of its tokens that the store has now; −1 if the lease has ended.
    """

    group: int
    member: int
    attempt: int
    start: int
    count: int
    runs: tuple[VersionRun, ...]
    size_bytes: int


@dataclass(frozen=True)
class ClaimStep:
    """Claim of the batch of `step` by the learner `session`. Answer: Batch.

    `ahead`: the learner prefetches it while it computes the step before, so it is not waiting yet. For `computed_s` of
    its wait it has computed groups of this batch that were finished early.
    """

    session: str
    lineage: int
    step: int
    ahead: bool = False
    computed_s: float = 0.0


@dataclass(frozen=True)
class Begin:
    """Start of a learner from the checkpoint `durable` (None: from initial weights). Answer: Version to train from.

    With the name of a `fork`, a new lineage begins at the checkpoint without the claims from that step on, even if
    their trajectories are trimmed. Once the fork exists, the same request is an ordinary start on its line.
    With a `log` the fork begins a new log, from what the checkpoint has of a lost one.
    """

    session: str
    durable: Version | None
    fork: str = ""
    log: LogStart | None = None


@dataclass(frozen=True)
class Publish:
    """Publication of new weights, which samplers can now fetch."""

    session: str
    ref: VersionRef


@dataclass(frozen=True)
class Ack:
    """Acknowledgement that the claim of version.step was trained."""

    session: str
    version: Version


@dataclass(frozen=True)
class Durable:
    """Notice that the checkpoint of `version` (the effect of claims below version.step) is on disk, finally named."""

    session: str
    version: Version


@dataclass(frozen=True)
class Tick:
    """Passage of time: expired leases and slow ones end. `stalled_s` is how long the store was suspended."""

    stalled_s: float = 0.0


@dataclass(frozen=True)
class EndData:
    """End of the prompt stream."""


@dataclass(frozen=True)
class Close:
    """Request to end the run."""

    reason: str


@dataclass(frozen=True)
class Open:
    """Start of the store: a run that was closed before its last step continues."""


Request = (
    Arrive
    | Leave
    | Lease
    | Renew
    | Release
    | PutMember
    | Flush
    | ClaimStep
    | Begin
    | Publish
    | Ack
    | Durable
    | Tick
    | EndData
    | Close
    | Open
)


# --- Events: the changes of the state


class Issued(msgspec.Struct, frozen=True, array_like=True, tag="issued"):
    """A prompt became a group. `cursor` is the prompt pipeline's state after it (None for a reissue).

    `ordinal` is the prompt's position in the stream; −1 means the next one. A reissue carries the ordinal of its prompt
    and the length class of the group that ended. Of the `size` members, the first `wanted` to finish count; 0: all.
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
    """Prompts up to `ordinal` are skipped because this line used them before a fork, or by the curriculum.

    `cursor` is the pipeline's state after them, `curriculum` the number of prompts that the curriculum did not admit.
    """

    ordinal: int
    cursor: bytes
    curriculum: int = 0


class Leased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """A holder leased members (member, attempt) of a group; `reserved`: those kept for it.

    Those in `resumed` (member, tokens) continue after their flushed tokens; flushed tokens of the others are discarded.
    """

    group: int
    members: tuple[tuple[int, int], ...]
    holder: str
    session: str
    request: str
    ttl_s: float
    resumed: tuple[tuple[int, int], ...] = ()
    reserved: bool = False


class LeaseEnded(msgspec.Struct, frozen=True, array_like=True, tag="lease_ended"):
    """Leases ended without a put: they expired, were too slow or released (for a holder), or their holder restarted.

    `holder_rest_s` is the rest imposed on a slow holder (0: none); None: the end does not count against the holder.
    """

    group: int
    members: tuple[int, ...]
    reason: str
    holder_rest_s: float | None = None
    reserved_for: str = ""


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    """Tokens of a member that goes on were stored; those from `start` 0 on replace all earlier ones."""

    group: int
    member: int
    attempt: int
    start: int
    runs: tuple[VersionRun, ...]
    size_bytes: int


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """A finished member was stored, `took_s` after its lease (0: unknown); its payload is in the same transaction.

    `holder_rest_s` is the rest imposed on a slow holder (0: it is resting already); None: the holder is not slow.
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
    is_measured: bool = True  # `took_s` counts in the comparison with other holders


class MemberFailed(msgspec.Struct, frozen=True, array_like=True, tag="member_failed"):
    """A member failed (kind INFRA or DATA) and may be leased again after `rest_s`.

    `holder_rest_s` is the rest imposed on its holder (0: none); None: the failure does not count against the holder.
    `spared`: it does not count among the failures that the member may have.
    """

    group: int
    member: int
    attempt: int
    digest: str
    kind: str
    error: str
    rest_s: float
    holder_rest_s: float | None = None
    spared: bool = False


class Shrunk(msgspec.Struct, frozen=True, array_like=True, tag="shrunk"):
    """A group was closed without these members."""

    group: int
    dropped: tuple[int, ...]
    reason: str


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="aborted"):
    """Redundant members were aborted: their group has `enough`, or they `failed` and have no retries left."""

    group: int
    members: tuple[int, ...]
    reason: str


class Expired(msgspec.Struct, frozen=True, array_like=True, tag="expired"):
    """A group ended untrained, with the reason stale, lineage, surplus, last_batch or "filtered: CAUSE".

    A fork may also end claimed groups (lineage).
    """

    group: int
    reason: str


class Died(msgspec.Struct, frozen=True, array_like=True, tag="died"):
    """A group ended because one of its members cannot be produced."""

    group: int
    reason: str


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="claimed"):
    """The learner claimed these groups, in this order, as the batch of `step`.

    `masked_tokens` are too old and get loss mask 0. The learner worked `worked_s` since the previous claim, then waited
    `waited_s` for this one; `worked_s` is 0 for the first claim after the learner or the store started. `pace` is the
    adapted in-flight window; None if the window is fixed.
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

    ref: VersionRef


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """A learner began at `version`; `parent` is the lineage that it left, None if it continues its lineage.

    With a `cut` it created the fork called `fork`: the claims from version.step on are made again, from the prompts of
    `cut` on. With a `log` this log is new, and an earlier one had those lineages and groups.
    """

    version: Version
    learner: str
    parent: int | None = None
    fork: str = ""
    cut: Cut | None = None
    log: LogStart | None = None


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """A process joined under `name` in `pool` with this session; '' if the process of that name left."""

    name: str
    session: str
    pool: str = ""


class DataEnded(msgspec.Struct, frozen=True, array_like=True, tag="data_ended"):
    """No further prompts will come."""


class RunClosed(msgspec.Struct, frozen=True, array_like=True, tag="run_closed"):
    """The run is over."""

    reason: str


class RunOpened(msgspec.Struct, frozen=True, array_like=True, tag="run_opened"):
    """A run that was closed before its last step continues."""


class Awaited(msgspec.Struct, frozen=True, array_like=True, tag="awaited"):
    """The learner asked for the claim of `step` before it was ready. Not logged: `Claimed` records the wait."""

    step: int


class Hungry(msgspec.Struct, frozen=True, array_like=True, tag="hungry"):
    """`name` has room for `room` members and got none (`leases._hunger`); without `why` this ends. Not logged."""

    name: str
    why: str  # "window": it is full; "weights": those of the sampler are not the newest; "away": it asks for none
    room: int = 0
    fetches: bool = False  # it has the newest weights but one, so that it will have them soon


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="seen"):
    """`name` asked for leases and has the newest weights. Not logged."""

    name: str


class Renewed(msgspec.Struct, frozen=True, array_like=True, tag="renewed"):
    """Leases (group, member) were extended to `ttl_s` from now. Not logged."""

    members: tuple[tuple[int, int], ...]
    ttl_s: float


class Extended(msgspec.Struct, frozen=True, array_like=True, tag="extended"):
    """The store was suspended for `by_s`; every lease is extended by that time. Not logged."""

    by_s: float


Event = (
    Issued
    | Skipped
    | Leased
    | LeaseEnded
    | Flushed
    | Put
    | MemberFailed
    | Shrunk
    | Aborted
    | Expired
    | Died
    | Claimed
    | Acked
    | MadeDurable
    | Published
    | Began
    | Arrived
    | DataEnded
    | RunClosed
    | RunOpened
    | Awaited
    | Hungry
    | Seen
    | Renewed
    | Extended
)

LEFT = "the rest is left to samplers that fetch their weights"  # the reason of a NoCredit where a share is used up
AWAY = "away"  # `Hungry.why` of a sampler that asks for no leases for a while
LAGGING = "weights"  # `Hungry.why`, and the reason of a NoCredit, where a sampler needs newer ones
NOT_LOGGED = (Awaited, Hungry, Seen, Renewed, Extended)
