"""The messages of the store's service. Bodies are MessagePack of these; a put's body is its records.Member itself."""

from __future__ import annotations

import msgspec

from jaxroll.records import Grant, Snapshot, Task, Version

SERVICE = "jaxroll.Store"

Key = tuple[int, int, int]  # (group, member, attempt)


class Hello(msgspec.Struct, frozen=True):
    """The first message. An empty digest is for observers, who need no config."""

    protocol: int
    config_digest: str


class Welcome(msgspec.Struct, frozen=True):
    """The run as it is now."""

    run_id: str
    lineage: int
    published: Snapshot | None
    protocol: int


class LeaseCall(msgspec.Struct, frozen=True):
    """`request` is the same when the same asking is sent again."""

    version: Version
    max_members: int
    wait_s: float
    request: str


class LeaseReply(msgspec.Struct, frozen=True):
    """Work."""

    grants: tuple[Grant, ...]


class Members(msgspec.Struct, frozen=True):
    """Leases by key: to renew, to release, or lost."""

    members: tuple[Key, ...]


class PutReply(msgspec.Struct, frozen=True):
    """OK or SURPLUS."""

    result: str


class ClaimCall(msgspec.Struct, frozen=True):
    """The batch of a step, from its `start`-th member on; only a call with start 0 waits."""

    lineage: int
    step: int
    wait_s: float
    start: int = 0


class ClaimPart(msgspec.Struct, frozen=True):
    """Members (as they were put) of one group; a group may go on in the next page."""

    group: int
    task: Task
    members: tuple[bytes, ...]


class ClaimPage(msgspec.Struct, frozen=True):
    """As much of a batch as one message holds; `next_start` is None on the last page."""

    step: int
    lineage: int
    shuffle_seed: int
    replayed: bool
    checkpoint_wanted: bool
    parts: tuple[ClaimPart, ...]
    next_start: int | None


class BeginCall(msgspec.Struct, frozen=True):
    """The checkpoint a learner starts from."""

    durable: Version | None


class VersionCall(msgspec.Struct, frozen=True):
    """Ack, durable, and the answer to begin."""

    version: Version


class PublishedCall(msgspec.Struct, frozen=True):
    """Wait for a snapshot that is not `known`."""

    known: Version | None
    wait_s: float


class PublishedReply(msgspec.Struct, frozen=True):
    """None: nothing new within the wait."""

    snapshot: Snapshot | None


class ReportCall(msgspec.Struct, frozen=True):
    """Metrics rows, each the bytes of a JSON object."""

    rows: tuple[bytes, ...]
    request: str


class CloseCall(msgspec.Struct, frozen=True):
    """End the run."""

    reason: str


class StatusReply(msgspec.Struct, frozen=True):
    """A JSON object."""

    body: bytes
