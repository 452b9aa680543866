"""Bad neighbours in virtual time: samplers and actors that fail or are slow, among healthy ones.

In addition to the loops of `virtual_run` these are real: the actor's loops and the samplers' generation service.
Environments are replaced by delays.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import Config, digest
from jaxroll.envs import registry
from jaxroll.errors import InfraError
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles.actor import ActorLoops
from jaxroll.roles.sampler import SamplerLoops, Serving
from jaxroll.roles.session import EngineSession, Session
from jaxroll.rpc.client import RawClient
from jaxroll.serving import service
from tests.harness import virtual_run
from tests.harness.virtual_run import TOKENIZER, Behaviour, MemoryServer, MemoryTransport, VirtualRun

ENV = "tests.harness.virtual_neighbours:neighbour"
HEALTHY, AT_ONCE, LATE, SLOW = "healthy", "fails at once", "fails late", "slow"
SLOWER = 10.0
ANSWER_S = 0.1


@registry.register("neighbour")
class Neighbour:
    """A question whose judge takes about a second. The pool of its process has its `fault`."""

    step_limit_s = 60.0

    def __init__(self, pool: Any, config: object) -> None:
        self._fault = getattr(pool, "fault", HEALTHY)
        self._latency_s = 0.0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        if self._fault == AT_ONCE:
            raise RuntimeError("a library is missing here")
        self._latency_s = random.Random(repr((task.index, seed))).uniform(0.75, 1.25)
        return task.messages

    async def step(self, answer: str) -> StepResult:
        await asyncio.sleep(self._latency_s * (SLOWER if self._fault == SLOW else 1.0))
        if self._fault == LATE:
            raise InfraError("the judge cannot be reached from here")
        return StepResult(done=True, reward=1.0)

    async def close(self) -> None: ...


# --- Scoring workers


class _MemoryServing(Serving):
    """The generation service of a sampler, on a `MemoryServer`."""

    server: MemoryServer

    async def _serve(self) -> None:
        self.server.start(service.SERVICE, self._service.methods(), lambda: 0)
        await asyncio.Event().wait()


class _MemoryActor(ActorLoops):
    """An actor with connections to `MemoryServer`s."""

    def __init__(self, session: Session, at: NeighbourRun) -> None:
        self._at = at
        super().__init__(session, TOKENIZER)

    def _clients(self) -> dict[str, RawClient]:
        clients = {}
        for name, server in self._at.servers.items():
            transport = MemoryTransport(self._at.network, server, self.session.role)
            clients[name] = client = RawClient(
                service.SERVICE, transport, role="actor", name=self.session.role, token=None, patience_s=0.0,
                max_message_bytes=2**20, config_digest=digest(self.config),
            )  # fmt: skip
            client.run_id = self.store.welcome.run_id
        return clients


@dataclass
class Result:
    """Steps per second after the first ones; groups that died, failed members, and holders that rested."""

    steps_per_s: float
    dead: int
    failed: int
    rested: set[str]
    residual: int


class NeighbourRun(VirtualRun):
    """A run whose samplers or actors have faults, by index."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self.servers: dict[str, MemoryServer] = {}

    def sampler_with(self, index: int, fault: str = HEALTHY) -> asyncio.Future[None]:
        """Start a sampler; it serves actors if there are any."""
        role = f"sampler-{index}"
        if self.config.placement.actors:
            self.servers[role] = MemoryServer()

        def play(session: EngineSession) -> Any:
            loops = SamplerLoops(session)
            if role in self.servers:
                loops.requests = serving = _MemoryServing(session)
                serving.server = self.servers[role]
            return loops.run()

        job = self._start(role, Behaviour(lambda key: ANSWER_S), play)
        own: Any = self.sessions[role].pool
        own.fault = fault
        return job

    def actor(self, index: int, fault: str = HEALTHY) -> asyncio.Future[None]:
        """Start an actor of the samplers that have started."""
        role, pool = f"actor-{index}", ScoringPool(1)
        pool.fault = fault  # type: ignore[attr-defined]
        transport = self.transport(role)
        session = Session(role, self.args, pool, asyncio.get_running_loop(), transport)
        job = asyncio.ensure_future(session.run(lambda: asyncio.sleep(0), lambda: _MemoryActor(session, self).run()))
        return self._born(role, job, transport)

    async def result(self, train_s: float, skipped: int) -> Result:
        """Train to the end."""
        training, rested = self.learner(train_s), set[str]()
        while not training.done():
            rested |= set(self.store.status()["backoff"])
            await asyncio.sleep(0.5)
        assert training.result() == 0
        first, last = self.trained[skipped], self.trained[-1]
        ((dead,),) = self.store.sql("SELECT COUNT(*) FROM groups WHERE state = 'DEAD'")
        ((failed,),) = self.store.sql("SELECT COUNT(*) FROM log WHERE kind = 'member_failed'")
        rate = (len(self.trained) - 1 - skipped) / (last.at_s - first.at_s)
        return Result(rate, dead, failed, rested, self.store.status()["conservation_residual"])


def prompts_of_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Let the prompts name the environment of this module."""
    patch.setattr(virtual_run, "ENV", ENV)
