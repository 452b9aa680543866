"""Bad neighbors in virtual time: samplers, actors and scoring workers that fail or are slow, among healthy ones.

In addition to the loops of `virtual_run` these are real: the actor's loops, the samplers' generation service, and the
pool of scoring workers. Environments and the processes of workers are replaced by delays: a real process answers in
real time, and the virtual clock would jump to its deadline meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jaxroll.config import Config, digest
from jaxroll.envs import registry
from jaxroll.errors import InfraError
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards import scoring_pool
from jaxroll.rewards.processes import Ready, Reply, Scored, ScoreItem, ScoringProcess, WorkerSettings, frame
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles.actor import ActorLoops
from jaxroll.roles.sampler import SamplerLoops
from jaxroll.roles.session import EngineSession, Session
from jaxroll.rpc.client import RawClient
from jaxroll.serving import service
from jaxroll.serving.service import ActorService
from jaxroll.sim.network import MemoryServer, MemoryTransport
from jaxroll.sim.world import TOKENIZER
from tests.harness import virtual_run
from tests.harness.virtual_run import Behaviour, VirtualRun

ENV = "tests.harness.virtual_neighbours:neighbour"
HEALTHY, AT_ONCE, LATE, SLOW = "healthy", "fails at once", "fails late", "slow"
SLOWER = 10.0
ANSWER_S = 0.1
START_S, SCORE_S = 2.0, 0.02  # of a scoring worker: its imports, and an item


@registry.register("neighbour")
class Neighbour:
    """A question whose judge takes about a second. The pool of its process has its `fault`."""

    step_limit_s = 60.0

    def __init__(self, pool: Any, config: object) -> None:
        self._pool, self._fault = pool, getattr(pool, "fault", HEALTHY)
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
        return StepResult(done=True, reward=await self._score(answer))

    async def close(self) -> None: ...

    async def _score(self, answer: str) -> float:
        return await self._pool.score("{}", answer) if self._pool.pids else 1.0


# --- Scoring workers


class MemoryWorker(ScoringProcess):
    """A scoring worker in this process, on the running loop's clock.

    Of a pool whose `modules` names a fault, one worker at a time has it, also after it was replaced: it ends at each
    item, ends after a second of each, or takes ten times as long.
    """

    _bad: ClassVar[list[WorkerSettings]] = []  # of pools that have a bad worker now

    def __init__(self, settings: WorkerSettings) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        self._received, self._items, self._settings = bytearray(), deque[ScoreItem](), settings
        self._fault = HEALTHY
        if settings.modules and not any(one is settings for one in self._bad):
            self._fault = settings.modules[0]
            self._bad.append(settings)
        self._timer: asyncio.TimerHandle | None = None
        self._after(START_S, Ready())

    @property
    def pid(self) -> int:
        return 1

    @property
    def input_descriptor(self) -> int:
        return self._out  # a valid one, also when the worker has ended; `send` never needs to wait for it

    def send(self, items: Iterable[ScoreItem]) -> bool:
        self._items += items
        if self._timer is None:
            self._work()
        return True

    def kill(self, grace_s: float = 0.0) -> int:
        if self._timer is not None:
            self._timer.cancel()
        if self._fault != HEALTHY:
            self._bad[:] = [one for one in self._bad if one is not self._settings]
        for descriptor in {self._in, self._out} - {-1}:
            os.close(descriptor)
        self._in = self._out = -1
        return 1

    def last_words(self) -> str:
        return "a library is missing here"

    def _after(self, delay_s: float, reply: Reply | None) -> None:
        """Send `reply` and go on; None: end."""
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._reply, reply)

    def _reply(self, reply: Reply | None) -> None:
        self._timer = None
        if reply is None:
            os.close(self._in)
            self._in = -1
            return
        os.write(self._in, frame(reply))
        self._work()

    def _work(self) -> None:
        if not self._items:
            return
        item = self._items.popleft()
        if self._fault in (AT_ONCE, LATE):
            self._after(0.0 if self._fault == AT_ONCE else 1.0, None)
        else:
            self._after(SCORE_S * (SLOWER if self._fault == SLOW else 1.0), Scored(item.id, 1.0))


# --- Roles


class _MemoryServing(ActorService):
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
                service.SERVICE,
                transport,
                role="actor",
                name=self.session.role,
                token=None,
                patience_s=0.0,
                max_message_bytes=2**20,
                config_digest=digest(self.config),
            )
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

    def sampler_with(
        self, index: int, fault: str = HEALTHY, workers: int = 0, worker_fault: str = ""
    ) -> asyncio.Future[None]:
        """Start a sampler; it serves actors if there are any. It scores with `workers`, one of them with a fault."""
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
        session: Any = self.sessions[role]
        if workers:
            session.pool = ScoringPool(workers, modules=(worker_fault,) if worker_fault else ())
            session.pool.start()
        setattr(session.pool, "fault", fault)  # noqa: B010 - for the environment; a pool has no such attribute
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
        return await self.result_of(self.learner(train_s), skipped)

    async def result_of(self, training: asyncio.Future[int], skipped: int) -> Result:
        """Wait for the end of `training`; the rate is that after the first `skipped` steps."""
        rested = set[str]()
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
    """Let the prompts name the environment of this module, and its scoring workers be those of this process."""
    patch.setattr(virtual_run, "ENV", ENV)
    patch.setattr(scoring_pool, "ScoringProcess", MemoryWorker)
