"""Keeper: state machine and log together; weights of intervals, handshakes, wake-ups, cancellation inbox, workers.

Nothing in this file but the keeper's state survives a restart of the store.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from jaxroll import config as configs
from jaxroll import wire
from jaxroll.clock import Clock, unix_s
from jaxroll.config import Config
from jaxroll.config.derived import COLOCATED, leader, sampler_names
from jaxroll.errors import NoCredit, NotReady, StaleClient, StoreRefusal, Unauthorized
from jaxroll.metrics import Tracker
from jaxroll.records import Version
from jaxroll.rpc.intake import Credit, TooManyCalls
from jaxroll.rpc.server import Caller
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings, free_members
from jaxroll.store.core.events import Key
from jaxroll.store.core.machine import Core, Ending
from jaxroll.store.core.state import NAMES_KNOWN, State
from jaxroll.store.log import commit_log, schema
from jaxroll.store.log.database import CommitLog
from jaxroll.store.messages import MAX_KEYS, Done, Hello, Joined

# --- schedule.mode=interval: which weights the samplers of a batch get


class Intervals:
    """Batch b is sampled with the weights of version b − 1, also by samplers that begin it late.

    A sampler keeps its weights until all begun batches are finished, and then gets those of the next batch, no newer
    ones. The learner gets a finished batch when all samplers have the weights that it made before, because it would
    replace them: the barrier of HTS-RL (arXiv 2012.09849). It waits for at most `limit_s`, and after that no more for
    a sampler that still has the same weights.
    """

    def __init__(self, keeper: Keeper, limit_s: float) -> None:
        self._keeper, self._limit_s = keeper, limit_s
        self._since: tuple[int, int, float] = (-1, -1, 0.0)  # lineage and step of the batch that waits, from this time
        self._given_up: dict[str, Version] = {}

    def keeps(self, known: Version, newest: Version) -> bool:
        """True if a sampler with the weights `known` goes on with them; False also if they are too old to sample."""
        state, limiter = self._keeper.state, self._keeper.settings.limiter
        if not limiter.intervals or limiter.window(newest.step - known.step) <= 0:
            return False
        if newest.step < state.next_claim - 1:  # claims are trained again
            return False
        finished = state.next_claim + len(state.open) // limiter.batch_groups
        return bool(state.index.lacking) or newest.step > max(finished - 1, 0)

    def are_late(self, step: int, held: Mapping[str, Version | None]) -> bool:
        """True while the claim of `step`, a finished batch, waits for samplers, which have the weights `held`."""
        state, limiter = self._keeper.state, self._keeper.settings.limiter
        is_finished = not state.index.lacking and len(state.open) >= limiter.batch_groups
        if not limiter.intervals or state.closed or step != state.next_claim or not is_finished:
            return False
        known = {name: version for name, version in held.items() if version and version.lineage == state.lineage}
        late = {name: v for name, v in known.items() if v.step < step and self._given_up.get(name) != v}
        now_s = self._keeper.now_s()
        if self._since[:2] != (state.lineage, step):
            self._since = state.lineage, step, now_s
        if late and now_s - self._since[2] >= self._limit_s:
            self._given_up = late
            return False
        return bool(late)


# --- handshake check: do the calls belong to this run?
#
# The facts that Hello establishes (protocol, config, run) are in the metadata of every call, so that a restarted store
# can check them too. A caller learns the run's id only from the reply to Hello. For samplers and learners the log also
# holds the names that sent Hello.

NAMES_KEPT = 1024  # names with best-effort entries (version, inbox); of reports the store knows eight times as many
_ARRIVALS, _ARRIVALS_PER_S = 512.0, 2.0  # each is a log record: enough for a pod that starts at once, not for a loop
WITH_LEASES = frozenset({"sampler", "learner"})  # a new process of these ends the leases of the one before
_WITHOUT_CONFIG = frozenset({"observer", "admin"})  # may join without a config; if they have one, it must match

V = TypeVar("V")
_Handler = Callable[[Caller, bytes], Awaitable[Any]]


class HandshakeCheck:
    """Check that refuses callers of other runs and configs, and limits the rate of arrivals."""

    def __init__(self, keeper: Keeper, config_digest: str, called: Callable[[Caller], None]) -> None:
        self._keeper, self._run_id, self._config_digest, self._called = keeper, keeper.run_id, config_digest, called
        self.last_call_s = keeper.now_s()
        self.callers: dict[str, str] = RecentMap(NAMES_KEPT)  # name → session of the last ones
        self._arrivals = Credit(_ARRIVALS, _ARRIVALS_PER_S)

    def answering(self, method: str, handler: _Handler) -> Callable[[Caller, bytes], Awaitable[bytes]]:
        """Wrap the handler of an RPC method: note the time, check a caller that has joined, encode the answer."""

        async def answer(caller: Caller, body: bytes) -> bytes:
            self.last_call_s = self._keeper.now_s()
            if method not in ("Hello", "Join"):
                self.check_call(caller, caller.right not in WITH_LEASES or self._greeted(caller.name))
                self.callers[caller.name] = caller.session
                self._called(caller)
            return wire.encode(await handler(caller, body))

        return answer

    def _greeted(self, name: str) -> bool:
        """True if `name` has sent Hello. Once names were dropped (beyond NAMES_KNOWN), the run's id is proof enough."""
        known = self._keeper.state.sessions
        return name in known or len(known) >= NAMES_KNOWN

    def check_hello(self, caller: Caller, hello: Hello) -> None:
        """Raise Unauthorized unless `caller` may join."""
        self.check_protocol(hello.protocol)
        self._check_config(caller, hello.config_digest)

    @staticmethod
    def check_protocol(protocol: int) -> None:
        """Raise Unauthorized unless the caller uses the store's protocol."""
        if protocol != wire.PROTOCOL_VERSION:
            raise Unauthorized(
                f"the store uses protocol {wire.PROTOCOL_VERSION}, the caller {protocol}: "
                "install the same JaxRoll on both sides"
            )

    def count_arrival(self) -> None:
        """Raise TooManyCalls if more processes join than a run can have, as when one restarts in a loop."""
        if not self._arrivals.take(self._keeper.now_s()):
            raise TooManyCalls("too many processes join this run; try again")

    def check_call(self, caller: Caller, greeted: bool) -> None:
        """Raise StaleClient or Unauthorized unless `caller` has joined this run; `greeted`: its name has sent Hello."""
        if not (caller.run_id and greeted):
            raise StaleClient(
                f"this is run {self._run_id}, the caller has not sent Hello, the first message of a caller"
            )
        if caller.run_id != self._run_id:
            raise StaleClient(
                f"this is run {self._run_id}, the caller belongs to {caller.run_id[:64]}: start it again for this run"
            )
        self._check_config(caller, caller.config_digest)

    def _check_config(self, caller: Caller, config_digest: str) -> None:
        if config_digest == self._config_digest or (not config_digest and caller.right in _WITHOUT_CONFIG):
            return
        raise Unauthorized(
            "the store and the caller have different configs: start both from the same config file and overrides, "
            "and compare the output of `jaxroll config`"
        )


class RecentMap(OrderedDict[str, V], Generic[V]):
    """Dict of the `size` keys written last, for keys that callers choose."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._size:
            self.popitem(last=False)


# --- state machine and log together: decide, log the events, wake the waiting calls, answer once they are on disk

COMPACT_EVERY, COMPACT_BYTES = 20_000, 32 * 2**20  # log records and bytes between compactions, which bound a restart
_STALLED_S = 1.0  # a tick this late means that the process or machine was suspended
_QUIET = (ev.Leased, ev.Flushed, ev.Awaited, ev.Hungry, ev.Seen, ev.Renewed, ev.Extended, ev.Arrived)


class Keeper:
    """State machine with its log. Use it from one event loop's thread; deciding and logging happen without an await."""

    def __init__(self, settings: Settings, log: CommitLog, clock: Clock) -> None:
        self.settings, self.log, self._clock = settings, log, clock
        known = log.recovered
        self.run_id = known.run_id
        self.core = Core.recovered(settings, known.state, known.events, clock.now_s())
        self.wakeups, self.cancellations = Wakeups(), CancellationInbox()
        log.begin(self.core.state)
        self._records, self._bytes, self._left_work = len(known.events), known.log_bytes, False
        self.tick_due_s = math.inf  # time at which the server's next tick is due
        self.on_acked: Callable[[], None] = lambda: None
        self.on_closed: Callable[[str], None] = lambda reason: None  # called if a decision, not Close, ends the run
        log.append(schema.rules(msgspec.json.encode(settings).decode()))

    @property
    def state(self) -> State:
        """The state; read only."""
        return self.core.state

    def now_s(self) -> float:
        """The time on the clock of leases."""
        return self._clock.now_s()

    def decide(self, request: ev.Request, payload: schema.Statement | None = None) -> Any:
        """Decide and apply `request`, pass its events to the log and return the answer, which is not yet on disk.

        `payload` is committed with the events if one of them is a Put or Flushed.

        After a suspension of the process or machine, all leases are extended first: this request may come before the
        tick.
        """
        late_s = self._clock.now_s() - self.tick_due_s
        if late_s > _STALLED_S:
            self.tick_due_s += late_s
            self.decide(ev.Tick(stalled_s=late_s))
        before = self.state.position
        try:
            decision = self.core.handle(request, self._clock.now_s())
            self._log(decision.events, before, payload)
            self._wake(decision.events)
        except BaseException as error:
            # Events may be applied that the log lacks: a repeated put would be acknowledged without being on disk.
            if self.state.position != before or isinstance(error, MemoryError):
                self.log.fail(error)
            raise
        if not isinstance(request, ev.Close):
            for event in decision.events:
                if isinstance(event, ev.RunClosed):
                    self.on_closed(event.reason)
        if isinstance(decision.reply, NoCredit) and decision.reply.reason == ev.LEFT:
            self._left_work = True  # until others have taken their shares, or a tick
        elif self._left_work and (isinstance(request, (ev.Tick, ev.PutMember)) or not self.state.by_holder.fetching()):
            self._left_work = False
            self.wakeups.notify(LEASE)
        if decision.ended:
            self.cancellations.add(decision.ended)
            self.wakeups.notify(ENDED)
        return decision.reply

    async def answer(self, request: ev.Request, payload: schema.Statement | None = None) -> Any:
        """Return the answer to `request` once it is on disk; raise it if it is a refusal."""
        reply = self.decide(request, payload)
        await self.log.committed()
        if isinstance(reply, StoreRefusal):
            raise reply
        return reply

    async def answer_when_ready(self, ask: Callable[[], Any], topic: str, wait_s: float) -> Any:
        """Return the answer of `ask`, which decides; ask again at every change while it is "not yet", for `wait_s`."""
        started = self._clock.now_s()
        while True:
            reply = ask()
            left_s = started + wait_s - self._clock.now_s()
            if not isinstance(reply, (NoCredit, NotReady)) or left_s <= 0:
                break
            await self.wakeups.wait(topic, left_s)
        await self.log.committed()
        if isinstance(reply, StoreRefusal):
            raise reply
        return reply

    def _log(self, events: list[ev.Event], position: int, payload: schema.Statement | None) -> None:
        statements: list[schema.Statement] = []
        now_s = unix_s()
        for event in events:
            if isinstance(event, ev.NOT_LOGGED):
                continue
            position += 1
            rows = commit_log.statements(event, self.state, position, now_s)
            statements += rows
            self._records += 1
            self._bytes += commit_log.record_bytes(rows[0])
            if isinstance(event, (ev.Put, ev.Flushed)) and payload is not None:
                statements.append(payload)
        self.log.append(statements)
        if self._records >= COMPACT_EVERY or self._bytes >= COMPACT_BYTES:
            self._records = self._bytes = 0
            self.log.compact()

    def _leaves_members(self, gid: int) -> bool:
        group = self.state.open.get(gid)
        return group is not None and bool(free_members(group, self._clock.now_s()))

    def _wake(self, events: list[ev.Event]) -> None:
        between_intervals = (PUBLISHED,) if self.settings.limiter.intervals else ()
        for event in events:
            if isinstance(event, ev.Leased) and (self.settings.pools.names or self._leaves_members(event.group)):
                self.wakeups.notify(LEASE)  # a waiting sampler may lease the others, or now help this pool
            if isinstance(event, _QUIET):
                continue
            if isinstance(event, ev.Put):
                group = self.state.open.get(event.group)
                if group is not None and group.ready:
                    self.wakeups.notify(CLAIM, *between_intervals)
                continue
            self.wakeups.notify(LEASE, CLAIM, *between_intervals)
            if isinstance(event, (ev.Published, ev.Began, ev.RunClosed)):
                self.wakeups.notify(PUBLISHED)
            if isinstance(event, ev.Acked):
                self.on_acked()


# --- waiting for a change by topic: long polls sleep until an event wakes them

LEASE, CLAIM, PUBLISHED, ENDED, REPACK = "lease", "claim", "published", "ended", "repack"
_Futures = dict[asyncio.Future[None], None]  # in the order of arrival
_WAKEN_AT_ONCE = 64  # woken calls decide again, so thousands of them must leave time for other calls


class Wakeups:
    """Waiting calls by topic, in the order of arrival. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Futures] = {}
        self._due: deque[_Futures] = deque()
        self._is_waking = False

    def notify(self, *topics: str) -> None:
        """Wake all calls that wait for one of `topics`, a few per iteration of the loop."""
        self._due += [waiting for topic in topics if (waiting := self._waiting.pop(topic, None))]
        self._schedule()

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """Wait for `topic`; return False after `timeout_s`. It registers before its first await, so it misses none."""
        waiting, woken = self._waiting.setdefault(topic, {}), asyncio.get_running_loop().create_future()
        waiting[woken] = None
        try:
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            return False
        finally:
            waiting.pop(woken, None)
        return True

    def _schedule(self) -> None:
        if self._due and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        left, self._is_waking = _WAKEN_AT_ONCE, False
        while self._due and left:
            waiting = self._due[0]
            for woken in list(itertools.islice(waiting, left)):
                del waiting[woken]
                if not woken.done():
                    woken.set_result(None)
                    left -= 1
            if not waiting:
                self._due.popleft()
        self._schedule()


# --- cancellation inbox: leases that the store ended, until their holders fetch them
#
# Best effort: if a reply or the store is lost, the holder learns of the end when it renews the lease.


class CancellationInbox:
    """Ended leases that their holders have not fetched yet, by session. Bounded in sessions and leases per session."""

    def __init__(self) -> None:
        self._by_session: RecentMap[list[Key]] = RecentMap(NAMES_KEPT)

    def add(self, endings: Iterable[Ending]) -> None:
        """Store ended leases for their holders; beyond MAX_KEYS per session, drop the later ones."""
        for session, key in endings:
            if not self.has(session):
                self._by_session[session] = []
            if len(waiting := self._by_session[session]) < MAX_KEYS:
                waiting.append(key)

    def has(self, session: str) -> bool:
        """True if there are ended leases for the session."""
        return session in self._by_session

    def take(self, session: str) -> tuple[Key, ...]:
        """Remove and return the ended leases of the session."""
        return tuple(self._by_session.pop(session, ()))


# --- workers: samplers and actors that call the store; their joins, leaves and silence; numbers of new samplers
#
# After a restart of the store a process is known again at its first call. Joins and leaves become metric rows, for the
# live view and `jaxroll inspect`.

RIGHT = "sampler"  # of samplers and actors
SILENCE_S = 30.0  # three heartbeats: a process that starts or waits calls no more often
_SAMPLER = re.compile(r"sampler-(\d{1,9})")


@dataclass
class _Process:
    session: str
    called_s: float
    leases: bool = False  # it has requested leases
    serves_on: str = ""  # HOST:PORT at which it serves actors


class Workers:
    """The samplers and actors that have called within `silence_s`."""

    def __init__(self, config: Config, keeper: Keeper, metrics: Tracker) -> None:
        self._config, self._keeper, self._metrics = config, keeper, metrics
        self._silence_s = max(SILENCE_S, config.store.lease_s)
        self._present: dict[str, _Process] = {}
        self._silent: dict[str, str] = {}  # name → session of a process that was reported as silent
        self.surplus: dict[str, str] = {}  # name → session of a sampler that is asked to leave

    @property
    def holders(self) -> int:
        """The number of processes that request leases."""
        return sum(one.leases for one in self._present.values())

    @property
    def sessions(self) -> dict[str, str]:
        """The sessions of the processes by name."""
        return {name: one.session for name, one in self._present.items()}

    def is_surplus(self, caller: Caller) -> bool:
        """True if the caller is asked to leave."""
        return self.surplus.get(caller.name) == caller.session

    @property
    def serving(self) -> dict[str, str]:
        """Addresses of the samplers that serve actors, by name."""
        return {name: one.serves_on for name, one in self._present.items() if one.serves_on}

    def note_call(self, caller: Caller) -> None:
        """Note a call of a sampler or actor."""
        if caller.right != RIGHT or self._keeper.state.sessions.get(caller.name) != caller.session:
            return
        one = self._present.get(caller.name)
        if one is None or one.session != caller.session:
            one = self._present[caller.name] = _Process(caller.session, 0.0)
            if self._silent.pop(caller.name, "") == caller.session:
                self._row(caller.name, "join", "is back")
        one.called_s = self._keeper.now_s()

    def note_arrival(self, caller: Caller) -> None:
        """Note that a process joined; its session is new."""
        self._silent.pop(caller.name, None)
        self.note_call(caller)
        if caller.right == RIGHT:
            self._row(caller.name, "join", "joined")

    def leases(self, caller: Caller) -> None:
        """Note that the process requests leases."""
        if (one := self._present.get(caller.name)) is not None:
            one.leases = True

    def serves(self, caller: Caller, address: str) -> None:
        """Note the address at which the process serves actors; '' if it serves none."""
        if (one := self._present.get(caller.name)) is not None:
            one.serves_on = address

    def tick(self) -> None:
        """Report processes that have fallen silent, and forget them."""
        now_s = self._keeper.now_s()
        for name, one in list(self._present.items()):
            if now_s - one.called_s > self._silence_s:
                del self._present[name]
                self._silent[name] = one.session
                self._keeper.wakeups.notify(CLAIM)
                self._row(name, "leave", f"is silent: no call for {now_s - one.called_s:.0f} s")

    async def join(self, caller: Caller, body: bytes) -> Joined:
        """The config and the number of a sampler that starts; no other one gets that number."""
        HandshakeCheck.check_protocol(wire.decode(body, Hello).protocol)
        if leader(self._config) == COLOCATED:
            raise StoreRefusal("placement.colocated keeps the weights of this run in one process: no sampler can join")
        sessions = self._keeper.state.sessions
        mine = next((name for name, session in sessions.items() if session == caller.session), "")  # a repeated call
        numbers = [int(found[1]) for name in sessions if (found := _SAMPLER.fullmatch(name))]
        name = mine or f"sampler-{max([len(sampler_names(self._config)) - 1, *numbers]) + 1}"
        await self._keeper.answer(ev.Arrive(name, caller.session))
        config = json.dumps(configs.to_dict(self._config)).encode()
        return Joined(self._keeper.run_id, config, int(name.rpartition("-")[2]))

    async def leave(self, caller: Caller, body: bytes) -> Done:
        """End the leases of a process that leaves."""
        was_there = self._keeper.state.sessions.get(caller.name) == caller.session
        await self._keeper.answer(ev.Leave(caller.name, caller.session))
        if was_there:
            self._present.pop(caller.name, None)
            self._keeper.wakeups.notify(CLAIM)
            self._row(caller.name, "leave", "left")
        return Done()

    def _row(self, name: str, what: str, text: str) -> None:
        row: dict[str, Any] = {"t": unix_s(), "role": name, "kind": "event", "what": what}
        self._metrics.log(row | {"text": f"{text}; {len(self._present)} samplers and actors are present"})
