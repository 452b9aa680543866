"""A run in one event loop: the real store, samplers and clients over an in-memory network, for a virtual clock.

Real: the store's keeper, service and ticker; the server's dispatch of a call (caller, intake, throttle); the client's
retries; a role's session, its lease, renew and cancellation loops, weight following, episodes and evaluations; the
learner's loop over steps. Replaced: gRPC by `Network`, the log's threads by SQLite in memory, engine and trainer by
delays, weights and checkpoints by their versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio
import numpy as np

from jaxroll.config import Config, MeshConfig, RoleArgs, digest
from jaxroll.engine.stats import EngineStats
from jaxroll.envs import registry
from jaxroll.errors import Closed, TransferError
from jaxroll.policy import best
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, StepResult
from jaxroll.records import Claim, Finished, Message, Task, Version, VersionRef, VersionRun
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles.evaluator import EvaluatorLoops
from jaxroll.roles.learner import LearnerSession
from jaxroll.roles.sampler import SamplerLoops
from jaxroll.roles.session import EngineSession
from jaxroll.roles.weights import WeightFollower
from jaxroll.rpc import server as rpc_server
from jaxroll.rpc.client import Metadata
from jaxroll.rpc.intake import Intake, RefusalThrottle
from jaxroll.rpc.protocol import PIECE_BYTES
from jaxroll.sharding import layout
from jaxroll.store import messages as msg
from jaxroll.store.client import StoreClient
from jaxroll.store.core.admission import Settings, status
from jaxroll.store.log import commit_log
from jaxroll.store.log.commit_log import MemoryLog
from jaxroll.store.server import server as store_server
from jaxroll.store.server.keeper import Keeper
from jaxroll.text.tokenizers import CharTokenizer
from tests.harness.virtual_time import LoopClock

T = TypeVar("T")
LATENCY_S = 0.001
ENV = "tests.harness.virtual_run:instant"
REQUESTS, REPLIES = "requests", "replies"
TOKENIZER = CharTokenizer("ab ")


# --- Network


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class Network:
    """Links between named clients and a server. A cut link holds messages back until it is healed, as TCP does."""

    def __init__(self) -> None:
        self._cuts: set[tuple[str, str]] = set()
        self._healed = asyncio.Event()
        self.delivered: Counter[tuple[str, str]] = Counter()  # (client, method) → requests that reached the server

    def cut(self, name: str, *directions: str) -> None:
        """Cut the link of `name` in these directions; without any, in both."""
        self._cuts |= {(name, direction) for direction in directions or (REQUESTS, REPLIES)}

    def heal(self, name: str) -> None:
        """Deliver what the link of `name` holds back."""
        self._cuts -= {(name, REQUESTS), (name, REPLIES)}
        self._healed.set()
        self._healed = asyncio.Event()

    def is_cut(self, name: str, direction: str) -> bool:
        return (name, direction) in self._cuts

    async def cross(self, name: str, direction: str) -> None:
        """Return when a message has crossed the link."""
        await asyncio.sleep(LATENCY_S)
        while self.is_cut(name, direction):
            await self._healed.wait()


class _Aborted(Exception):
    """A handler ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        super().__init__(details)


class _Context:
    """As much of a gRPC servicer context as the server uses."""

    def __init__(self, peer: str, body: bytes, deadline_s: float) -> None:
        self._peer, self._left, self._deadline_s = peer, memoryview(body), deadline_s

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float:
        return self._deadline_s - asyncio.get_running_loop().time()

    async def read(self) -> bytes:
        piece, self._left = bytes(self._left[:PIECE_BYTES]), self._left[PIECE_BYTES:]
        return piece

    async def send_initial_metadata(self, metadata: Metadata) -> None: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _Aborted(code, details)


class MemoryServer:
    """The calls of one service. `methods` None: it is down, and calls fail at once."""

    def __init__(self) -> None:
        self._dispatcher: rpc_server._Dispatcher | None = None
        self._calls: set[asyncio.Task[bytes]] = set()

    def start(self, service: str, methods: Mapping[str, rpc_server.Method], position: Callable[[], int]) -> None:
        paths = {f"/{service}/{name}": method for name, method in methods.items()}
        self._dispatcher = rpc_server._Dispatcher(paths, None, RefusalThrottle(), Intake(2**20), position)

    def stop(self) -> None:
        """Go down: calls under way break off."""
        self._dispatcher = None
        for call in self._calls:
            call.cancel()

    def accept(self, name: str, path: str, body: bytes, metadata: Metadata, deadline_s: float) -> asyncio.Task[bytes]:
        """The call under way. AioRpcError when the server is down."""
        if self._dispatcher is None:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the server is down")
        details: Any = SimpleNamespace(method=path, invocation_metadata=metadata)
        handler: Any = self._dispatcher.service(details)
        assert handler is not None, f"no method {path}"

        async def handle() -> bytes:
            async with asyncio.timeout_at(deadline_s):
                return await handler.stream_unary(None, _Context(name, body, deadline_s))

        call = asyncio.ensure_future(handle())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call


class MemoryTransport:
    """The `Transport` of the client `name` to `server`."""

    def __init__(self, network: Network, server: MemoryServer, name: str) -> None:
        self._network, self._server, self._name, self.target = network, server, name, "memory"
        self.is_killed = False  # True: nothing that its process still does reaches the server

    async def attempt(
        self, path: str, body: bytes, metadata: Metadata, deadline_s: float, *, asks_first: bool
    ) -> bytes:
        if self.is_killed:
            raise Closed("this process was killed")
        until_s = asyncio.get_running_loop().time() + deadline_s
        limit = asyncio.timeout_at(until_s)
        try:
            async with limit:
                return await self._call(path, body, metadata, until_s)
        except TimeoutError as error:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline") from error

    async def _call(self, path: str, body: bytes, metadata: Metadata, until_s: float) -> bytes:
        await self._network.cross(self._name, REQUESTS)
        self._network.delivered[self._name, path.rpartition("/")[2]] += 1
        call = self._server.accept(self._name, path, body, metadata, until_s)
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            if not self._network.is_cut(self._name, REQUESTS):
                call.cancel()  # the cancellation reaches the server
            raise
        if call.cancelled():
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the server went down")
        await self._network.cross(self._name, REPLIES)
        if isinstance(error := call.exception(), _Aborted):
            raise rpc_error(error.code, error.details)
        return call.result()

    async def diagnosis(self) -> None:
        return None

    def refresh(self) -> None: ...

    async def close(self) -> None: ...


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
    """Prompts 0, 1, 2, …: `limit` of them, or without end."""

    def __init__(self, limit: int | None = None) -> None:
        self._at, self._limit = 0, limit

    def restore(self, state: bytes | None) -> None:
        self._at = int(state) if state else 0

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        end = self._at + count if self._limit is None else min(self._at + count, self._limit)
        first, self._at = self._at, end
        numbers = range(first, self._at)
        return [(Task(i, (Message("user", "a"),), ENV, "{}", i, f"{i:016x}"), str(i + 1).encode()) for i in numbers]


@registry.register("instant")
class Instant:
    """One question, one answer, at once."""

    step_limit_s = 60.0

    def __init__(self, pool: object, config: object) -> None: ...

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        return task.messages

    async def step(self, answer: str) -> StepResult:
        return StepResult(done=True, reward=1.0)

    async def close(self) -> None: ...


class VirtualStore:
    """The store, which can be killed and started again; its history lives in memory."""

    def __init__(self, config: Config, prompts: int | None = None) -> None:
        self.config, self.server, self.metrics, self._prompts = config, MemoryServer(), Rows(), prompts
        self._log = MemoryLog()
        self.keeper: Keeper
        self._job: asyncio.Future[None] | None = None

    def start(self) -> None:
        self._log.recovered = commit_log._read(self._log.connection)  # as a new process would
        metrics: Any = self.metrics
        self.keeper = keeper = Keeper(Settings.of(self.config), self._log, LoopClock())
        linger_s = store_server.LINGER_S
        store = store_server._Store(self.config, keeper, metrics, Feed(self._prompts), linger_s, None, lambda: 0)
        self.server.start(msg.SERVICE, store.service.methods(), lambda: keeper.state.position)
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

    def sql(self, query: str) -> list[tuple]:
        return self._log.connection.execute(query).fetchall()


# --- Roles


@dataclass
class Behaviour:
    """The engine of a sampler: seconds of an answer, and of fetching weights; `fails` makes a generation raise."""

    answer_s: Callable[[GenerationKey], float] = lambda key: 1.0
    fetch_s: float = 0.1
    fails: Callable[[GenerationKey], Exception | None] = lambda key: None
    weights_reachable: bool = True


class DelayEngine:
    """Replaces the engine, its thread and its proxy: up to `slots` answers at a time, each after a delay.

    An answer has two tokens: the first is of the version at its start, the last of the version at its end.
    """

    def __init__(self, behaviour: Behaviour, slots: int) -> None:
        self.behaviour, self._slots, self._version = behaviour, asyncio.Semaphore(slots), None
        self.engine = self.spans = self.latencies = self
        self.generations = 0

    def call(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` at once, as the JAX thread does between two steps."""
        done: Future[Any] = Future()
        done.set_result(job())
        return done

    def warmup(self, params: object) -> None: ...

    def swap(self, version: Version, params: object) -> None:
        self._version = version

    def stats(self) -> EngineStats:
        return EngineStats(version=self._version)

    def take(self) -> list[Any]:
        return []

    def take_intervals(self) -> list[Any]:
        return []

    def percentiles(self) -> dict[str, float]:
        return {}

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        async with self._slots:
            self.generations += 1
            version = self._version
            assert version is not None, "a token before the first weights"
            await asyncio.sleep(self.behaviour.answer_s(key))
            if (error := self.behaviour.fails(key)) is not None:
                raise error
            tokens = np.array([TOKENIZER.encode("b")[0], TOKENIZER.eos_id], np.int32)
            last = self._version
            assert last is not None
            runs = (VersionRun(version, 2),) if last == version else (VersionRun(version, 1), VersionRun(last, 1))
            return Completion(tokens, np.full(2, -0.5, np.float32), runs, "stop")

    async def fetch(self, ref: VersionRef) -> Any:
        await asyncio.sleep(self.behaviour.fetch_s)
        if not self.behaviour.weights_reachable:
            raise TransferError("the learner cannot be reached")
        return SimpleNamespace(fetched_bytes=0)

    def place(self, staged: object) -> dict[str, Any]:
        return {}


async def in_place(job: Callable[[], Any]) -> Any:
    """The result of `job`, which may be a coroutine: the hand-over to a thread, without a thread."""
    found = job()
    return await found if inspect.isawaitable(found) else found


class Trained(NamedTuple):
    """A step of a learner: its groups, the age of its oldest token in versions, and the time of its start."""

    lineage: int
    step: int
    groups: tuple[int, ...]
    age: int
    at_s: float


class DelayTrainer:
    """Replaces the trainer: a step takes `train_s`, and `trained` lists the claims in order."""

    lora = reference = state = spec = None
    sends_adapters, prepares_ahead = False, True

    def __init__(self, train_s: float) -> None:
        self._train_s, self.trained = train_s, list[Trained]()
        self.layout = SimpleNamespace(mesh=layout.build(MeshConfig()))
        self.programs = SimpleNamespace(recipe=SimpleNamespace(attention="none"))

    def warmup(self, progress: object) -> None: ...

    def abstract_state(self) -> None: ...

    def base_digest(self) -> str:
        return ""

    def publishable_params(self) -> dict[str, Any]:
        return {}

    def prepare(self, claim: Claim) -> Any:
        return SimpleNamespace(claim=claim)

    def dispatch_step(self, ready: Any) -> Any:
        loop = asyncio.get_running_loop()
        claim: Claim = ready.claim
        outcomes = [member.outcome for group in claim.groups for member in group.members]
        oldest = min(run.version.step for o in outcomes if isinstance(o, Finished) for run in o.versions)
        groups = tuple(group.group for group in claim.groups)
        self.trained.append(Trained(claim.lineage, claim.step, groups, claim.step - oldest, loop.time()))
        end_s = loop.time() + self._train_s
        return SimpleNamespace(is_done=lambda: loop.time() >= end_s, left_s=lambda: end_s - loop.time())

    async def await_step(self, running: Any) -> dict[str, Any]:
        await asyncio.sleep(running.left_s())
        return {}


class MemoryCheckpoints:
    """Checkpoints that are on disk `write_s` after they are saved; a learner that is killed meanwhile leaves none."""

    damaged: tuple[Version, ...] = ()

    def __init__(self) -> None:
        self.kept, self.write_s = 1_000, 0.0
        self._written: list[Version] = []
        self._writing: list[tuple[float, Version]] = []
        self._new: list[Version] = []

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

    def save(self, version: Version, position: int, state: object, base: str) -> None:
        self._writing.append((asyncio.get_running_loop().time() + self.write_s, version))

    async def finished(self, *, wait: bool) -> list[Version]:
        while self.writing and wait:
            await asyncio.sleep(0.1)
        new, self._new = self._new, []
        return new

    def restore(self, version: Version, *args: object, durable: bool) -> tuple[None, None]:
        return None, None

    def settle(self, version: Version) -> None: ...

    def remove_old(self, version: Version, spared: Collection[Version] = ()) -> None:
        for old in best.removable(self._written, version, self.kept, spared):
            self._written.remove(old)


class MemoryPublisher:
    """Weights that can be fetched at once."""

    def publish(self, version: Version, params: object) -> VersionRef:
        return VersionRef(version, "tcp", "memory", "digest")

    def start(self, version: Version, params: object) -> Version:
        return version

    def finish(self, version: Version, started: Version) -> VersionRef:
        return self.publish(started, None)

    def drop_older(self, version: Version) -> None: ...


class VirtualRun:
    """A store and its roles, for one test. Use it as an asynchronous context manager."""

    def __init__(self, config: Config, run_dir: Path, prompts: int | None = None) -> None:
        self.config, self.args = config, RoleArgs(config, run_dir)
        self.network, self.store = Network(), VirtualStore(config, prompts)
        self.sessions: dict[str, EngineSession] = {}
        self.checkpoints, self.stop = MemoryCheckpoints(), threading.Event()
        self.trained: list[Trained] = []  # by learners that ended
        self._jobs: list[asyncio.Future[Any]] = []
        self._alive: dict[str, tuple[asyncio.Future[Any], list[MemoryTransport]]] = {}  # by role
        self._clients: list[StoreClient] = []

    async def __aenter__(self) -> VirtualRun:
        self.store.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for client in self._clients:
            await client.aclose()
        await self.store.stop()

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

    def sampler(self, index: int = 0, behaviour: Behaviour | None = None) -> asyncio.Future[None]:
        """Start a sampler; the future ends as its process would."""
        return self._start(f"sampler-{index}", behaviour or Behaviour(), lambda session: SamplerLoops(session).run())

    def evaluator(self, tasks: Sequence[Task], behaviour: Behaviour | None = None) -> asyncio.Future[None]:
        """Start an evaluator of `tasks`."""
        play = lambda session: EvaluatorLoops(session, {"heldout": tasks}).run()  # noqa: E731
        return self._start("evaluator", behaviour or Behaviour(), play)

    def learner(self, train_s: float = 1.0) -> asyncio.Future[int]:
        """Start a learner whose steps take `train_s`; the future is its exit code. A second one restores the newest
        checkpoint of the first."""

        transport = self.transport("learner")

        async def play() -> int:
            store = await self.client("learner", transport=transport)
            checkpoints: Any = self.checkpoints
            publisher: Any = MemoryPublisher()
            trainer: Any = DelayTrainer(train_s)
            session = LearnerSession(
                self.args, store, checkpoints, publisher, lambda: trainer, stop=self.stop, on_device=in_place,
                on_thread=in_place,
            )  # fmt: skip
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

    def _start(
        self, role: str, behaviour: Behaviour, play: Callable[[EngineSession], Awaitable[None]]
    ) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        transport = self.transport(role)
        session = EngineSession(role, self.args, ScoringPool(1), loop, transport)
        engine: Any = DelayEngine(behaviour, self.config.sampler.slots)
        follower = WeightFollower(engine, engine, session.progress)
        session.parts = SimpleNamespace(tokenizer=TOKENIZER, host=engine, engine=engine, follower=follower)  # type: ignore[assignment]
        session.proxy = engine
        self.sessions[role] = session
        job = asyncio.ensure_future(session.run(lambda: asyncio.sleep(0), lambda: play(session)))
        return self._born(role, job, transport)
