"""Turns at changing weights (`schedule.rolling`): so many samplers at a time, who has waited longest first.

A sampler has its turn from when it is told of new weights until it asks for others, which it does when its engine
computes with them, or when it could not have them. A turn that lasts too long is over: whoever had it may be gone.
Nothing here is kept over a restart of the store: at worst two turns are one too many for once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from jaxroll import wire
from jaxroll.clock import Clock, unix_s
from jaxroll.errors import NoCredit, NotReady, StaleClient, StoreRefusal, Unauthorized
from jaxroll.rpc.intake import Credit, TooManyCalls
from jaxroll.rpc.server import Caller
from jaxroll.store.core import events as ev
from jaxroll.store.core import requests as rq
from jaxroll.store.core.holders import free_members
from jaxroll.store.core.machine import Core, Ending
from jaxroll.store.core.requests import Key
from jaxroll.store.core.settings import Settings
from jaxroll.store.core.state import State
from jaxroll.store.log import schema
from jaxroll.store.log.commit_log import Log
from jaxroll.store.messages import MAX_KEYS, Hello


class UpdateSlots:
    """Up to `count` turns at a time, of at most `turn_s` each; a `count` of 0 gives one to everybody."""

    def __init__(self, count: int, turn_s: float) -> None:
        self._count, self._turn_s = count, turn_s
        self._until_s: dict[str, float] = {}  # who has a turn → when it is over at the latest
        self._waiting: dict[str, None] = {}  # in the order in which they came

    def over(self, name: str) -> bool:
        """The turn of `name` is over; whether it had one."""
        return self._until_s.pop(name, None) is not None

    def take(self, name: str, now_s: float) -> bool:
        """True if `name` has a turn from `now_s` on. If not it has a place in the queue, until it has one or leaves."""
        if not self._count:
            return True
        self._until_s = {who: until_s for who, until_s in self._until_s.items() if until_s > now_s}
        if name in self._until_s:
            return True  # a call of it that nobody hears any more was given the turn
        self._waiting.setdefault(name)
        free = self._count - len(self._until_s)
        if list(self._waiting).index(name) >= free:
            return False
        del self._waiting[name]
        self._until_s[name] = now_s + self._turn_s
        return True

    def leave(self, name: str) -> bool:
        """`name` waits no longer; whether it did."""
        if name not in self._waiting:
            return False
        del self._waiting[name]
        return True

    def next_end_s(self, now_s: float) -> float:
        """When the next of the turns is over by itself; infinite when there is none."""
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=math.inf)


# --- Whose calls belong to this run: the facts of the first message, which every later call carries again
#
# What a hello proves (same protocol, same config, this run) is in the metadata of every call, so that a store that
# started again can check it too; a caller learns the run's id only from the answer to its hello. Of samplers and
# learners
# the log also knows the names that said hello.

NAMES_KEPT = 1024  # of which something is remembered that nothing depends on
_ARRIVALS, _ARRIVALS_PER_S = 512.0, 2.0  # each is a record of the log: a whole pod at once, but no stream of them
_WITHOUT_CONFIG = frozenset({"observer", "admin"})  # may come without a config; with one, it must be the run's

V = TypeVar("V")


class HandshakeCheck:
    """Refuses callers of other runs and configs, and a stream of newcomers."""

    def __init__(self, run_id: str, config_digest: str) -> None:
        self._run_id, self._config_digest = run_id, config_digest
        self._arrivals = Credit(_ARRIVALS, _ARRIVALS_PER_S)

    def check_hello(self, caller: Caller, hello: Hello) -> None:
        """Raise Unauthorized unless `caller` may join."""
        if hello.protocol != wire.PROTOCOL_VERSION:
            raise Unauthorized(
                f"the store speaks protocol {wire.PROTOCOL_VERSION}, the caller {hello.protocol}: "
                "install the same JaxRoll on both sides"
            )
        self._check_config(caller, hello.config_digest)

    def count_arrival(self, now_s: float) -> None:
        """Raise TooManyCalls when more processes join than a run can have: is something looping?"""
        if not self._arrivals.take(now_s):
            raise TooManyCalls("too many processes join this run; try again")

    def check_call(self, caller: Caller, greeted: bool) -> None:
        """Raise StaleClient or Unauthorized unless `caller` has been welcomed; `greeted`: its name has said hello."""
        if not (caller.run_id and greeted):
            raise StaleClient(f"this is run {self._run_id}, the caller has not said Hello, its first message")
        if caller.run_id != self._run_id:
            raise StaleClient(
                f"this is run {self._run_id}, the caller belongs to {caller.run_id[:64]}: start it again for this run"
            )
        self._check_config(caller, caller.config_digest)

    def _check_config(self, caller: Caller, said: str) -> None:
        if said == self._config_digest or (not said and caller.right in _WITHOUT_CONFIG):
            return
        raise Unauthorized(
            f"the store runs config {self._config_digest[:12]}, the caller {said[:12] or 'none'}: "
            "start both from the same config (`jaxroll config` prints its digest)"
        )


class RecentMap(OrderedDict[str, V], Generic[V]):
    """A dict of the `size` keys written last: what callers choose must not grow without end."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._size:
            self.popitem(last=False)


# --- State machine and log together: events are logged, waiters wake, an answer waits for the disk

COMPACT_EVERY, COMPACT_BYTES = 20_000, 32 * 2**20  # log records, and their bytes: what a restart reads at most
_STOOD_STILL_S = 1.0  # a tick this much late was the machine's fault, and no holder's
_QUIET = (ev.Leased, ev.Awaited, ev.Hungry, ev.Seen, ev.Renewed, ev.Extended, ev.Arrived)


class Keeper:
    """The run's history, kept. Belongs to one event loop's thread; deciding and logging happen without an await."""

    def __init__(self, settings: Settings, log: Log, clock: Clock) -> None:
        self.settings, self.log, self._clock = settings, log, clock
        known = log.recovered
        self.core = Core.recovered(settings, known.state, known.events, clock.now_s())
        self.wakeups, self.untold = Wakeups(), CancellationInbox()
        log.begin(self.core.state)
        self._records, self._bytes = len(known.events), known.log_bytes
        self.tick_due_s = math.inf  # when the store's own tick is to come; it moves on with every tick
        self.on_acked: Callable[[], None] = lambda: None
        self.on_closed: Callable[[str], None] = lambda reason: None  # by the run itself: nobody asked for it
        log.append(schema.rules(msgspec.json.encode(settings).decode()))

    @property
    def state(self) -> State:
        """The state; read only."""
        return self.core.state

    def now_s(self) -> float:
        """The clock that leases live by."""
        return self._clock.now_s()

    def decide(self, request: rq.Request, payload: schema.Statement | None = None) -> Any:
        """The answer to `request`, already decided, applied and handed to the log, but not yet on disk.

        `payload` is committed with the events, if there are any that put it.

        If the process or its machine stood still, everybody is forgiven that time first: the first request after it
        may come before the tick.
        """
        late_s = self._clock.now_s() - self.tick_due_s
        if late_s > _STOOD_STILL_S:
            self.tick_due_s += late_s
            self.decide(rq.Tick(stalled_s=late_s))
        before = self.state.position
        decision = self.core.handle(request, self._clock.now_s())
        self._log(decision.events, before, payload)
        self._wake(decision.events)
        if not isinstance(request, rq.Close):
            for event in decision.events:
                if isinstance(event, ev.RunClosed):
                    self.on_closed(event.reason)
        if decision.ended:
            self.untold.add(decision.ended)
            self.wakeups.notify(ENDED)
        return decision.reply

    async def answer(self, request: rq.Request, payload: schema.Statement | None = None) -> Any:
        """The answer to `request` once it is on disk; raises it when it is a refusal."""
        reply = self.decide(request, payload)
        await self.log.committed()
        if isinstance(reply, StoreRefusal):
            raise reply
        return reply

    async def answer_when_ready(self, ask: Callable[[], Any], topic: str, wait_s: float) -> Any:
        """The answer of `ask` (which decides), asked again at every change while it is "not yet" and time is left."""
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
            rows = schema.statements(event, self.state, position, now_s)
            statements += rows
            self._records += 1
            self._bytes += schema.record_bytes(rows[0])
            if isinstance(event, ev.Put) and payload is not None:
                statements.append(payload)
        self.log.append(statements)
        if self._records >= COMPACT_EVERY or self._bytes >= COMPACT_BYTES:
            self._records = self._bytes = 0
            self.log.compact()

    def _leaves_members(self, gid: int) -> bool:
        group = self.state.open.get(gid)
        return group is not None and bool(free_members(group, self._clock.now_s()))

    def _wake(self, events: list[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.Leased) and self._leaves_members(event.group):
                self.wakeups.notify(LEASE)  # they were left for somebody who waits
            if isinstance(event, _QUIET):
                continue
            if isinstance(event, ev.Put):
                group = self.state.open.get(event.group)
                if group is not None and group.ready:
                    self.wakeups.notify(CLAIM)
                continue
            self.wakeups.notify(LEASE, CLAIM)
            if isinstance(event, (ev.Published, ev.Began, ev.RunClosed)):
                self.wakeups.notify(PUBLISHED)
            if isinstance(event, ev.Acked):
                self.on_acked()


# --- waiting for a change by topic: long polls sleep until an event wakes them

LEASE, CLAIM, PUBLISHED, ENDED = "lease", "claim", "published", "ended"
_Places = dict[asyncio.Future[None], None]  # in the order in which they were taken
_AT_ONCE = 64  # who wakes asks again: of thousands, others have their turn in between


class Wakeups:
    """Those who wait, by topic, in the order in which they came. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Places] = {}
        self._due: deque[_Places] = deque()
        self._is_waking = False

    def notify(self, *topics: str) -> None:
        """Wake everyone who waits for one of `topics`, a few at each turn of the loop."""
        self._due += [waiting for topic in topics if (waiting := self._waiting.pop(topic, None))]
        self._go_on()

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """True if `topic` was notified within `timeout_s`. Nothing is missed between deciding and waiting: no await."""
        waiting, place = self._waiting.setdefault(topic, {}), asyncio.get_running_loop().create_future()
        waiting[place] = None
        try:
            async with asyncio.timeout(timeout_s):
                await place
        except TimeoutError:
            return False
        finally:
            waiting.pop(place, None)
        return True

    def _go_on(self) -> None:
        if self._due and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        left, self._is_waking = _AT_ONCE, False
        while self._due and left:
            waiting = self._due[0]
            for place in list(itertools.islice(waiting, left)):
                del waiting[place]
                if not place.done():
                    place.set_result(None)
                    left -= 1
            if not waiting:
                self._due.popleft()
        self._go_on()


# --- cancellation inbox: ended leases, until their holders ask
#
# A courtesy: what is lost with an answer, or with the store, the holder learns when it renews.


class CancellationInbox:
    """What holders have not been told yet, by session. Bounded in sessions and in leases of each."""

    def __init__(self) -> None:
        self._by_session: RecentMap[list[Key]] = RecentMap(NAMES_KEPT)

    def add(self, endings: Iterable[Ending]) -> None:
        """Keep these for their holders; of too many, the first ones."""
        for session, key in endings:
            if not self.has(session):
                self._by_session[session] = []
            if len(waiting := self._by_session[session]) < MAX_KEYS:
                waiting.append(key)

    def has(self, session: str) -> bool:
        """True if there is something to tell."""
        return session in self._by_session

    def take(self, session: str) -> tuple[Key, ...]:
        """What is to be told, which is forgotten."""
        return tuple(self._by_session.pop(session, ()))
