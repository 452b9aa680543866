"""The life of a process that owns an engine: sampler or evaluator.

The scoring pool starts first (before JAX and gRPC are loaded), then the loop thread connects to the store while the
main thread builds the engine and becomes the JAX thread. `play`, the role's own coroutine, runs on the loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from jaxroll.config import Config, Flip, MeshConfig, RoleArgs
from jaxroll.config.rules import episode_tokens
from jaxroll.envs import registry
from jaxroll.envs.places import Places
from jaxroll.envs.scoring import ScoringPool
from jaxroll.errors import EXIT_INTERRUPTED, Closed
from jaxroll.protocols import SamplingParams
from jaxroll.roles.progress import Progress
from jaxroll.rollout.episode import Bounds
from jaxroll.rollout.manager import RolloutManager
from jaxroll.rpc import tls
from jaxroll.store.client import StoreClient

if TYPE_CHECKING:  # these load JAX, which must come after the scoring pool
    from jaxroll.engine.host import EngineProxy
    from jaxroll.roles.build import Inference

STORE_PATIENCE_S = 60.0
STOP_S = 15.0


class Session:
    """What `play` works with, all of it on the loop thread."""

    def __init__(self, role: str, args: RoleArgs, pool: ScoringPool, loop: asyncio.AbstractEventLoop) -> None:
        self.role, self.args, self.config, self.pool, self.loop = role, args, args.config, pool, loop
        self.stopping = asyncio.Event()
        self._rows: list[dict] = []
        self.store: StoreClient
        self.parts: Inference
        self.proxy: EngineProxy
        self.places: Places
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

    def manager(self, sampling: SamplingParams) -> RolloutManager:
        """Plays members against this process's engine, each environment where it asks to run."""
        bounds = Bounds(tokens=episode_tokens(self.config))
        return RolloutManager(self.proxy, self.places.create, self.parts.tokenizer, sampling, bounds=bounds)

    async def run(self, built: Future[Inference], play: Callable[[Session], Awaitable[None]]) -> None:
        """Connect, send rows as they come, and play until `play` ends, the run is closed or a stop is requested."""
        from jaxroll.engine.host import EngineProxy

        self.store = await StoreClient.connect(
            self.args.store_address or self.args.run_dir / "store.addr",
            role=self.role.partition("-")[0], name=self.role, config_digest=self.args.config_digest,
            patience_s=STORE_PATIENCE_S, call_s=self.config.store.rpc_deadline_s, run_dir=self.args.run_dir,
        )  # fmt: skip
        reporting = asyncio.ensure_future(self._send_rows())
        stopping = asyncio.ensure_future(self.stopping.wait())
        playing: asyncio.Future | None = None
        try:
            await asyncio.wait([wrapped := asyncio.wrap_future(built), stopping], return_when="FIRST_COMPLETED")
            if not wrapped.done():
                return
            self.parts = wrapped.result()
            self.proxy, self.places = EngineProxy(self.parts.host, self.loop), Places(self.pool, self.config)
            playing = asyncio.ensure_future(play(self))
            await asyncio.wait([playing, stopping, reporting], return_when="FIRST_COMPLETED")
            for job in (playing, reporting):
                if job.done():
                    with contextlib.suppress(Closed):
                        job.result()
        finally:
            for job in (playing, stopping, reporting):
                if job is not None:
                    job.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Closed):
                        await job
            if playing is not None:
                await self.places.close()
            with contextlib.suppress(Closed):
                await self.store.report(self.take_rows())
            await self.store.aclose()

    async def _send_rows(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if self._rows:
                await self.store.report(self.take_rows())


def main(
    role: str,
    args: RoleArgs,
    play: Callable[[Session], Awaitable[None]],
    *,
    mesh: MeshConfig,
    slots: int,
    flip: Flip,
) -> int:
    """Run `play` beside an engine of `slots` slots on `mesh` until it ends (0) or is stopped (EXIT_INTERRUPTED)."""
    config: Config = args.config
    pool = ScoringPool(config.sampler.scoring_workers, modules=registry.scorer_modules(config.task.env))
    pool.start()
    from jaxroll.roles import build, weights

    thread = build.LoopThread(role)
    session = Session(role, args, pool, thread.loop)
    signal.signal(signal.SIGUSR1, lambda *_: thread.loop.call_soon_threadsafe(print_stacks, thread.loop))
    faulthandler.register(
        signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, chain=True
    )  # in C: threads too, when one hangs in XLA
    told_to = threading.Event()

    def stop(*_: object) -> None:
        told_to.set()
        session.request_stop()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    built: Future[Inference] = Future()
    finished = thread.start(session.run(built, play))
    try:
        session.progress.start("building the engine")
        token = weights.weights_token(args.run_dir)
        parts = build.inference(
            config,
            role.partition("-")[0],
            mesh,
            slots=slots,
            flip=flip,
            token=token,
            progress=session.progress,
            tls=tls.load(args.run_dir),
        )
        session.progress.end("building the engine")
        finished.add_done_callback(lambda _: parts.host.stop())
        built.set_result(parts)
        parts.host.run()
    finally:
        session.request_stop()
        finished.result(timeout=STOP_S)
        thread.close()
        pool.close()
    return EXIT_INTERRUPTED if told_to.is_set() else 0


def print_stacks(loop: asyncio.AbstractEventLoop) -> None:
    """Print where every task of `loop` is; `kill -USR1` of a role asks for it."""
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
