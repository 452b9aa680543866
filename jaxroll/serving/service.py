"""Generation service of a sampler, and its client in actors: endpoints, their weight versions, routing.

`Generate` is held until its completion is ready. If the caller cancels it or dies, the request is aborted. It may be
repeated, here or at another sampler: the same key draws the same tokens at the same version. `Version` returns the
engine's weight version, and is held until it differs from the one that the caller knows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxroll import disk, wire
from jaxroll.config.derived import episode_tokens
from jaxroll.errors import DataError, InfraError, StaleClient, Unauthorized
from jaxroll.policy.routing import SamplerLoad, route, serves
from jaxroll.protocols import Completion, GenerationKey, LLMProxy, SamplingParams
from jaxroll.records import Version
from jaxroll.rollout.episode import GENERATION_LIMIT_S
from jaxroll.rpc import protocol, tls
from jaxroll.rpc.client import RawClient
from jaxroll.rpc.intake import Busy
from jaxroll.rpc.server import Caller, Method, RawServer

SERVICE = "jaxroll.Sampler"
CALLERS = frozenset({"sampler", "admin"})  # an actor has the right of a sampler
MAX_OPEN = 16_384  # requests of all actors at one sampler
_REPLY_MARGIN_S = 0.5  # a reply is sent this long before its caller's deadline


class GenerateCall(msgspec.Struct, frozen=True):
    """One request (`LLMProxy.generate`). Every token is drawn at version `floor` or at a later one."""

    prompt: np.ndarray  # int32 [P]
    key: GenerationKey
    params: SamplingParams
    keep: bool
    floor: Version


class GenerateReply(msgspec.Struct, frozen=True):
    """The completion of the engine; or the reason why no sampler can serve this request."""

    completion: Completion | None
    error: str = ""


class VersionCall(msgspec.Struct, frozen=True):
    """Wait until the engine's version differs from `known`."""

    known: Version | None
    wait_s: float


class VersionReply(msgspec.Struct, frozen=True):
    """New requests are sampled at this version or a later one; None before the first weights."""

    version: Version | None


class WeightVersion(Protocol):
    """The weight version of an engine: new requests are sampled at `version` or a later one."""

    version: Version | None

    async def other_than(self, known: Version | None, wait_s: float) -> Version | None:
        """The version, as soon as it differs from `known` or after `wait_s`."""
        ...


class RunService:
    """Answers the actors of one run. Belongs to one event loop."""

    def __init__(self, proxy: LLMProxy, weights: WeightVersion, *, run_id: str, config_digest: str) -> None:
        self._proxy, self._weights = proxy, weights
        self._run_id, self._config_digest = run_id, config_digest
        self.open = self.served = self.aborted = 0
        self._leaving = asyncio.Event()

    def methods(self) -> dict[str, Method]:
        """Every method with its allowed callers."""
        return {"Generate": Method(self._generate, CALLERS), "Version": Method(self._version, CALLERS, held=True)}

    async def drain(self) -> None:
        """Take no further requests, and return when none is open. Actors then use other samplers."""
        self._leaving.set()
        while self.open:
            await asyncio.sleep(DRAIN_POLL_S)

    async def _generate(self, caller: Caller, body: bytes) -> bytes:
        self._check(caller)
        self._check_stays()
        call = wire.decode(body, GenerateCall)
        version = self._weights.version
        if version is None or version < call.floor:
            raise InfraError(f"the weights here are {version}, the request asks for {call.floor} or later")
        if self.open >= MAX_OPEN:
            raise Busy(f"{self.open} requests are held already")
        self.open += 1
        completion = None
        try:
            completion = await self._proxy.generate(call.prompt, call.key, call.params, keep=call.keep)
        except DataError as error:
            return wire.encode(GenerateReply(None, str(error)))
        finally:
            self.open -= 1
            self.served += completion is not None
        return wire.encode(GenerateReply(completion))

    async def _version(self, caller: Caller, body: bytes) -> bytes:
        self._check(caller)
        call = wire.decode(body, VersionCall)
        wait_s = max(0.0, min(call.wait_s, protocol.MAX_WAIT_S, caller.deadline_s - _REPLY_MARGIN_S))
        found = asyncio.ensure_future(self._weights.other_than(call.known, wait_s))
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait([found, leaving], return_when=asyncio.FIRST_COMPLETED)
            self._check_stays()
            return wire.encode(VersionReply(found.result()))
        finally:
            found.cancel()
            leaving.cancel()

    def _check_stays(self) -> None:
        if self._leaving.is_set():
            raise InfraError("this sampler leaves the run")

    def _check(self, caller: Caller) -> None:
        """Raise StaleClient or Unauthorized for a caller of another run or config."""
        if caller.run_id != self._run_id:
            raise StaleClient(f"this sampler is of run {self._run_id}, the caller of {caller.run_id[:64] or 'none'}")
        if caller.config_digest != self._config_digest:
            raise Unauthorized(
                "the sampler and the caller have different configs: start both from the same config file"
            )


# --- client, for actors
#
# A conversation is an `LLMProxy` that stays with one sampler, whose KV cache has its earlier turns. If that sampler
# dies, the request is repeated at another one, or at the same one after its restart: the episode continues, because key
# and prompt determine the tokens. Belongs to one event loop.

DRAIN_POLL_S = 0.1
WAIT_S, CALL_S = 10.0, 10.0  # of one Version call: the longest hold, and the time for its reply
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 1.0  # between two attempts to reach a sampler
_REPEATABLE = (InfraError, StaleClient, Unauthorized)  # errors that another sampler, or this one later, may not raise


class _Remote:
    """A sampler, its connection, and its state at the last reply."""

    def __init__(self, name: str, raw: RawClient, pool: str) -> None:
        self.name, self.raw, self.pool = name, raw, pool
        self.version: Version | None = None  # None: unreachable, or without weights
        self.conversations = 0


class Samplers:
    """The samplers of a run, by name. None of them is used before `follow` runs.

    `pools` has the pool of each ('' or absent: none), `room` the number of conversations from which on they queue.
    """

    def __init__(
        self,
        clients: Mapping[str, RawClient],
        replicate: str,
        report: Callable[[str], object],
        pools: Mapping[str, str] = MappingProxyType({}),
        room: float = math.inf,
    ) -> None:
        self._remotes = {name: _Remote(name, raw, pools.get(name, "")) for name, raw in clients.items()}
        self._replicate, self._report, self.room = replicate, report, room
        self._changed, self._membership = asyncio.Event(), asyncio.Event()
        self._gone: list[RawClient] = []  # of removed samplers, which may still answer
        self.repeated = 0  # requests that were made again
        self.elsewhere = 0  # conversations that went to another pool than their own

    async def follow(self) -> None:
        """Follow the version of every sampler, of later ones too, forever."""
        following: dict[_Remote, asyncio.Future[None]] = {}
        try:
            while True:
                for gone in following.keys() - self._remotes.values():
                    following.pop(gone).cancel()
                for new in self._remotes.values() - following.keys():
                    following[new] = asyncio.ensure_future(self._follow(new))
                self._membership.clear()
                change = asyncio.ensure_future(self._membership.wait())
                try:
                    done, _ = await asyncio.wait([*following.values(), change], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
                for job in done:
                    job.result()
        finally:
            for job in following.values():
                job.cancel()
            await asyncio.gather(*following.values(), return_exceptions=True)

    @property
    def names(self) -> set[str]:
        """The names of the samplers."""
        return set(self._remotes)

    def is_reachable(self, name: str) -> bool:
        """True if the sampler has weights and answers."""
        return self._remotes[name].version is not None

    def add(self, name: str, raw: RawClient) -> None:
        """Use a further sampler."""
        self._remotes[name] = _Remote(name, raw, "")
        self._membership.set()

    def set_pools(self, pools: Mapping[str, str]) -> None:
        """Note the pools of samplers by name."""
        for name in pools.keys() & self._remotes.keys():
            self._remotes[name].pool = pools[name]

    def remove(self, name: str) -> None:
        """Route no further conversation to this sampler. Requests under way go on."""
        gone = self._remotes.pop(name)
        self._gone.append(gone.raw)
        self._set_version(gone, None)
        self._membership.set()

    async def close(self) -> None:
        """Close the connections."""
        for raw in (*self._gone, *(remote.raw for remote in self._remotes.values())):
            await raw.close()

    async def newer_than(self, known: Version | None) -> Version:
        """The newest version of all samplers, as soon as it is newer than `known`."""
        while True:
            found = [r.version for r in self._remotes.values() if r.version is not None]
            if found and (known is None or max(found) > known):
                return max(found)
            await self._changed.wait()

    async def has(self, floor: Version) -> None:
        """Return when a sampler has `floor` or a later version."""
        while not self._at(floor):
            await self._changed.wait()

    def group(self, floor: Version, pool: str = "") -> GroupConversations:
        """Conversations for the members of one group, sampled at `floor` or a later version, mostly in `pool`."""
        return GroupConversations(self, floor, pool)

    def conversations(self) -> dict[str, int]:
        """Number of conversations of each sampler."""
        return {remote.name: remote.conversations for remote in self._remotes.values()}

    def _at(self, floor: Version) -> dict[str, SamplerLoad]:
        remotes = self._remotes.values()
        usable = (r for r in remotes if r.version is not None and r.version >= floor)
        return {r.name: SamplerLoad(r.conversations, self.room, r.pool) for r in usable}

    async def route(self, floor: Version, last: str, pool: str) -> _Remote:
        """The sampler for one more conversation of a group, after that of `last`; waits until there is one."""
        await self.has(floor)
        found = self._remotes[route(self._at(floor), last, self._replicate, pool)]
        self.elsewhere += not serves(found.pool, pool)
        return found

    def _set_version(self, remote: _Remote, version: Version | None) -> None:
        if version == remote.version:
            return
        remote.version = version
        self._changed.set()  # wakes all current waiters; later ones wait for the next change
        self._changed = asyncio.Event()

    async def _follow(self, remote: _Remote) -> None:
        pause_s, reported = RETRY_FIRST_S, ""
        while True:
            call = wire.encode(VersionCall(remote.version, WAIT_S))
            try:
                body = await remote.raw.call("Version", call, WAIT_S + CALL_S, patience_s=0.0)
                self._set_version(remote, wire.decode(body, VersionReply).version)
                pause_s, reported = RETRY_FIRST_S, ""
            except (*_REPEATABLE, msgspec.MsgspecError) as error:
                if type(error).__name__ != reported:
                    reported = type(error).__name__
                    self._report(f"{remote.name} cannot be reached: {reported}: {error}")
                self._set_version(remote, None)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)


class GroupConversations:
    """The conversations of one group's members, and the sampler that the last one went to."""

    def __init__(self, samplers: Samplers, floor: Version, pool: str = "") -> None:
        self.samplers, self.floor, self.pool = samplers, floor, pool
        self.last = ""  # the sampler of its last member

    def conversation(self) -> Conversation:
        """One member's conversation. Use it as a context manager: it counts at its sampler until the end."""
        return Conversation(self)


class Conversation:
    """An `LLMProxy` over one of the samplers, the same one while it is reachable."""

    def __init__(self, group: GroupConversations) -> None:
        self._group, self._samplers = group, group.samplers
        self._remote: _Remote | None = None

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._leave()

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        """The completion of `prompt`; cancelling the call aborts the request in its sampler.

        Waits while no sampler is reachable. DataError if no sampler can serve the request.
        """
        call = wire.encode(GenerateCall(np.asarray(prompt, np.int32), key, params, keep, self._group.floor))
        failures = 0
        while True:
            remote = self._remote or await self._choose_sampler()
            try:
                body = await remote.raw.call("Generate", call, GENERATION_LIMIT_S, patience_s=0.0)
                reply = wire.decode(body, GenerateReply)
                break
            except (*_REPEATABLE, msgspec.MsgspecError):
                self._leave()
                self._samplers.repeated += 1
                await asyncio.sleep(min(RETRY_FIRST_S * 2 ** min(failures, 4), RETRY_MAX_S))  # 2**1024 overflows
                failures += 1
        if reply.completion is None:
            raise DataError(reply.error)
        return reply.completion

    async def _choose_sampler(self) -> _Remote:
        group = self._group
        self._remote = remote = await self._samplers.route(group.floor, group.last, group.pool)
        group.last = remote.name
        remote.conversations += 1
        return remote

    def _leave(self) -> None:
        if self._remote is not None:
            self._remote.conversations -= 1
            self._remote = None


# --- Generation service of a sampler's engine, for actors

STATUS_EVERY_S = 2.0  # between two checks if the run is closed
_GRACE_S = 0.5
_TOKEN_BYTES = 4  # of a prompt on the wire


class ActorService:
    """Generation service for actors over the engine of `session`, an `EngineSession`."""

    def __init__(self, session: Any) -> None:
        self._session, self._args, self._config = session, session.args, session.config
        self._service = RunService(
            session.proxy,
            session.parts.follower,
            run_id=session.store.welcome.run_id,
            config_digest=session.args.config_digest,
        )

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """The tasks to run concurrently until the run is closed."""
        return (self._serve(), self._until_closed(), self._drained())

    def counts(self) -> dict[str, int]:
        """Requests of actors: open now, and answered since the start."""
        return {"requests_in_flight": self._service.open, "requests_served": self._service.served}

    async def give_back(self) -> None:
        """Do nothing: actors hold the leases."""

    async def _serve(self) -> None:
        args, kept = self._args, self._config.store
        server = RawServer(
            SERVICE, self._service.methods(), secret=protocol.load_secret(args.run_dir),
            max_message_bytes=kept.max_message_mb * 2**20, tls=tls.load(args.run_dir), mutual_tls=kept.mutual_tls,
            calls_per_connection=protocol.GENERATIONS_PER_CONNECTION,
            held_bytes=MAX_OPEN * _TOKEN_BYTES * episode_tokens(self._config),
        )  # fmt: skip
        port = server.bind(args.host, args.port, insecure=args.insecure)
        await server.start()
        try:
            address = protocol.address(args.host, port)
            disk.replace_text(args.paths.sampler_address(self._session.role), address + "\n")
            self._session.parts.follower.serves_on = address
            self._session.progress(f"serves actors on {address}")
            await asyncio.Event().wait()
        finally:
            await server.stop(_GRACE_S)

    async def _drained(self) -> None:
        await self._session.stopping.wait()
        await self._service.drain()

    async def _until_closed(self) -> None:
        while not (await self._session.store.status())["closed"]:
            await asyncio.sleep(STATUS_EVERY_S)
