"""The machine under random samplers, learners, crashes and lost replies, against what a run must never do.

`World` plays everyone around the core on a manual clock. A request may meet a store that dies before its events are on
disk (they are lost, and so is the reply), or after (only the reply is lost); the caller then asks again, as the real
clients do. The expected results are recorded independently of the core: the batches a learner saw, the parameters it
made of them, the puts that were acknowledged.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxroll import wire
from jaxroll.errors import Closed, Conflict, Fenced, NoCredit, NotReady, StaleClient, StoreRefusal
from jaxroll.policy.limiter import AgeLimiter
from jaxroll.records import Task, Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.machine import Core
from jaxroll.store.core.puts import finished_early
from jaxroll.store.core.state import DONE, Index, State, conservation_residual, counts, on_line, outstanding

REMEMBERED = ("pace", "questions", "lengths", "cuts", "claim_cuts", "stream", "next_ordinal", "passed", "cursor")
REFUSALS = (NoCredit, NotReady, StaleClient, Fenced, Conflict, Closed)


def task(index: int) -> Task:
    return Task(index, (), "single_turn", "{}", 0, f"{index:016x}")


@dataclass
class Sampler:
    """A sampler that may be killed: `open` is what it works on, `unsure` what it put without hearing an answer."""

    name: str
    life: int = 0
    version: Version | None = None
    open: dict[ev.Key, list[VersionRun]] = field(default_factory=dict)
    unsure: list[ev.PutMember] = field(default_factory=list)

    @property
    def session(self) -> str:
        return f"{self.name}-{self.life}"


@dataclass
class Learner:
    """A learner that may be killed. `params` is a fold of everything it was trained on."""

    life: int = 0
    version: Version | None = None
    params: tuple = ()
    trained: bool = False
    disk: list[tuple[Version, tuple]] = field(default_factory=list)  # checkpoints under their final names

    @property
    def session(self) -> str:
        return f"learner-{self.life}"


class World:
    def __init__(self, seed: int, rules: Settings, *, samplers: int, prompts: int | None, faults: float) -> None:
        self.random, self.rules, self.faults = random.Random(seed), rules, faults
        self.log: list[ev.Event] = []
        self.core = Core(rules)
        self.now = 0.0
        self.prompts_left = prompts
        self.samplers = [Sampler(f"s{i}") for i in range(samplers)]
        self.learner = Learner()
        self.batches: dict[int, tuple[int, ...]] = {}
        self.put: dict[tuple[int, int], tuple[int, str]] = {}  # acknowledged: (attempt, digest)
        self.lost_replies = self.store_deaths = self.rewinds = 0
        self.early: dict[int, set[int]] = {}  # by step, groups that were finished while it was not
        self.age_max = self.early_groups = 0
        self.requests = 0

    # --- the store, with its deaths

    def ask(self, request: ev.Request) -> Any:
        """The answer on disk; the caller of a store that dies asks again."""
        while True:
            self.requests += 1
            decision = self.core.handle(request, self.now)
            logged = [e for e in decision.events if not isinstance(e, ev.NOT_LOGGED)]
            died = self.random.random() < self.faults / 4
            if died and self.random.random() < 0.5:
                logged = []
            self.log += logged
            if died:
                self.restart_store()
                self.lost_replies += 1
                continue
            self.check()
            if isinstance(decision.reply, StoreRefusal):
                raise decision.reply
            return decision.reply

    def restart_store(self) -> None:
        self.store_deaths += 1
        before = Core.recovered(self.rules, None, self.log, self.now).state
        cut = self.random.randrange(len(self.log) + 1)
        kept = Core.recovered(self.rules, None, self.log[:cut], self.now).state if cut else None
        snapshot = wire.decode(wire.encode(kept), State) if kept else None  # a compaction happened there
        self.core = Core.recovered(self.rules, snapshot, self.log[cut:], self.now)
        assert self.core.state.position == len(self.log)
        for name in REMEMBERED:
            assert getattr(self.core.state, name) == getattr(before, name), f"a compaction changes {name}"
        self.check()

    def check(self) -> None:
        state = self.core.state
        assert conservation_residual(state) == 0
        assert state.issued == state.next_group
        claimed = [g for batch in self.batches.values() for g in batch]
        assert len(claimed) == len(set(claimed)), "a group in two steps"
        assert list(state.open) == sorted(state.open)
        assert state.index == Index(state.open, state.held), "what is found by the index is not what there is"
        for (gid, member), (attempt, digest) in self.put.items():
            group = state.find(gid)
            if group is not None:
                slot = group.slots[member]
                assert (slot.status, slot.attempt, slot.digest) == (DONE, attempt, digest), (
                    "an acknowledged put is lost"
                )

    # --- samplers

    def sampler_acts(self, s: Sampler) -> None:
        action = self.random.choice(("flip", "lease", "lease", "work", "work", "work", "renew", "retry"))
        published = self.core.state.published
        if action == "flip" and published is not None:
            s.version = published.version
        elif action == "lease" and s.version is not None:
            self.lease(s, self.random.randint(1, 2 * self.rules.group_size + 1))
        elif action == "work" and s.open:
            for key in self.random.sample(list(s.open), self.random.randint(1, len(s.open))):
                self.work(s, key)
        elif action == "renew" and s.open:
            for key in self.ask(ev.Renew(s.session, tuple(s.open))):
                s.open.pop(key)
        elif action == "retry" and s.unsure:
            self.send(s, s.unsure.pop())

    def lease(self, s: Sampler, members: int) -> None:
        assert s.version is not None
        fed = self.core.state.next_ordinal
        count = members // self.rules.group_size + 2
        if self.prompts_left is not None:
            count = min(count, self.prompts_left - fed)
            if count <= 0:
                self.ask(ev.EndData())
        offered = tuple((task(fed + i), str(fed + i).encode()) for i in range(max(0, count)))
        self.requests += 1
        request = ev.Lease(s.name, s.session, s.version, members, f"r{self.requests}", offered)
        try:
            leases = self.ask(request)
        except REFUSALS:
            return
        granted = [(g.group, m, a) for g in leases.grants for m, a in g.members]
        assert 0 < len(granted) <= members
        assert len(set(granted)) == len(granted)
        for key in granted:
            s.open[key] = []

    def work(self, s: Sampler, key: ev.Key) -> None:
        """Sample a few tokens at the sampler's version of the moment, fail, or finish."""
        assert s.version is not None
        runs = s.open[key]
        if self.random.random() < 0.5 or not runs:
            if runs and (runs[-1].version >= s.version):
                runs[-1] = VersionRun(runs[-1].version, runs[-1].count + 1)
            else:
                runs.append(VersionRun(s.version, 1))
            return
        s.open.pop(key)
        failure = None
        if self.random.random() < self.faults:
            failure = (self.random.choice(("INFRA", "DATA")), "injected")
        digest = f"{key}{self.random.random()}"
        put = ev.PutMember(*key, digest, 100, () if failure else tuple(runs), failure)
        self.send(s, put)

    def send(self, s: Sampler, put: ev.PutMember) -> None:
        recorded = None
        if self.core.state.find(put.group) is None and (put.group, put.member) in self.put:
            recorded = ev.Recorded(*self.put[put.group, put.member])
        put = ev.PutMember(
            put.group, put.member, put.attempt, put.digest, put.size_bytes, put.runs, put.failure, recorded
        )
        try:
            answer = self.ask(put)
        except (Fenced, StaleClient):
            return
        assert answer in ("OK", "SURPLUS")
        if answer == "OK" and put.failure is None:
            known = self.put.setdefault((put.group, put.member), (put.attempt, put.digest))
            assert known == (put.attempt, put.digest), "two puts of one member were acknowledged"
            if self.random.random() < 0.2:
                s.unsure.append(put)

    # --- the learner

    def learner_acts(self) -> None:
        learner = self.learner
        if learner.version is None:
            self.begin()
            return
        state = self.core.state
        action = self.random.choice(("step", "step", "step", "checkpoint", "durable"))
        if action == "step":
            self.step()
        elif action == "checkpoint" and state.acked == learner.version.step:
            learner.disk.append((learner.version, learner.params))
        elif action == "durable" and learner.disk and learner.disk[-1][0].lineage == learner.version.lineage:
            self.ask(ev.Durable(learner.session, learner.disk[-1][0]))

    def begin(self) -> None:
        learner = self.learner
        durable, learner.params = learner.disk[-1] if learner.disk else (None, ())
        before = self.core.state.lineage
        learner.version = self.ask(ev.Begin(learner.session, durable))
        assert learner.version.step == (durable.step if durable else 0)
        self.rewinds += self.core.state.lineage > before
        self.publish()
        learner.trained = False

    def publish(self) -> None:
        version = self.learner.version
        assert version is not None
        snapshot = VersionRef(version, "tcp", f"life{self.learner.life}", str(hash(self.learner.params)))
        self.ask(ev.Publish(self.learner.session, snapshot))

    def step(self) -> None:
        """One of: claim and train, publish, ack; a kill may come between any two."""
        learner = self.learner
        assert learner.version is not None
        try:
            batch = self.ask(ev.ClaimStep(learner.session, learner.version.lineage, learner.version.step))
        except (NotReady, Closed):
            early = finished_early(self.rules, self.core.state, ())
            self.early.setdefault(learner.version.step, set()).update(early)
            return
        self.see(batch)
        self.claim_ahead()
        if self.random.random() < self.faults:
            return self.kill_learner()
        done = learner.version
        learner.params = (hash((learner.params, batch.groups)),)
        learner.version = Version(done.lineage, done.step + 1)
        if learner.version.step % self.rules.limiter.publish_every == 0 or learner.version.step == self.rules.steps:
            self.publish()
        if self.random.random() < self.faults:
            return self.kill_learner()
        self.ask(ev.Ack(learner.session, done))

    def claim_ahead(self) -> None:
        """Now and then the batch of the step after is asked for before this one is published."""
        version = self.learner.version
        assert version is not None
        if self.random.random() < 0.3:
            with contextlib.suppress(NotReady, Closed):
                self.see(self.ask(ev.ClaimStep(self.learner.session, version.lineage, version.step + 1, ahead=True)))

    def see(self, batch: Any) -> None:
        """Check the groups that a learner sees at a step: the same every time, whole, and none too old."""
        known = self.batches.setdefault(batch.step, batch.groups)
        assert known == batch.groups, "another batch for the same step"
        state = self.core.state
        early = self.early.pop(batch.step, set())
        lost = [gid for gid in early - {*batch.groups} if state.find(gid) is not None]
        assert not lost, "a group that was finished early is alive, and not in its batch"
        self.early_groups += len(early & {*batch.groups})
        for gid in batch.groups:
            group = state.held[gid]
            done = dict(group.done())
            assert done and group.ready
            for member, slot in done.items():
                assert self.put[gid, member] == (slot.attempt, slot.digest)
                age = batch.step - min(run.version.step for run in slot.runs)
                if self.rules.on_stale == "expire":
                    assert age <= math.ceil(self.rules.limiter.alpha)
                    self.age_max = max(self.age_max, age)

    def kill_learner(self) -> None:
        self.learner.life += 1
        self.learner.version = None

    # --- everyone

    def act(self) -> None:
        self.now += self.random.random() * self.rules.lease_s / 40
        roll = self.random.random()
        if roll < 0.05:
            self.ask(ev.Tick())
        elif roll < 0.05 + self.faults / 16:
            self.restart_store()
        elif roll < 0.05 + self.faults / 4:
            self.kill_learner()
        elif roll < 0.05 + self.faults / 2:
            self.restart_sampler(self.random.choice(self.samplers))
        elif roll < 0.3:
            self.learner_acts()
        else:
            self.sampler_acts(self.random.choice(self.samplers))

    def restart_sampler(self, s: Sampler) -> None:
        """Half of the time it says hello again, half of the time its leases must run out."""
        s.life, s.version, s.open, s.unsure = s.life + 1, None, {}, s.unsure
        if self.random.random() < 0.5:
            self.ask(ev.Arrive(s.name, s.session))

    @property
    def over(self) -> bool:
        state = self.core.state
        if state.data_ended and not state.open and state.acked == state.next_claim:
            return True
        return state.acked >= self.rules.steps

    def finish(self) -> None:
        """Let all roles work without failures: the run must end. Bounded, so that a deadlock fails with the state."""
        self.faults = 0.0
        for s in self.samplers:
            self.ask(ev.Arrive(s.name, s.session))
        for _ in range(400 * self.rules.steps):
            if self.over:
                return
            self.now += self.rules.lease_s / 50
            self.ask(ev.Tick())
            self.learner_acts() if self.learner.version is None else self.step()
            for s in self.samplers:
                if self.core.state.published is not None:
                    s.version = self.core.state.published.version
                    self.lease(s, 2 * self.rules.group_size)
                if s.open:
                    for key in self.ask(ev.Renew(s.session, tuple(s.open))):
                        s.open.pop(key)
                for key in list(s.open):
                    self.work(s, key)
        pytest.fail(f"no end: {counts(self.core.state)}, outstanding {outstanding(self.core.state)}")


def rules(alpha: float, **changes: Any) -> Settings:
    limiter_keys = ("batch_groups", "redundant_groups", "publish_every", "buffer_groups")
    limiter = AgeLimiter(alpha, **{"batch_groups": 3} | {k: changes.pop(k) for k in limiter_keys if k in changes})
    values = {"group_size": 3, "steps": 12, "lease_s": 10.0, "straggler_deadline_s": 60.0, "reissues": 100} | changes
    return Settings(limiter, **values)


def play(
    seed: int, chosen: Settings, *, actions: int = 1000, prompts: int | None = None, faults: float = 0.08
) -> World:
    world = World(seed, chosen, samplers=3, prompts=prompts, faults=faults)
    for _ in range(actions):
        if world.over:
            break
        world.act()
    world.finish()
    return world


ALPHAS = st.sampled_from([0.0, 0.5, 1.0, 2.0])


@given(st.integers(0, 2**32), ALPHAS)
@settings(max_examples=24)
def test_every_run_ends_with_every_step_trained_once_along_one_line(seed: int, alpha: float) -> None:
    world = play(seed, rules(alpha))
    state = world.core.state
    assert state.acked == world.rules.steps
    params: tuple = ()
    for step in range(world.rules.steps):
        params = (hash((params, world.batches[step])),)
    assert world.learner.params == params, "the parameters are not the fold of the logged claims"
    assert Core.recovered(world.rules, None, world.log, 0.0).state.batches.keys() == state.batches.keys()


@given(st.integers(0, 2**32), ALPHAS, st.booleans(), st.sampled_from(["lease_order", "ready_first", "freshest_first"]))
@settings(max_examples=16)
def test_every_policy_ends(seed: int, alpha: float, mask: bool, order: str) -> None:
    chosen = rules(
        alpha,
        order=order,
        on_stale="mask" if mask else "expire",
        redundant_groups=seed % 3,
        straggler_deadline_s=5.0,
        publish_every=2 if alpha >= 1 and seed % 2 else 1,
        retention_bytes=2000,
        window="adaptive" if seed % 4 < 2 else "full",
    )
    assert play(seed, chosen, actions=600).core.state.acked == chosen.steps


@given(st.integers(0, 2**32), ALPHAS, st.integers(0, 20))
@settings(max_examples=12)
def test_the_data_may_end_at_any_prompt(seed: int, alpha: float, prompts: int) -> None:
    world = play(seed, rules(alpha), actions=600, prompts=prompts)
    state = world.core.state
    assert state.prompts_issued <= prompts
    left = counts(state)
    if state.acked < world.rules.steps:
        assert left["PENDING"] == left["LEASED"] == left["READY"] == 0, "the last short batch was not delivered"


@given(st.integers(0, 2**32), ALPHAS)
@settings(max_examples=12)
def test_without_faults_nothing_is_wasted_and_the_order_is_that_of_the_prompts(seed: int, alpha: float) -> None:
    world = play(seed, rules(alpha), faults=0.0)
    state = world.core.state
    assert (state.expired, state.dead, state.lineage) == ({}, 0, 0)
    trained = [sorted(world.batches[step]) for step in range(world.rules.steps)]
    assert list(itertools.chain(*trained)) == list(range(world.rules.steps * world.rules.limiter.batch_groups))
    assert state.issued == world.rules.steps * world.rules.limiter.batch_groups, "prompts beyond the last step"


def test_faults_do_happen_in_these_worlds() -> None:
    """The generator reaches what it is for; otherwise the properties above say little."""
    worlds = [play(seed, rules(alpha, data_retries=0)) for seed in range(6) for alpha in (0.0, 1.0, 2.0)]
    assert sum(w.store_deaths for w in worlds) > 50
    assert sum(w.rewinds for w in worlds) > 10
    assert sum(w.core.state.expired.get("lineage", 0) for w in worlds) > 0
    assert sum(w.core.state.trimmed for w in worlds) > 100
    assert sum(w.core.state.dead for w in worlds) > 10
    assert max(w.age_max for w in worlds) == 2
    assert sum(w.early_groups for w in worlds) > 100
    greedy = [play(seed, rules(1.0, order="ready_first", redundant_groups=1)) for seed in range(4)]
    assert sum(w.core.state.expired.get("stale", 0) for w in greedy) > 0
    assert sum(w.core.state.expired.get("surplus", 0) for w in greedy) > 0
    fresh = [play(seed, rules(1.0, order="freshest_first")) for seed in range(4)]
    assert sum(w.early_groups for w in fresh) == 0, "any group may be left out"
    short = [play(seed, rules(1.0, straggler_deadline_s=2.0)) for seed in range(4)]
    assert sum(w.core.state.shrunk for w in short) > 0


@given(st.integers(0, 2**32))
@settings(max_examples=8)
def test_versions_on_one_line_are_those_reached_by_walking_back(seed: int) -> None:
    """`on_line` against the walk: a version is on the line iff retracing parents from the end meets it."""
    world = play(seed, rules(1.0), actions=600, faults=0.2)
    lines = world.core.state.lineages
    reached, here, top = set(), len(lines) - 1, 50
    while here is not None:
        reached |= {(here, step) for step in range(top + 1)}
        top, here = min(top, lines[here].fork_step), lines[here].parent
    for lineage in range(len(lines)):
        for step in range(51):
            assert on_line(lines, Version(lineage, step)) == ((lineage, step) in reached)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_the_same_holds_in_many_more_runs(first: int) -> None:
    """Every property above, over all that it draws from."""
    for seed in range(first, first + 100):
        chance = random.Random(f"many {seed}")
        alpha = chance.choice([0.0, 0.5, 1.0, 2.0])
        order = chance.choice(["lease_order", "ready_first", "freshest_first"])
        for given_test, more in (
            (test_every_run_ends_with_every_step_trained_once_along_one_line, (alpha,)),
            (test_every_policy_ends, (alpha, chance.random() < 0.5, order)),
            (test_the_data_may_end_at_any_prompt, (alpha, chance.randint(0, 20))),
            (test_without_faults_nothing_is_wasted_and_the_order_is_that_of_the_prompts, (alpha,)),
            (test_versions_on_one_line_are_those_reached_by_walking_back, ()),
        ):
            given_test.hypothesis.inner_test(seed, *more)
