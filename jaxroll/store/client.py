"""Client of the store, for asyncio.

Every call is idempotent and is repeated for `patience_s` while the store is down. The store's refusals are raised:
NoCredit, NotReady, StaleClient, Fenced, Conflict, Closed, Unauthorized. InfraError if the store stays away longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from jaxroll import metrics, wire
from jaxroll.errors import ConfigError, DataError, InfraError, NoCredit, NotReady, StoreRefusal
from jaxroll.records import (
    Claim,
    ClaimedGroup,
    Grant,
    LogStart,
    Member,
    Partial,
    Version,
    VersionRef,
)
from jaxroll.rpc import protocol, tls
from jaxroll.rpc.client import RawClient, Transport
from jaxroll.rpc.protocol import error_of
from jaxroll.store import messages as msg
from jaxroll.store.flushes import Flushes, Stream, answers
from jaxroll.store.messages import (
    MAX_PUTS,
    Joined,
    Key,
    PublishedReply,
    PutAnswer,
    PutCall,
    PutReply,
    RelayState,
    Welcome,
)

MAX_MESSAGE_BYTES = 2**30  # of a reply of the store; the store has a smaller limit for requests
STORE_PATIENCE_S = 60.0  # of learner, samplers, actors and evaluator, while a store that died is started again
WELCOME_S = 0.5  # for a user who may have named a run that is over
JOIN_S = 60.0  # a sampler that joins waits for the store, as for one that is starting
_CALL_S = 10.0  # deadline of one attempt, beyond what a long poll waits

T = TypeVar("T")


class StoreClient:
    """A connection to the store, for one event loop. Make it with `connect`."""

    welcome: Welcome

    def __init__(self, raw: RawClient, config_digest: str, call_s: float = _CALL_S) -> None:
        self._raw, self._config_digest, self._call_s = raw, config_digest, call_s
        self.holders = 1  # processes that request leases, as of the last grant
        self.on_surplus: Callable[[], None] = lambda: None  # called when the run needs this sampler no more
        self.on_profile: Callable[[msg.ProfileOrder], None] = lambda order: None  # may be called again for the same one
        self._puts = Puts(lambda call: self._call("Put", call, msg.PutReply))
        self._flushes = Flushes(lambda call: self._call("Flush", call, msg.FlushReply))

    @classmethod
    async def connect(
        cls,
        address: str | Path | Transport,
        *,
        role: str,
        name: str,
        config_digest: str = "",
        token: str | None = None,
        patience_s: float = 60.0,
        welcome_s: float | None = None,
        call_s: float = _CALL_S,
        run_dir: Path | None = None,
        session: str = "",
        pool: str = "",
    ) -> StoreClient:
        """A connected client, after the store's welcome. `address`: host:port, the file with it, or a transport.

        A call is repeated for `patience_s` while the store is down, the first one for `welcome_s`, if it is given.
        `session` is that of another client whose claims this one fetches rows of: the hosts of one learner share a
        name and a session. Without it the client gets a session of its own. `pool` is that of a sampler.

        The default of `token` is JAXROLL_TOKEN or RUN/token; certificates come from JAXROLL_TLS or RUN/tls. RUN is
        `run_dir`, or the address file's folder.
        """
        raw = _raw_client(address, role, name, token, patience_s, run_dir, config_digest)
        raw.session = session or raw.session
        client = cls(raw, config_digest, call_s)
        async with contextlib.AsyncExitStack() as unless_welcome:
            unless_welcome.push_async_callback(raw.close)
            hello = msg.Hello(wire.PROTOCOL_VERSION, config_digest, pool)
            reply = await raw.call("Hello", wire.encode(hello), call_s, patience_s=welcome_s)
            client.welcome = wire.decode(reply, Welcome)
            unless_welcome.pop_all()
        raw.run_id = client.welcome.run_id
        return client

    @property
    def session(self) -> str:
        """Identifier of this process among all that had its name."""
        return self._raw.session

    @property
    def position(self) -> int:
        """The newest position of the store's log in any reply."""
        return self._raw.position

    async def lease(
        self, version: Version, max_members: int, wait_s: float = 0.0, *, reserved: bool = False
    ) -> list[Grant]:
        """Grants for at most `max_members` members. Raises NoCredit if there were none within `wait_s`.

        `reserved`: only those that are reserved for this sampler, which may be none.
        """
        request = uuid.uuid4().hex

        async def ask(left_s: float) -> list[Grant]:
            call = msg.LeaseCall(version, max_members, left_s, request, reserved)
            reply = await self._call("Lease", call, msg.LeaseReply, left_s)
            self.holders = reply.holders
            if reply.surplus:
                self.on_surplus()
            return list(reply.grants)

        return await _until(ask, wait_s, NoCredit)

    async def renew(self, grants: Sequence[Key]) -> list[Key]:
        """The leases (group, member, attempt) of `grants` that are lost; the others get their full lease time again."""
        call = msg.Members(tuple((g, m, a) for g, m, a in grants))
        return list((await self._call("Renew", call, msg.Members)).members)

    async def ended(self, wait_s: float) -> list[Key]:
        """Leases of this caller that the store cancelled, as soon as there are any; empty after `wait_s`."""
        call = msg.EndedCall(min(wait_s, protocol.MAX_WAIT_S))
        return list((await self._call("Ended", call, msg.Members, call.wait_s)).members)

    async def put(self, member: Member) -> str:
        """Store a member: OK, or SURPLUS if its group ended without it. Raises Conflict, Fenced."""
        return await self._puts.put(wire.encode(member))

    def stream(self, key: Key, tokens: int, before: Sequence[Partial] = ()) -> Stream:
        """A stream of the conversation of a leased member; at most `tokens` sampled ones are not with the store.

        `before` are its answers that the store has. `end_stream` ends it.
        """
        return self._flushes.begin(key, tokens, before)

    def on_flushed(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each answer of the store to tokens of streams; their engine may have waited for it."""
        self._flushes.on_answer = wake

    def end_stream(self, key: Key) -> None:
        """Send no more tokens of this member."""
        self._flushes.end(key)

    async def flushed(self) -> None:
        """Wait until the tokens that the streams have gathered are with the store."""
        await self._flushes.idle()

    async def partial(self, key: Key) -> tuple[Partial, ...]:
        """The answers of a leased member that the store has, all but the last one complete. InfraError if malformed."""
        reply = await self._call("Partial", msg.PartialCall(key), msg.PartialReply)
        try:
            return answers([wire.decode(piece, Partial) for piece in reply.pieces])
        except (msgspec.MsgspecError, DataError) as error:
            raise InfraError(f"the flushed tokens of member {key}: {error}") from error

    async def leave(self) -> None:
        """End all leases of this process, granted ones whose reply was lost included, as its last call."""
        await self._call("Leave", None, msg.Done)

    async def release(self, grants: Sequence[Key], to: str = "", *, away: bool = False) -> None:
        """Return leases; `to` is the sampler for which they are reserved for a while. `away`: none are asked for."""
        await self._call("Release", msg.Members(tuple((g, m, a) for g, m, a in grants), to, away), msg.Members)

    async def repack(
        self, version: Version, members: int, tokens: int, wait_s: float, *, leaves: bool = False
    ) -> msg.RepackReply:
        """Report members whose end new weights wait for; the reply says within `wait_s` if some are to move.

        A sampler that `leaves` the run gets no members.
        """
        call = msg.RepackCall(version, members, tokens, wait_s, leaves)
        return await self._call("Repack", call, msg.RepackReply, wait_s)

    async def claim(
        self,
        lineage: int,
        step: int,
        wait_s: float = 0.0,
        rows: range | None = None,
        *,
        ahead: bool = False,
        known: Sequence[int] | None = None,
        computed_s: float = 0.0,
    ) -> Claim:
        """The batch of `step`. Raises NotReady if it is not complete within `wait_s`.

        With `ahead` the wait does not count as an idle learner (which widens the in-flight window). With `known`, the
        groups that the caller has already, the reply may be other finished groups of a batch that is not complete;
        for `computed_s` it has computed such groups, which is no wait either.

        With `rows` only these members, counted over the groups in order: the share of one of the learner's hosts. The
        first and the last group may then be incomplete.
        """
        start, stop = (rows.start, rows.stop) if rows is not None else (0, None)

        async def ask(left_s: float) -> msg.ClaimPage:
            had = known if known is None else tuple(known)
            call = msg.ClaimCall(lineage, step, left_s, start, stop, ahead, had, computed_s=computed_s)
            return await self._call("Claim", call, msg.ClaimPage, left_s)

        first = page = await _until(ask, wait_s, NotReady)
        parts = list(page.parts)
        while page.next_start is not None:
            call = msg.ClaimCall(lineage, step, 0.0, page.next_start, stop, early=first.early)
            page = await self._call("Claim", call, msg.ClaimPage)
            parts += page.parts
        rest = (first.shuffle_seed, first.replayed, first.checkpoint_wanted, first.after, not first.early)
        return Claim(first.step, first.lineage, _joined(parts), *rest)

    async def begin(self, durable: Version | None, fork: str = "", log: LogStart | None = None) -> Version:
        """The version to train from, after restoring the checkpoint `durable` (None: nothing was restored).

        `fork` names a fork to make there: a new lineage whose claims from that step on are made again. A name makes
        only one fork. Raises StaleClient if the run cannot continue from the checkpoint (for example below the trim
        mark, without a fork). With a `log` the fork begins a new log, which must be empty, from what the checkpoint
        has of a lost one.
        """
        return (await self._call("Begin", msg.BeginCall(durable, fork, log), msg.VersionCall)).version

    async def publish(self, ref: VersionRef) -> None:
        """Announce weights that samplers can fetch."""
        await self._call("Publish", ref, msg.Done)

    async def published(
        self, known: Version | None, wait_s: float = 0.0, *, in_turn: bool = False, serves_on: str = ""
    ) -> VersionRef | None:
        """The newest published version if it differs from `known`; None after `wait_s` without one: see `announced`."""
        return (await self.announced(known, wait_s, in_turn=in_turn, serves_on=serves_on)).ref

    async def announced(
        self,
        known: Version | None,
        wait_s: float = 0.0,
        *,
        in_turn: bool = False,
        serves_on: str = "",
        relay: RelayState | None = None,
    ) -> PublishedReply:
        """The newest published version if it differs from `known`, and relays that have it; None after `wait_s`.

        `serves_on` tells actors where this sampler serves them, `relay` tells the store about this receiver.

        With `in_turn` the reply waits for the caller's update slot (`schedule.rolling_updates`); its next call
        gives the slot back.
        """
        now_s = asyncio.get_running_loop().time
        deadline = now_s() + wait_s
        while True:
            left_s = min(max(0.0, deadline - now_s()), protocol.MAX_WAIT_S)
            call = msg.PublishedCall(known, left_s, in_turn, serves_on, relay)
            reply = await self._call("Published", call, msg.PublishedReply, left_s)
            if reply.ref is not None or now_s() >= deadline:
                return reply

    async def ack(self, version: Version) -> None:
        """Acknowledge that the claim of version.step was trained at `version`."""
        await self._call("Ack", msg.VersionCall(version), msg.Done)

    async def durable(self, version: Version) -> None:
        """Report that a checkpoint of `version` is on disk, which contains every claim below version.step."""
        await self._call("Durable", msg.VersionCall(version), msg.Done)

    async def report(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append metrics rows to the run's metrics.jsonl."""
        lines = tuple(metrics.dumps(row).encode() for row in rows)
        if lines:
            reply = await self._call("Report", msg.ReportCall(lines, uuid.uuid4().hex), msg.Reported)
            if reply.profile is not None:
                self.on_profile(reply.profile)

    async def status(self) -> dict[str, Any]:
        """The run's status: counts, versions, waits."""
        reply = await self._call("Status", None, msg.StatusReply)
        if reply.profile is not None:
            self.on_profile(reply.profile)
        return json.loads(reply.body)

    async def close_run(self, reason: str) -> None:
        """End the run: lease and claim calls raise Closed from then on."""
        await self._call("Close", msg.CloseCall(reason), msg.Done)

    async def control(self, action: Literal["pause", "resume", "checkpoint"]) -> None:
        """Pause the run (no leases are granted; those that are held go on), resume it, or ask for a checkpoint.

        The learner writes the checkpoint after the next step that it claims. A restart of the store ends a pause.
        """
        await self._call("Control", msg.ControlCall(action), msg.Done)

    async def profile(self, order: msg.ProfileOrder) -> None:
        """Ask a role for a profile, or withdraw the order.

        StoreRefusal if the store knows no such role, or a profile of it is under way.
        """
        await self._call("Control", msg.ControlCall("profile", order), msg.Done)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._flushes.close()
        await self._puts.close()
        await self._raw.close()

    async def _call(self, method: str, message: Any, kind: type[T], held_s: float = 0.0) -> T:
        """The reply of type `kind`; the store may hold the call for `held_s`."""
        return wire.decode(await self._raw.call(method, wire.encode(message), held_s + self._call_s), kind)


async def joined(address: str, run_dir: Path | None, wait: Callable[[InfraError], None]) -> Joined:
    """The run at `address`, with the number of a new sampler. Credentials are as for `StoreClient.connect`.

    Calls `wait` with the reason if the store does not answer at once; InfraError if it does not within JOIN_S.
    """
    raw, hello = _raw_client(address, "sampler", "joining", None, JOIN_S, run_dir), msg.Hello(wire.PROTOCOL_VERSION, "")
    try:
        try:
            body = await raw.call("Join", wire.encode(hello), _CALL_S, patience_s=WELCOME_S)
        except InfraError as error:
            wait(error)
            body = await raw.call("Join", wire.encode(hello), _CALL_S)
        return wire.decode(body, Joined)
    finally:
        await raw.close()


def _raw_client(
    address: str | Path | Transport,
    role: str,
    name: str,
    token: str | None,
    patience_s: float,
    run_dir: Path | None,
    config_digest: str = "",
) -> RawClient:
    if isinstance(address, str) and not all(map(protocol.is_address, address.split(","))):
        raise ConfigError("store address", address, "is not HOST:PORT", "Write it as in 127.0.0.1:7077.")
    if run_dir is None and isinstance(address, Path):
        run_dir = address.parent
    return RawClient(
        msg.SERVICE,
        address,
        role=role,
        name=name,
        token=token or protocol.load(run_dir),
        patience_s=patience_s,
        max_message_bytes=MAX_MESSAGE_BYTES,
        config_digest=config_digest,
        tls=tls.load(run_dir),
    )


async def _until(ask, wait_s: float, not_yet: type[Exception]):
    """The reply of `ask(seconds to wait)`, repeated in waits that the store allows, until `wait_s` is over."""
    now_s = asyncio.get_running_loop().time
    deadline = now_s() + wait_s
    while True:
        left_s = min(max(0.0, deadline - now_s()), protocol.MAX_WAIT_S)
        try:
            return await ask(left_s)
        except not_yet as refusal:
            retry_s = getattr(refusal, "retry_after_s", 0.0)
            if now_s() + retry_s >= deadline or left_s < protocol.MAX_WAIT_S:
                raise


def _joined(parts: Sequence[msg.ClaimPart]) -> tuple[ClaimedGroup, ...]:
    """The groups, joined from the parts on the pages of a claim."""
    groups: dict[int, tuple[Any, list[Member]]] = {}
    for part in parts:
        members = groups.setdefault(part.group, (part.task, []))[1]
        members += [wire.decode(body, Member) for body in part.members]
    return tuple(ClaimedGroup(group, task, tuple(members)) for group, (task, members) in groups.items())


# --- Outbox: batches the members that finish while a put call is under way
#
# The call is most of the cost of a put. A sampler's members end in bursts, so under load a call carries many of them; a
# single member is sent at once. Belongs to one event loop.

MAX_CALL_BYTES = 2**20  # of members in one call, unless a single one has more

Waiting = tuple[bytes, asyncio.Future[str]]


class Puts:
    """Queue of members to store, sent in batches by `call`, which repeats a call while the store is down."""

    def __init__(self, call: Callable[[PutCall], Awaitable[PutReply]]) -> None:
        self._call = call
        self._waiting: deque[Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    async def put(self, body: bytes) -> str:
        """Store the encoded member `body`; the store's answer. Raises its refusal, or InfraError if it stays away.

        After a cancellation it may be stored or not.
        """
        if self._closed:
            raise InfraError("this client of the store is closed")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((body, answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all())
        return await answer

    async def close(self) -> None:
        """Cancel the call under way; unanswered members fail with InfraError."""
        self._closed = True
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _send_all(self) -> None:
        batch: list[Waiting] = []
        try:
            while batch := self._next():
                await self._send(batch)
        except asyncio.CancelledError:
            self._fail(batch, InfraError("this client of the store was closed before it was answered"))
        except Exception as error:  # noqa: BLE001 - each waiting put raises it
            self._fail(batch, error)

    def _next(self) -> list[Waiting]:
        """The next batch: the oldest members whose callers still wait, as many as fit into one call."""
        batch: list[Waiting] = []
        size = 0
        while self._waiting and len(batch) < MAX_PUTS:
            body, answer = self._waiting[0]
            if batch and size + len(body) > MAX_CALL_BYTES:
                break
            self._waiting.popleft()
            if not answer.done():
                batch.append((body, answer))
                size += len(body)
        return batch

    async def _send(self, batch: list[Waiting]) -> None:
        try:
            answers = (await self._call(PutCall(tuple(body for body, _ in batch)))).answers
        except StoreRefusal as refusal:
            if len(batch) == 1:
                _settle(batch[0][1], refusal)
                return
            for one in batch:  # one malformed member may have caused the refusal of the whole call
                await self._send([one])
            return
        if len(answers) != len(batch):
            raise InfraError(f"the store gave {len(answers)} answers for {len(batch)} members")
        for (_, waiting), answer in zip(batch, answers, strict=True):
            _settle(waiting, _described(answer))

    def _fail(self, batch: list[Waiting], error: Exception) -> None:
        for _, answer in [*batch, *self._waiting]:
            _settle(answer, error)
        self._waiting.clear()


def _described(answer: PutAnswer) -> str | StoreRefusal:
    return answer.result if answer.refusal is None else error_of(answer.refusal)


def _settle(waiting: asyncio.Future[str], answer: str | Exception) -> None:
    if waiting.done():  # its caller was cancelled
        return
    if isinstance(answer, Exception):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)
