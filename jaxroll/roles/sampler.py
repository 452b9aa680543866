"""The sampler role: leases groups, plays their members against its engine, puts the finished ones.

The main thread dispatches JAX; everything here runs on the loop thread (see `jaxroll.roles.session`):

- *follow* waits for the learner's snapshots and flips the engine;
- *lease* asks the store for work while there is room; every member is a task that plays its episode and puts it;
- *ended* hears of leases that are not needed any more, and aborts their members at once: their slots are free again;
- *renew* keeps the leases alive; *report* sends metrics every second.

It waits for the store (leases) and, before its first token, for the learner's first snapshot. It ends when the run is
closed or on SIGTERM, giving unfinished leases back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from jaxroll.config import Config, RoleArgs
from jaxroll.errors import Closed, NoCredit, StaleClient, StoreRefusal
from jaxroll.protocols import SamplingParams, Tokenizer
from jaxroll.records import Grant
from jaxroll.roles import session as sessions

LEASE_WAIT_S, ENDED_WAIT_S = 5.0, 10.0
REPORT_EVERY_S = 1.0
GROUPS_AHEAD = 4  # leased beyond the slots: a lease is a round trip and a commit, during which slots go on emptying
Key = tuple[int, int, int]  # group, member, attempt


def main(args: RoleArgs) -> int:
    """Sample until the run is closed."""
    config = args.config
    return sessions.main(
        f"sampler-{args.index}", args, lambda session: Sampling(session).run(),
        mesh=config.sampler.mesh, slots=config.sampler.slots, flip=config.schedule.flip,
    )  # fmt: skip


def capacity_members(config: Config) -> int:
    """How many members a sampler holds: what is asked for, or its slots and groups enough that a freed slot never waits
    for a lease. Members whose environments take their time hold no slot meanwhile."""
    return config.sampler.episodes or config.sampler.slots + GROUPS_AHEAD * config.schedule.members_per_group


def training_params(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """How training answers are drawn."""
    s = config.sampling
    return SamplingParams(s.max_tokens, s.temperature, s.top_k, s.top_p, (tokenizer.eos_id,))


class Sampling:
    """The members in flight and the loops around them."""

    def __init__(self, session: sessions.Session) -> None:
        self.session, self.config, self.store = session, session.config, session.store
        self.engine = session.parts.engine
        self.manager = session.manager(training_params(self.config, session.parts.tokenizer))
        self.capacity = capacity_members(self.config)
        self.open: dict[Key, asyncio.Task] = {}
        self.ended: set[Key] = set()  # not needed any more, and not heard of yet: their lease is still on its way
        self.aborted = 0
        self.room = asyncio.Event()
        self._reported = (time.monotonic(), self.engine.stats())

    async def run(self) -> None:
        """All loops, until one of them ends; then unfinished leases go back."""
        follow = self.session.parts.follower.follow(self.store)
        jobs = (follow, self._lease(), self._end_early(), self._renew(), self._report())
        loops = [asyncio.ensure_future(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for job in loops:
                job.cancel()
            await self._give_back()
            self._add_rows()

    async def _lease(self) -> None:
        await self.session.parts.follower.first.wait()
        while True:
            self.room.clear()
            free = self.capacity - len(self.open)
            if free < self.config.schedule.members_per_group:
                await self.room.wait()
                continue
            for grant in await self._grants(free):
                for member, attempt in grant.members:
                    if (key := (grant.group, member, attempt)) not in self.ended:
                        self.open[key] = asyncio.ensure_future(self._produce(grant, member, attempt))
            self.ended.clear()  # what is granted from now on cannot have ended before

    async def _grants(self, free: int) -> list[Grant]:
        version = self.session.parts.follower.version
        assert version is not None, "no lease is asked for before the first weights"
        try:
            return await self.store.lease(version, free, LEASE_WAIT_S)
        except NoCredit as refusal:
            await asyncio.sleep(min(refusal.retry_after_s, 1.0))
        except StaleClient as refusal:
            self.session.progress(f"lease refused: {refusal}")
            await asyncio.sleep(0.2)
        return []

    async def _produce(self, grant: Grant, member: int, attempt: int) -> None:
        key = (grant.group, member, attempt)
        try:
            await self.store.put(await self.manager.run_member(grant, member, attempt))
        except Closed:
            self.session.request_stop()
        except StoreRefusal as refusal:  # somebody else owns this member now, or it is there already
            self.session.progress(f"put {key}: {refusal}")
        finally:
            self.open.pop(key, None)
            self.room.set()

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

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._add_rows()

    def _add_rows(self) -> None:
        """What happened since the last call, as rows that the session sends."""
        (last_t, last), (now_t, now) = self._reported, (time.monotonic(), self.engine.stats())
        self._reported = (now_t, now)
        for row in self._rows(max(now_t - last_t, 1e-9), last, now):
            self.session.add_row({"t": time.time(), "role": self.session.role, **row})

    def _rows(self, elapsed_s: float, last, now) -> list[dict]:
        rows: list[dict] = [
            {"kind": "span", "what": "decode", "t0": t0, "t1": t1, "tokens": tokens}
            for t0, t1, tokens in self.session.parts.host.spans.take()
        ]
        if intervals := self.session.proxy.take_intervals():
            rows.append({"kind": "members", "rows": [list(row) for row in intervals]})
        total = now.slot_steps_total_while_waiting - last.slot_steps_total_while_waiting
        busy = now.slot_steps_busy_while_waiting - last.slot_steps_busy_while_waiting
        rows.append({
            "kind": "stats", "version": str(now.version), "queue_depth": now.queue_depth, "active": now.active,
            "tokens_per_s": (now.tokens_decoded - last.tokens_decoded) / elapsed_s,
            "slot_steps_busy": busy, "slot_steps_total": total, "slot_occupancy": busy / total if total else None,
            "compiles": now.compiles, "host_share": now.host_share, "prefix_hits": now.prefix_hits,
            "preemptions": now.preemptions, "tokens_discarded": now.tokens_discarded,
            "prefill_tokens": now.prefill_tokens, "open": len(self.open), "members_aborted": self.aborted,
            "tokens_aborted": now.tokens_aborted, **self._episodes(),
            **self.engine.latencies.percentiles(),
        })  # fmt: skip
        return rows

    def _episodes(self) -> dict[str, Any]:
        """How episodes went since the start: ended, failed, environments that were asked again or given up."""
        counts, asked = self.manager.counts, self.manager.asked
        return {
            "episodes": counts.finished, "failed": dict(counts.failed), "env_calls": asked.calls,
            "env_retries": asked.retries, "env_overdue": asked.overdue, **self.session.places.counts(),
            "reward_parts": {name: total / counts.finished for name, total in counts.parts.items()},
        }  # fmt: skip

    async def _give_back(self) -> None:
        unfinished = dict(self.open)
        for task in unfinished.values():
            task.cancel()
        await asyncio.gather(*unfinished.values(), return_exceptions=True)
        if unfinished:
            with contextlib.suppress(Closed):
                await self.store.release(list(unfinished))
