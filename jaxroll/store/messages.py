"""The messages of the store's service. Bodies are MessagePack of these."""

from __future__ import annotations

from typing import Annotated

import msgspec

from jaxroll.records import Count, Grant, Label, Task, Version, VersionRef
from jaxroll.rpc.protocol import Refusal
from jaxroll.store.core.state import Lineage

SERVICE = "jaxroll.Store"

Key = tuple[int, int, int]  # (group, member, attempt)
MAX_KEYS, MAX_ROWS, MAX_PUTS = 65_536, 65_536, 256  # in one message


class Hello(msgspec.Struct, frozen=True):
    """The first message. An empty digest is for observers, who need no config."""

    protocol: int
    config_digest: Label


class Welcome(msgspec.Struct, frozen=True):
    """The run as it is now. `lineages` says which checkpoints lie on the newest lineage's line."""

    run_id: str
    lineage: int
    published: VersionRef | None
    protocol: int
    lineages: tuple[Lineage, ...] = ()


class LeaseCall(msgspec.Struct, frozen=True):
    """`request` is the same when the same asking is sent again."""

    version: Version
    max_members: Count
    wait_s: float
    request: Label


class LeaseReply(msgspec.Struct, frozen=True):
    """Work."""

    grants: tuple[Grant, ...]


class Members(msgspec.Struct, frozen=True):
    """Leases by key: to renew, to release, lost, or ended."""

    members: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)]


class EndedCall(msgspec.Struct, frozen=True):
    """Wait until a lease of the caller has ended without a put of it."""

    wait_s: float


class PutCall(msgspec.Struct, frozen=True):
    """Members, each as the bytes of a records.Member."""

    members: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_PUTS)]


class PutBodies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A PutCall as the store reads it: its members are views of the message, which may be large."""

    members: Annotated[tuple[memoryview, ...], msgspec.Meta(max_length=MAX_PUTS)]


class PutAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Of one member: OK or SURPLUS, or why it is refused."""

    result: str = ""
    refusal: Refusal | None = None


class PutReply(msgspec.Struct, frozen=True):
    """An answer for each member, in their order."""

    answers: tuple[PutAnswer, ...]


class Done(msgspec.Struct, frozen=True):
    """It is on disk."""


class ClaimCall(msgspec.Struct, frozen=True):
    """The batch of a step: its members from the `start`-th to before the `stop`-th, or to the last.

    `ahead` says that the learner has something else to do until it comes.
    """

    lineage: Count
    step: Count
    wait_s: float
    start: Count = 0
    stop: Count | None = None
    ahead: bool = False


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
    """The checkpoint a learner starts from; `fork` names the fork to make there, if any."""

    durable: Version | None
    fork: str = ""


class VersionCall(msgspec.Struct, frozen=True):
    """Ack, durable, and the answer to begin."""

    version: Version


class PublishedCall(msgspec.Struct, frozen=True):
    """Wait for a snapshot that is not `known` and, `in_turn`, for the turn to fetch it; the turn before is over."""

    known: Version | None
    wait_s: float
    in_turn: bool = False


class PublishedReply(msgspec.Struct, frozen=True):
    """None: nothing new within the wait."""

    snapshot: VersionRef | None


class ReportCall(msgspec.Struct, frozen=True):
    """Metrics rows, each the bytes of a JSON object."""

    rows: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_ROWS)]
    request: Label


class CloseCall(msgspec.Struct, frozen=True):
    """End the run."""

    reason: str


class StatusReply(msgspec.Struct, frozen=True):
    """A JSON object."""

    body: bytes
