"""The store under test: the pure core, a simulated log with group commit, and the reference that watches both.

An operation is a plain tuple, and a list of them can be performed again on a fresh store:

    (ask, request, prompts)   the core decides; `prompts` is how many the feeder has ready for a lease
    (sync,)                   everything decided is on disk, and only now the answers leave
    (crash, kept, clock_s)    the process dies; `kept` of the decisions that wait for the disk happen to be on it
    (compact,)                the log is replaced by the state, when the next sync comes
    (wait, seconds)           the clock goes on
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from jaxroll import wire
from jaxroll.policy.limiter import HUNGRY_S, Rooms
from jaxroll.records import Task
from jaxroll.store.core import events as ev
from jaxroll.store.core import state as st
from jaxroll.store.core.admission import Settings, by_holder
from jaxroll.store.core.machine import Core, decide, rebased
from jaxroll.store.core.state import Index
from tests.harness.store_model.books import Broken, Fact, Rules, broken
from tests.harness.store_model.reference import Reference
from tests.harness.store_model.views import answered, facts, figures, members_of, settings, slow, timeless

REMEMBER_EVERY = 64  # decisions between two copies of the reference
WHOLE_EVERY = 16  # decisions between two comparisons of every member


@dataclass
class Waiting:
    """A decision that is not on disk yet. `state` is that of a compaction, which replaces all before it."""

    request: Any
    reply: Any
    events: list[bytes]
    facts: list[Fact]
    puts: list[ev.Put]
    now: float
    branch: int = 0
    slow: frozenset[str] = frozenset()  # the samplers that the core called slow then
    took: dict[str, float] = field(default_factory=dict)  # how long members of each holder took then
    state: bytes | None = None


class Disk:
    """Data that survives a crash: the log, and the members put according to it."""

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.events: list[bytes] = []
        self.put: dict[tuple[int, int], ev.Recorded] = {}

    def write(self, waiting: list[Waiting]) -> None:
        """Commits decisions, in order."""
        for entry in waiting:
            if entry.state is not None:
                self.state, self.events = entry.state, []
            self.events += entry.events
            self.put |= {(e.group, e.member): ev.Recorded(e.attempt, e.digest) for e in entry.puts}

    def recovered(self, settings: Settings, now: float) -> Core:
        """The machine that a new process recovers from it."""
        state = None if self.state is None else wire.decode(self.state, st.State)
        return Core.recovered(settings, state, [wire.decode(body, ev.Event) for body in self.events], now)  # type: ignore[arg-type]


class Store:
    """Performs operations, and raises Broken at the first that breaks a promise."""

    def __init__(self, rules: Rules) -> None:
        self.settings = settings(rules)
        self.core, self.disk, self.ref = Core(self.settings), Disk(), Reference(rules)
        self.waiting: list[Waiting] = []
        self.fed = self.done = self.narrowed = 0
        self.answered: Counter[str] = Counter()
        self.now = 0.0
        self._since: list[Waiting] = []  # on disk since the reference was copied
        self._copy = pickle.dumps(self.ref.__dict__)
        self.promised: dict[tuple[int, int], tuple[int, str]] = {}  # puts whose OK has left
        self.delivered: dict[tuple[int, int], tuple[int, ...]] = {}  # (branch, step)  # batches that a learner has

    def perform(self, operation: tuple) -> Any:
        """The answer to the operation; only an `ask` has one."""
        kind, *arguments = operation
        try:
            return getattr(self, kind)(*arguments)
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"[11 typed ends] {operation} ends with {error!r}") from error

    # --- operations

    def ask(self, request: Any, prompts: int = 0) -> Any:
        """The core's answer, which must not leave before the next sync."""
        self.done += 1
        request = self.completed(request, prompts)
        if self.done % WHOLE_EVERY == 0:
            self.check_pure(request)
        leased = self.ref.leases()
        self.ref.slow, self.ref.took = slow(self.settings, self.core.state), dict(self.core.state.member_s)
        decision = self.core.handle(request, self.now)
        logged = [e for e in decision.events if not isinstance(e, ev.NOT_LOGGED)]
        puts = [e for e in logged if isinstance(e, ev.Put)]
        encoded = [wire.encode(e) for e in logged]
        entry = Waiting(request, decision.reply, encoded, facts(logged), puts, self.now)
        self.ref.observe(request, decision.reply, entry.facts, self.now)
        self.check_told(request, leased, decision.ended)
        self.waiting.append(entry)
        self.answered[answered(request, decision.reply)] += 1
        self.narrowed += 0 < self.core.state.pace.groups < self.ref.window(0)[1]
        entry.branch, entry.slow = self.ref.branch_of[-1], frozenset(self.ref.slow)
        entry.took = self.ref.took
        self.fed += getattr(decision.reply, "prompts_used", 0)
        if getattr(request, "fork", "") and not isinstance(decision.reply, Exception):
            self.fed = int(self.core.state.cursor or b"0")
        self.compare(whole=self.done % WHOLE_EVERY == 0)
        return decision.reply

    def completed(self, request: Any, prompts: int) -> Any:
        """The request with what the service adds: prompts of the feeder, what the log knows of a group that ended."""
        if isinstance(request, ev.Lease):
            tasks = (Task(i, (), "env", "{}", 0, str(i)) for i in range(self.fed, self.fed + prompts))
            return replace(request, prompts=tuple((task, b"%d" % (task.index + 1)) for task in tasks))
        if isinstance(request, ev.PutMember) and self.core.state.find(request.group) is None:
            self.sync()
            return replace(request, recorded=self.disk.put.get((request.group, request.member)))
        return request

    def sync(self) -> None:
        """A group commit: the answers leave."""
        self.disk.write(self.waiting)
        for entry in self.waiting:
            self.leave(entry)
        self._since += self.waiting
        self.waiting = []
        if len(self._since) >= REMEMBER_EVERY:
            self._copy, self._since = pickle.dumps(self.ref.__dict__), []

    def leave(self, entry: Waiting) -> None:
        """Note that a client relies on this answer from now on."""
        request, reply = entry.request, entry.reply
        if reply == "OK" and request.failure is None:
            self.promised[request.group, request.member] = (request.attempt, request.digest)
        elif isinstance(reply, st.Batch):
            self.delivered[entry.branch, reply.step] = reply.groups
            if entry.branch == self.ref.branch_of[-1] and reply.step >= self.core.state.durable:
                self.read_pages(reply)

    def read_pages(self, batch: st.Batch) -> None:
        """Fetch the batch as a learner does: every group must be there, whole, with what was put."""
        for gid in batch.groups:
            group = self.core.state.held.get(gid)
            done = {} if group is None else {(gid, n): (s.attempt, s.digest) for n, s in group.done()}
            if not done:
                broken("6 never trimmed early", f"claim {batch.step} names group {gid}, whose payload is gone")
            if done != {key: self.ref.finished.get(key) for key in done}:
                broken("3 atomic groups", f"group {gid} of claim {batch.step} holds {done}, which was never put")

    def crash(self, kept: int, clock_s: float) -> None:
        """The process dies and another one starts, on a machine whose clock shows something else."""
        self.done += 1
        survivors = self.waiting[:kept]
        whole = wire.encode(self.core.state) if len(survivors) == len(self.waiting) else None
        self.disk.write(survivors)
        self.ref.__dict__ = pickle.loads(self._copy)
        for entry in (*self._since, *survivors):
            if entry.request is not None:
                self.ref.slow, self.ref.took = set(entry.slow), entry.took
                self.ref.observe(entry.request, entry.reply, entry.facts, entry.now)
        self.now, self.waiting = clock_s, []
        self.core = self.disk.recovered(self.settings, clock_s)
        self.ref.recovered(clock_s)
        self.fed = int(self.core.state.cursor or b"0")
        self._copy, self._since = pickle.dumps(self.ref.__dict__), []
        self.check_promised()
        if whole is not None:
            self.check_same(whole)
        self.compare(whole=True)
        self.ask(ev.Open())

    def compact(self) -> None:
        """The state in place of the log, as of now."""
        self.done += 1
        self.waiting.append(Waiting(None, None, [], [], [], self.now, state=wire.encode(self.core.state)))

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    # --- checks

    def check_told(self, request: Any, before: set[tuple], told: list[tuple]) -> None:
        """Check that holders are notified of lost leases at once, but not of those that expired or that they ended."""
        gone = before - self.ref.leases()
        if isinstance(request, ev.Release | ev.Tick | ev.Arrive | ev.Leave):
            gone = set()
        elif isinstance(request, ev.PutMember):
            gone = {lease for lease in gone if lease[1][:2] != (request.group, request.member)}
        if len(set(told)) != len(told) or set(told) != gone:
            broken("11 holders learn of lost leases", f"{request}: {told} are reported, {gone} were lost")

    def compare(self, whole: bool) -> None:
        """The core's own figures against the reference's; with `whole` every member as well."""
        state = self.core.state
        mine, theirs = self.ref.figures(), figures(state)
        if mine != theirs:
            wrong = {key: (theirs[key], mine[key]) for key in mine if mine[key] != theirs[key]}
            broken("conservation", f"(the store's figure, the contract's): {wrong}")
        if whole and state.index != Index(state.open, state.held):
            broken("conservation", "what is found by the index is not what there is")
        index = by_holder(self.settings, state)
        hungry, waiting = (
            {
                name: state.rooms[name]
                for name, at_s in asked.items()
                if self.now - at_s <= HUNGRY_S and not index.holds_up(name)
            }
            for asked in (state.hungry, state.hungry | state.behind)
        )
        sums = Rooms.sum(index.rooms_of(name) for name in waiting)
        if {*index.with_room("", self.now)} != {*hungry} or index.rooms_of_others("", self.now) != sums:
            broken("9 shares", f"the index of holders does not find {hungry} and {waiting}")
        if whole and (residual := st.conservation_residual(state)):
            broken("conservation", f"the store itself misses {residual} groups")
        resting = {name for name, health in state.holders.items() if health.rested_at_s is not None}
        if resting != (due := {name for name, health in self.ref.health.items() if health["at"] is not None}):
            broken("failures: rest", f"{resting} rest in the store, {due} are to")
        if whole and (members := self.ref.members()) != (found := members_of(state)):
            wrong = {
                g: (found.get(g), members.get(g)) for g in found.keys() | members if found.get(g) != members.get(g)
            }
            broken("conservation", f"group: (the store's members, the contract's): {wrong}")

    def check_pure(self, request: Any) -> None:
        """Deciding changes nothing."""
        before = wire.encode(self.core.state)
        decide(self.settings, self.core.state, request, self.now)
        if wire.encode(self.core.state) != before:
            broken("the core is pure", f"deciding {request} changes the state")

    def check_same(self, before: bytes) -> None:
        """A process that died and lost nothing comes back as it was, on another clock."""
        expected = timeless(rebased(wire.decode(before, st.State), self.now, self.settings.lease_s))
        found = timeless(wire.decode(wire.encode(self.core.state), st.State))
        wrong = [name for name in st.State.__struct_fields__ if getattr(expected, name) != getattr(found, name)]
        if wrong:
            broken("10 one consistent cut", f"the log does not give back {wrong}")

    def check_promised(self) -> None:
        """Check that answers sent before a crash are still true after it."""
        for (gid, number), promise in self.promised.items():
            group = self.core.state.find(gid)
            slot = None if group is None else group.slots[number]
            kept = self.disk.put.get((gid, number)) if slot is None else slot
            if kept is None or (kept.attempt, kept.digest) != promise:
                broken("1 durable put", f"{gid}.{number} was acknowledged as {promise} and is now {kept}")
        for (branch, step), groups in self.delivered.items():
            batch = self.core.state.batches.get(step)
            if (
                branch == self.ref.branch_of[-1]
                and step >= self.core.state.durable
                and (batch is None or batch.groups != groups)
            ):
                broken("5 replayable batches", f"claim {step} was delivered as {groups} and is now {batch}")


def first_broken(rules: Rules, operations: list[tuple]) -> tuple[int, Broken] | None:
    """The first of `operations` that breaks a promise on a fresh store, and the promise."""
    store = Store(rules)
    for place, operation in enumerate(operations):
        try:
            store.perform(operation)
        except Broken as error:
            return place, error
    return None


def shortened(rules: Rules, operations: list[tuple], budget: int = 400_000) -> list[tuple]:
    """A shorter list that breaks the same promise, by leaving out ever smaller pieces.

    Any sequence of operations is allowed, so what is left need not be what a client would do. `operations` itself when
    they break nothing on their own. `budget` is the number of operations that may be performed.
    """
    found = first_broken(rules, operations)
    if found is None:
        return operations
    kept, promise = operations[: found[0] + 1], str(found[1]).split("]")[0]
    size = len(kept) // 2
    while size and budget > 0:
        start = 0
        while start < len(kept) and budget > 0:
            fewer = kept[:start] + kept[start + size :]
            budget -= len(fewer)
            found = first_broken(rules, fewer)
            if found is not None and str(found[1]).startswith(promise):
                kept = fewer[: found[0] + 1]
            else:
                start += size
        size //= 2
    return kept
