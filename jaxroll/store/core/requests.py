"""What may be asked of the state machine, and what it answers besides refusals (`jaxroll.errors`)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxroll.records import Grant, Task, Version, VersionRef, VersionRun

Key = tuple[int, int, int]  # (group, member, attempt)


@dataclass(frozen=True)
class Arrive:
    """A process called `name` speaks for the first time; leases of an earlier process of that name end."""

    name: str
    session: str


@dataclass(frozen=True)
class Lease:
    """Work for a sampler at `version` with room for `max_members`. `prompts` is what the feeder has ready.

    `request` names the asking: asked again (the reply was lost), it gets the same grants.
    """

    name: str
    session: str
    version: Version
    max_members: int
    request: str
    prompts: tuple[tuple[Task, bytes], ...] = ()


@dataclass(frozen=True)
class Leases:
    """The answer to Lease. `prompts_used` of the offered prompts became groups (or are passed over, after a fork).

    There may be no grants when some were passed over: ask again with the prompts after them.
    """

    grants: tuple[Grant, ...]
    prompts_used: int


@dataclass(frozen=True)
class Renew:
    """Leases that are still being worked on. Answer: those that are lost."""

    session: str
    members: tuple[Key, ...]


@dataclass(frozen=True)
class Release:
    """Leases given back."""

    members: tuple[Key, ...]


@dataclass(frozen=True)
class Recorded:
    """What the log says of a member of a group that is no longer alive."""

    attempt: int
    digest: str


@dataclass(frozen=True)
class PutMember:
    """A member as it arrived: finished with token `runs`, or failed with (kind, error).

    `recorded` is what the log holds of it when its group is no longer alive. Answer: OK or SURPLUS.
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
    """The batch of `step` for the learner `session`. Answer: Batch.

    Asked `ahead`, while the step before is computed, the learner does not wait for it.
    """

    session: str
    lineage: int
    step: int
    ahead: bool = False


@dataclass(frozen=True)
class Begin:
    """A learner starts from the checkpoint `durable` (None: from nothing). Answer: Version to train from.

    With the name of a `fork` a new lineage begins there, and nothing claimed from that step on is trained again, even
    if its trajectories are trimmed. Asked again by the same name, it is an ordinary beginning on that line.
    """

    session: str
    durable: Version | None
    fork: str = ""


@dataclass(frozen=True)
class Publish:
    """Weights can be fetched."""

    session: str
    snapshot: VersionRef


@dataclass(frozen=True)
class Ack:
    """The claim of version.step was trained."""

    session: str
    version: Version


@dataclass(frozen=True)
class Durable:
    """A checkpoint of `version` (the effect of claims below version.step) is on disk under its final name."""

    session: str
    version: Version


@dataclass(frozen=True)
class Tick:
    """Time passed: end what ran out. `stalled_s` is how long the store itself stood still."""

    stalled_s: float = 0.0


@dataclass(frozen=True)
class EndData:
    """The feeder has no more prompts."""


@dataclass(frozen=True)
class Close:
    """End the run."""

    reason: str


@dataclass(frozen=True)
class Open:
    """The store starts: a run closed before its end goes on."""


Request = (
    Arrive | Lease | Renew | Release | PutMember | ClaimStep | Begin | Publish | Ack | Durable | Tick | EndData | Close
    | Open
)  # fmt: skip
