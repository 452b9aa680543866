"""A random run around one store: samplers, learners, an evaluator, an operator, time, and death.

A `World` draws operations until its quota is used, then lets all work without faults until the run is over: a run
that does not end is broken too. A client gets an answer at the sync after it. Equal seeds give equal operations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxroll.records import Version
from jaxroll.store.core import events as ev
from tests.harness.store_model.books import Rules, broken
from tests.harness.store_model.checked_store import Store
from tests.harness.store_model.clients import Heard, Learner, Sampler, ignore, wrong_put

ORDERS = ("lease_order", "ready_first", "freshest_first")
FILTERS = (
    ("none", 0.0, 1.0),
    ("mean_band", 0.2, 0.9),
    ("none", 0.0, 1.0),
    ("pass_rate", 0.0, 1.0),
    ("min_std", 0.2, 0.0),
)
FINISH_WITHIN = 3000  # operations that a run without faults may still need


def some_rules(rng: random.Random) -> Rules:
    """Settings of a small run; nearly half are made so that tokens grow old, one in three adapts its window."""
    aging = rng.random() < 0.45
    adaptive = rng.random() < 0.3
    alpha = rng.choice((0.5, 1) if aging else (0, 0, 0.5, 1, 1.5, 2, 4))
    batch, redundant = rng.choice((1, 2, 2, 3)), rng.choice((0, 0, 0, 1, 2))
    least_buffer = int((alpha + 1) * batch) + redundant
    size = rng.choice((2, 3) if aging else (1, 2, 2, 3))
    on_stale = rng.choice(("expire", "mask") if aging else ("expire", "expire", "mask"))
    kinds = FILTERS[: 1 if on_stale == "mask" else 2 if size == 1 else None]  # masking is rare enough as it is
    return Rules(
        alpha=alpha,
        batch=batch,
        redundant=redundant,
        buffer=rng.choice((0, 0, least_buffer, least_buffer + 3)),
        publish_every=rng.randint(1, int(alpha + 1)) if rng.random() < 0.3 else 1,
        size=size,
        steps=rng.randint(4, 9) + 9 * adaptive,
        order=rng.choice(ORDERS[1:] if aging else (*ORDERS, "lease_order")),
        on_stale=on_stale,
        straggler=rng.choice(("shrink", "wait")),
        straggler_s=rng.choice((4.0, 40.0)),
        lease_s=10.0,
        infra_retries=rng.choice((1, 3)),
        data_retries=rng.choice((0, 2)),
        reissues=rng.choice((1, 3, 100)),
        retention_bytes=rng.choice((6000, 30_000, 10**9)),
        window="adaptive" if adaptive else "full",
        last_batch=rng.choice(("deliver", "drop")),
        filter=rng.choice(kinds),
        filter_windows=rng.choice((1, 1, 5)),
        at_limit=rng.choice(("stop", "deliver")),
        spare=rng.choice((0, 0, 0, 1, 2)),
        replicate=rng.choice(("together", "spread", "auto")),
    )


class World:
    """A random run. `operations` is what was done, and can be performed again."""

    def __init__(self, seed: int, quota: int, make_store: Callable[[Rules], Store] = Store) -> None:
        self.rng = random.Random(seed)
        self.rules = replace(some_rules(self.rng), holders=(0, 2, 0, 4)[seed % 4])
        self.store = make_store(self.rules)
        self.operations: list[tuple] = []
        self.quota = quota
        self.prompts = self.rng.choice((None, self.rng.randint(0, 16), self.rng.randint(0, 16)))
        self.faults = self.rng.choice((0.2, 1.0, 1.0, 2.0))
        self.slowness = 0.8 if self.rules.on_stale == "mask" else self.rng.choice((0.2, 0.5, 0.85))
        self.learner_share = self.rng.choice((7, 15, 28))  # of the operations, in percent
        self.hostile = self.rng.random() < 0.5
        self.moves = seed % 8 == 1  # members from one sampler to another
        self.away = seed % 11 == 2  # samplers ask for no leases for a while
        self.samplers = [Sampler(f"s{i}") for i in range(self.rng.randint(1, 3))]
        self.samplers[0].broken = self.rng.choice(("INFRA", "DATA")) if self.rng.random() < 0.3 else ""
        self.samplers[-1].slow = seed % 4 == 1
        self.learner, self.lives, self.names = Learner(), 0, 0
        self.zombie: Learner | None = None
        self.checkpoints: list[tuple[Version, tuple]] = []  # on the learner's disk, with what made them
        self.listening: list[tuple[Any, Any, int, Heard, Any]] = []  # client, request, prompts, what to do, the answer
        self.sent: list[ev.PutMember] = []
        self.granted: list[ev.Key] = []

    def run(self) -> None:
        """Raise Broken where the store does not keep a promise."""
        while self.store.done < self.quota and not self.over:
            self.act()
        self.finish()

    # --- talking to the store

    def do(self, *operation: Any) -> Any:
        """Perform and remembers an operation."""
        self.operations.append(operation)
        return self.store.perform(operation)

    def ask(self, client: Any, request: Any, heard: Heard, prompts: int = 0) -> None:
        """`heard` gets the answer at the next sync; the request is kept when the store dies before."""
        reply = self.do("ask", request, prompts)
        self.listening.append((client, request, prompts, heard, reply))
        if not self.store.waiting or len(self.listening) > 6 or self.rng.random() < 0.5:
            self.sync()

    def sync(self) -> None:
        """Commit the group; all clients get their answers."""
        self.do("sync")
        listening, self.listening = self.listening, []
        for _, _, _, heard, reply in listening:
            heard(reply)

    def crash(self) -> None:
        """Restart the store; clients that waited for an answer will ask again."""
        self.do("crash", self.rng.randint(0, len(self.store.waiting)), self.rng.choice((0.0, 1e6)) + self.rng.random())
        for client, request, prompts, heard, _ in self.listening:
            if client is not None:
                client.unsaid.append((request, prompts, heard))
        self.listening = []

    def ask_again(self, client: Any) -> bool:
        """True if there was something to ask again, which was done."""
        if not client.unsaid:
            return False
        request, prompts, heard = client.unsaid.pop(0)
        self.ask(client, request, heard, self.ready(prompts))
        return True

    def ready(self, wanted: int) -> int:
        """Prompts that the feeder has ready."""
        return wanted if self.prompts is None else max(0, min(wanted, self.prompts - self.store.fed))

    def name(self, prefix: str) -> str:
        """A name that nothing else has."""
        self.names += 1
        return f"{prefix}{self.names}"

    # --- what happens next

    def act(self) -> None:
        """One thing that may happen."""
        rng, roll = self.rng, self.rng.random() * 100
        if rng.random() < 0.3:
            self.do("wait", rng.choice((0.1, 0.5, 0.5, 2.0, 6.0)))
        if roll < 88 - self.learner_share:
            rng.choice(self.samplers).act(self)
        elif roll < 88:
            self.learner.act(self)
        elif roll < 92:
            self.ask(None, ev.Tick(), ignore)
        elif roll < 93:
            self.do("compact")
        elif roll < 93.5:
            self.ask(None, ev.Arrive("evaluator", f"e{rng.randint(0, 3)}"), ignore)
        elif roll < 97 and self.hostile:
            self.ask(None, wrong_put(self), ignore)
        else:
            self.fault(rng.random() * 4)

    def fault(self, roll: float) -> None:
        """One thing that goes wrong; how often depends on the world."""
        rng = self.rng
        if rng.random() > self.faults / 2:
            return
        if roll < 1.2 or self.store.ref.closed:
            self.crash()
        elif roll < 2.2:
            rng.choice(self.samplers).die(self, says_hello=rng.random() < 0.6)
        elif roll < 3.2:
            self.kill_learner()
        elif roll < 3.4:
            self.do("wait", 30.0)
            self.ask(None, ev.Tick(30.0), ignore)
        elif roll < 3.5:
            self.ask(None, ev.Close("by hand"), ignore)
        elif self.zombie is not None:
            self.zombie.act(self)

    # --- learners

    def next_life(self) -> int:
        """A number for a new learner."""
        self.lives += 1
        return self.lives

    def kill_learner(self) -> None:
        """Kill a client, or start its successor while it continues."""
        if self.rng.random() < 0.3:
            self.zombie = replace(self.learner, unsaid=list(self.learner.unsaid), waits=False)
        self.learner = Learner()
        self.learner.die(self)

    def some_checkpoint(self) -> tuple[Version | None, tuple]:
        """The newest, most of the time; an older one, which may be trimmed or of a line that ended, or nothing."""
        ref = self.store.ref
        if self.learner.fork and self.rng.random() < 0.8:
            return self.rng.choice([c for c in self.checkpoints if c[0].step] or [(None, ())])
        if self.rng.random() < 0.8:
            for version, line in reversed(self.checkpoints):
                if version.step >= ref.durable and ref.on_line(version.lineage, version.step):
                    return version, line
        return self.rng.choice([*self.checkpoints, (None, ())])

    def durable(self, version: Version, line: tuple) -> None:
        """A checkpoint is durable: it was trained on the claims of its line, and on no group twice."""
        groups, claims = [gid for groups in line for gid in groups], self.store.ref.line(version.lineage, version.step)
        if line != claims or len(set(groups)) < len(groups):
            broken("4 exactly once", f"{version} was trained on {line}, its line's claims are {claims}")

    # --- the end

    @property
    def over(self) -> bool:
        """True if everything that was to be trained is trained."""
        ref = self.store.ref
        return ref.acked >= self.rules.steps or (ref.data_ended and not ref.open and ref.acked == ref.next_claim)

    def finish(self) -> None:
        """Let all clients work without failures: the run must end, with every step trained once."""
        self.faults, self.slowness, self.zombie, end = 0.0, 0.2, None, self.store.done + FINISH_WITHIN
        self.crash()
        for s in self.samplers:
            s.die(self, says_hello=True)
        self.resume()
        while not self.over:
            if self.store.done > end:
                broken("liveness", f"the run does not end: {self.store.ref.figures()}, {self.store.ref.members()}")
            self.do("wait", 0.6)
            if self.store.ref.closed:  # the filter rejected too much: the operator starts the run again
                self.crash()
            self.ask(None, ev.Tick(), ignore)
            self.train()
            for s in self.samplers:
                self.work(s)
        self.sync()
        self.do("crash", 0, 0.0)
        if self.rules.order == "lease_order" and not self.hostile and self.store.ref.ended["stale"]:
            broken("7 with lease_order (a) makes (b) never bite", f"{self.store.ref.ended['stale']} groups grew stale")
        if self.learner.version is not None:
            self.durable(self.learner.version, self.learner.line[: self.learner.version.step])

    def resume(self) -> None:
        """A learner that begins from the newest checkpoint that is not refused."""
        self.learner = Learner(self.next_life())
        if self.over:
            return
        for checkpoint in (*reversed(self.checkpoints), (None, ())):
            self.learner.begin(self, checkpoint)
            self.sync()
            if self.learner.version is not None:
                return
        broken("liveness", f"no checkpoint of {self.checkpoints} is accepted")

    def train(self) -> None:
        """A learner that checkpoints after every step."""
        learner = self.learner
        learner.act(self)
        self.sync()
        if learner.version is not None and learner.batch is None and not learner.to_publish:
            self.checkpoints.append((learner.version, learner.line))
            learner.make_durable(self)
            self.sync()

    def work(self, s: Sampler) -> None:
        """A sampler that keeps up."""
        s.flip(self)
        if s.version is not None:
            s.lease(self, 2 * self.rules.members)
            self.sync()
        if s.holding:
            s.renew(self)
            self.sync()
        for key in list(s.holding):
            if key in s.holding:
                s.sample(self, key)
