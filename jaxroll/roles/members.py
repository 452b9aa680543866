"""The members that a sampler or an actor holds: leased while there is room, played, put, renewed, given back.

Everything runs on one event loop, every member as a task of its own. The loops:

- *lease* asks the store for work while there is room; every member is a task that plays its episode and puts it;
- *ended* hears of leases that are not needed any more, and aborts their members at once;
- *renew* keeps the leases alive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from jaxroll.envs.places import Places
from jaxroll.errors import Closed, NoCredit, StaleClient, StoreRefusal
from jaxroll.protocols import SamplingParams, Tokenizer
from jaxroll.records import Grant, Member, Version
from jaxroll.roles.session import Session
from jaxroll.rollout.manager import RolloutManager

LEASE_WAIT_S, ENDED_WAIT_S = 5.0, 10.0
Key = tuple[int, int, int]  # group, member, attempt
Play = Callable[[int, int], Awaitable[Member]]  # (member, attempt) → the member, finished or failed


class Members:
    """The members in flight and the loops around them.

    `version` says, once there are weights, which version a lease is asked for with; every token of what is granted is
    drawn at it or at a later one. `begin` gives what plays the members of a grant.
    """

    def __init__(
        self, session: Session, capacity: int, version: Callable[[], Awaitable[Version]], begin: Callable[[Grant], Play]
    ) -> None:
        self.session, self.config, self.store = session, session.config, session.store
        self.capacity, self._version, self._begin = capacity, version, begin
        self.open: dict[Key, asyncio.Task] = {}
        self.ended: set[Key] = set()  # not needed any more, and not heard of yet: their lease is still on its way
        self.aborted = 0
        self.room = asyncio.Event()

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What is to run for ever, side by side."""
        return (self._lease(), self._end_early(), self._renew())

    def counts(self) -> dict[str, int]:
        """Members in flight, and those aborted since the start."""
        return {"open": len(self.open), "members_aborted": self.aborted}

    async def _lease(self) -> None:
        while True:
            self.room.clear()
            free = self.capacity - len(self.open)
            if free < self.config.schedule.members_per_group:
                await self.room.wait()
                continue
            for grant in await self._grants(free):
                play = self._begin(grant)
                for member, attempt in grant.members:
                    if (key := (grant.group, member, attempt)) not in self.ended:
                        self._start(key, play)
            self.ended.clear()  # what is granted from now on cannot have ended before

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

    def _start(self, key: Key, play: Play) -> None:
        self.open[key] = task = asyncio.ensure_future(self._produce(key, play))
        task.add_done_callback(lambda _: self._over(key))  # also of one that is cancelled before it begins

    def _over(self, key: Key) -> None:
        self.open.pop(key, None)
        self.room.set()

    async def _produce(self, key: Key, play: Play) -> None:
        try:
            await self.store.put(await play(key[1], key[2]))
        except Closed:
            self.session.request_stop()
        except StoreRefusal as refusal:  # somebody else owns this member now, or it is there already
            self.session.progress(f"put {key}: {refusal}")

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
        elif lost.cancel():
            self.aborted += 1

    async def give_back(self) -> None:
        """End what is unfinished and release its leases."""
        unfinished = dict(self.open)
        for task in unfinished.values():
            task.cancel()
        await asyncio.gather(*unfinished.values(), return_exceptions=True)
        if unfinished:
            with contextlib.suppress(Closed):
                await self.store.release(list(unfinished))


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


def episode_counts(manager: RolloutManager, places: Places) -> dict[str, Any]:
    """How episodes went since the start: ended, failed, environments that were asked again or given up."""
    counts, asked = manager.counts, manager.asked
    return {
        "episodes": counts.finished, "failed": dict(counts.failed), "env_calls": asked.calls,
        "env_retries": asked.retries, "env_overdue": asked.overdue, **places.counts(),
        "reward_parts": {name: total / counts.finished for name, total in counts.parts.items()},
    }  # fmt: skip
