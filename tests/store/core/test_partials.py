"""Flushed tokens in the pure core: samplers join, leave, die, flush and continue one another's members at random.

The books are kept apart from the core: which tokens were flushed for a member, and at which versions.
"""

from __future__ import annotations

import itertools
import random

import pytest

from jaxroll.errors import Conflict, Fenced, NoCredit, NotReady, StaleClient, StoreRefusal
from jaxroll.policy.limiter import AgeLimiter
from jaxroll.records import Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import RESERVED_S, Settings
from jaxroll.store.core.invariants import Known
from jaxroll.store.core.machine import Core
from jaxroll.store.core.state import Index, State, conservation_residual, held_bytes
from jaxroll.store.log import replay
from jaxroll.store.server.server import next_deadline_s
from tests.harness.store.machine import V0, Machine, offer

V1 = Version(0, 1)
Key = tuple[int, int, int]


def flush(machine: Machine, key: Key, start: int, *runs: tuple[Version, int], size_bytes: int = 50) -> int:
    """The store's answer: the number of tokens that it has of the member."""
    made = tuple(VersionRun(version, count) for version, count in runs)
    return machine.ask(ev.Flush(*key, start, sum(count for _, count in runs), made, size_bytes))


def resumed(machine: Machine) -> dict[int, int]:
    """Tokens after which the members of the last lease continue."""
    return {member: tokens for grant in machine.grants for member, tokens in grant.resumed}


def test_the_next_holder_continues_after_the_flushed_tokens(machine: Machine) -> None:
    first = machine.lease(1)[0]
    assert flush(machine, first, 0, (V0, 8)) == 8
    assert flush(machine, first, 8, (V0, 8)) == 16
    machine.now += 11
    machine.ask(ev.Tick())
    again = machine.lease(1, name="T")[0]
    assert again == (*first[:2], 2) and resumed(machine) == {first[1]: 16}
    assert flush(machine, first, 16, (V0, 8)) == -1, "the holder before it still flushes"
    assert flush(machine, again, 16, (V0, 4)) == 20
    machine.restart()
    found = machine.state.open[0].slots[0].flushed
    assert found is not None and found.tokens == 20
    machine.put(again)
    assert machine.state.open[0].slots[0].flushed is None


def test_a_member_released_for_a_sampler_waits_for_it_with_its_tokens_and_then_for_any(machine: Machine) -> None:
    for name in ("T", "U"):
        machine.ask(ev.Arrive(name, f"{name}-1"))
    keys = machine.lease(4)
    for key in keys[:2]:
        flush(machine, key, 0, (V0, 8))
    machine.ask(ev.Release(tuple(keys[:2]), "T"))
    machine.ask(ev.Release(tuple(keys[2:3])))
    others = {key[:2] for key in machine.lease(8, name="U")}
    assert others == {keys[2][:2], (2, 0), (2, 1), (3, 0), (3, 1)}, "others get all but what is reserved"
    assert reserved(machine, "U", 4) == {}
    assert reserved(machine, "T", 1) == {keys[0][:2]: 8}
    machine.now += RESERVED_S - 0.1
    assert next_deadline_s(machine.state, machine.now) == RESERVED_S, "the store wakes those that wait for it"
    with pytest.raises(NoCredit):
        machine.lease(4, name="U")
    machine.now += 0.2
    assert reserved(machine, "T", 4) == {}, "T is too late"
    assert machine.lease(4, name="U") == [(*keys[1][:2], 2)] and resumed(machine) == {keys[1][1]: 8}


def test_two_calls_of_a_session_may_be_under_way_and_either_may_be_repeated(machine: Machine) -> None:
    """A sampler asks for reserved members while its call for others waits; the answer to each may be lost."""
    machine.ask(ev.Arrive("T", "T-1"))
    for key in (keys := machine.lease(2)):
        flush(machine, key, 0, (V0, 8))
    machine.ask(ev.Release((keys[0],), "T"))
    machine.ask(ev.Release((keys[1],), "T"))
    first = machine.lease(2, name="T", request="others")
    assert reserved(machine, "T", 1, "kept") == {keys[0][:2]: 8}
    later = machine.lease(2, name="T", request="later")
    assert reserved(machine, "T", 1, "kept") == {keys[0][:2]: 8}, "its answer was lost"
    assert machine.lease(2, name="T", request="later") == later and not {*later} & {*first}
    assert reserved(machine, "T", 4, "more") == {keys[1][:2]: 8}
    machine.restart()
    assert machine.lease(2, name="T", request="later") == later
    assert reserved(machine, "T", 4, "more") == {keys[1][:2]: 8}
    machine.ask(ev.Arrive("T", "T-2"))
    assert not machine.state.receipts.keys() & {"T-1", "T-1/reserved"}, "receipts of a process that is gone"


def test_a_restart_ends_reservations_and_there_are_none_for_samplers_that_are_gone(machine: Machine) -> None:
    machine.ask(ev.Arrive("T", "T-1"))
    keys = machine.lease(2)
    machine.ask(ev.Release((keys[0],), "T"))
    machine.restart()
    assert machine.lease(1, name="U") == [(*keys[0][:2], 2)]
    machine.ask(ev.Leave("T", "T-1"))
    machine.ask(ev.Release((keys[1],), "T"))
    assert machine.lease(1, name="U") == [(*keys[1][:2], 2)]


def reserved(machine: Machine, name: str, members: int, request: str = "") -> dict[tuple[int, int], int]:
    """The members that are reserved for `name` and that it leases, with their flushed tokens."""
    machine.requests += 1
    request = request or f"r{machine.requests}"
    reply = machine.ask(ev.Lease(name, f"{name}-1", V0, members, request, offer(90, 94), reserved=True))
    assert reply.prompts_used == 0
    return {(grant.group, m): dict(grant.resumed)[m] for grant in reply.grants for m, _ in grant.members}


def test_a_flush_that_does_not_follow_is_answered_with_what_the_store_has(machine: Machine) -> None:
    key = machine.lease(1)[0]
    assert flush(machine, key, 0, (V0, 8)) == 8
    assert flush(machine, key, 16, (V0, 8)) == 8, "the store lost the flush between, by a crash before it was on disk"
    assert flush(machine, key, 0, (V0, 3)) == 3, "its holder started it again"


def test_versions_never_regress_within_a_member(machine: Machine) -> None:
    machine.fill(4)
    keys = machine.lease(2)
    machine.claim(0)
    machine.publish(V1)
    flush(machine, keys[0], 0, (V0, 4), (V1, 4))
    with pytest.raises(StaleClient, match=r"0\.0 after 0\.1"):
        flush(machine, keys[0], 8, (V0, 1))
    machine.ask(ev.Release(tuple(keys)))
    assert keys[0][:2] not in {key[:2] for key in machine.lease(4, V0, name="old")}, "an older sampler continues it"
    assert keys[0][:2] in {key[:2] for key in machine.lease(1, V1, name="new")}
    assert resumed(machine) == {keys[0][1]: 8}


def test_a_failure_discards_the_tokens(machine: Machine) -> None:
    key = machine.lease(1)[0]
    flush(machine, key, 0, (V0, 8))
    machine.fail(key, "DATA")
    assert machine.lease(1, name="T")[0][:2] == key[:2]
    assert resumed(machine) == {}


def test_another_lineage_discards_the_tokens(machine: Machine) -> None:
    machine.fill(4)
    machine.train(0)
    key = machine.lease(1, V1)[0]
    flush(machine, key, 0, (V1, 8))
    assert machine.start(None, "L2") == Version(1, 0)
    assert machine.lease(1, Version(1, 0), name="T")[0][:2] == key[:2]
    assert resumed(machine) == {}


@pytest.mark.parametrize(("one_version", "found"), [(False, {0: 8}), (True, {})])
def test_with_one_version_per_member_a_sampler_at_a_later_one_starts_it_again(
    one_version: bool, found: dict[int, int]
) -> None:
    machine = Machine(one_version=one_version)
    machine.start()
    machine.fill(4)
    key = machine.lease(1)[0]
    flush(machine, key, 0, (V0, 8))
    machine.claim(0)
    machine.publish(V1)
    machine.ask(ev.Release((key,)))
    assert machine.lease(1, V1, name="T")[0][:2] == key[:2]
    assert resumed(machine) == found
    assert (machine.state.open[key[0]].slots[key[1]].flushed is None) is one_version


def test_with_one_version_per_member_an_older_sampler_starts_it_again_instead_of_waiting() -> None:
    machine = Machine(one_version=True, alpha=2.0)
    machine.start()
    machine.fill(4)
    machine.train(0)
    key = machine.lease(1, V1)[0]
    flush(machine, key, 0, (V1, 8))
    machine.ask(ev.Release((key,)))
    assert machine.lease(1, V0, name="T")[0][:2] == key[:2]
    assert resumed(machine) == {}


@pytest.mark.parametrize(("on_stale", "found"), [("expire", {}), ("mask", {0: 8})])
def test_tokens_that_would_be_too_old_are_discarded_unless_the_rule_is_to_mask_them(
    on_stale: str, found: dict[int, int]
) -> None:
    """α = 1: the member of group 2 was flushed at version 0 and cannot be trained before claim 2."""
    machine = Machine(batch=1, size=1, on_stale=on_stale, order="ready_first")
    machine.start()
    first = machine.lease(1)[0]
    machine.fill(1)
    flush(machine, first, 0, (V0, 8))
    machine.train(0)
    machine.fill(1, V1)
    machine.train(1)
    machine.ask(ev.Release((first,)))
    assert machine.lease(1, Version(0, 2), name="T")[0][:2] == first[:2]
    assert resumed(machine) == found


def test_flushes_stay_within_the_budget_and_beyond_it_they_are_not_taken() -> None:
    machine = Machine(alpha=3.0, batch=1, size=2, retention_bytes=20_000)
    machine.start()
    keys = machine.lease(2)
    assert flush(machine, keys[0], 0, (V0, 8), size_bytes=9_000) == 8
    assert flush(machine, keys[0], 8, (V0, 8), size_bytes=2_000) == 8, "two leases of 11,000 bytes exceed the budget"
    machine.ask(ev.Release(tuple(keys)))
    assert held_bytes(machine.state) == 9_000


class Books:
    """Samplers around a core whose log may lose what is not on disk: flushes are answered before they are."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rules = Settings(
            AgeLimiter(self.chance.choice((0.0, 1.0, 2.0)), 2),
            group_size=3,
            steps=12,
            lease_s=10.0,
            on_stale=self.chance.choice(("expire", "mask")),
            one_version=self.chance.random() < 0.3,
            retention_bytes=200_000,
        )
        self.core, self.log, self.now = Core(self.rules), list[ev.Event](), 0.0
        self.synced = 0
        self.versions: dict[str, Version] = {}  # of the samplers that are alive
        self.open: dict[Key, tuple[str, list[Version]]] = {}  # holder, and the version of each token so far
        self.flushed: dict[tuple[int, int], list[Version]] = {}
        self.moved = self.kept = self.restarts = 0
        self.born = itertools.count()

    def ask(self, request: ev.Request, *, waits: bool = True):
        decision = self.core.handle(request, self.now)
        self.log += [event for event in decision.events if not isinstance(event, ev.NOT_LOGGED)]
        self.synced = len(self.log) if waits else self.synced
        state = self.core.state
        assert conservation_residual(state) == 0 and state.index == Index(state.open, state.held)
        assert held_bytes(state) <= self.rules.retention_bytes
        if isinstance(decision.reply, StoreRefusal):
            raise decision.reply
        return decision.reply

    def crash(self) -> None:
        """The store dies; what it acknowledged is on disk, but for the last flushes."""
        del self.log[self.chance.randint(self.synced, len(self.log)) :]
        self.restarts += 1
        self.core = Core.recovered(self.rules, None, self.log, self.now)
        for (group, member), tokens in list(self.flushed.items()):
            slot = self.core.state.open[group].slots[member] if group in self.core.state.open else None
            known = slot.flushed.tokens if slot is not None and slot.flushed is not None else 0
            self.flushed[group, member] = tokens[:known]

    def join(self) -> None:
        published = self.core.state.published
        if published is not None and len(self.versions) < 4:
            self.versions[f"s{next(self.born)}"] = published.version

    def leave(self, name: str, *, dies: bool) -> None:
        lost = [key for key, (holder, _) in self.open.items() if holder == name]
        del self.versions[name]
        if dies:
            self.now += 11
            for key in [key for key, (holder, _) in self.open.items() if holder != name]:
                self.ask(ev.Renew(f"{self.open[key][0]}-1", (key,)))
            self.ask(ev.Tick())
        else:
            for key in lost:
                self.flush(key)
            self.ask(ev.Release(tuple(lost)))
        for key in lost:
            self.open.pop(key, None)

    def lease(self, name: str) -> None:
        fed = self.core.state.next_ordinal
        request = ev.Lease(
            name,
            f"{name}-1",
            self.versions[name],
            self.chance.randint(1, 5),
            f"r{next(self.born)}",
            offer(fed, fed + 3),
        )
        try:
            grants = self.ask(request).grants
        except NoCredit:
            return
        for grant in grants:
            tokens = dict(grant.resumed)
            for member, attempt in grant.members:
                known = self.flushed.get((grant.group, member), [])
                begun = known[: tokens.get(member, 0)]
                assert len(begun) == tokens.get(member, 0), "tokens that were never flushed"
                assert member not in tokens or known == begun, "not all of the flushed tokens"
                assert not begun or begun[-1] <= self.versions[name], "an older sampler continues the member"
                assert not begun or not self.rules.one_version or set(begun) == {self.versions[name]}
                self.flushed[grant.group, member] = begun
                self.moved += bool(begun)
                self.kept += len(begun)
                self.open[grant.group, member, attempt] = (name, list(begun))

    def sample(self, key: Key) -> None:
        name, tokens = self.open[key]
        if self.rules.one_version and tokens and tokens[-1] != self.versions[name]:
            return self.finish(key)  # it drains before the swap
        tokens += [self.versions[name]] * self.chance.randint(1, 6)
        if self.chance.random() < 0.4:
            self.flush(key)
        elif self.chance.random() < 0.15:
            self.finish(key)
        return None

    def flush(self, key: Key) -> None:
        tokens, known = self.open[key][1], self.flushed.setdefault(key[:2], [])
        if not (new := tokens[len(known) :]):
            return
        try:
            answer = self.ask(ev.Flush(*key, len(known), len(new), runs_of(new), 10 * len(new)), waits=False)
        except StaleClient:
            return
        if answer == len(tokens):
            self.flushed[key[:2]] = list(tokens)
        elif answer == -1:
            del self.open[key]
        else:
            assert answer == len(known), "the store has another number of tokens than was flushed"

    def finish(self, key: Key) -> None:
        _, tokens = self.open.pop(key)
        if not tokens:
            return
        begun = self.flushed.get(key[:2], [])
        assert tokens[: len(begun)] == begun and tokens == sorted(tokens)
        failed = ("INFRA", "x") if self.chance.random() < 0.1 else None
        try:
            self.ask(ev.PutMember(*key, f"{key}", 500, () if failed else runs_of(tokens), failed))
        except (Fenced, StaleClient, Conflict):
            return
        self.flushed.pop(key[:2], None)

    def learn(self) -> None:
        state = self.core.state
        if not state.learner:
            self.publish(self.ask(ev.Begin("L", None)))
        elif state.acked < state.next_claim:
            self.publish(Version(state.lineage, state.acked + 1))
            self.ask(ev.Ack("L", Version(state.lineage, state.acked)))
            self.ask(ev.Durable("L", Version(state.lineage, self.core.state.acked)))
        elif self.chance.random() < 0.05 and state.acked:
            self.publish(self.ask(ev.Begin("L", Version(state.lineage, state.durable))))  # a rewind
        else:
            try:
                self.ask(ev.ClaimStep("L", state.lineage, state.next_claim))
            except (NotReady, StoreRefusal):
                return

    def publish(self, version: Version) -> None:
        self.ask(ev.Publish("L", VersionRef(version, "t", "h", "d")))

    def finish_run(self) -> None:
        """One sampler joins that stays, and nothing else happens until the run is closed."""
        for name in list(self.versions):
            self.leave(name, dies=self.chance.random() < 0.5)
        for _ in range(400):
            self.now += 5.0
            self.learn()
            if self.core.state.published is None:
                continue
            for key in list(self.open):
                self.sample(key)
                if key in self.open:
                    self.finish(key)
            self.versions["last"] = self.core.state.published.version
            self.ask(ev.Tick())
            if self.core.state.acked == self.rules.steps:
                return
            self.lease("last")

    def act(self) -> None:
        self.now += self.chance.random()
        names, what = list(self.versions), self.chance.random()
        if what < 0.12 or not names:
            self.learn()
            self.join()
        elif what < 0.2:
            self.leave(self.chance.choice(names), dies=self.chance.random() < 0.5)
        elif what < 0.28 and self.core.state.published is not None:
            name = self.chance.choice(names)
            for key in [key for key, (holder, _) in self.open.items() if holder == name and self.rules.one_version]:
                self.finish(key)
            self.versions[name] = self.core.state.published.version
        elif what < 0.31:
            self.crash()
        elif what < 0.5:
            self.lease(self.chance.choice(names))
        elif self.open:
            self.sample(self.chance.choice(list(self.open)))


def runs_of(tokens: list[Version]) -> tuple[VersionRun, ...]:
    return tuple(VersionRun(version, len(list(same))) for version, same in itertools.groupby(tokens))


def played(seed: int, actions: int) -> Books:
    books = Books(seed)
    for _ in range(actions):
        books.act()
    return books


def test_no_interleaving_loses_flushed_tokens_mixes_versions_or_trains_what_is_too_old() -> None:
    moved = kept = restarts = 0
    for seed in range(15):
        books = played(seed, 400)
        books.finish_run()
        assert books.core.state.acked == books.rules.steps, "a member is never finished"
        seen, state = Known(books.rules), State()
        for event in books.log:
            assert not (why := replay.broken_by(state, seen, event)), why
        assert seen.largest_age <= books.rules.limiter.max_age
        moved, kept, restarts = moved + books.moved, kept + books.kept, restarts + books.restarts
    assert moved > 100 and kept > 500 and restarts > 50, (moved, kept, restarts)
