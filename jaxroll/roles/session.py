"""The life of a process that plays episodes or owns an engine: sampler, actor, evaluator.

The scoring pool starts first (before JAX and gRPC are loaded). With an engine (`main`) the loop thread then connects to
the store while the main thread builds the engine and becomes the JAX thread. `play`, the role's own coroutine, runs on
the loop thread. Where several share a process (`jaxroll.roles.colocated`) each has a JAX thread and a loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jaxroll import lifeline
from jaxroll.config import Config, Flip, MeshConfig, RoleArgs
from jaxroll.envs import registry
from jaxroll.envs.executors.choice import Executors
from jaxroll.errors import EXIT_INTERRUPTED, Closed, InfraError
from jaxroll.protocols import LLMProxy, SamplingParams, Tokenizer
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles.weights import Progress
from jaxroll.rollout.episode import bounds_of
from jaxroll.rollout.loop_thread import BLOCKED_S, LoopThread
from jaxroll.rollout.manager import RolloutManager
from jaxroll.rpc import tls
from jaxroll.store.client import StoreClient

if TYPE_CHECKING:  # these load JAX, which must come after the scoring pool
    from jaxroll.roles.build import Inference
    from jaxroll.serving.engine_thread import EngineProxy

T = TypeVar("T")
STORE_PATIENCE_S = 60.0
STOP_S = 15.0
SEND_EVERY_S, HEARTBEAT_S = 0.5, 10.0  # the latter well below what a closed store waits for (LINGER_S)


class Session:
    """What `play` works with, all of it on the loop thread: the store, metrics rows, places for environments."""

    def __init__(self, role: str, args: RoleArgs, pool: ScoringPool, loop: asyncio.AbstractEventLoop) -> None:
        self.role, self.args, self.config, self.pool, self.loop = role, args, args.config, pool, loop
        self.stopping = asyncio.Event()
        self._rows: list[dict] = []
        self.store: StoreClient
        self.places: Executors
        self.progress = Progress(role, self.add_row)

    def request_stop(self) -> None:
        """Stop soon; callable from any thread and from a signal handler."""
        self.loop.call_soon_threadsafe(self.stopping.set)

    def add_row(self, row: dict) -> None:
        """Send one metrics row soon; callable from any thread."""
        self.loop.call_soon_threadsafe(self._add_row, row)

    def _add_row(self, row: dict) -> None:
        self._rows.append(row)

    def take_rows(self) -> list[dict]:
        """The rows added since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def play_roles(self, proxy: LLMProxy | None, tokenizer: Tokenizer, sampling: SamplingParams) -> RolloutManager:
        """Plays members against `proxy` (None: each against its own), each environment where it asks to run."""
        return RolloutManager(proxy, self.places.create, tokenizer, sampling, bounds=bounds_of(self.config))

    async def run(self, ready: Awaitable[None], play: Callable[[], Awaitable[None]]) -> None:
        """Connect, send rows as they come, and play until `play` ends, the run is closed or a stop is requested.

        `play` begins when `ready` is there. RestartRequired when environments have left no threads to play with.
        """
        self.store = await StoreClient.connect(
            self.args.store_address or self.args.run_dir / "store.addr",
            role=self.role.partition("-")[0], name=self.role, config_digest=self.args.config_digest,
            patience_s=STORE_PATIENCE_S, call_s=self.config.store.rpc_deadline_s, run_dir=self.args.run_dir,
        )  # fmt: skip
        reporting = asyncio.ensure_future(self._send_rows())
        stopping = asyncio.ensure_future(self.stopping.wait())
        playing: asyncio.Future | None = None
        wearing: asyncio.Future | None = None
        try:
            await asyncio.wait([wrapped := asyncio.ensure_future(ready), stopping], return_when="FIRST_COMPLETED")
            if not wrapped.done():
                wrapped.cancel()
                return
            wrapped.result()
            self.places = Executors(self.pool, self.config)
            playing = asyncio.ensure_future(play())
            wearing = asyncio.ensure_future(self.places.raise_when_worn_out())
            await asyncio.wait([playing, stopping, reporting, wearing], return_when="FIRST_COMPLETED")
            for job in (playing, reporting, wearing):
                if job.done():
                    with contextlib.suppress(Closed):
                        job.result()
        finally:
            all_jobs: tuple[asyncio.Future[Any] | None, ...] = (playing, wearing, stopping, reporting)
            for job in (jobs := [job for job in all_jobs if job is not None]):
                job.cancel()
            ends: list[Any] = await asyncio.gather(*jobs, return_exceptions=True)
            if playing is not None:
                await self.places.close()
            with contextlib.suppress(Closed):
                await self.store.report(self.take_rows())
            await self.store.aclose()
        for end in ends:  # of a job that failed on its way out
            if isinstance(end, Exception) and not isinstance(end, Closed):
                raise end

    async def _send_rows(self) -> None:
        """Send what there is to say. The store of a closed run leaves when nobody speaks to it any more: an evaluation
        that takes its time is heard of meanwhile."""
        said_s = time.monotonic()
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            if self._rows:
                await self.store.report(self.take_rows())
            elif time.monotonic() - said_s >= HEARTBEAT_S:
                await self.store.status()
            else:
                continue
            said_s = time.monotonic()


class EngineSession(Session):
    """A session beside an engine of this process."""

    parts: Inference
    proxy: EngineProxy

    def manager(self, sampling: SamplingParams) -> RolloutManager:
        """Plays members against this process's engine."""
        return self.play_roles(self.proxy, self.parts.tokenizer, sampling)

    async def built(self, parts: Future[Inference]) -> None:
        """Return when the engine is there."""
        from jaxroll.serving.engine_thread import EngineProxy

        self.parts = await asyncio.shield(asyncio.wrap_future(parts))  # who stops waiting stops nobody's building
        self.proxy = EngineProxy(self.parts.host, self.loop)


def loop_thread(name: str, config: Config) -> LoopThread:
    """The loop of a role. Where it is blocked for twice as long as a lease lives, nothing of its work counts anyway."""
    return LoopThread(name, max(BLOCKED_S, 2 * config.store.lease_s))


def ended(session: Future[T], timeout_s: float | None = None) -> T:
    """The result of the `session`. InfraError when foreign code cancelled it."""
    try:
        return session.result(timeout_s)
    except CancelledError as error:
        reason = (
            "code on the event loop cancelled the session; an environment must not cancel tasks that it did not start"
        )
        raise InfraError(reason) from error


def install_signal_handlers(session: Session) -> threading.Event:
    """Stop the session when told to (the event is set then), and print where it is when asked by SIGUSR1."""
    told_to = threading.Event()

    def stop() -> None:
        told_to.set()
        session.request_stop()

    print_stacks_on_signal(session)
    lifeline.on_stop(stop)
    return told_to


def print_stacks_on_signal(*sessions: Session) -> None:
    """At SIGUSR1 print where every task of the `sessions` is, and every thread."""

    def show(*_: object) -> None:
        for session in sessions:
            session.loop.call_soon_threadsafe(print_stacks, session.loop)

    signal.signal(signal.SIGUSR1, show)
    faulthandler.register(
        signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, chain=True
    )  # in C: threads too, when one hangs in XLA


@dataclass(frozen=True)
class RoleSpec:
    """What is played beside an engine of `slots` slots on `mesh`, under the name `role`."""

    role: str
    play: Callable[[EngineSession], Awaitable[None]]
    mesh: MeshConfig
    slots: int
    flip: Flip


def main(part: RoleSpec, args: RoleArgs) -> int:
    """Play `part` until it ends (0) or is stopped (EXIT_INTERRUPTED)."""
    life = EngineProcess(part, args)
    told_to = install_signal_handlers(life.open())
    life.run()
    return EXIT_INTERRUPTED if told_to.is_set() else 0


class EngineProcess:
    """One life of a part: its scoring pool, its loop thread, and its engine on the thread that calls `run`.

    In the order of construction, `open` and `run`, since the pool starts before JAX and gRPC are loaded.
    """

    session: EngineSession

    def __init__(self, part: RoleSpec, args: RoleArgs) -> None:
        self.part, self._args = part, args
        self._pool = registry.scoring_pool(args.config)
        if not (part.role.startswith("sampler") and args.config.placement.actors):  # its episodes are played elsewhere
            self._pool.start()

    def open(self) -> EngineSession:
        """The session, on a loop thread of its own; JAX is loaded from here on."""
        from jaxroll.roles import build  # noqa: F401 - loads JAX, after the scoring pool has started

        self._thread = loop_thread(self.part.role, self._args.config)
        self.session = EngineSession(self.part.role, self._args, self._pool, self._thread.loop)
        return self.session

    def run(self, turn: AbstractContextManager[object] | None = None) -> None:
        """Play until the part ends or its session is stopped. Its engine dispatches in `turn`."""
        from jaxroll.roles import build, weights

        part, args, session = self.part, self._args, self.session
        built: Future[Inference] = Future()
        finished = self._thread.start(session.run(session.built(built), lambda: part.play(session)))
        try:
            session.progress.start("building the engine")
            token = weights.weights_token(args.run_dir)
            with turn or contextlib.nullcontext():
                parts = build.inference(
                    args.config,
                    part.role.partition("-")[0],
                    part.mesh,
                    slots=part.slots,
                    flip=part.flip,
                    token=token,
                    progress=session.progress,
                    tls=tls.load(args.run_dir),
                    turn=turn,
                )
            session.progress.end("building the engine")
            finished.add_done_callback(lambda _: parts.host.stop())
            built.set_result(parts)
            parts.host.run()
        finally:
            session.request_stop()
            ended(finished, STOP_S)
            self.close()

    def close(self) -> None:
        """Let go of the loop thread and the pool. For a life that was not run; `run` does it by itself."""
        self._thread.close()
        self._pool.close()


def print_stacks(loop: asyncio.AbstractEventLoop) -> None:
    """Print where every task of `loop` is; `kill -USR1` of a role asks for it."""
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
