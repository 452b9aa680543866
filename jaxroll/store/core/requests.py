"""Requests to the state machine, and its answers other than refusals (`jaxroll.errors`)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxroll.records import Grant, Task, Version, VersionRef, VersionRun

Key = tuple[int, int, int]  # (group, member, attempt)


@dataclass(frozen=True)
class Arrive:
    """First request of a process called `name`; leases of an earlier process with that name end."""

    name: str
    session: str


@dataclass(frozen=True)
class Lease:
    """Request for up to `max_members` leases by a sampler at `version`. `prompts` are those that the feeder has ready.

    A retry with the same `request` id (after a lost reply) gets the same grants.
    """

    name: str
    session: str
    version: Version
    max_members: int
    request: str
    prompts: tuple[tuple[Task, bytes], ...] = ()


@dataclass(frozen=True)
class Leases:
    """The answer to Lease. `prompts_used` of the offered prompts became groups (or are skipped, after a fork).

    If all offered prompts were skipped there are no grants: ask again with the prompts after them.
    """

    grants: tuple[Grant, ...]
    prompts_used: int


@dataclass(frozen=True)
class Renew:
    """Renewal of leases. Answer: those that are lost."""

    session: str
    members: tuple[Key, ...]


@dataclass(frozen=True)
class Release:
    """Return of leases."""

    members: tuple[Key, ...]


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
class ClaimStep:
    """Claim of the batch of `step` by the learner `session`. Answer: Batch.

    `ahead`: the learner prefetches it while it computes the step before, so it is not waiting yet.
    """

    session: str
    lineage: int
    step: int
    ahead: bool = False


@dataclass(frozen=True)
class Begin:
    """Start of a learner from the checkpoint `durable` (None: from initial weights). Answer: Version to train from.

    With the name of a `fork`, a new lineage begins at the checkpoint without the claims from that step on, even if
    their trajectories are trimmed. Once the fork exists, the same request is an ordinary start on its line.
    """

    session: str
    durable: Version | None
    fork: str = ""


@dataclass(frozen=True)
class Publish:
    """Publication of new weights, which samplers can now fetch."""

    session: str
    snapshot: VersionRef


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
    """Passage of time: expired leases end. `stalled_s` is how long the store's process was suspended."""

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
    Arrive | Lease | Renew | Release | PutMember | ClaimStep | Begin | Publish | Ack | Durable | Tick | EndData | Close
    | Open
)  # fmt: skip
