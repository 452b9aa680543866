"""A cluster on a virtual clock around the real core: samplers with slots, one learner, weights that take time.

Nothing here decides anything that the core decides. Times are seconds of the virtual clock. A member's tokens are
spread evenly over the time it takes; those drawn after its sampler's weight swap are of the newer version.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jaxroll.errors import Closed, Fenced, NoCredit, NotReady, StoreRefusal
from jaxroll.policy.limiter import AgeLimiter
from jaxroll.records import Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.machine import Core
from jaxroll.store.core.state import conservation_residual
from tests.harness.store.machine import offer

TOKENS = 20  # of every member, however long it takes
ASK_AGAIN_S = 1.0  # a sampler that was refused work
TICK_S = 1.0  # as the store's ticker


@dataclass(frozen=True)
class Fault:
    """A sampler that breaks a `share` of its members, each `after` times its duration after its lease.

    It does so from `from_s` until `until_s`, and is a healthy one otherwise.
    """

    after: float = 0.0
    share: float = 1.0
    kind: str = "INFRA"
    from_s: float = 0.0
    until_s: float = math.inf

    def breaks(self, rng: random.Random, now: float) -> bool:
        """True if a member that is leased now will break."""
        return self.from_s <= now < self.until_s and rng.random() < self.share


@dataclass(frozen=True)
class World:
    """Parameters of a cluster: `duration_s` draws how long one member takes, `train_s` one step of the learner."""

    duration_s: Callable[[random.Random], float]
    train_s: Callable[[random.Random], float]
    samplers: int = 2
    slots: int = 64
    lag_s: float = 0.1  # from a publication to the samplers' weight swap
    alpha: float = 2.0
    batch: int = 8
    size: int = 4
    steps: int = 300
    seed: int = 0
    slower: tuple[float, ...] = ()  # how many times slower each sampler is; () is 1 for all
    faults: tuple[tuple[int, Fault], ...] = ()  # (sampler, what is wrong with it)
    ready_s: tuple[float, ...] = ()  # when each sampler asks for the first time; () is at once
    redraws: bool = False  # each attempt of a member takes a time of its own; else all take the same


@dataclass
class Result:
    """Result of a run; the rates leave out the first `skipped` steps."""

    steps_per_s: float = 0.0
    waiting_share: float = 0.0
    age_mean: float = 0.0
    age_max: int = 0
    windows: list[int] = field(default_factory=list)  # in force, after each claim
    wasted: int = 0
    seconds: float = 0.0  # of the virtual clock, until the last step
    dead: int = 0  # groups
    failed: int = 0  # members, each time one broke
    lengths_s: list[float] = field(default_factory=list)  # durations of the trained members, if the world `redraws`


class Cluster:
    """One run. `play` it once."""

    def __init__(self, world: World, **rules: Any) -> None:
        self.world, self.now = world, 0.0
        limits = {key: rules.pop(key) for key in ("publish_every", "redundant_groups") if key in rules}
        values = {"group_size": world.size, "steps": world.steps, "lease_s": 1e9, "straggler_deadline_s": 1e9} | rules
        self.core = Core(Settings(AgeLimiter(world.alpha, world.batch, **limits), **values))
        self.waiting: tuple[int, float] | None = None  # the step the learner waits for, and since when
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.versions = [Version(0, 0)] * world.samplers
        self.free = [world.slots] * world.samplers
        self.flips: list[list[tuple[float, Version]]] = [[(0.0, Version(0, 0))] for _ in range(world.samplers)]
        self.requests = itertools.count()
        self.leased = [0] * world.samplers  # members
        self.asking = [False] * world.samplers  # those that were refused ask again
        self.faults = dict(world.faults)
        self.waits: list[tuple[float, float]] = []  # (claimed at, waited) of every step
        self.ages: dict[int, int] = {}
        self.result = Result()

    def play(self, skipped: int = 50) -> Result:
        """Until all steps are trained."""
        self.ask(ev.Begin("L", None))
        self.publish(Version(0, 0), first=True)
        self.claim(0, 0.0)
        for sampler, ready_s in enumerate(self.world.ready_s):
            self.later(ready_s, lambda sampler=sampler: self.lease(sampler))
        self.lease_all()
        self.tick()
        while self.events and self.core.state.acked < self.world.steps:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.settle(skipped)
        return self.result

    def settle(self, skipped: int) -> None:
        state = self.core.state
        assert (state.acked, conservation_residual(state)) == (self.world.steps, 0)
        counted = self.waits[skipped:]
        seconds = self.now - counted[0][0] + counted[0][1]
        tokens = sum(self.ages.values())
        self.result.steps_per_s = len(counted) / seconds
        self.result.waiting_share = sum(wait for _, wait in counted) / seconds
        self.result.age_mean = sum(age * count for age, count in self.ages.items()) / tokens
        self.result.age_max = max(self.ages)
        self.result.seconds, self.result.dead = self.now, state.dead
        self.result.wasted = sum(state.tokens_expired.values())
        self.skipped = skipped

    def ask(self, request: ev.Request) -> Any:
        reply = self.core.handle(request, self.now).reply
        if isinstance(reply, StoreRefusal):
            raise reply
        return reply

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay_s, next(self.order), act))

    def drawn_s(self, what: Callable[[random.Random], float], *name: int) -> float:
        """A duration that depends on nothing but the seed and the name."""
        return what(random.Random(repr((self.world.seed, name))))

    def length_s(self, prompt: int, member: int, attempt: int) -> float:
        """Seconds that a healthy sampler takes for the member."""
        name = (prompt, member, attempt) if self.world.redraws else (prompt, member)
        return self.drawn_s(self.world.duration_s, *name)

    def tick(self) -> None:
        """Let the store look at the time, as its ticker does."""
        self.ask(ev.Tick())
        self.later(TICK_S, self.tick)

    # --- samplers

    def lease_all(self) -> None:
        """Let all samplers ask for as many members as they have room for, in a rotating order."""
        first = next(self.requests)
        for sampler in range(self.world.samplers):
            self.lease((first + sampler) % self.world.samplers)

    def lease(self, sampler: int) -> None:
        if self.free[sampler] < 1 or (self.world.ready_s and self.now < self.world.ready_s[sampler]):
            return
        fed = self.core.state.next_ordinal
        members, version, name = self.free[sampler], self.versions[sampler], f"s{sampler}"
        prompts = offer(fed, fed + members // self.world.size + 1)
        try:
            leases = self.ask(ev.Lease(name, name, version, members, f"r{next(self.requests)}", prompts))
        except Closed:
            return
        except NoCredit:
            if not self.asking[sampler]:
                self.asking[sampler] = True
                self.later(ASK_AGAIN_S, lambda: self.ask_again(sampler))
            return
        for grant in leases.grants:
            for member, attempt in grant.members:
                self.free[sampler] -= 1
                duration_s = self.length_s(grant.task.index, member, attempt)
                duration_s *= self.world.slower[sampler] if self.world.slower else 1.0
                self.leased[sampler] += 1
                key, began = (grant.group, member, attempt), self.now
                fault = self.faults.get(sampler)
                if fault and fault.breaks(random.Random(repr((self.world.seed, sampler, key))), self.now):
                    wait_s = max(0.01, fault.after * duration_s)
                    self.later(wait_s, lambda key=key, kind=fault.kind: self.fail(sampler, key, kind))
                else:
                    self.later(duration_s, lambda key=key, began=began: self.put(sampler, key, began))
        self.lease(sampler)  # what is left of its room it asks for at once

    def ask_again(self, sampler: int) -> None:
        self.asking[sampler] = False
        self.lease(sampler)

    def fail(self, sampler: int, key: ev.Key, kind: str) -> None:
        self.result.failed += 1
        with contextlib.suppress(Fenced):  # the lease has ended meanwhile
            self.ask(ev.PutMember(*key, f"{key}", 10, failure=(kind, "broken")))
        self.free[sampler] += 1
        self.lease(sampler)

    def put(self, sampler: int, key: ev.Key, began: float) -> None:
        with contextlib.suppress(Fenced):
            self.ask(ev.PutMember(*key, f"{key}", 100, self.runs(sampler, began)))
        self.free[sampler] += 1
        if self.waiting is not None:
            self.claim(*self.waiting)
        self.lease(sampler)

    def runs(self, sampler: int, began: float) -> tuple[VersionRun, ...]:
        """The versions of a member's tokens, which were drawn from `began` until now."""
        flips, step_s = self.flips[sampler], (self.now - began) / TOKENS
        places = (bisect_right(flips, began + step_s * i, key=lambda flip: flip[0]) - 1 for i in range(TOKENS))
        drawn = [flips[max(0, place)][1] for place in places]
        return tuple(VersionRun(version, len(list(same))) for version, same in itertools.groupby(drawn))

    # --- the learner

    def claim(self, step: int, since: float) -> None:
        try:
            batch = self.ask(ev.ClaimStep("L", 0, step))
        except NotReady:
            self.waiting = (step, since)
            return
        self.waiting = None
        self.waits.append((self.now, self.now - since))
        self.result.windows.append(self.core.state.pace.groups or self.core.settings.limiter.window(0))
        for group in (self.core.state.held[gid] for gid in batch.groups):
            for member, slot in enumerate(group.slots):
                for run in slot.runs:
                    age = step - run.version.step
                    self.ages[age] = self.ages.get(age, 0) + run.count
                if self.world.redraws:
                    self.result.lengths_s.append(self.length_s(group.task.index, member, slot.attempt))
        self.later(self.drawn_s(self.world.train_s, step), lambda: self.trained(step))
        self.lease_all()

    def trained(self, step: int) -> None:
        after = Version(0, step + 1)
        if after.step % self.core.settings.limiter.publish_every == 0 or after.step == self.world.steps:
            self.publish(after)
        self.ask(ev.Ack("L", Version(0, step)))
        self.ask(ev.Durable("L", after))
        if after.step < self.world.steps:
            self.claim(after.step, self.now)
        self.lease_all()

    def publish(self, version: Version, first: bool = False) -> None:
        self.ask(ev.Publish("L", VersionRef(version, "tcp", "here", "d")))
        for sampler in range(self.world.samplers):
            self.later(0.0 if first else self.world.lag_s, lambda sampler=sampler: self.flip(sampler, version))

    def flip(self, sampler: int, version: Version) -> None:
        self.versions[sampler] = version
        self.flips[sampler].append((self.now, version))
        self.lease(sampler)


def compared(world: World, **rules: Any) -> tuple[Result, Result]:
    """The same world with the full window and with the adaptive one."""
    return Cluster(replace(world), window="full", **rules).play(), Cluster(world, window="adaptive", **rules).play()
