"""Sampler role: leases prompt groups, generates their rollouts and stores the finished ones.

Threads: the main thread runs JAX (in a colocated run, a thread of its own); this module runs on the asyncio loop thread
(`jaxroll.roles.session`).
Tasks: follow new weights; the tasks of `Members` (request leases, receive cancellations, renew leases); report metrics
every second.
Waits for: leases from the store, and the learner's first weights before its first token.
Stops: when the run is closed or on SIGTERM, after returning unfinished leases.

With `placement.actors` > 0 it leases nothing and only serves generation requests of actors (`jaxroll.roles.actor`);
RUN/sampler-0.addr holds the address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec

from jaxroll.config import RoleArgs
from jaxroll.config.derived import flush_tokens, one_version, renewal_s, sampler_members
from jaxroll.errors import (
    Closed,
    Conflict,
    Fenced,
    InfraError,
    NoCredit,
    StaleClient,
    StoreRefusal,
    Unauthorized,
    described,
)
from jaxroll.loop_thread import until_one_ends
from jaxroll.records import Failed, Grant, Member, Partial, Version
from jaxroll.roles import session as sessions
from jaxroll.roles.session import Session
from jaxroll.roles.weights import RoleLog, SwapGate, suspended
from jaxroll.rollout.episode import Transcript, sampling_params
from jaxroll.serving.service import ActorService
from jaxroll.store.flushes import Stream

# --- Leased members of a sampler or an actor: requested while there is room, generated, stored, renewed, returned
#
# Threads: everything runs on the asyncio loop thread of the role. Tasks: request leases while there is room; receive
# cancelled leases and abort their members; renew leases; one task per member, which runs its episode and stores the
# result. A member counts against the capacity until its episode ends: the next one is leased while the result is on its
# way to the store. Waits for: leases, room, and the role's first weights. Stops: when its tasks are cancelled;
# `give_back` then returns unfinished leases.

LEASE_WAIT_S, ENDED_WAIT_S = 5.0, 10.0
LAST_PUTS_S = 2.0  # for results on their way to the store at the end; then their leases are returned as well
GATHER_S = 0.01  # room for less than a group waits this long for more: fewer lease calls when members end together
MAX_ERROR_CHARS = 1000
Key = tuple[int, int, int]  # group, member, attempt
# (member, attempt, transcript to fill) → the member, finished or failed
MemberPlayer = Callable[[int, int, Transcript], Awaitable[Member]]


class Members:
    """The members in flight and the tasks around them.

    Up to `capacity` members run, and up to twice as many are open with those that wait to be stored: while the store is
    slow to accept results no more leases are requested.
    `version` returns, once there are weights, the version to request leases with; every token of the granted members is
    sampled at it or at a later one. `begin` returns the function that runs the members of a grant.
    At most `flush_tokens` of a member are not with the store (0: no flushes); `gather` requests the rest of the engine.
    Members begin, and go on until their episodes end, while `gate` lets no new weights in.
    """

    def __init__(
        self,
        session: Session,
        capacity: int,
        version: Callable[[], Awaitable[Version]],
        begin: Callable[[Grant], MemberPlayer],
        flush_tokens: int = 0,
        gather: Callable[[], Awaitable[object]] | None = None,
        gate: SwapGate | None = None,
    ) -> None:
        self.session, self.config, self.store = session, session.config, session.store
        self._flush_tokens, self._gather, self._gate = flush_tokens, gather, gate or SwapGate()
        self.capacity, self._version, self._begin = capacity, version, begin
        self._group = session.config.schedule.members_per_group
        self.open: dict[Key, asyncio.Task] = {}  # leased and not put yet
        self.playing: dict[Key, Transcript] = {}  # the open ones whose episode has not ended
        self._begun: set[Key] = set()  # those of them that weights wait for
        self.moved = self.repacks = self.tokens_moved = 0  # members given to other samplers, how often, their tokens
        self.ended: set[Key] = set()  # cancelled before the reply that grants their lease arrived
        self.aborted = self.tokens_let_go = self.refused = self.lost = 0
        self._cancelled: set[Key] = set()  # by this object
        self.works = asyncio.Event()  # see `rest`
        self.works.set()
        self._failure: BaseException | None = None  # unexpected error of a member's task, which ends the role
        self._failed = asyncio.Event()
        self.room = asyncio.Event()
        self._plenty = False  # the last lease call was granted as many members as it requested

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """The tasks to run concurrently, forever."""
        repack = (self._repack(self.config.schedule.repack_s),) if self._flush_tokens else ()
        return (self._lease(), self._abort_cancelled(), self._renew(), self._raise_failure(), self._drained(), *repack)

    def counts(self) -> dict[str, int]:
        """Members in flight, and those that wait to be stored; since the start: aborted members and the tokens of their
        complete answers, members that the store rejected as malformed, members lost here (not stored, so the store
        leases them again), members given to other samplers, moves, and tokens of answers that go on elsewhere."""
        unput = len(self.open) - len(self.playing)
        return {
            "members_in_flight": len(self.open), "members_unstored": unput,
            "members_aborted": self.aborted, "tokens_aborted_done": self.tokens_let_go,
            "puts_refused": self.refused, "members_lost": self.lost, "members_moved": self.moved,
            "tokens_moved": self.tokens_moved, "repacks": self.repacks,
        }  # fmt: skip

    @property
    def _in_parts(self) -> bool:
        """True if leases for less than a group may be requested.

        The rest of it may then go to another holder, so a group that should stay together waits for room instead,
        unless there is no other holder. Free capacity of an actor is not an idle slot.
        """
        actors, placement = self.config.placement.actors, self.config.schedule.group_placement
        return self.store.holders <= 1 or placement == "spread" or (placement == "auto" and not actors)

    async def _drained(self) -> None:
        """Return when the role is to stop and no member is open."""
        await self.session.stopping.wait()
        while self.open:
            self.room.clear()
            await self.room.wait()

    async def _lease(self) -> None:
        while not self.session.stopping.is_set():
            await self.works.wait()
            free = await self._free()
            grants = await self._grants(free) if self.works.is_set() else []
            if self.works.is_set() and not self.session.stopping.is_set():
                self._plenty = sum(len(grant.members) for grant in grants) == free
                self._start_all(grants)
            elif unplayed := [(one.group, *member) for one in grants for member in one.members]:
                await self.store.release(unplayed, away=not self.works.is_set())
            self.ended.clear()  # later grants are new attempts
        await asyncio.Event().wait()  # it leases no more

    async def vacate(self, generating: Callable[[], Collection[tuple[int, int]]]) -> bool:
        """Return the leases of members (group, member) that generate, with what these have sampled; request none until
        `works` is set. True if others go on: they need no device now, or would begin again elsewhere.
        """
        self.works.clear()
        self.room.set()
        if self._gather is not None:
            with contextlib.suppress(InfraError, TimeoutError):
                async with asyncio.timeout(LAST_PUTS_S):
                    await self._gather()
                    await self.store.flushed()
        now = generating()
        keys = [key for key, one in self.playing.items() if key[:2] in now and _sent(one) >= one.sampled]
        stays = len(self.playing) > len(keys)
        await self._release(keys, away=True)
        for _ in range(2):  # the engine learns of them
            await asyncio.sleep(0)
        return stays

    def _start_all(self, grants: Sequence[Grant], *, joins: bool = False) -> None:
        for grant in grants:
            play, resumed = self._begin(grant), dict(grant.resumed)
            for member, attempt in grant.members:
                if (key := (grant.group, member, attempt)) not in self.ended:
                    self._start(key, play, joins, resumes=member in resumed)

    async def _repack(self, every_s: float) -> None:
        """While weights wait for members, report these, and move them or take others as the store plans."""
        while every_s:
            await self._gate.drains()
            version, begun = await self._version(), {key: self.playing[key] for key in self._begun}
            tokens = sum(one.length + (one.stream.unended() if one.stream else 0) for one in begun.values())
            with contextlib.suppress(StoreRefusal, InfraError):
                stops = self.session.stopping.is_set
                reply = await self.store.repack(version, len(begun), tokens, every_s, leaves=stops())
                if reply.to:
                    await self._give(reply.to, begun.keys())
                elif reply.coming and not stops():  # otherwise any sampler may lease them soon
                    async with self._gate.member(joins=True):  # weights wait until these members have begun
                        grants = await self.store.lease(await self._version(), self.capacity, reserved=True)
                        self._start_all(grants, joins=True)
        await asyncio.Event().wait()

    async def _give(self, to: str, reported: Collection[Key]) -> None:
        """Give the reported members that go on, and what they have sampled, to another sampler."""
        if self._gather is not None:
            await self._gather()
        await self.store.flushed()
        keys = [key for key in reported if key in self._begun]  # not those that began since, with newer weights
        await self._release(keys, to)
        self.repacks += 1

    async def _release(self, keys: Sequence[Key], to: str = "", *, away: bool = False) -> None:
        await self.store.release(keys, to, away=away)
        for key in self.playing.keys() & keys:  # not those that ended meanwhile: their puts are taken
            if not self.open[key].cancelling():
                self._move(key)
        self.moved += len(keys)

    async def _free(self) -> int:
        """The number of members to request: those of a group or more, or fewer while the store has plenty of work.

        While work is scarce a call for a few members would wait in the store, and room that becomes free meanwhile
        would wait for the next call. So a call for less than a group is made only if the call before was granted all
        that it requested.
        """
        now_s, until = asyncio.get_running_loop().time, 0.0
        while (free := self._room_left()) < self._group and self.works.is_set():
            self.room.clear()
            if not (free and self._in_parts and self._plenty):
                await self.room.wait()
                continue
            until = until or now_s() + GATHER_S
            if (left := until - now_s()) <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.room.wait()
        return free

    def _room_left(self) -> int:
        """The number of members that have room; none while members that moved here fill more than the capacity."""
        return max(0, min(self.capacity - len(self.playing), 2 * self.capacity - len(self.open)))

    async def _grants(self, free: int) -> list[Grant]:
        version = await self._version()
        try:
            return await self.store.lease(version, free, LEASE_WAIT_S)
        except NoCredit as refusal:
            await asyncio.sleep(min(refusal.retry_after_s, 1.0))
        except StaleClient as refusal:
            self.session.progress(f"lease refused: {refusal}")
            await asyncio.sleep(0.2)
        return []

    async def _partial(self, key: Key) -> Sequence[Partial]:
        """The flushed answers of a member; none if they cannot be read, so that it starts again."""
        try:
            return await self.store.partial(key)
        except (StoreRefusal, InfraError):
            return ()

    def _start(self, key: Key, play: MemberPlayer, joins: bool = False, *, resumes: bool = False) -> None:
        self.playing[key] = Transcript()
        if joins:  # its task begins only after the next report
            self._begun.add(key)
        self.open[key] = task = asyncio.ensure_future(self._produce(key, play, joins, resumes))
        task.add_done_callback(lambda task: self._over(key, task))  # also if it is cancelled before it starts

    def _over(self, key: Key, task: asyncio.Task[None]) -> None:
        self.open.pop(key, None)
        self._free_capacity(key)
        if self._flush_tokens:
            self.store.end_stream(key)
        if task.cancelled():
            if key not in self._cancelled:  # by foreign code that cancels all tasks of the loop
                self._report_lost(key, "its task was cancelled by other code")
            self._cancelled.discard(key)
        elif isinstance(error := task.exception(), InfraError):
            self._report_lost(key, described(error))
        elif error is not None:
            self._failure = error
            self._failed.set()

    def _report_lost(self, key: Key, why: str) -> None:
        """Count a member that was not stored. Its lease expires, and the store grants it to another sampler."""
        self.lost += 1
        self.session.progress(f"member {key} was not stored: {why}")

    async def _raise_failure(self) -> None:
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _free_capacity(self, key: Key) -> None:
        self.playing.pop(key, None)
        self._begun.discard(key)
        self.room.set()

    async def _produce(self, key: Key, play: MemberPlayer, joins: bool, resumes: bool) -> None:
        transcript = self.playing[key]
        try:
            async with self._gate.member(joins=joins):
                self._begun.add(key)
                if self._flush_tokens:
                    # Each member reads its own: its lease is renewed meanwhile, however slowly the store answers.
                    before = await self._continued(await self._partial(key) if resumes else ())
                    transcript.stream = self.store.stream(key, self._flush_tokens, before)
                member = await play(key[1], key[2], transcript)
            self._free_capacity(key)
            if await self._put(member) == "SURPLUS":
                self._count_aborted(transcript)
        except Closed:
            self.session.request_stop()
        except (Fenced, Conflict) as refusal:  # another holder has this member now, or it is stored already
            self.session.progress(f"put {key}: {refusal}")

    async def _continued(self, before: Sequence[Partial]) -> Sequence[Partial]:
        """`before`, or none if the member must have one version and the weights are others by now."""
        version = await self._version()
        is_mixed = any(run.version != version for one in before for run in one.versions)
        return () if is_mixed and one_version(self.config) else before

    async def _put(self, member: Member) -> str:
        """Store the member; the store's answer. A member that the store rejects is stored as a failure with the store's
        reason: otherwise its lease would expire and be granted again, without end.

        StaleClient is about the versions that the engine recorded (INFRA); any other refusal, and a member that cannot
        be encoded, is about the environment's output (DATA).
        """
        try:
            return await self.store.put(member)
        except (Closed, Fenced, Conflict, Unauthorized):
            raise
        except StaleClient as refusal:
            kind, why = "INFRA", described(refusal)
        except (StoreRefusal, TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
            kind, why = "DATA", described(error)
        self.refused += 1
        key = (member.group, member.member, member.attempt)
        self.session.progress(f"the store rejects member {key}: {why}")
        failed = Failed(kind, f"the store refuses this member: {why}"[:MAX_ERROR_CHARS])
        try:
            return await self.store.put(msgspec.structs.replace(member, outcome=failed))
        except StaleClient as refusal:  # the store does not know the member's group
            raise InfraError(str(refusal)) from refusal

    async def _renew(self) -> None:
        every_s = renewal_s(self.config)
        while True:
            await asyncio.sleep(every_s)
            for key in await self.store.renew(list(self.open)):
                self._abort(key)

    async def _abort_cancelled(self) -> None:
        while True:
            for key in await self.store.ended(ENDED_WAIT_S):
                self._abort(key)

    def _abort(self, key: Key) -> None:
        """Abort the member of a cancelled lease."""
        if (lost := self.open.get(key)) is None:
            self.ended.add(key)
        elif key in self.playing and not lost.cancelling():
            # For one on its way to the store, the reply to its put decides.
            self._cancel(key)
            self._count_aborted(self.playing[key])

    def _move(self, key: Key) -> None:
        """Cancel a member that goes on elsewhere."""
        self.tokens_moved += max(0, _sent(one := self.playing[key]) - one.sampled)
        self._cancel(key)

    def _cancel(self, key: Key) -> None:
        if (task := self.open.get(key)) is not None:
            self._cancelled.add(key)
            task.cancel()

    def _count_aborted(self, transcript: Transcript) -> None:
        """Count an aborted member and the tokens of its complete answers; the engine counts the others."""
        self.aborted += 1
        self.tokens_let_go += transcript.sampled

    async def give_back(self) -> None:
        """Abort unfinished members, wait `LAST_PUTS_S` for finished ones to be stored, and return the other leases."""
        if self._gather is not None and self.playing:
            with contextlib.suppress(InfraError, TimeoutError):
                async with asyncio.timeout(LAST_PUTS_S):
                    await self._gather()
                    await self.store.flushed()
        held = dict(self.open)
        puts = {key: task for key, task in held.items() if key not in self.playing}
        for key in self.playing:
            self._move(key)
        if puts:
            await asyncio.wait(puts.values(), timeout=LAST_PUTS_S)
        for key in puts:
            self._cancel(key)
        await asyncio.gather(*held.values(), return_exceptions=True)
        if unput := [key for key, task in held.items() if task.cancelled() or task.exception()]:
            with contextlib.suppress(Closed):
                await self.store.release(unput)


def _sent(transcript: Transcript) -> int:
    """The sampled tokens of a member that the store has."""
    return transcript.stream.sent if isinstance(transcript.stream, Stream) else 0


# --- The role

REPORT_EVERY_S = 1.0


def main(args: RoleArgs) -> int:
    """Sample until the run is closed; the exit code. On several hosts process 0 does so, and the others follow it."""
    if args.hosts("sampler").count == 1:
        return sessions.main(role_spec(args), args)
    process = None if args.process else sessions.EngineProcess(role_spec(args), args)  # before JAX is loaded
    from jaxroll.roles import build

    if process is None:
        return build.follow(args)
    interrupted = sessions.install_signal_handlers(process.open())
    return build.lead(args, process.run, process.close, interrupted)


def compile_programs(args: RoleArgs, progress: RoleLog) -> None:
    """Compile a sampler's programs into the compilation cache."""
    sessions.compile_engine(role_spec(args), args.config, progress)


def role_spec(args: RoleArgs) -> sessions.RoleSpec:
    """The sampler `args.index` as a role with an engine."""
    config = args.config
    return sessions.RoleSpec(
        f"sampler-{args.index}",
        lambda session: SamplerLoops(session).run(),
        mesh=config.sampler.mesh,
        slots=config.sampler.slots,
        weight_swap=config.schedule.weight_swap,
    )


class RolloutPlay:
    """Members that this process leases and generates."""

    def __init__(self, session: sessions.EngineSession) -> None:
        self._session = session
        self._manager = session.manager(sampling_params(session.config, session.parts.tokenizer))
        tokens = flush_tokens(session.config)
        gather = session.proxy.flush if tokens else None
        members = sampler_members(session.config)
        gate = session.parts.follower.gate if session.config.schedule.weight_swap == "trajectory" else None
        self._members = Members(session, members, self._version, self._begin, tokens, gather, gate)
        self.give_back = self._members.give_back

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """The tasks to run concurrently, forever."""
        shares = sessions.share_devices(self._session, self._members) if self._session.seeding else None
        return (*self._members.loops(), *((shares,) if shares else ()))

    def counts(self) -> dict[str, Any]:
        """Counts of members and episodes for the `stats` rows."""
        return self._members.counts() | sessions.episode_counts(self._manager, self._session.executors)

    async def _version(self) -> Version:
        follower = self._session.parts.follower
        await follower.first.wait()
        assert follower.version is not None, "`first` is set once there are weights"
        return follower.version

    def _begin(self, grant: Grant) -> MemberPlayer:
        play = self._manager.run_member
        return lambda member, attempt, transcript: play(grant, member, attempt, transcript=transcript)


class SamplerLoops:
    """The engine, its weights, the source of its requests, and the tasks around them."""

    def __init__(self, session: sessions.EngineSession) -> None:
        self.session, self.store = session, session.store
        self.engine = session.parts.engine
        self.requests = ActorService(session) if session.config.placement.actors else RolloutPlay(session)
        self._reported = (session.loop.time(), self.engine.stats())
        if session.config.schedule.mode == "async_controller":
            session.parts.follower.during_load = lambda: suspended(session.proxy)

    async def run(self) -> None:
        """Run all tasks until one of them ends, then return unfinished leases."""
        session, sampler = self.session, self.session.config.sampler
        follow, front = session.parts.follower.follow(self.store), ()
        if sampler.http_port >= 0:
            from jaxroll.roles import build

            own = session.parts, session.proxy, session.progress
            front = (build.serve_http(session.args, sampler.slots, *own),)
        try:
            await until_one_ends((follow, *self.requests.loops(), self._report(), *front))
        finally:
            self._add_rows()  # first: returned leases must not count as aborted members
            await self.requests.give_back()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._add_rows()

    def _add_rows(self) -> None:
        """Append metric rows for the interval since the last report."""
        (last_t, last), (now_t, now) = self._reported, (self.session.loop.time(), self.engine.stats())
        self._reported = (now_t, now)
        self.session.engine_rows(max(now_t - last_t, 1e-9), last, now, self.requests.counts())
