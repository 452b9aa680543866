"""RPC methods of the store: decode each call, decide it, encode the answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from jaxroll import wire
from jaxroll.errors import NoCredit, StoreRefusal
from jaxroll.metrics import JsonlTracker
from jaxroll.records import Version, VersionRef
from jaxroll.rpc import protocol
from jaxroll.rpc.protocol import refusal_of
from jaxroll.rpc.server import Caller, Method
from jaxroll.store import messages as msg
from jaxroll.store.core import puts
from jaxroll.store.core import requests as rq
from jaxroll.store.core.holders import checkpoint_wanted
from jaxroll.store.core.state import NAMES_KNOWN, Batch
from jaxroll.store.core.waits import status
from jaxroll.store.log import schema
from jaxroll.store.server import validation
from jaxroll.store.server.audit import Audit
from jaxroll.store.server.keeper import (
    CLAIM,
    ENDED,
    LEASE,
    NAMES_KEPT,
    PUBLISHED,
    HandshakeCheck,
    Keeper,
    RecentMap,
    UpdateSlots,
)
from jaxroll.store.server.prompts import PromptBuffer
from jaxroll.store.server.validation import Key, key_of, masked, put_request

PAGE_BYTES = 8 * 2**20
_TURN_S = 0.005  # a put yields to other calls after this time
_ON_LOOP_BYTES, _ON_LOOP_SEGMENTS = 2**18, 64  # members up to this size are decoded on the loop, mostly in 1 ms
_REPLY_MARGIN_S = 0.5  # an answer is sent this long before its caller's deadline

WORKERS = frozenset({"sampler", "admin"})
LEARNERS = frozenset({"learner", "admin"})
EVERYONE = frozenset({"sampler", "learner", "admin", "observer"})
_WITH_LEASES = frozenset({"sampler", "learner"})  # a new process of these ends the leases of the one before
_HELD = frozenset({"Lease", "Ended", "Claim", "Published"})  # long polls
MAX_MEMBERS_PER_LEASE = 4096
MAX_REPORT_BYTES = 4 * 2**20
_MAX_CALL_BYTES = 2**20  # for all methods not in `_LARGE`; None: the server's limit
_LARGE = {"Put": None, "Report": MAX_REPORT_BYTES + 2**20, "Renew": 2**22, "Release": 2**22}  # 65,536 keys


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
        vocab_size: Callable[[], int],
    ) -> None:
        self._keeper, self._prompts, self._metrics, self._audit = keeper, prompts, metrics, audit
        self._page_bytes, self._turns, self._vocab_size = page_bytes, turns, vocab_size
        self._run_id = keeper.log.recovered.run_id
        self._guests = HandshakeCheck(self._run_id, config_digest)
        self._last_report: dict[str, str] = RecentMap(NAMES_KEPT)
        self.holders: dict[str, Version | None] = RecentMap(NAMES_KEPT)  # caller → the version that it reports to have
        self.last_call_s = keeper.now_s()
        self._large_puts = ThreadPoolExecutor(1, "large-puts")  # one thread, which shares the GIL with the loop

    def methods(self) -> dict[str, Method]:
        """The methods by name, each with the rights that may call it."""
        table: dict[str, tuple[Callable[[Caller, bytes], Awaitable[Any]], frozenset[str]]] = {
            "Hello": (self._hello, EVERYONE),
            "Lease": (self._lease, WORKERS),
            "Renew": (self._renew, WORKERS),
            "Ended": (self._ended, WORKERS),
            "Put": (self._put, WORKERS),
            "Release": (self._release, WORKERS),
            "Claim": (self._claim, LEARNERS),
            "Begin": (self._begin, LEARNERS),
            "Publish": (self._publish, LEARNERS),
            "Ack": (self._ack, LEARNERS),
            "Durable": (self._durable, LEARNERS),
            "Published": (self._published, EVERYONE),
            "Report": (self._report, EVERYONE),
            "Status": (self._status, EVERYONE),
            "Close": (self._close, LEARNERS),
        }
        return {
            name: Method(self._answering(name, handler), rights, name in _HELD, _LARGE.get(name, _MAX_CALL_BYTES))
            for name, (handler, rights) in table.items()
        }

    def _answering(self, name: str, handler: Callable[[Caller, bytes], Awaitable[Any]]):
        async def answer(caller: Caller, body: bytes) -> bytes:
            self.last_call_s = self._keeper.now_s()
            if name != "Hello":
                self._guests.check_call(caller, caller.right not in _WITH_LEASES or self._greeted(caller.name))
            return wire.encode(await handler(caller, body))

        return answer

    def _greeted(self, name: str) -> bool:
        """True if `name` has sent Hello. Once names were dropped (beyond NAMES_KNOWN), the run's id is proof enough."""
        known = self._keeper.state.sessions
        return name in known or len(known) >= NAMES_KNOWN

    def _wait_s(self, caller: Caller, wanted_s: float) -> float:
        """The time for which a call may be held: what it asked for, within the limit and its deadline."""
        return max(0.0, min(wanted_s, protocol.MAX_WAIT_S, caller.deadline_s - _REPLY_MARGIN_S))

    async def _hello(self, caller: Caller, body: bytes) -> msg.Welcome:
        hello = wire.decode(body, msg.Hello)
        self._guests.check_hello(caller, hello)
        if caller.right in _WITH_LEASES:
            if self._keeper.state.sessions.get(caller.name) != caller.session:
                self._guests.count_arrival(self._keeper.now_s())
            await self._keeper.answer(rq.Arrive(caller.name, caller.session))
        state = self._keeper.state
        lines = tuple(state.lineages)
        return msg.Welcome(self._run_id, state.lineage, state.published, wire.PROTOCOL_VERSION, lines)

    async def _lease(self, caller: Caller, body: bytes) -> msg.LeaseReply:
        call = wire.decode(body, msg.LeaseCall)
        if not protocol.is_name(call.request):
            raise StoreRefusal("a lease request must match [A-Za-z0-9_-]{1,64}")
        members = min(call.max_members, MAX_MEMBERS_PER_LEASE)
        count = -(-max(members, 1) // self._keeper.settings.group_size) + 1

        def ask() -> Any:
            offered = tuple(itertools.islice(self._prompts.ready, count))
            version = max(call.version, self.holders.get(caller.name) or call.version)
            request = rq.Lease(caller.name, caller.session, version, members, call.request, offered)
            reply = self._keeper.decide(request)
            if isinstance(reply, rq.Leases):
                self._prompts.take(reply.prompts_used)
                if not reply.grants and reply.prompts_used:
                    return ask()  # all offered prompts had been trained before a fork
            elif isinstance(reply, NoCredit):
                self._prompts.want(count)
            return reply

        leases = await self._keeper.answer_when_ready(ask, LEASE, self._wait_s(caller, call.wait_s))
        return msg.LeaseReply(leases.grants)

    async def _renew(self, caller: Caller, body: bytes) -> msg.Members:
        members = wire.decode(body, msg.Members).members
        return msg.Members(await self._keeper.answer(rq.Renew(caller.session, members)))

    async def _ended(self, caller: Caller, body: bytes) -> msg.Members:
        wanted_s = wire.decode(body, msg.EndedCall).wait_s
        keeper, deadline_s = self._keeper, self._keeper.now_s() + self._wait_s(caller, wanted_s)
        while not keeper.cancellations.has(caller.session) and (left_s := deadline_s - keeper.now_s()) > 0:
            await keeper.wakeups.wait(ENDED, left_s)
        ended = keeper.cancellations.take(caller.session)
        await keeper.log.committed()
        return msg.Members(ended)

    async def _release(self, caller: Caller, body: bytes) -> msg.Members:
        await self._keeper.answer(rq.Release(wire.decode(body, msg.Members).members))
        return msg.Members(())

    async def _put(self, caller: Caller, body: bytes) -> msg.PutReply:
        """Decide member by member, then answer for all of them once all are on disk.

        A call may need seconds of decoding, so it yields to other calls between members.
        """
        answers, turn_ends = [], time.monotonic() + _TURN_S
        for one in wire.decode(body, msg.PutBodies).members:
            answers.append(await self._put_one(caller, one))
            if time.monotonic() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.monotonic() + _TURN_S
        await self._keeper.log.committed()
        return msg.PutReply(tuple(answers))

    async def _put_one(self, caller: Caller, body: memoryview) -> msg.PutAnswer:
        try:
            key = key_of(body)
            reply = puts.by_key(self._keeper.state, key.group, key.member, key.attempt)
            if reply is None:  # otherwise the answer needs no decoding
                was_alive = self._is_alive(key.group)
                recorded = None if was_alive else await self._keeper.log.recorded(key.group, key.member)
                request = await self._request_of(key, body, recorded)
                if was_alive and not self._is_alive(key.group):  # its group ended while the thread decoded it
                    request = replace(request, recorded=await self._keeper.log.recorded(key.group, key.member))
                reply = self._decide_put(caller, request, schema.payload(key.group, key.member, body))
        except StoreRefusal as refusal:  # keep no reference to it: its traceback holds the decoded member
            return msg.PutAnswer("", refusal_of(refusal))
        return msg.PutAnswer("", refusal_of(reply)) if isinstance(reply, StoreRefusal) else msg.PutAnswer(reply)

    def _is_alive(self, group: int) -> bool:
        return self._keeper.state.find(group) is not None

    async def _request_of(self, key: Key, body: memoryview, recorded: rq.Recorded | None) -> rq.PutMember:
        """Decode a member; large ones in a thread, because one with thousands of segments would block all calls."""
        if len(body) <= _ON_LOOP_BYTES and len(key.outcome.segments) <= _ON_LOOP_SEGMENTS:
            return self._read(body, recorded)
        return await asyncio.get_running_loop().run_in_executor(self._large_puts, self._read, body, recorded)

    def _read(self, body: memoryview, recorded: rq.Recorded | None) -> rq.PutMember:
        settings = self._keeper.settings
        return put_request(
            body, recorded, row_tokens=settings.row_tokens, prompt_tokens=settings.prompt_tokens,
            vocab_size=self._vocab_size(),
        )  # fmt: skip

    def close(self) -> None:
        """Stop the thread that decodes large members."""
        self._large_puts.shutdown(wait=False, cancel_futures=True)

    def _decide_put(self, caller: Caller, request: rq.PutMember, payload: schema.Statement) -> str | StoreRefusal:
        """Decide a put; if its failure ends a group, add an audit row."""
        if request.failure is None:
            return self._keeper.decide(request, payload)
        alive = self._keeper.state.find(request.group) is not None
        reply = self._keeper.decide(request)
        if alive and self._keeper.state.find(request.group) is None:
            kind, error = request.failure
            self._audit.record(caller, "dead-letter", f"group {request.group}: {kind}: {error}", reply)
        return reply

    async def _claim(self, caller: Caller, body: bytes) -> msg.ClaimPage:
        call = wire.decode(body, msg.ClaimCall)
        request = rq.ClaimStep(caller.session, call.lineage, call.step, call.ahead)
        wait_s = self._wait_s(caller, call.wait_s)
        batch = await self._keeper.answer_when_ready(lambda: self._keeper.decide(request), CLAIM, wait_s)
        return await self._page(call, batch)

    async def _page(self, call: msg.ClaimCall, batch: Batch) -> msg.ClaimPage:
        state, settings = self._keeper.state, self._keeper.settings
        mask = settings.on_stale == "mask"
        groups = [state.held[gid] for gid in batch.groups]
        parts: list[msg.ClaimPart] = []
        position, size = 0, 0
        next_start: int | None = None
        for group in groups:
            numbers = [m for m, _ in group.done()]
            if call.stop is not None and position >= call.stop:
                break
            if position + len(numbers) <= call.start:
                position += len(numbers)
                continue
            bodies = await self._keeper.log.payloads(group.id)
            taken: list[bytes] = []
            for number in numbers:
                data = bodies[number]
                if call.start <= position and (call.stop is None or position < call.stop) and next_start is None:
                    if size and size + len(data) > self._page_bytes:
                        next_start = position
                    else:
                        taken.append(masked(data, batch.step, settings.limiter.max_age) if mask else data)
                        size += len(data)
                position += 1
            if taken:
                parts.append(msg.ClaimPart(group.id, group.task, tuple(taken)))
            if next_start is not None:
                break
        wanted = checkpoint_wanted(settings, state)
        replayed = batch.step < state.replay_until
        return msg.ClaimPage(batch.step, call.lineage, batch.shuffle_seed, replayed, wanted, tuple(parts), next_start)

    async def _begin(self, caller: Caller, body: bytes) -> msg.VersionCall:
        call = wire.decode(body, msg.BeginCall)
        if call.fork and not protocol.is_name(call.fork):
            raise StoreRefusal("the name of a fork must match [A-Za-z0-9_-]{1,64}")
        forks = sum(bool(line.fork) for line in self._keeper.state.lineages)
        reply = self._keeper.decide(rq.Begin(caller.session, call.durable, call.fork))
        if sum(bool(line.fork) for line in self._keeper.state.lineages) > forks:
            self._prompts.restart(self._keeper.state.cursor)  # before anything else can be leased
        asked = f"from {call.durable or 'nothing'}" + (f", fork {call.fork}" if call.fork else "")
        begun = "" if isinstance(reply, StoreRefusal) else f" at {reply}"
        return msg.VersionCall(await self._recorded(caller, "Begin", asked + begun, reply))

    async def _publish(self, caller: Caller, body: bytes) -> msg.Done:
        snapshot = wire.decode(body, VersionRef)
        reply = self._keeper.decide(rq.Publish(caller.session, snapshot))
        await self._recorded(caller, "Publish", f"{snapshot.version} {snapshot.manifest_digest}", reply)
        return msg.Done()

    async def _ack(self, caller: Caller, body: bytes) -> msg.Done:
        version = wire.decode(body, msg.VersionCall).version
        await self._recorded(caller, "Ack", str(version), self._keeper.decide(rq.Ack(caller.session, version)))
        return msg.Done()

    async def _durable(self, caller: Caller, body: bytes) -> msg.Done:
        version = wire.decode(body, msg.VersionCall).version
        await self._recorded(caller, "Durable", str(version), self._keeper.decide(rq.Durable(caller.session, version)))
        return msg.Done()

    async def _published(self, caller: Caller, body: bytes) -> msg.PublishedReply:
        call = wire.decode(body, msg.PublishedCall)
        in_turn = call.in_turn and caller.right in WORKERS
        if self.holders.get(caller.name) != call.known:
            self.holders[caller.name] = call.known
            self._keeper.wakeups.notify(LEASE)  # a lease call that was refused for its older weights may be granted now
        if in_turn and self._turns.over(caller.name):
            self._keeper.wakeups.notify(PUBLISHED)
        deadline_s = self._keeper.now_s() + self._wait_s(caller, call.wait_s)
        try:
            while True:
                now_s = self._keeper.now_s()
                may_fetch = self._may_fetch(call.known, caller.name if in_turn else "", now_s)
                if may_fetch or now_s >= deadline_s:
                    break
                until_s = min(deadline_s, self._turns.next_end_s(now_s))
                await self._keeper.wakeups.wait(PUBLISHED, until_s - now_s)
            snapshot = self._keeper.state.published if may_fetch else None
        finally:
            if in_turn and self._turns.leave(caller.name):
                self._keeper.wakeups.notify(PUBLISHED)
        await self._keeper.log.committed()
        return msg.PublishedReply(snapshot)

    def _may_fetch(self, known: Version | None, name: str, now_s: float) -> bool:
        """True if there are weights other than `known` and `name` (if not empty) has an update slot or needs none.

        A sampler without weights, or with those of an ended lineage, cannot sample, so it needs no slot.
        """
        snapshot = self._keeper.state.published
        if snapshot is None or snapshot.version == known:
            return False
        cannot_sample = known is None or known.lineage < snapshot.version.lineage
        return cannot_sample or not name or self._turns.take(name, now_s)

    async def _report(self, caller: Caller, body: bytes) -> msg.Done:
        """Append the valid rows to metrics.jsonl; a repeated report (same request id) is not written again."""
        call = wire.decode(body, msg.ReportCall)
        if (size := sum(map(len, call.rows))) > MAX_REPORT_BYTES:
            raise StoreRefusal(f"a report of {size} bytes; at most {MAX_REPORT_BYTES} are taken: send it in parts")
        if self._last_report.get(caller.session) != call.request:
            rows, left_out = validation.rows_of(call.rows, caller.right)
            self._metrics.log_all(rows)
            if left_out:
                self._audit.refused(caller.peer, f"{caller.right}:{caller.name}", f"metrics: {left_out[0]}")
            self._last_report[caller.session] = call.request
        return msg.Done()

    async def _status(self, caller: Caller, body: bytes) -> msg.StatusReply:
        holders = {who: str(version) for who, version in self.holders.items()}
        keeper = self._keeper
        report = status(keeper.settings, keeper.state, bool(self._prompts.ready), keeper.now_s()) | {"holders": holders}
        report["log"] = await self._keeper.log.facts()
        return msg.StatusReply(json.dumps(report).encode())

    async def _close(self, caller: Caller, body: bytes) -> msg.Done:
        reason = wire.decode(body, msg.CloseCall).reason[:500]
        await self._recorded(caller, "Close", reason, self._keeper.decide(rq.Close(reason)))
        return msg.Done()

    async def _recorded(self, caller: Caller, what: str, detail: str, reply: Any) -> Any:
        """Record the decision in the audit, wait for the disk, then return `reply` or raise it if it is a refusal."""
        self._audit.record(caller, what, detail, reply)
        await self._keeper.log.committed()
        if isinstance(reply, StoreRefusal):
            raise reply
        return reply
