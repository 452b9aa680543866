"""A run in one event loop: the real store, samplers and learner over an in-memory network, for a virtual clock.

Real: the store's keeper, service and ticker; the server's dispatch of a call; the client's retries; a role's session,
its lease, renew and cancellation loops, weight following, episodes and evaluations; the learner's loop over steps.
Replaced: gRPC by `Network`, the log's threads by SQLite in memory, checkpoints by their versions. Engine, trainer and
publisher are arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from jaxroll.config import Config, RoleArgs, digest
from jaxroll.config.derived import learner_samplers
from jaxroll.engine.sequence import EngineStats
from jaxroll.errors import InfraError
from jaxroll.metrics import JsonlTracker
from jaxroll.policy import selection
from jaxroll.policy.step_times import Seeding
from jaxroll.records import Message, Task, Version, VersionRef
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles.learner import LearnerSession
from jaxroll.roles.session import EngineSession, RoleSpec
from jaxroll.roles.weights import WeightFollower, transfer_config
from jaxroll.sim.costs import Cluster, LearnerCosts, SamplerCosts, TransferCosts
from jaxroll.sim.network import LoopClock, MemoryServer, MemoryTransport, Network, OrderedThreads
from jaxroll.store import messages as msg
from jaxroll.store.client import StoreClient
from jaxroll.store.core.admission import Settings, status
from jaxroll.store.core.events import Recorded
from jaxroll.store.core.state import State
from jaxroll.store.log import commit_log, database
from jaxroll.store.log.commit_log import KEEP_BYTES
from jaxroll.store.log.schema import Statement
from jaxroll.store.server import server as store_server
from jaxroll.store.server.keeper import Keeper
from jaxroll.text.tokenizers import CharTokenizer

if TYPE_CHECKING:  # it loads JAX
    from jaxroll.serving.engine_thread import EngineHost

T = TypeVar("T")
TOKENIZER = CharTokenizer("ab ")


# --- Store


class Rows:
    """The rows that a tracker would write."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log(self, row: Any) -> None:
        self.rows.append(row)

    def log_all(self, rows: Any) -> None:
        self.rows += rows

    def written(self) -> list[Any]:
        return self.rows


class Feed:
    """Prompts 0, 1, 2, … of the environment `env`: `limit` of them, or without end; `text` makes the question."""

    def __init__(self, env: str, limit: int | None = None, text: Callable[[int], str] = lambda index: "a") -> None:
        self._at, self._env, self._limit, self._text = 0, env, limit, text

    def restore(self, state: bytes | None) -> None:
        self._at = int(state) if state else 0

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        end = self._at + count if self._limit is None else min(self._at + count, self._limit)
        first, self._at = self._at, end
        numbers = range(first, self._at)
        return [(self._task(i), str(i + 1).encode()) for i in numbers]

    def _task(self, index: int) -> Task:
        return Task(index, (Message("user", self._text(index)),), self._env, "{}", index, f"{index:016x}")


class MemoryLog:
    """Commit log in memory, with the same tables. It commits at once, without threads or waits, and ends with `close`.

    `connection` is for readers of the tables.
    """

    def __init__(self, *, keep_bytes: int = 0) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        database.prepare(self.connection, Path(":memory:"))
        self.recovered = database.recovered(self.connection)
        self.failure: InfraError | None = None
        self.commits = 0
        self._upkeep = commit_log.Maintenance(self.connection, commit_log.HISTORY_BYTES, keep_bytes)

    def append(self, statements: Sequence[Statement]) -> None:
        """Commit the statements; sqlite3.Error if they are refused."""
        if statements:
            commit_log.commit(self.connection, statements, self._upkeep)
            self.commits += 1

    def fail(self, error: BaseException) -> None:
        """Raise it: a simulation has no process that would start again."""
        raise error

    async def committed(self) -> None:
        """Return at once: every append has been committed."""

    def begin(self, state: State) -> None:
        """Do nothing: there is no history to compact."""

    def compact(self) -> None:
        """Do nothing: the history stays whole."""

    async def payloads(self, group: int) -> dict[int, bytes]:
        """Read the bytes of the group's members, by member number."""
        return dict(self.connection.execute(commit_log.SELECT_PAYLOADS, (group,)))

    async def partials(self, group: int, member: int) -> list[bytes]:
        """Read the flushed tokens of a member, in order."""
        return [body for (body,) in self.connection.execute(commit_log.SELECT_PARTIALS, (group, member))]

    async def recorded(self, group: int, member: int) -> Recorded | None:
        """Read the last finished attempt of a member whose group has ended; None if there is none."""
        rows = self.connection.execute(commit_log.SELECT_RECORDED, (group, member)).fetchall()
        return Recorded(*rows[0]) if rows else None

    async def facts(self) -> dict[str, int | str]:
        """Settings of the connection and number of committed transactions."""
        return database.facts(self.connection) | {"wal_bytes": 0, "commits": self.commits}

    async def close(self) -> None:
        """Drop all data."""
        self.connection.close()


class VirtualStore:
    """The store, which can be killed and started again; its history lives in memory."""

    def __init__(self, config: Config, feed: Callable[[], Any], metrics: Any = None, keep_bytes: int = 0) -> None:
        self.config, self.server, self._feed = config, MemoryServer(), feed
        self.metrics: Any = Rows() if metrics is None else metrics
        self._log = MemoryLog(keep_bytes=keep_bytes)
        self.keeper: Keeper
        self.fleet: store_server.Fleet | None = None
        self._job: asyncio.Future[None] | None = None

    def start(self) -> None:
        self._log.recovered = database.recovered(self._log.connection)  # as a new process would
        self.keeper = keeper = Keeper(Settings.of(self.config), self._log, LoopClock())
        linger_s = store_server.LINGER_S
        store = store_server._Store(self.config, keeper, self.metrics, self._feed(), linger_s, None, lambda: 0)
        self.server.start(msg.SERVICE, store.service.methods(), lambda: keeper.state.position)
        self.fleet = store.fleet
        self._job = asyncio.ensure_future(store.run())

    async def stop(self) -> None:
        self.server.stop()
        if self._job is not None:
            self._job.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._job

    def status(self) -> dict[str, Any]:
        """The run's status, as the store reports it."""
        return status(self.keeper.settings, self.keeper.state, now_s=self.keeper.now_s())

    def save(self, file: Path) -> None:
        """Write the log to `file`, as a store process leaves it."""
        with contextlib.closing(sqlite3.connect(file)) as copy:
            self._log.connection.backup(copy)

    def sql(self, query: str) -> list[tuple]:
        return self._log.connection.execute(query).fetchall()


# --- Roles


class _Learner(LearnerSession):
    """A learner without parameters."""

    def _initial_params(self, trainer: object) -> None:
        return None


async def in_place(job: Callable[[], Any]) -> Any:
    """The result of `job`, which may be a coroutine: the hand-over to a thread, without a thread."""
    found = job()
    return await found if inspect.isawaitable(found) else found


class MemoryCheckpoints:
    """Checkpoints that are on disk `write_s` after they are saved; a learner that is killed meanwhile leaves none."""

    damaged: tuple[Version, ...] = ()

    def __init__(self) -> None:
        self.kept, self.write_s = 1_000, 0.0
        self._written, self._new = list[Version](), list[Version]()
        self._writing: list[tuple[float, Version]] = []
        self._logs: dict[Version, Any] = {}

    @property
    def writing(self) -> list[Version]:
        """The versions that are not on disk yet."""
        now_s = asyncio.get_running_loop().time()
        done = [version for end_s, version in self._writing if end_s <= now_s]
        self._writing = [one for one in self._writing if one[0] > now_s]
        self._written += done
        self._new += done
        return [version for _, version in self._writing]

    def kill(self) -> None:
        """End the writing as the process that does it ends."""
        _ = self.writing
        self._writing, self._new = [], []

    def versions(self) -> tuple[Version, ...]:
        _ = self.writing
        return tuple(sorted(self._written))

    def latest(self, usable: Callable[[Version], bool]) -> Version | None:
        return max(filter(usable, self.versions()), default=None)

    def path(self, version: Version) -> Path:
        return Path(str(version))

    def save(self, version: Version, position: int, state: object, base: str, log: object) -> None:
        self._writing.append((asyncio.get_running_loop().time() + self.write_s, version))
        self._logs[version] = log

    async def finished(self, *, wait: bool) -> list[Version]:
        while self.writing and wait:
            await asyncio.sleep(0.1)
        new, self._new = self._new, []
        return new

    def restore(self, version: Version, *args: object, durable: bool) -> tuple[None, None]:
        return None, None

    def sync(self, version: Version) -> None: ...

    def settle(self, version: Version) -> None: ...

    def log_start(self, version: Version) -> Any:
        return self._logs[version]

    def remove_old(self, version: Version, spared: Collection[Version] = ()) -> None:
        for old in selection.removable(self._written, version, self.kept, spared):
            self._written.remove(old)


class MemoryPublisher:
    """Weights that can be fetched at once."""

    sent_bytes = 0

    def publish(self, version: Version, params: object) -> VersionRef:
        return VersionRef(version, "tcp", "memory", "digest")

    def start(self, version: Version, params: object) -> Version:
        return version

    def finish(self, version: Version, started: Version) -> VersionRef:
        return self.publish(started, None)

    def drop_older(self, version: Version) -> None: ...


class World:
    """A store and its roles. Use it as an asynchronous context manager."""

    def __init__(
        self, config: Config, run_dir: Path, feed: Callable[[], Any], metrics: Any = None,
        network: Network | None = None, keep_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.args = config, RoleArgs(config, run_dir)
        self.network, self.store = network or Network(), VirtualStore(config, feed, metrics, keep_bytes)
        self.sessions: dict[str, EngineSession] = {}
        self.checkpoints, self.stop = MemoryCheckpoints(), threading.Event()
        self.trained, names = list[Any](), learner_samplers(config)  # by learners that ended
        now_s = lambda: asyncio.get_running_loop().time()  # noqa: E731
        self._seeding = Seeding(names, now_s, contextlib.nullcontext()) if names else None
        self._jobs: list[asyncio.Future[Any]] = []
        self._alive: dict[str, tuple[asyncio.Future[Any], list[MemoryTransport]]] = {}  # by role
        self._clients: list[StoreClient] = []

    async def __aenter__(self) -> Self:
        self.store.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for client in self._clients:
            await client.aclose()
        await self.store.stop()

    def has_left(self, role: str) -> bool:
        """True if the role has ended by itself, as a sampler that the run does not need."""
        return role in self._alive and self._alive[role][0].done()

    def jobs(self) -> list[asyncio.Future[Any]]:
        """The roles that run, or have ended without being killed."""
        return [job for job, _ in self._alive.values()]

    async def settled(self) -> None:
        """Wait until the roles have ended after the run."""
        await asyncio.wait(self.jobs())

    async def kill(self, *roles: str) -> None:
        """End these roles as `kill -9` does; without names, all of them and the store."""
        ended = [self._alive.pop(role) for role in roles or list(self._alive)]
        for job, transports in ended:
            for transport in transports:
                transport.is_killed = True
            job.cancel()
        if not roles or "learner" in roles:
            self.checkpoints.kill()
        if not roles:
            await self.store.stop()
        await asyncio.gather(*(job for job, _ in ended), return_exceptions=True)

    def transport(self, name: str) -> MemoryTransport:
        return MemoryTransport(self.network, self.store.server, name)

    async def client(self, role: str, name: str = "", **options: Any) -> StoreClient:
        """A client of the store, for a test that plays the role itself."""
        name = name or role
        options = {"config_digest": digest(self.config), "patience_s": 60.0} | options
        transport = options.pop("transport", None) or self.transport(name)
        self._clients.append(client := await StoreClient.connect(transport, role=role, name=name, **options))
        return client

    def start_learner(self, trainer: Any, publisher: Any, poll_s: float = 0.0) -> asyncio.Future[int]:
        """Start a learner; the future is its exit code. A second one restores the newest checkpoint of the first.

        `poll_s` is the time between two looks at the devices (0: as in a real run).
        """
        transport = self.transport("learner")

        async def play() -> int:
            store = await self.client("learner", transport=transport)
            checkpoints: Any = self.checkpoints
            at: dict[str, Any] = {"on_device": in_place, "on_thread": in_place, "seeding": self._seeding}
            session = _Learner(self.args, store, checkpoints, publisher, lambda: trainer, stop=self.stop, **at)
            session.device_poll_s = poll_s or session.device_poll_s
            try:
                return await session.run()
            finally:
                self.trained += trainer.trained
                await session.close()

        return self._born("learner", asyncio.ensure_future(play()), transport)

    def _born(self, role: str, job: asyncio.Future[T], *transports: MemoryTransport) -> asyncio.Future[T]:
        self._jobs.append(job)
        self._alive[role] = (job, list(transports))
        return job

    def start_engine(
        self, role: str, engine: Any, play: Callable[[EngineSession], Awaitable[None]], pool: ScoringPool | None = None
    ) -> asyncio.Future[None]:
        """Start a role with `engine`, which is also its thread, proxy and weight receiver."""
        loop, transport = asyncio.get_running_loop(), self.transport(role)
        session = EngineSession(role, self.args, pool or ScoringPool(1), loop, transport)
        session.seeding = self._seeding if role in learner_samplers(self.config) else None
        relays = self.config.transfer.relay != "none" and session.seeding is None
        relay = msg.RelayState(address=role) if relays else None
        follower = WeightFollower(engine, engine, session.progress, engine.in_force_s, relay)
        session.parts = SimpleNamespace(tokenizer=TOKENIZER, host=engine, engine=engine, follower=follower)  # type: ignore[assignment]
        session.proxy = engine
        self.sessions[role] = session
        job = asyncio.ensure_future(session.run(lambda: asyncio.sleep(0), lambda: play(session)))
        return self._born(role, job, transport)


# --- A deterministic run: all roles on one thread and a virtual clock (`run.deterministic`)

# Seconds of the virtual clock. They fix the order of events, and with it the version of every token; they are no
# measurement. A training step takes as long as some dozens of decode steps, so that both overlap with α > 0.
CLOCK = Cluster(
    source="the clock of deterministic runs",
    sampler=SamplerCosts(step_overhead_s=0.02, prefill_overhead_s=0.05),
    learner=LearnerCosts(step_overhead_s=0.5, micro_batch_overhead_s=0.25),
    transfer=TransferCosts(publish_s=0.05),
)
LIMIT_S = 10 * 365 * 86400.0


class Deterministic(World):
    """A run whose roles share a thread and a virtual clock. Use it as an asynchronous context manager.

    Store, role loops, engines, trainer, environments, rewards and checkpoints are those of every run; replaced are the
    network and the log on disk (by a `World`), and time (`CLOCK`). While one part computes, the clock does not move.
    """

    def __init__(self, args: RoleArgs, pool: ScoringPool, metrics: JsonlTracker, stop: threading.Event) -> None:
        from jaxroll.roles.store import PromptsHere

        network = Network(CLOCK.rpc_s)
        super().__init__(args.config, args.run_dir, lambda: PromptsHere(args), metrics, network, KEEP_BYTES)
        self.stop, self._pool = stop, pool
        self._threads = OrderedThreads(args.config.sampler.env_threads)
        self._engines: list[tuple[EngineHost, asyncio.Future[None]]] = []

    async def train(self) -> int:
        """The exit code of the learner, after all roles have ended. The first error of a role is raised."""
        from jaxroll.roles import colocated

        training = self._learner()
        for spec in colocated.role_specs(self.args):
            self._role(spec)
        waiting = {training, *self.jobs(), *(work for _, work in self._engines)}
        while not training.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        if code := training.result():  # otherwise the run is closed, and the roles end by themselves
            for session in self.sessions.values():
                session.request_stop(at_once=True)
        await self.settled()
        for job in self.jobs():
            job.result()
        for host, work in self._engines:
            host.stop()
            await work
        return code

    def _role(self, spec: RoleSpec) -> None:
        """Start a role with an engine."""
        from jaxroll.roles import build
        from jaxroll.serving.engine_thread import EngineProxy

        loop, transport = asyncio.get_running_loop(), self.transport(spec.role)
        session = EngineSession(spec.role, self.args, self._pool, loop, transport, self._threads)
        session.parts = build.inference(
            self.config, spec.role.partition("-")[0], spec.mesh, slots=spec.slots, weight_swap=spec.weight_swap,
            token="", progress=session.progress,
        )  # fmt: skip
        session.proxy = EngineProxy(session.parts.host, loop)
        self.sessions[spec.role] = session
        self._engines.append((session.parts.host, asyncio.ensure_future(session.parts.host.run_on_loop(_step_s))))

        async def ready() -> None:
            session.store.on_flushed(session.parts.host.wake)

        playing = session.run(ready, lambda: spec.play(session))
        self._born(spec.role, asyncio.ensure_future(playing), transport)

    def _learner(self) -> asyncio.Future[int]:
        """Start the learner; the future is its exit code."""
        from jaxroll.roles import build, colocated, learner

        config, kept = self.config, self.config.learner.checkpoints_kept
        make = functools.partial(colocated.TimedTrainer, CLOCK.learner.train_s, asyncio.get_running_loop().time)
        checkpoints = colocated.WrittenCheckpoints(self.args.paths.checkpoints, kept)
        publisher = colocated.TimedPublisher(transfer_config(config).dtype, CLOCK.transfer.publish_s)
        transport, device = self.transport("learner"), ThreadPoolExecutor(1)  # Orbax needs a thread without a loop

        async def on_device(job: Callable[[], Any]) -> Any:
            found = device.submit(job).result()
            return await found if inspect.isawaitable(found) else found

        async def play() -> int:
            session = learner.LearnerSession(
                self.args, await self.client("learner", transport=transport), checkpoints, publisher,
                lambda: build.trainer(config, make), stop=self.stop, on_device=on_device, on_thread=in_place,
            )  # fmt: skip
            try:
                return await session.run()
            finally:
                await session.close()
                await on_device(checkpoints.close)
                publisher.close()
                device.shutdown()

        return self._born("learner", asyncio.ensure_future(play()), transport)


def _step_s(before: EngineStats, after: EngineStats) -> float:
    costs = CLOCK.sampler
    calls, tokens = after.prefills - before.prefills, after.prefill_tokens - before.prefill_tokens
    steps = after.decode_steps - before.decode_steps
    return costs.prefill_s(tokens, calls) + steps * costs.step_s(after.active, 0.0)
