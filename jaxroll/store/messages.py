"""Messages of the store's RPC service, encoded as MessagePack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from jaxroll.clock import unix_s
from jaxroll.errors import StoreRefusal
from jaxroll.records import MAX_ADDRESS_CHARS, Count, Grant, Label, LogStart, Relay, Task, Version, VersionRef
from jaxroll.rpc.protocol import CallRefusal
from jaxroll.store.core.state import Lineage

SERVICE = "jaxroll.Store"

Key = tuple[int, int, int]  # (group, member, attempt)
MAX_KEYS, MAX_ROWS, MAX_PUTS, MAX_RELAYS = 65_536, 65_536, 256, 8  # in one message
MAX_PROFILE_STEPS, MAX_PROFILE_S = 1000, 3600.0


class Hello(msgspec.Struct, frozen=True):
    """First message of a caller. `config_digest` is empty for observers, which need no config.

    `pool` is that of a sampler ('': none).
    """

    protocol: int
    config_digest: Label
    pool: Label = ""


class Welcome(msgspec.Struct, frozen=True):
    """Reply to Hello: the run's id and current weights. `lineages` tells a learner which checkpoints it may use."""

    run_id: str
    lineage: int
    published: VersionRef | None
    protocol: int
    lineages: tuple[Lineage, ...] = ()


class FollowCall(msgspec.Struct, frozen=True):
    """A standby has the commits of `session` up to number `after` on disk; it asks for the next within `wait_s`.

    `run_id` and `epoch` are those of its own log ('' and 0: none), `offset` that from which it reads the copy of the
    database (-1: it has the copy), `metrics` the size of its metrics. A `probe` asks for the epoch only.
    """

    run_id: Label
    epoch: int
    session: Label = ""
    after: int = 0
    offset: int = -1
    metrics: int = 0
    wait_s: float = 0.0
    probe: bool = False


class FollowReply(msgspec.Struct, frozen=True):
    """The commits after the call's, each as the encoded list of its statements, and the next bytes of the metrics.

    A call of another session gets a new copy of the database: its `size`, and the number of its last commit as `after`;
    until it is made, replies have no `session`.
    `ended`: the store ends in order, and its standby is not to take over.
    """

    run_id: str
    epoch: int
    session: str = ""
    after: int = 0
    size: int = -1
    piece: bytes = b""
    commits: tuple[bytes, ...] = ()
    metrics: bytes = b""
    ended: bool = False


class Joined(msgspec.Struct, frozen=True):
    """Reply to Join: the run's id, its config as a JSON object, and the number of the new sampler."""

    run_id: str
    config: bytes
    index: int


class LeaseCall(msgspec.Struct, frozen=True):
    """Request for leases. A retry carries the same `request` id and gets the same grants.

    `reserved`: only members that are reserved for the caller, without a wait.
    """

    version: Version
    max_members: Count
    wait_s: float
    request: Label
    reserved: bool = False


class LeaseReply(msgspec.Struct, frozen=True):
    """Granted leases; `holders` is the number of processes that request leases. With `surplus` the caller leaves."""

    grants: tuple[Grant, ...]
    holders: int = 1
    surplus: bool = False


class Members(msgspec.Struct, frozen=True):
    """Keys of leases: those to renew or release in a call, those lost or ended in a reply.

    `to`: released members are reserved for this sampler. `away`: the caller wants none for a while.
    """

    members: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)]
    to: Label = ""
    away: bool = False


class RepackCall(msgspec.Struct, frozen=True):
    """Report of a sampler whose new weights wait for its `members`, which have `tokens` in the KV cache.

    One that `leaves` the run may give its members, and gets none.
    """

    version: Version
    members: Count
    tokens: Count
    wait_s: float
    leaves: bool = False


class RepackReply(msgspec.Struct, frozen=True):
    """The sampler to which the caller gives its members, or True if members are reserved for the caller."""

    to: str = ""
    coming: bool = False


class EndedCall(msgspec.Struct, frozen=True):
    """Wait until the store has ended a lease of the caller early."""

    wait_s: float


class PutCall(msgspec.Struct, frozen=True):
    """Members to store, each as the bytes of a `records.Member`."""

    members: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_PUTS)]


class PutBodies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PutCall as the store decodes it: members are views into the message, so that large ones are not copied.

    In a Flush call they are the bytes of `records.Partial`.
    """

    members: Annotated[tuple[memoryview, ...], msgspec.Meta(max_length=MAX_PUTS)]


class PutAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Answer for one member: `result` is OK or SURPLUS, or `refusal` gives the reason."""

    result: str = ""
    refusal: CallRefusal | None = None


class PutReply(msgspec.Struct, frozen=True):
    """One answer for each member, in the order of the call."""

    answers: tuple[PutAnswer, ...]


LOST = -1  # answer to a flush: the lease has ended


class FlushReply(msgspec.Struct, frozen=True):
    """For each member of a flush, in order: the number of its tokens that the store has; −1 if the lease has ended."""

    tokens: tuple[int, ...]


class PartialCall(msgspec.Struct, frozen=True):
    """Request for the flushed tokens of a member that the caller leases."""

    member: Key


class PartialReply(msgspec.Struct, frozen=True):
    """The flushed tokens of a member in order, each piece the bytes of a `records.Partial`."""

    pieces: tuple[bytes, ...]


class Done(msgspec.Struct, frozen=True):
    """Acknowledgement: the change is on disk."""


class ClaimCall(msgspec.Struct, frozen=True):
    """Request for the batch of a step: members `start` up to (not including) `stop`; None means to the last.

    `ahead`: the learner prefetches this batch while it still computes the step before. With `known`, the groups that it
    has already, the answer to a batch that is not complete is its other finished groups, `ClaimPage.early`; further
    pages of that answer are asked for with the same `early`. The learner has computed such groups of this batch for
    `computed_s`, which is no wait.
    """

    lineage: Count
    step: Count
    wait_s: float
    start: Count = 0
    stop: Count | None = None
    ahead: bool = False
    known: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_KEYS)] | None = None
    early: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()
    computed_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0


class ClaimPart(msgspec.Struct, frozen=True):
    """Members of one group as they were put; a group may continue on the next page."""

    group: int
    task: Task
    members: tuple[bytes, ...]


class ClaimPage(msgspec.Struct, frozen=True):
    """Page of a batch that fits into one message; `next_start` is None on the last page."""

    step: int
    lineage: int
    shuffle_seed: int
    replayed: bool
    checkpoint_wanted: bool
    parts: tuple[ClaimPart, ...]
    next_start: int | None
    after: LogStart | None = None  # on the first page
    early: tuple[int, ...] = ()  # all groups of this answer, if the batch is not complete


class BeginCall(msgspec.Struct, frozen=True):
    """Checkpoint from which a learner starts; a non-empty `fork` is the name of the fork to create there.

    With a `log` the fork begins the log of this store, which is new.
    """

    durable: Version | None
    fork: str = ""
    log: LogStart | None = None


class VersionCall(msgspec.Struct, frozen=True):
    """Version in the calls Ack and Durable and in the reply to Begin."""

    version: Version


class RelayState(msgspec.Struct, frozen=True):
    """A receiver of weights where relays are used (`transfer.relay`).

    `address` is where it serves them to others ('': it does not), `site` the place within which copies are cheap. Its
    last fetch: the relay or learner that sent most, bytes per second, and relays that failed.
    """

    address: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)] = ""
    site: Label = ""
    source: Label = ""
    bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    failed: Annotated[tuple[Label, ...], msgspec.Meta(max_length=MAX_RELAYS)] = ()


class PublishedCall(msgspec.Struct, frozen=True):
    """Wait for published weights other than `known`.

    With `in_turn` also wait for an update slot (rolling updates); the caller's previous slot ends with this call.
    `serves_on` is the address at which the caller serves actors; with `relay` the reply names relays.
    """

    known: Version | None
    wait_s: float
    in_turn: bool = False
    serves_on: Label = ""
    relay: RelayState | None = None


class PublishedReply(msgspec.Struct, frozen=True):
    """Reference of the new weights; None if there were none within the wait. `relays` to ask first, in order."""

    ref: VersionRef | None
    relays: tuple[Relay, ...] = ()


class ReportCall(msgspec.Struct, frozen=True):
    """Metric rows, each the bytes of a JSON object."""

    rows: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_ROWS)]
    request: Label


class CloseCall(msgspec.Struct, frozen=True):
    """Request to end the run."""

    reason: str


class ProfileOrder(msgspec.Struct, frozen=True):
    """A person's request for a trace of the next `steps` steps of the process `role`, within `limit_s`.

    `request` names it; `python` asks for the calls of Python functions too. `withdrawn`: the request is taken back.
    """

    role: Label
    request: Label
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROFILE_STEPS)]
    limit_s: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_PROFILE_S)]
    python: bool = False
    withdrawn: bool = False


@dataclass
class WantedProfile:
    """An order, until when it is wanted, the session of the process that has it ('': none), and whether it began."""

    order: ProfileOrder
    until_s: float
    session: str = ""
    has_begun: bool = False


class ProfileOrders(dict[str, WantedProfile]):
    """The profile that is wanted of each role. `log` takes the row of one that its role will not end.

    An order is for one process of its role: a role that a profile ends would record it again after every restart.
    """

    def __init__(self, log: Callable[[Iterable[Mapping[str, Any]]], None]) -> None:
        super().__init__()
        self._log = log

    def place(self, order: ProfileOrder | None, callers: Iterable[str], now_s: float) -> StoreRefusal | None:
        """Keep or withdraw the order; the refusal if its role is none of the callers, or busy with another one."""
        known = sorted(name for name in callers if name.startswith(("learner", "sampler", "evaluator")))
        if order is None or order.role not in known:
            return StoreRefusal(f"there is no such role in this run; there are {', '.join(known) or 'none yet'}")
        wanted = self.get(order.role)
        if order.withdrawn:
            if wanted is not None and wanted.order.request == order.request:
                wanted.order = order
            return None
        if wanted is not None and now_s < wanted.until_s and (wanted.has_begun or not wanted.order.withdrawn):
            return StoreRefusal(f"another profile of {order.role} is under way, or waits for its next step")
        self[order.role] = WantedProfile(order, now_s + order.limit_s)
        return None

    def note(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Note the begin of this role's profile if one of its rows reports it, and forget the order at its end."""
        for row in rows:
            if row.get("kind") == "profile" and name in self and self[name].order.request == row["request"]:
                if row["state"] == "started":
                    self[name].has_begun = True
                else:
                    del self[name]

    def of(self, name: str, session: str, now_s: float) -> ProfileOrder | None:
        """The profile that is wanted of this process of the role, or withdrawn from it."""
        if (wanted := self.get(name)) is None or now_s >= wanted.until_s:
            return None
        order = wanted.order
        if wanted.session not in ("", session):
            del self[name]
            row = {"t": unix_s(), "role": name, "kind": "profile", "request": order.request, "state": "failed"}
            self._log([row | {"steps": 0, "reason": "the role started again before the end of its trace"}])
            return None
        wanted.session = session
        return None if wanted.has_begun and not order.withdrawn else order


class Reported(msgspec.Struct, frozen=True):
    """The rows are taken; `profile` is wanted of the caller until it reports the end of that request."""

    profile: ProfileOrder | None = None


class ControlCall(msgspec.Struct, frozen=True):
    """A person's request: grant no leases (pause), grant them again (resume), checkpoint after the next step, or
    profile a role."""

    action: Literal["pause", "resume", "checkpoint", "profile"]
    profile: ProfileOrder | None = None


class StatusReply(msgspec.Struct, frozen=True):
    """Status of the run as a JSON object; `profile` as in `Reported`."""

    body: bytes
    profile: ProfileOrder | None = None
