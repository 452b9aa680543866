"""The members that a sampler or an actor holds: leased while there is room, played, put, renewed, given back.

Everything runs on one event loop, every member as a task of its own, which plays the episode and puts it. A member has
its place while it is played: the next one is leased while it is on its way to the store. The loops:

- *lease* asks the store for work while there is room;
- *ended* hears of leases that are not needed any more, and aborts their members at once;
- *renew* keeps the leases alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from jaxroll.env_checks import described
from jaxroll.envs.executors.choice import Executors
from jaxroll.errors import Closed, Conflict, Fenced, InfraError, NoCredit, StaleClient, StoreRefusal, Unauthorized
from jaxroll.protocols import SamplingParams, Tokenizer
from jaxroll.records import Failed, Grant, Member, Version
from jaxroll.roles.session import Session
from jaxroll.rollout.episode import Transcript
from jaxroll.rollout.manager import RolloutManager

LEASE_WAIT_S, ENDED_WAIT_S = 5.0, 10.0
LAST_PUTS_S = 2.0  # for what is on its way when all ends; then its lease is given back like any other
GATHER_S = 0.01  # how long room for a part of a group waits for more: a call less for each member that ends with it
MAX_ERROR_CHARS = 1000
Key = tuple[int, int, int]  # group, member, attempt
# (member, attempt, where to write what is said) → the member, finished or failed
MemberPlayer = Callable[[int, int, Transcript], Awaitable[Member]]


class Members:
    """The members in flight and the loops around them.

    Up to `capacity` are being played, and with those that wait to be put there are up to twice as many: a store that is
    slow to take members is asked for no more.

    `version` says, once there are weights, which version a lease is asked for with; every token of what is granted is
    drawn at it or at a later one. `begin` gives what plays the members of a grant.
    """

    def __init__(
        self,
        session: Session,
        capacity: int,
        version: Callable[[], Awaitable[Version]],
        begin: Callable[[Grant], MemberPlayer],
    ) -> None:
        self.session, self.config, self.store = session, session.config, session.store
        self.capacity, self._version, self._begin = capacity, version, begin
        self.open: dict[Key, asyncio.Task] = {}  # leased and not put yet
        self.playing: dict[Key, Transcript] = {}  # those of them whose episode has not ended, and what is said in it
        self.ended: set[Key] = set()  # not needed any more, and not heard of yet: their lease is still on its way
        self.aborted = self.tokens_let_go = self.refused = self.lost = 0
        self._cancelled: set[Key] = set()  # by this object
        self._failure: BaseException | None = None  # of a member's task: a defect, which ends the role
        self._failed = asyncio.Event()
        self.room = asyncio.Event()
        # Whether parts of a group are asked for. Beside other samplers the rest of it may go to one of them: what is to
        # stay together waits for room instead. An actor's free place is no idle place of a sampler.
        actors, replicate = self.config.placement.actors, self.config.schedule.replicate
        alone = max(self.config.sampler.count, actors) == 1
        self._in_parts = alone or replicate == "spread" or (replicate == "auto" and not actors)
        self._plenty = False  # the last lease brought all that it asked for

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What is to run forever, side by side."""
        return (self._lease(), self._end_early(), self._renew(), self._raise_failure())

    def counts(self) -> dict[str, int]:
        """Members in flight, those of them that are played and not put yet; since the start those let go, and the
        tokens of the whole answers that they had; members that the store refused as malformed, and those that were lost
        here: not put, so that the store leases them again."""
        unput = len(self.open) - len(self.playing)
        return {
            "open": len(self.open), "unput": unput,
            "members_aborted": self.aborted, "tokens_let_go": self.tokens_let_go,
            "puts_refused": self.refused, "members_lost": self.lost,
        }  # fmt: skip

    async def _lease(self) -> None:
        while True:
            free = await self._free()
            grants = await self._grants(free)
            self._plenty = sum(len(grant.members) for grant in grants) == free
            for grant in grants:
                play = self._begin(grant)
                for member, attempt in grant.members:
                    if (key := (grant.group, member, attempt)) not in self.ended:
                        self._start(key, play)
            self.ended.clear()  # what is granted from now on cannot have ended before

    async def _free(self) -> int:
        """For how many members there is room: for those of a group or more, or for fewer while work is plenty.

        Where it is not, a call for a few would wait for work, and what becomes free meanwhile for another call. That
        one follows at once if all that the first asked for was there: what is left needs room for no group then.
        """
        until = 0.0
        while (free := self._places()) < self.config.schedule.members_per_group:
            self.room.clear()
            if not (free and self._in_parts and self._plenty):
                await self.room.wait()
                continue
            until = until or time.monotonic() + GATHER_S
            if (left := until - time.monotonic()) <= 0:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.room.wait(), left)
        return free

    def _places(self) -> int:
        return min(self.capacity - len(self.playing), 2 * self.capacity - len(self.open))

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

    def _start(self, key: Key, play: MemberPlayer) -> None:
        self.playing[key] = Transcript()
        self.open[key] = task = asyncio.ensure_future(self._produce(key, play))
        task.add_done_callback(lambda task: self._over(key, task))  # also of one that is cancelled before it begins

    def _over(self, key: Key, task: asyncio.Task[None]) -> None:
        self.open.pop(key, None)
        self._play(key)
        if task.cancelled():
            if key not in self._cancelled:  # as foreign code does that cancels all tasks of the loop
                self._drop_leases(key, "its task was cancelled by other code")
            self._cancelled.discard(key)
        elif isinstance(error := task.exception(), InfraError):
            self._drop_leases(key, described(error))
        elif error is not None:
            self._failure = error
            self._failed.set()

    def _drop_leases(self, key: Key, why: str) -> None:
        """Count a member that was not put. Its lease is renewed no more, and the store gives it to another."""
        self.lost += 1
        self.session.progress(f"member {key} was not put: {why}")

    async def _raise_failure(self) -> None:
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _play(self, key: Key) -> None:
        self.playing.pop(key, None)
        self.room.set()

    async def _produce(self, key: Key, play: MemberPlayer) -> None:
        try:
            member = await play(key[1], key[2], said := self.playing[key])
            self._play(key)
            if await self._put(member) == "SURPLUS":
                self._abort_members(said)
        except Closed:
            self.session.request_stop()
        except (Fenced, Conflict) as refusal:  # somebody else owns this member now, or it is there already
            self.session.progress(f"put {key}: {refusal}")

    async def _put(self, member: Member) -> str:
        """Put the member. One that the store cannot take is put as a failure with the store's reason: without that its
        lease would run out, and be given again, forever.

        StaleClient speaks of the versions that the engine stamped (INFRA); every other plain refusal, and a member that
        cannot be encoded, of what the environment made (DATA).
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
        self.session.progress(f"put {key} is refused: {why}")
        failed = Failed(kind, f"the store refuses this member: {why}"[:MAX_ERROR_CHARS])
        try:
            return await self.store.put(msgspec.structs.replace(member, outcome=failed))
        except StaleClient as refusal:  # of the lease itself: its group is not known there
            raise InfraError(str(refusal)) from refusal

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.config.store.lease_s / 3)
            for key in await self.store.renew(list(self.open)):
                self._abort(key)

    async def _end_early(self) -> None:
        while True:
            for key in await self.store.ended(ENDED_WAIT_S):
                self._abort(key)

    def _abort(self, key: Key) -> None:
        """Stop working on what nobody needs any more."""
        if (lost := self.open.get(key)) is None:
            self.ended.add(key)
        elif key in self.playing and not lost.cancelling():  # of one on its way to the store the store's answer says
            self._cancel(key)
            self._abort_members(self.playing[key])

    def _cancel(self, key: Key) -> None:
        if (task := self.open.get(key)) is not None:
            self._cancelled.add(key)
            task.cancel()

    def _abort_members(self, said: Transcript) -> None:
        """One member more that nobody needs; what it drew of an answer that is not whole the engine counts."""
        self.aborted += 1
        self.tokens_let_go += said.sampled

    async def give_back(self) -> None:
        """End what is unfinished, let what was played reach the store, and release the leases that are left."""
        held = dict(self.open)
        puts = {key: task for key, task in held.items() if key not in self.playing}
        for key in self.playing:
            self._cancel(key)
        if puts:
            await asyncio.wait(puts.values(), timeout=LAST_PUTS_S)
        for key in puts:
            self._cancel(key)
        await asyncio.gather(*held.values(), return_exceptions=True)
        if unput := [key for key, task in held.items() if task.cancelled() or task.exception()]:
            with contextlib.suppress(Closed):
                await self.store.release(unput)


async def until_one_ends(jobs: tuple[Coroutine[Any, Any, None], ...]) -> None:
    """Run all jobs until one of them ends, and raise what ended it; the others are cancelled, and have ended."""
    loops = [asyncio.ensure_future(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            job.result()
    finally:
        for job in loops:
            job.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


def training_params(session: Session, tokenizer: Tokenizer) -> SamplingParams:
    """How training answers are drawn."""
    s = session.config.sampling
    return SamplingParams(s.max_tokens, s.temperature, s.top_k, s.top_p, (tokenizer.eos_id,))


def episode_counts(manager: RolloutManager, places: Executors) -> dict[str, Any]:
    """How episodes went since the start: ended, failed, environments that were asked again or given up."""
    counts, asked = manager.counts, manager.env_calls
    return {
        "episodes": counts.finished, "failed": dict(counts.failed), "env_calls": asked.calls,
        "env_retries": asked.retries, "env_overdue": asked.overdue, "env_calls_abandoned": asked.abandoned,
        "env_closes_failed": counts.closes_failed, **places.counts(),
        "reward_parts": {name: total / counts.finished for name, total in counts.parts.items()},
    }  # fmt: skip
