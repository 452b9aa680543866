"""RPC methods of the store (decode each call, decide it, encode the answer), and the prompts that leases take.

Prompts are requested from the feeder in advance, so that a lease never waits for the prompt pipeline.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

from jaxroll import wire
from jaxroll.errors import NoCredit, NotReady, StoreRefusal
from jaxroll.metrics import JsonlTracker
from jaxroll.policy import selection
from jaxroll.policy.routing import Draining, RelayTree, Repacker, Room, UpdateSlots
from jaxroll.records import LogStart, Relay, Task, Version, VersionRef
from jaxroll.rpc import protocol
from jaxroll.rpc.server import Caller, Method
from jaxroll.store import messages as msg
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import checkpoint_wanted, over, status
from jaxroll.store.core.puts import finished_early
from jaxroll.store.core.state import Batch
from jaxroll.store.log.schema import Audit, rows_of
from jaxroll.store.server.keeper import (
    CLAIM,
    ENDED,
    LEASE,
    NAMES_KEPT,
    PUBLISHED,
    REPACK,
    WITH_LEASES,
    HandshakeCheck,
    Intervals,
    Keeper,
    RecentMap,
    Workers,
)
from jaxroll.store.server.puts import PutPipeline, page

# --- prompts that no group has used yet

_CHUNK = 64


class Feeder(Protocol):
    """Source of prompts. `next(count)` returns (task, pipeline state after it) pairs; fewer only at the data's end.

    It may have an attribute `skipped`: counts of items that were not trained on, by kind.
    """

    async def next(self, count: int) -> list[tuple[Task, bytes]]: ...

    def restore(self, state: bytes | None) -> Any:
        """Continue after the prompt with this pipeline state; None is the beginning. May be a coroutine."""
        ...


class PromptBuffer:
    """Prompts that no group has used yet. Not durable: after a restart the feeder provides them again."""

    def __init__(self, feeder: Feeder, ahead: int, on_change: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._feeder, self._target = feeder, max(1, ahead)
        self._on_change, self._on_end = on_change, on_end
        self.ready: deque[tuple[Task, bytes]] = deque()
        self._low = asyncio.Event()
        self._low.set()
        self._restart_from: tuple[bytes | None] | None = None  # (pipeline state,) at which a fork continues

    @property
    def skipped(self) -> dict[str, int]:
        """Items that the prompt stream has skipped or truncated, by kind; empty if the feeder does not count them."""
        return getattr(self._feeder, "skipped", {})

    def take(self, count: int) -> None:
        """Drop the first `count` prompts, which became groups."""
        for _ in range(count):
            self.ready.popleft()
        if len(self.ready) < self._target:
            self._low.set()

    def want(self, count: int) -> None:
        """Keep at least `count` prompts ready from now on."""
        self._target = max(self._target, count)
        if len(self.ready) < self._target:
            self._low.set()

    def restart(self, state: bytes | None) -> None:
        """Drop the buffer and continue after the prompt with this pipeline state, even if the data had ended."""
        self.ready.clear()
        self._restart_from = (state,)
        self._low.set()

    async def fill(self, state: bytes | None, *, ended: bool = False) -> None:
        """Restore the feeder and keep the buffer full, without end; the feeder's errors pass through.

        At the end of the data (or if it has `ended` already), wait for a restart.
        """
        while True:
            if not ended:
                await self._fill_from(state)
            while self._restart_from is None:
                await self._until_low()
            (state,), self._restart_from, ended = self._restart_from, None, False

    async def _fill_from(self, state: bytes | None) -> None:
        """Keep the buffer full until the data ends or a restart is requested."""
        restored = self._feeder.restore(state)
        if inspect.isawaitable(restored):
            await restored
        while self._restart_from is None:
            await self._until_low()
            while self._restart_from is None and len(self.ready) < self._target:
                wanted = min(_CHUNK, self._target - len(self.ready))
                prompts = await self._feeder.next(wanted)
                if self._restart_from is not None:
                    return  # they belong to the stream before the restart
                self.ready.extend(prompts)
                self._on_change()
                if len(prompts) < wanted:
                    return await self._end()

    async def _end(self) -> None:
        """Report the end of the data once its last prompt is used."""
        while self.ready:
            await self._until_low()
        if self._restart_from is None:
            self._on_end()

    async def _until_low(self) -> None:
        await self._low.wait()
        self._low.clear()


# --- RPC methods

PAGE_BYTES = 8 * 2**20
_REPLY_MARGIN_S = 0.5  # an answer is sent this long before its caller's deadline

WORKERS = frozenset({"sampler", "admin"})
LEARNERS = frozenset({"learner", "admin"})
ADMINS = frozenset({"admin"})
EVERYONE = frozenset({"sampler", "learner", "admin", "observer"})
_HELD = frozenset({"Lease", "Ended", "Claim", "Published", "Repack"})  # long polls
MAX_MEMBERS_PER_LEASE = 4096
_NEXT: Literal["next"] = "next"  # the next claim that is delivered
_PAUSED_ASK_S = 1.0
MAX_REPORT_BYTES = 4 * 2**20
_MAX_CALL_BYTES = 2**20  # for all methods not in `_LARGE`; None: the server's limit
_LARGE = {"Put": None, "Flush": None, "Report": MAX_REPORT_BYTES + 2**20}
_LARGE |= dict.fromkeys(("Renew", "Release"), 2**22)  # 65,536 keys


class StoreService:
    """RPC methods of the store of one run."""

    def __init__(
        self,
        keeper: Keeper,
        prompts: PromptBuffer,
        metrics: JsonlTracker,
        audit: Audit,
        *,
        config_digest: str,
        page_bytes: int,
        turns: UpdateSlots,
        workers: Workers,
        vocab_size: Callable[[], int],
        keep_best: str = "",
        room: Room = Room(0),  # noqa: B008 - a frozen value
    ) -> None:
        self._keep_best = keep_best
        self._measured = selection.measured(metrics.written() if keep_best else (), keep_best)
        self._keeper, self._prompts, self._metrics, self._audit = keeper, prompts, metrics, audit
        self._page_bytes, self._turns, self._workers = page_bytes, turns, workers
        self._run_id = keeper.run_id
        self.handshake = HandshakeCheck(keeper, config_digest, workers.note_call)
        self._put = PutPipeline(keeper, audit, vocab_size)
        self.paused = False  # by a person; not in the log, so a restart of the store ends it
        self._checkpoint_at: int | Literal["next"] | None = None  # step after which a person wants a checkpoint
        self._profiles = msg.ProfileOrders(metrics.log_all)  # empty unless a person has asked for one
        self._away: dict[str, str] = RecentMap(NAMES_KEPT)  # name → session, until its next lease call
        self._reported: dict[str, bool] = RecentMap(8 * NAMES_KEPT)  # request ids; a role has several on their way
        self._relays, self._following = RelayTree(), Counter[str]()  # names of the receivers that wait for weights
        self._repacker, self._intervals = Repacker(room), Intervals(keeper, turns.slot_s)
        self.holders: dict[str, Version | None] = RecentMap(NAMES_KEPT)  # caller → the version that it reports to have

    def methods(self) -> dict[str, Method]:
        """The methods by name, each with the rights that may call it."""
        table: dict[str, tuple[Callable[[Caller, bytes], Awaitable[Any]], frozenset[str]]] = {
            "Hello": (self._hello, EVERYONE),
            "Join": (self._join, WORKERS),
            "Leave": (self._workers.leave, WORKERS),
            "Lease": (self._lease, WORKERS),
            "Renew": (self._renew, WORKERS),
            "Ended": (self._ended, WORKERS),
            "Put": (self._put, WORKERS),
            "Flush": (self._put.flush, WORKERS),
            "Partial": (self._put.partial, WORKERS),
            "Release": (self._release, WORKERS),
            "Repack": (self._repack, WORKERS),
            "Claim": (self._claim, LEARNERS),
            "Begin": (self._begin, LEARNERS),
            "Publish": (self._publish, LEARNERS),
            "Ack": (self._ack, LEARNERS),
            "Durable": (self._durable, LEARNERS),
            "Published": (self._published, EVERYONE),
            "Report": (self._report, EVERYONE),
            "Status": (self._status, EVERYONE),
            "Close": (self._close, LEARNERS),
            "Control": (self._control, ADMINS),
        }
        return {
            name: Method(
                self.handshake.answering(name, handler), rights, name in _HELD, _LARGE.get(name, _MAX_CALL_BYTES)
            )
            for name, (handler, rights) in table.items()
        }

    def _wait_s(self, caller: Caller, wanted_s: float) -> float:
        """The time for which a call may be held: what it asked for, within the limit and its deadline."""
        return max(0.0, min(wanted_s, protocol.MAX_WAIT_S, caller.deadline_s - _REPLY_MARGIN_S))

    async def _hello(self, caller: Caller, body: bytes) -> msg.Welcome:
        hello = wire.decode(body, msg.Hello)
        self.handshake.check_hello(caller, hello)
        if caller.right in WITH_LEASES:
            if is_new := self._keeper.state.sessions.get(caller.name) != caller.session:
                self.handshake.count_arrival()
                self.holders.pop(caller.name, None)
            await self._keeper.answer(ev.Arrive(caller.name, caller.session, hello.pool))
            if is_new:
                self._workers.note_arrival(caller)
        state = self._keeper.state
        return msg.Welcome(self._run_id, state.lineage, state.published, wire.PROTOCOL_VERSION, tuple(state.lineages))

    async def _join(self, caller: Caller, body: bytes) -> msg.Joined:
        self.handshake.count_arrival()
        return await self._workers.join(caller, body)

    async def _lease(self, caller: Caller, body: bytes) -> msg.LeaseReply:
        call = wire.decode(body, msg.LeaseCall)
        if not protocol.NAME.fullmatch(call.request):
            raise StoreRefusal("a lease request must match [A-Za-z0-9_-]{1,64}")
        self._workers.leases(caller)
        self._away.pop(caller.name, None)
        members = min(call.max_members, MAX_MEMBERS_PER_LEASE)
        size = 1 if self._keeper.settings.replicate != "together" else self._keeper.settings.group_size
        count = -(-max(members, 1) // size) + 1  # of a group that is split the caller takes a member or more
        if self._keeper.settings.longest_first:  # it begins with the longest members of a claim
            count = max(count, self._keeper.settings.limiter.batch_groups)

        def ask() -> Any:
            if self._workers.is_surplus(caller) or self._away.get(caller.name) == caller.session:
                return ev.Leases((), 0)
            if self.paused and not call.reserved and not over(self._keeper.settings, self._keeper.state):
                return NoCredit("the run is paused", _PAUSED_ASK_S)
            version = max(call.version, self.holders.get(caller.name) or call.version)
            while True:
                offered = tuple(itertools.islice(self._prompts.ready, count))
                request = ev.Lease(caller.name, caller.session, version, members, call.request, offered, call.reserved)
                reply = self._keeper.decide(request)
                if isinstance(reply, ev.Leases):
                    self._prompts.take(reply.prompts_used)
                    if not reply.grants and reply.prompts_used:
                        continue  # those prompts are for other pools, or had been trained before a fork
                elif isinstance(reply, NoCredit):
                    self._prompts.want(count)
                return reply

        leases = await self._keeper.answer_when_ready(ask, LEASE, self._wait_s(caller, call.wait_s))
        return msg.LeaseReply(leases.grants, self._workers.holders, self._workers.is_surplus(caller))

    async def _renew(self, caller: Caller, body: bytes) -> msg.Members:
        members = wire.decode(body, msg.Members).members
        return msg.Members(await self._keeper.answer(ev.Renew(caller.session, members)))

    async def _ended(self, caller: Caller, body: bytes) -> msg.Members:
        wanted_s = wire.decode(body, msg.EndedCall).wait_s
        keeper, deadline_s = self._keeper, self._keeper.now_s() + self._wait_s(caller, wanted_s)
        while not keeper.cancellations.has(caller.session) and (left_s := deadline_s - keeper.now_s()) > 0:
            await keeper.wakeups.wait(ENDED, left_s)
        ended = keeper.cancellations.take(caller.session)
        await keeper.log.committed()
        return msg.Members(ended)

    async def _release(self, caller: Caller, body: bytes) -> msg.Members:
        call = wire.decode(body, msg.Members)
        if call.away:
            self._away[caller.name] = caller.session
            self._keeper.wakeups.notify(LEASE)
        is_it = call.away and self._keeper.state.sessions.get(caller.name) == caller.session
        await self._keeper.answer(ev.Release(call.members, call.to, caller.name if is_it else ""))
        if call.to:
            self._repacker.given(caller.name, len(call.members))
            self._keeper.wakeups.notify(REPACK)
        return msg.Members(())

    async def _repack(self, caller: Caller, body: bytes) -> msg.RepackReply:
        call, keeper, repacker = wire.decode(body, msg.RepackCall), self._keeper, self._repacker
        pool, leaves = keeper.state.pools.get(caller.name, ""), call.leaves or self._workers.is_surplus(caller)
        load = Draining(call.version, call.members, call.tokens, pool, leaves)
        if repacker.report(caller.name, load, keeper.now_s(), call.wait_s):
            keeper.wakeups.notify(REPACK)
        deadline_s = keeper.now_s() + self._wait_s(caller, call.wait_s)
        while True:
            to, coming = repacker.order(caller.name), repacker.coming(caller.name)
            if to or coming or (left_s := deadline_s - keeper.now_s()) <= 0:
                return msg.RepackReply(to, coming)
            await keeper.wakeups.wait(REPACK, left_s)

    def close(self) -> None:
        """Stop the thread that decodes large members."""
        self._put.close()

    async def _claim(self, caller: Caller, body: bytes) -> msg.ClaimPage:
        call = wire.decode(body, msg.ClaimCall)
        request = ev.ClaimStep(caller.session, call.lineage, call.step, call.ahead, call.computed_s)

        def ask() -> Any:
            if self._intervals.are_late(call.step, {name: self.holders.get(name) for name in self._workers.sessions}):
                return NotReady(f"a sampler has not the weights of version {call.step} yet")
            answer = self._keeper.decide(request)
            if call.known is None or not isinstance(answer, NotReady):
                return answer
            return finished_early(self._keeper.settings, self._keeper.state, call.known) or answer

        answer = call.early or await self._keeper.answer_when_ready(ask, CLAIM, self._wait_s(caller, call.wait_s))
        if isinstance(answer, Batch):
            return await self._page(call, answer)
        return await self._page(call, Batch(call.step, answer, self._keeper.settings.shuffle_seed(call.step)), answer)

    async def _page(self, call: msg.ClaimCall, batch: Batch, early: tuple[int, ...] = ()) -> msg.ClaimPage:
        state, settings = self._keeper.state, self._keeper.settings
        parts, next_start = await page(self._keeper, call, batch.groups, self._page_bytes)
        if self._checkpoint_at == _NEXT and call.start == 0:  # the learner reads it on a claim's first page
            self._checkpoint_at = batch.step
        wanted = checkpoint_wanted(settings, state) or self._checkpoint_at == batch.step
        after, cut = None, state.claim_cuts.get(batch.step)
        if cut is not None and call.start == 0:
            after = LogStart(cut, tuple((line.parent, line.fork_step) for line in state.lineages))
        rest = (batch.shuffle_seed, batch.step < state.replay_until, wanted, parts, next_start, after)
        return msg.ClaimPage(batch.step, call.lineage, *rest, early)

    async def _begin(self, caller: Caller, body: bytes) -> msg.VersionCall:
        call = wire.decode(body, msg.BeginCall)
        if call.fork and not protocol.NAME.fullmatch(call.fork):
            raise StoreRefusal("the name of a fork must match [A-Za-z0-9_-]{1,64}")
        forks = sum(bool(line.fork) for line in self._keeper.state.lineages)
        reply = self._keeper.decide(ev.Begin(caller.session, call.durable, call.fork, call.log))
        if sum(bool(line.fork) for line in self._keeper.state.lineages) > forks:
            self._prompts.restart(self._keeper.state.cursor)  # before anything else can be leased
        asked = f"from {call.durable or 'nothing'}" + (f", fork {call.fork}" if call.fork else "")
        begun = "" if isinstance(reply, StoreRefusal) else f" at {reply}"
        return msg.VersionCall(await self._recorded(caller, "Begin", asked + begun, reply))

    async def _publish(self, caller: Caller, body: bytes) -> msg.Done:
        ref = wire.decode(body, VersionRef)
        reply = self._keeper.decide(ev.Publish(caller.session, ref))
        await self._recorded(caller, "Publish", f"{ref.version} {ref.manifest_digest}", reply)
        return msg.Done()

    async def _ack(self, caller: Caller, body: bytes) -> msg.Done:
        version = wire.decode(body, msg.VersionCall).version
        await self._recorded(caller, "Ack", str(version), self._keeper.decide(ev.Ack(caller.session, version)))
        return msg.Done()

    async def _durable(self, caller: Caller, body: bytes) -> msg.Done:
        version = wire.decode(body, msg.VersionCall).version
        await self._recorded(caller, "Durable", str(version), self._keeper.decide(ev.Durable(caller.session, version)))
        if isinstance(self._checkpoint_at, int) and version.step > self._checkpoint_at:
            self._checkpoint_at = None
        return msg.Done()

    async def _published(self, caller: Caller, body: bytes) -> msg.PublishedReply:
        call = wire.decode(body, msg.PublishedCall)
        in_turn = call.in_turn and caller.right in WORKERS
        self._workers.serves(caller, call.serves_on)
        if self.holders.get(caller.name) != call.known:
            self.holders[caller.name] = call.known
            self._repacker.forget(caller.name)
            self._keeper.wakeups.notify(LEASE, CLAIM)  # a lease that was refused for its older weights may be granted
        if in_turn and self._turns.over(caller.name):
            self._keeper.wakeups.notify(PUBLISHED)
        deadline_s = self._keeper.now_s() + self._wait_s(caller, call.wait_s)
        if (one := call.relay) is not None:
            fetched = (one.source, one.bytes_per_s) if one.source else None
            self._relays.report(caller.name, one.address, one.site, fetched, one.failed)
            self._following[caller.name] += 1
        try:
            while True:
                now_s = self._keeper.now_s()
                may_fetch = self._may_fetch(call.known, caller.name if in_turn else "", now_s)
                if may_fetch or now_s >= deadline_s:
                    break
                until_s = min(deadline_s, self._turns.next_end_s(now_s))
                await self._keeper.wakeups.wait(PUBLISHED, until_s - now_s)
            ref = self._keeper.state.published if may_fetch else None
            relays = self._relays_for(caller.name, ref) if ref is not None and call.relay is not None else ()
        finally:
            if call.relay is not None:
                self._following[caller.name] -= 1
            if in_turn and self._turns.leave(caller.name):
                self._keeper.wakeups.notify(PUBLISHED)
        await self._keeper.log.committed()
        return msg.PublishedReply(ref, relays)

    def _relays_for(self, name: str, ref: VersionRef) -> tuple[Relay, ...]:
        """The relays from which `name` may fetch the newest weights; the learner comes after them."""
        one_by_one = not self._turns.unlimited or self._keeper.settings.limiter.intervals
        following = {who for who, calls in self._following.items() if calls}
        holding = [who for who, version in self.holders.items() if version == ref.version]
        found = self._relays.sources(
            name, ref.version, present={*self._workers.sessions, *following},
            waiting=() if one_by_one else following, holding=holding,
        )  # fmt: skip
        return tuple(Relay(*one) for one in found)

    def _may_fetch(self, known: Version | None, name: str, now_s: float) -> bool:
        """True if there are weights other than `known` and `name` (if not empty) has an update slot or needs none.

        A sampler without weights, or with those of an ended lineage, cannot sample, so it needs no slot.
        """
        ref = self._keeper.state.published
        if ref is None or ref.version == known:
            return False
        if known is None or known.lineage < ref.version.lineage or not name:
            return True
        return not self._intervals.keeps(known, ref.version) and self._turns.take(name, now_s)

    async def _report(self, caller: Caller, body: bytes) -> msg.Reported:
        """Append the valid rows to metrics.jsonl; a repeated report (same request id) is not written again."""
        call = wire.decode(body, msg.ReportCall)
        if (size := sum(map(len, call.rows))) > MAX_REPORT_BYTES:
            raise StoreRefusal(f"a report of {size} bytes; at most {MAX_REPORT_BYTES} are taken: send it in parts")
        if call.request not in self._reported:
            rows, left_out = rows_of(call.rows, caller.right)
            self._metrics.log_all(rows)
            if self._keep_best:
                self._measured |= selection.measured(rows, self._keep_best)
            if left_out:
                self._audit.add_refusal(caller.peer, f"{caller.right}:{caller.name}", f"metrics: {left_out[0]}")
            if self._profiles:
                self._profiles.note(caller.name, rows)
            self._reported[call.request] = True
        return msg.Reported(self._profile_of(caller))

    async def _status(self, caller: Caller, body: bytes) -> msg.StatusReply:
        keeper, holders = self._keeper, {who: str(version) for who, version in self.holders.items()}
        report = status(keeper.settings, keeper.state, bool(self._prompts.ready), keeper.now_s()) | {"holders": holders}
        report |= {"paused": self.paused, "serving": self._workers.serving, "present": sorted(self._workers.sessions)}
        report["log"] = await self._keeper.log.facts()
        report["measured"] = [(version.lineage, version.step, value) for version, value in self._measured.items()]
        return msg.StatusReply(json.dumps(report).encode(), self._profile_of(caller))

    def _profile_of(self, caller: Caller) -> msg.ProfileOrder | None:
        return self._profiles.of(caller.name, caller.session, self._keeper.now_s()) if self._profiles else None

    async def _close(self, caller: Caller, body: bytes) -> msg.Done:
        reason = wire.decode(body, msg.CloseCall).reason[:500]
        await self._recorded(caller, "Close", reason, self._keeper.decide(ev.Close(reason)))
        return msg.Done()

    async def _control(self, caller: Caller, body: bytes) -> msg.Done:
        call, refusal = wire.decode(body, msg.ControlCall), None
        if call.action == "checkpoint":
            self._checkpoint_at = _NEXT
        elif call.action == "profile":
            refusal = self._profiles.place(call.profile, self.handshake.callers, self._keeper.now_s())
        else:
            self.paused = call.action == "pause"
            self._keeper.wakeups.notify(LEASE)
        await self._recorded(caller, "Control", call.action, refusal)
        return msg.Done()

    async def _recorded(self, caller: Caller, what: str, detail: str, reply: Any) -> Any:
        """Record the decision in the audit, wait for the disk, then return `reply` or raise it if it is a refusal."""
        self._audit.record(caller, what, detail, reply)
        await self._keeper.log.committed()
        if isinstance(reply, StoreRefusal):
            raise reply
        return reply
