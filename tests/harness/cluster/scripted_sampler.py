"""A sampler without a model: it leases, renews, sleeps, puts members of random size, and follows new versions.

It has the same loops as `jaxroll.roles.sampler`. It journals every put before it is sent, and the answer afterwards, so
that acknowledged puts are known even if both processes are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import numpy as np

from jaxroll import wire
from jaxroll.errors import Closed, NoCredit, StaleClient, StoreRefusal
from jaxroll.records import Failed, Finished, Grant, Member, Segment, Version, VersionRun
from jaxroll.store.client import StoreClient
from jaxroll.store.messages import Key
from tests.harness.cluster.scripted_role import Journal, Orders, connected, first_of, orders_of, pair, stop_event

FOLLOW_WAIT_S, ENDED_WAIT_S = 10.0, 10.0
PROMPT_TOKENS = 4


class SamplerOrders(Orders, frozen=True, kw_only=True):
    """Orders of a sampler. A member takes `work_s` on average, `slow_factor` times that if it is slow.

    A member has `tokens_low` to `tokens_high` sampled tokens, of 9 bytes each. `follows` False: stuck at the first
    weights it sees. Members of every `dull_every`-th prompt have the same reward.
    """

    slots: int = 8
    lease_wait_s: float = 2.0
    work_s: float = 0.02
    tokens_low: int = 8
    tokens_high: int = 400
    slow_member: int = -1
    slow_every: int = 1
    slow_factor: float = 100.0
    fails: float = 0.0
    follows: bool = True
    dull_every: int = 0


class Sampler:
    """One process of a sampler."""

    def __init__(self, orders: SamplerOrders, journal: Journal, store: StoreClient) -> None:
        self.orders, self.journal, self.store = orders, journal, store
        self.version: Version | None = None
        self.open: dict[Key, asyncio.Task] = {}
        self.has_version, self.room, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Sample until the run is closed or a stop is requested; return unfinished leases."""
        jobs = (self._follow(), self._lease(), self._end_early(), self._renew(), stop.wait(), self.closed.wait())
        try:
            await first_of(*map(asyncio.ensure_future, jobs))
        finally:
            unfinished = dict(self.open)
            for job in unfinished.values():
                job.cancel()
            await asyncio.gather(*unfinished.values(), return_exceptions=True)
            with contextlib.suppress(Closed):
                await self.store.release(list(unfinished))
            self.journal.log("end", released=[list(key) for key in unfinished])

    async def _follow(self) -> None:
        while True:
            ref = await self.store.published(self.version, FOLLOW_WAIT_S)
            if ref is not None:
                self.version = ref.version
                self.journal.log("flip", version=pair(self.version))
                self.has_version.set()
                if not self.orders.follows:
                    await asyncio.Event().wait()

    async def _lease(self) -> None:
        await self.has_version.wait()
        while True:
            self.room.clear()
            free = self.orders.slots - len(self.open)
            if free < max(1, self.orders.slots // 2):
                await self.room.wait()
                continue
            for grant in await self._grants(free):
                for member, attempt in grant.members:
                    key = (grant.group, member, attempt)
                    self.open[key] = asyncio.ensure_future(self._produce(key, grant))

    async def _grants(self, free: int) -> list[Grant]:
        assert self.version is not None
        try:
            grants = await self.store.lease(self.version, free, self.orders.lease_wait_s)
        except NoCredit as refusal:
            self.journal.log("no credit", reason=refusal.reason)
            await asyncio.sleep(min(refusal.retry_after_s, 1.0))
            return []
        except StaleClient as refusal:
            self.journal.log("refused", call="lease", text=str(refusal))
            await asyncio.sleep(0.2)
            return []
        self.journal.log("lease", keys=[[g.group, m, a] for g in grants for m, a in g.members])
        return grants

    async def _produce(self, key: Key, grant: Grant) -> None:
        chance = random.Random(f"{self.orders.seed} {key}")
        first = self.version
        assert first is not None
        try:
            work_s = self.orders.work_s * chance.uniform(0.5, 1.5)
            slow = key[1] == self.orders.slow_member and key[0] % self.orders.slow_every == 0
            await asyncio.sleep(work_s * (self.orders.slow_factor if slow else 1.0))
            count = chance.randint(self.orders.tokens_low, self.orders.tokens_high)
            failed = chance.random() < self.orders.fails
            runs = _runs(first, self.version or first, count)
            reward = 1.0 if self._is_dull(grant) else float(key[1] % 2)
            outcome = Failed("INFRA", "injected") if failed else finished(key, runs, reward)
            await put(self.store, self.journal, Member(*key, outcome))
        except Closed:
            self.closed.set()
        finally:
            self.open.pop(key, None)
            self.room.set()

    def _is_dull(self, grant: Grant) -> bool:
        return self.orders.dull_every > 0 and grant.task.index % self.orders.dull_every == 0

    async def _end_early(self) -> None:
        while True:
            ended = await self.store.ended(ENDED_WAIT_S)
            for key in ended:
                if (job := self.open.get(key)) is not None:
                    job.cancel()
            if ended:
                self.journal.log("ended", keys=[list(key) for key in ended])

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.orders.lease_s / 3)
            lost = await self.store.renew(list(self.open))
            for key in lost:
                if (job := self.open.get(key)) is not None:
                    job.cancel()
            if lost:
                self.journal.log("lost", keys=[list(key) for key in lost])


async def put(store: StoreClient, journal: Journal, member: Member) -> str:
    """Journal and put a member; return OK, SURPLUS, or the name of a refusal. Raises Closed."""
    body = wire.encode(member)
    known = {
        "key": [member.group, member.member, member.attempt],
        "digest": wire.digest(body),
        "finished": isinstance(member.outcome, Finished),
    }
    journal.log("send", **known, bytes=len(body))
    text = ""
    try:
        answer = await store.put(member)
    except Closed:
        raise
    except StoreRefusal as refusal:
        answer, text = type(refusal).__name__, str(refusal)
    journal.log("put", **known, answer=answer, text=text)
    return answer


def _runs(first: Version, last: Version, count: int) -> tuple[VersionRun, ...]:
    """Runs of `count` tokens, the second half at `last` if weights were swapped meanwhile (weight_swap=keep_kv)."""
    if first == last or count < 2:
        return (VersionRun(first, count),)
    return (VersionRun(first, count - count // 2), VersionRun(last, count // 2))


def finished(key: Key, runs: tuple[VersionRun, ...], reward: float = 1.0) -> Finished:
    """A rollout whose tokens identify the member."""
    count = sum(run.count for run in runs)
    prompt = Segment(
        np.arange(PROMPT_TOKENS, dtype=np.int32), np.zeros(PROMPT_TOKENS, np.uint8), np.zeros(PROMPT_TOKENS, np.float32)
    )
    tokens = np.random.default_rng(key).integers(0, 24, count, dtype=np.int32)
    answer = Segment(tokens, np.ones(count, np.uint8), np.linspace(-1, 0, count, dtype=np.float32))
    return Finished((prompt, answer), "stop", reward, {}, runs)


async def _main(orders: SamplerOrders) -> None:
    journal, stop = Journal(orders.journal), stop_event()
    try:
        async with connected(orders, journal, "sampler") as store:
            await Sampler(orders, journal, store).run(stop)
    except Closed as closed:
        journal.log("closed", text=str(closed))
    except Exception as error:
        journal.log("error", text=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    asyncio.run(_main(orders_of(SamplerOrders)))
