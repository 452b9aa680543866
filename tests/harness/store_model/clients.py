"""Clients of the store in the random test: samplers and learners, correct ones and others.

A client that waits for an answer does not know if it was lost: it keeps the call in `unsaid` and repeats it.
A process that dies forgets everything but the learner's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxroll.records import Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.state import Batch

if TYPE_CHECKING:
    from tests.harness.store_model.world import World

BYTES = (100, 900, 3000)  # of a member
REWARDS = (0.0, 0.0, 0.5, 1.0)
Heard = Callable[[Any], None]


def ignore(reply: Any) -> None:
    """For an answer that changes nothing for who asked."""


@dataclass
class Sampler:
    """One that may die or stay behind. `holding` are its leases with the tokens sampled so far."""

    name: str
    life: int = 0
    version: Version | None = None
    holding: dict[ev.Key, list[VersionRun]] = field(default_factory=dict)
    unsaid: list[tuple[Any, int, Heard]] = field(default_factory=list)
    leasing: bool = False
    broken: str = ""  # the kind with which nearly all that it does fails
    slow: bool = False  # most of its steps sample nothing

    @property
    def session(self) -> str:
        """The name of this process."""
        return f"{self.name}-{self.life}"

    def act(self, world: World) -> None:
        """One thing a sampler may do."""
        rng = world.rng
        roll = rng.random()
        if world.ask_again(self):
            return
        if self.version is None or roll < 0.12:
            if self.version is None or rng.random() < 0.7:
                self.flip(world)
        elif roll < 0.35 and not self.leasing:
            self.lease(world, rng.randint(1, 2 * world.rules.members + 1))
        elif roll < 0.85 and self.holding:
            for key in rng.sample(list(self.holding), rng.randint(1, min(4, len(self.holding)))):
                if key in self.holding:  # an answer may have taken it away meanwhile
                    self.sample(world, key)
        elif roll < (0.87 if world.moves else 0.92) and self.holding:
            self.renew(world)
        elif roll < 0.94 and self.holding:
            key = rng.choice(list(self.holding))
            self.holding.pop(key)
            to = rng.choice(world.samplers).name if world.moves else ""
            away = self.name if world.away and rng.random() < 0.7 else ""
            world.ask(self, ev.Release((key,), to, away), ignore)
        elif world.sent:
            put = rng.choice(world.sent)
            world.ask(self, replace(put, digest="other") if rng.random() < 0.3 else put, ignore)

    def flip(self, world: World) -> None:
        """Take the newest weights that a caller can know of."""
        world.sync()
        published = world.store.core.state.published
        self.version = self.version if published is None else published.version

    def renew(self, world: World) -> None:
        """Say that it still works, and drops what was lost."""
        world.ask(self, ev.Renew(self.session, tuple(self.holding)), self.drop)

    def drop(self, lost: Any) -> None:
        """Forget these leases, which other clients hold now."""
        for key in lost:
            self.holding.pop(key, None)

    def lease(self, world: World, room: int) -> None:
        """Ask for work. Once the feeder has no more prompts, notify the store."""
        assert self.version is not None
        if world.prompts is not None and world.store.fed >= world.prompts and world.rng.random() < 0.5:
            world.ask(None, ev.EndData(), ignore)
        self.leasing, life = True, self.life

        def heard(reply: Any) -> None:
            if self.life == life:
                self.leasing = False
                keys = [(grant.group, *member) for grant in getattr(reply, "grants", ()) for member in grant.members]
                self.holding |= {key: [] for key in keys}
                world.granted = [*world.granted[-20:], *keys]

        reserved = world.moves and world.faults > 0 and world.rng.random() < 0.4
        request = ev.Lease(self.name, self.session, self.version, room, world.name("r"), reserved=reserved)
        world.ask(self, request, heard, world.ready(room // world.rules.size + 1))

    def sample(self, world: World, key: ev.Key) -> None:
        """More tokens at the sampler's version of now, or the end of the member, or its failure."""
        assert self.version is not None
        runs, rng = self.holding[key], world.rng
        if self.slow and world.faults and rng.random() < 0.95:
            return
        if not runs or rng.random() < world.slowness:
            if not runs or self.version > runs[-1].version:
                runs.append(VersionRun(self.version, 1))
            return
        self.holding.pop(key)
        failure = None
        if rng.random() < 0.06 * world.faults:
            failure = (rng.choice(("INFRA", "DATA")), "injected")
        if self.broken and world.faults and rng.random() < 0.95:
            failure = (self.broken, "broken")
        sampled, reward = () if failure else tuple(runs), rng.choice(REWARDS)
        put = ev.PutMember(*key, world.name("d"), rng.choice(BYTES), sampled, failure, reward=reward)
        world.sent = [*world.sent[-40:], put]
        world.ask(self, put, ignore)

    def die(self, world: World, says_hello: bool) -> None:
        """It comes back under its name, and says so at once or never; every fourth process leaves before it ends."""
        if self.life % 4 == 3:
            world.ask(self, ev.Leave(self.name, self.session), ignore)
        self.life += 1
        self.version, self.holding, self.unsaid, self.leasing = None, {}, [], False
        if says_hello:
            world.ask(self, ev.Arrive(self.name, self.session), ignore)


def wrong_put(world: World) -> ev.PutMember:
    """A put that no honest sampler sends: wrong attempt, group, member, or versions that are not, or go back."""
    rng = world.rng
    held = [key for s in world.samplers for key in s.holding]
    known = [*((put.group, put.member, put.attempt) for put in world.sent), *world.granted, (0, 0, 1)]
    group, member, attempt = rng.choice(held if held and rng.random() < 0.5 else known)
    version = Version(rng.randint(0, world.store.core.state.lineage + 1), rng.randint(-1, world.rules.steps + 1))
    published = list(enumerate(world.store.ref.newest))
    dead = [found for found in published if not world.store.ref.on_line(*found)]
    ended = Version(*rng.choice(dead or published))
    runs = [(VersionRun(version, rng.choice((0, 1, 1, 3))),), (VersionRun(Version(0, 0), 1),), ()]
    runs += 2 * [(VersionRun(ended, 1),)]
    kind = rng.randint(0, 6)
    if kind < 2:
        attempt += rng.choice((-1, 1, 1, 2))
    elif kind == 2:
        group += rng.choice((1, 100))
    elif kind == 3:
        member = rng.choice((-1, world.rules.members))
    elif kind == 4:
        runs = [(VersionRun(Version(0, 1), 1), *runs[0])]
    failure = ("INFRA", "injected") if rng.random() < 0.2 else None
    return ev.PutMember(group, member, attempt, world.name("wrong"), 100, rng.choice(runs), failure)


@dataclass
class Learner:
    """One that may die, or go on after it was given up. `line` is what its parameters were trained on."""

    life: int = 0
    version: Version | None = None
    line: tuple[tuple[int, ...], ...] = ()
    batch: Batch | None = None
    ahead: Batch | None = None  # of the step after, claimed while `batch` is not yet published or acknowledged
    to_publish: bool = False
    fork: str = ""
    waits: bool = False
    unsaid: list[tuple[Any, int, Heard]] = field(default_factory=list)

    @property
    def session(self) -> str:
        """The name of this process."""
        return f"learner-{self.life}"

    def act(self, world: World) -> None:
        """The next thing of: begin, publish, claim, train and publish, ack; between them checkpoints and questions."""
        if world.ask_again(self) or self.waits:
            return
        roll = world.rng.random()
        if self.version is None:
            self.begin(world, world.some_checkpoint())
        elif self.batch is not None and self.ahead is None and world.rng.random() < 0.2:
            self.claim_ahead(world)
        elif self.to_publish:
            self.publish(world, self.version.step + (self.batch is not None))
        elif roll < 0.06 * world.faults:
            self.ask_oddly(world)
        elif self.batch is not None:
            self.say(world, ev.Ack(self.session, Version(self.version.lineage, self.batch.step)), self.acked)
        elif roll < 0.2:
            world.checkpoints.append((self.version, self.line))
        elif roll < 0.35 and world.checkpoints:
            self.make_durable(world)
        elif self.ahead is not None:
            ahead, self.ahead = self.ahead, None
            self.claimed(world)(ahead)
        else:
            self.say(world, ev.ClaimStep(self.session, self.version.lineage, self.version.step), self.claimed(world))

    def claim_ahead(self, world: World) -> None:
        """Ask for the batch of the step after; trains on it when its time comes."""
        assert self.version is not None

        def keep(batch: Batch) -> None:
            self.ahead = batch

        self.say(world, ev.ClaimStep(self.session, self.version.lineage, self.version.step + 1, ahead=True), keep)

    def say(self, world: World, request: Any, heard: Heard) -> None:
        """Make one call at a time. A learner that is refused as stale ends."""
        self.waits, life = True, self.life

        def hear(reply: Any) -> None:
            if self.life != life:
                return
            self.waits = False
            if type(reply).__name__ == "StaleClient":
                self.die(world)
            elif not isinstance(reply, Exception):
                heard(reply)

        world.ask(self, request, hear)

    def begin(self, world: World, checkpoint: tuple[Version | None, tuple]) -> None:
        """Starts from a checkpoint, on a line of its own if it is a `fork`."""

        def begun(version: Version) -> None:
            self.version, self.line, self.to_publish = version, checkpoint[1], True
            self.batch = self.ahead = None

        self.say(world, ev.Begin(self.session, checkpoint[0], self.fork), begun)

    def publish(self, world: World, step: int) -> None:
        """Weights after `step` claims."""
        assert self.version is not None
        self.to_publish = False
        ref = VersionRef(Version(self.version.lineage, step), "tcp", world.name("at"), "digest")
        self.say(world, ev.Publish(self.session, ref), ignore)

    def claimed(self, world: World) -> Heard:
        """Train on what comes."""

        def train(batch: Batch) -> None:
            assert self.version is not None
            self.batch, self.line = batch, (*self.line, batch.groups)
            made = batch.step + 1
            self.to_publish = made % world.rules.publish_every == 0 or made == world.rules.steps

        return train

    def acked(self, reply: None) -> None:
        """Goes on to the next step."""
        assert self.version is not None
        self.version, self.batch = Version(self.version.lineage, self.version.step + 1), None

    def make_durable(self, world: World) -> None:
        """Say that its newest checkpoint is on disk."""
        version, line = world.checkpoints[-1]
        self.say(world, ev.Durable(self.session, version), lambda reply: world.durable(version, line))

    def ask_oddly(self, world: World) -> None:
        """Something old, something early, something asked twice: none of it may change anything."""
        assert self.version is not None
        lineage, step, odd = self.version.lineage, self.version.step, world.rng.randint(-3, 3)
        request = world.rng.choice(
            (
                ev.ClaimStep(self.session, lineage, step - abs(odd)),
                ev.ClaimStep(self.session, lineage, step + 1 + abs(odd)),
                ev.ClaimStep(self.session, lineage + odd, step),
                ev.Ack(self.session, Version(lineage, step + 2 + abs(odd))),
                ev.Ack(self.session, Version(lineage, max(0, step - 1 - abs(odd)))),
                ev.Durable(self.session, Version(lineage, step + 2 + abs(odd))),
                ev.Durable(self.session, Version(lineage + 1 + abs(odd), step)),
                ev.Publish(self.session, VersionRef(Version(lineage, step + 2 + abs(odd)), "tcp", "odd", "d")),
                ev.Publish(self.session, VersionRef(Version(lineage, step - 1 - abs(odd)), "tcp", "odd", "d")),
            )
        )
        world.ask(None, request, ignore)

    def die(self, world: World) -> None:
        """Forget all and gets a new name; its successor begins from a checkpoint."""
        self.life = world.next_life()
        self.version, self.batch, self.ahead, self.to_publish = None, None, None, False
        self.waits, self.unsaid = False, []
        self.fork = world.name("fork") if world.rng.random() < 0.1 * world.faults else ""
