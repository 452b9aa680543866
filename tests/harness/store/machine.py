"""The core with a clock, and its requests by short names, for the tests of the contract."""

from __future__ import annotations

import functools
from typing import Any

from jaxroll.errors import (
    StoreRefusal,
)
from jaxroll.policy.limiter import AgeLimiter
from jaxroll.records import (
    Task,
    Version,
    VersionRef,
    VersionRun,
)
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.machine import Core
from jaxroll.store.core.state import Batch, conservation_residual, counts

V0 = Version(0, 0)


def offer(first: int, end: int) -> tuple[tuple[Task, bytes], ...]:
    """Prompts `first` … `end` − 1 as a feeder has them ready."""
    return tuple(_prompt(index) for index in range(first, end))


@functools.cache
def _prompt(index: int) -> tuple[Task, bytes]:
    return Task(index, (), "env", "{}", 0, f"{index:016x}"), str(index).encode()


class Machine:
    """A core with a clock, and requests by their short names."""

    def __init__(self, alpha: float = 1.0, batch: int = 2, size: int = 2, redundant: int = 0, **rules: Any) -> None:
        self.now, self.requests, self.fed = 0.0, 0, 0
        values = {"group_size": size, "steps": 10, "lease_s": 10.0} | rules
        limits = {key: values.pop(key) for key in ("publish_every", "buffer_groups") if key in values}
        self.core = Core(Settings(AgeLimiter(alpha, batch, redundant, **limits), **values))
        self.prompts = 100
        self.log: list[ev.Event] = []  # what a store would have on disk

    @property
    def state(self):
        return self.core.state

    def ask(self, request: ev.Request) -> Any:
        decision = self.core.handle(request, self.now)
        self.log += [event for event in decision.events if not isinstance(event, ev.NOT_LOGGED)]
        reply = decision.reply
        assert conservation_residual(self.state) == 0
        if isinstance(reply, StoreRefusal):
            raise reply
        return reply

    def start(self, durable: Version | None = None, session: str = "L", fork: str = "") -> Version:
        version = self.ask(ev.Begin(session, durable, fork))
        self.publish(version, session)
        return version

    def publish(self, version: Version, session: str = "L") -> None:
        self.ask(ev.Publish(session, VersionRef(version, "tcp", "here", "d")))

    def lease(self, members: int, version: Version = V0, name: str = "S", request: str = "", session: str = "") -> list:
        self.requests += 1
        fed = self.state.next_ordinal
        offered = offer(fed, min(fed + members, self.prompts))
        reply = self.ask(
            ev.Lease(name, session or f"{name}-1", version, members, request or f"r{self.requests}", offered)
        )
        self.grants = reply.grants
        return [(g.group, m, a) for g in reply.grants for m, a in g.members]

    def put(self, key: tuple[int, int, int], *versions: Version, digest: str = "d", **more: Any) -> str:
        runs = tuple(VersionRun(v, 5) for v in versions or (V0,))
        return self.ask(ev.PutMember(*key, digest, more.pop("size_bytes", 100), runs, **more))

    def fail(self, key: tuple[int, int, int], kind: str, digest: str = "f") -> str:
        return self.ask(ev.PutMember(*key, digest, 10, failure=(kind, "it broke")))

    def fill(self, members: int, version: Version = V0) -> list[tuple[int, int, int]]:
        keys = self.lease(members, version)
        for key in keys:
            self.put(key, version)
        return keys

    def claim(self, step: int, lineage: int = 0, session: str = "L", *, ahead: bool = False) -> Batch:
        return self.ask(ev.ClaimStep(session, lineage, step, ahead))

    def train(self, step: int, lineage: int = 0, session: str = "L") -> Batch:
        """Claim, publish, ack."""
        batch = self.claim(step, lineage, session)
        self.publish(Version(lineage, step + 1), session)
        self.ask(ev.Ack(session, Version(lineage, step)))
        return batch

    def restart(self) -> None:
        """The store dies and reads its log."""
        self.core = Core.recovered(self.core.settings, None, self.log, self.now)

    def states(self) -> dict[str, int]:
        return {name: n for name, n in counts(self.state).items() if n}
