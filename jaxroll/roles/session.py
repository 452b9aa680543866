"""Process of a role that runs episodes or an engine: sampler, actor, evaluator.

Start: the scoring pool first, before JAX and gRPC are loaded. A role with an engine (`main`) then connects to the store
on the loop thread while the main thread builds the engine.
Threads: the main thread becomes the JAX thread; the role's coroutine (`play`) runs on the asyncio loop thread. In a
colocated run (`jaxroll.roles.colocated`) every role has a JAX thread and a loop thread.
Waits for: the store, and the engine.
Stops: when `play` ends, the run is closed, or a signal arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from jaxroll import lifeline
from jaxroll.clock import unix_s
from jaxroll.config import Config, MeshConfig, RoleArgs, WeightSwap, section_rules
from jaxroll.config.derived import actor_names
from jaxroll.config.parsing import labels
from jaxroll.envs import registry
from jaxroll.envs.executors import Executors
from jaxroll.envs.threads import Threads
from jaxroll.errors import EXIT_INTERRUPTED, Closed, ConfigError
from jaxroll.loop_thread import BLOCKED_S, HAND_OVER_S, LoopThread, ended
from jaxroll.protocols import LLMProxy, SamplingParams, Tokenizer
from jaxroll.records import Version
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles.weights import Profiler, RoleLog, suspended
from jaxroll.rollout import episode
from jaxroll.rollout.episode import RolloutManager, own_bounds
from jaxroll.rpc import tls
from jaxroll.rpc.client import Transport
from jaxroll.serving.agents import Agents
from jaxroll.store.client import STORE_PATIENCE_S, StoreClient

if TYPE_CHECKING:  # these load JAX, which must come after the scoring pool
    from jaxroll.engine.sequence import EngineStats
    from jaxroll.learner.multihost import Leader
    from jaxroll.policy.step_times import Seeding
    from jaxroll.roles.build import Inference
    from jaxroll.serving.engine_thread import EngineProxy

T = TypeVar("T")
POOL_VARIABLE = "JAXROLL_POOL"  # name of the pool of this sampler, above all for one that joins
STOP_S = 15.0
HOLDERS = ("sampler", "actor")  # roles with leases
SEND_EVERY_S, HEARTBEAT_S = 0.5, 10.0  # a closed store lingers for longer than a heartbeat (LINGER_S)


class Session:
    """A role's connection to the store, its metric rows and its environment executors; all on the event loop `loop`.

    `transport` replaces the connection over gRPC, `threads` those of the environments.
    """

    def __init__(
        self,
        role: str,
        args: RoleArgs,
        pool: ScoringPool,
        loop: asyncio.AbstractEventLoop,
        transport: Transport | None = None,
        threads: Threads | None = None,
    ) -> None:
        self._store_at, self._threads = transport or args.store_address or args.paths.store_address, threads
        self.role, self.args, self.config, self.pool, self.loop = role, args, args.config, pool, loop
        self.stopping, self._stopped, self._drain_s = asyncio.Event(), asyncio.Event(), args.drain_s
        self._rows = lifeline.restarts(role)
        self.store: StoreClient
        self.executors: Executors
        self._agents: Agents | None = None
        self.progress = RoleLog(role, self.add_row)
        self.profiler = Profiler(role, args.paths.profiles, self.add_row)

    def request_stop(self, *, at_once: bool = False) -> None:
        """Stop soon: at the second request or `at_once` without finishing running members (`RoleArgs.drain_s`).

        Callable from any thread and from a signal handler.
        """
        self.soon(self._stop, at_once)

    def soon(self, callback: Callable[..., object], *args: object) -> None:
        """Call it on the session's loop; callable from any thread. Once the session has ended nothing happens."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(callback, *args)

    def _stop(self, at_once: bool) -> None:
        if at_once or self.stopping.is_set():
            self._stopped.set()
        self.stopping.set()

    def _leave(self) -> None:
        """Stop when the running members have ended: the run needs fewer samplers (`sampler.least_count`)."""
        self._drain_s = max(self._drain_s, self.config.schedule.straggler_deadline_s)
        self.stopping.set()

    def add_row(self, row: dict) -> None:
        """Send one metrics row soon; callable from any thread."""
        self.soon(self._add_row, row)

    def _add_row(self, row: dict) -> None:
        self._rows.append(row)

    def take_rows(self) -> list[dict]:
        """The rows added since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def rollout_manager(self, proxy: LLMProxy | None, tokenizer: Tokenizer, sampling: SamplingParams) -> RolloutManager:
        """A manager that generates with `proxy`; None: each member brings its own."""
        play = episode.run
        if self.config.task.agent:
            self._agents = self._agents or Agents(self.pool, self.config.task)
            play = self._agents.play
        return RolloutManager(
            proxy,
            self.executors.create,
            tokenizer,
            sampling,
            bounds=episode.bounds_of(self.config),
            own_bounds=own_bounds(self.config),
            sources=labels(self.config),
            play=play,
        )

    async def run(self, ready: Callable[[], Awaitable[None]], play: Callable[[], Awaitable[None]]) -> None:
        """Connect, send metric rows, and run `play()` until it ends, the run is closed or a stop is requested.

        `play()` starts when `ready()` is done, which is called after the connection. When a stop is requested it has
        `args.drain_s` to end by itself. RestartRequired if hanging environments occupy all executor threads.
        """
        self.store = await StoreClient.connect(
            self._store_at,
            role=self.role.partition("-")[0],
            name=self.role,
            config_digest=self.args.config_digest,
            patience_s=STORE_PATIENCE_S,
            call_s=self.config.store.rpc_deadline_s,
            run_dir=self.args.run_dir,
            pool=self._pool(),
        )
        self.store.on_surplus, self.store.on_profile = self._leave, self.profiler.ask
        reporting = asyncio.ensure_future(self._send_rows())
        stopping = asyncio.ensure_future(self.stopping.wait())
        playing: asyncio.Future | None = None
        exhausted: asyncio.Future | None = None
        try:
            await asyncio.wait([wrapped := asyncio.ensure_future(ready()), stopping], return_when="FIRST_COMPLETED")
            if not wrapped.done():
                wrapped.cancel()
                return
            wrapped.result()
            self.executors = Executors(self.pool, self.config, self._threads)
            playing = asyncio.ensure_future(play())
            exhausted = asyncio.ensure_future(self.executors.raise_when_worn_out())
            await asyncio.wait([playing, stopping, reporting, exhausted], return_when="FIRST_COMPLETED")
            if self.stopping.is_set() and self._drain_s:
                await self._drain(playing, reporting, exhausted)
            for job in (playing, reporting, exhausted):
                if job.done():
                    with contextlib.suppress(Closed):
                        job.result()
        finally:
            all_jobs: tuple[asyncio.Future[Any] | None, ...] = (playing, exhausted, stopping, reporting)
            for job in (jobs := [job for job in all_jobs if job is not None]):
                job.cancel()
            ends: list[Any] = await asyncio.gather(*jobs, return_exceptions=True)
            if playing is not None:
                await self.executors.close()
            if self._agents is not None:
                await self._agents.close()
            if self.profiler.order is not None:
                await asyncio.to_thread(self.profiler.close)
            with contextlib.suppress(Closed):
                await self.store.report(self.take_rows())
                if self.role.startswith(HOLDERS):
                    await self.store.leave()
            await self.store.aclose()
        for end in ends:  # a job may fail while it is cancelled
            if isinstance(end, Exception) and not isinstance(end, Closed):
                raise end

    def _pool(self) -> str:
        """The pool of a sampler: JAXROLL_POOL, or that of its number by the config; '' for none."""
        pools, named = section_rules.pools(self.config), os.environ.get(POOL_VARIABLE, "")
        if not self.role.startswith("sampler") or not named:
            return pools.of_role(self.role)
        if named not in pools.names:
            known = ", ".join(pools.names) or "none"
            raise ConfigError(POOL_VARIABLE, named, "placement.pools has no such pool", f"Pools: {known}.")
        return named

    async def _drain(self, *jobs: asyncio.Future[Any]) -> None:
        """Wait until a job ends, for the time to drain, or until a second request to stop."""
        self.progress(f"leaves when its running members end, within {self._drain_s:g} s")
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait([*jobs, stopped], timeout=self._drain_s, return_when="FIRST_COMPLETED")
        stopped.cancel()

    async def _send_rows(self) -> None:
        """Send metric rows as they come, and a heartbeat while there are none.

        The store of a closed run ends once it gets no calls: heartbeats keep it during a long last evaluation.
        """
        sent_s = self.loop.time()
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            if self._rows:
                await self.store.report(self.take_rows())
            elif self.loop.time() - sent_s >= HEARTBEAT_S:
                await self.store.status()
            else:
                continue
            sent_s = self.loop.time()


class EngineSession(Session):
    """A session with an engine in this process."""

    parts: Inference
    proxy: EngineProxy
    seeding: Seeding | None = None  # of a sampler on the learner's devices

    def manager(self, sampling: SamplingParams) -> RolloutManager:
        """A manager that generates with this process's engine."""
        return self.rollout_manager(self.proxy, self.parts.tokenizer, sampling)

    def engine_rows(self, elapsed_s: float, last: EngineStats, now: EngineStats, counts: Mapping[str, Any]) -> None:
        """Add the metric rows of an interval of the engine, between two of its statistics."""
        rows: list[dict] = [
            {"kind": "span", "what": "decode", "t0": t0, "t1": t1, "tokens": tokens}
            for t0, t1, tokens in self.parts.host.spans.take()
        ]
        if intervals := self.proxy.take_intervals():
            rows.append({"kind": "members", "rows": [list(row) for row in intervals]})
        total = now.slot_steps_total_while_waiting - last.slot_steps_total_while_waiting
        busy = now.slot_steps_busy_while_waiting - last.slot_steps_busy_while_waiting
        aborted = max(0, now.tokens_aborted - counts.get("tokens_moved", 0))
        rows.append({
            "kind": "stats", "version": str(now.version), "queue_depth": now.queue_depth, "active": now.active,
            "tokens_per_s": (now.tokens_decoded - last.tokens_decoded) / elapsed_s,
            "slot_steps_busy": busy, "slot_steps_total": total, "slot_occupancy": busy / total if total else None,
            "compiles": now.compiles, "host_share": now.host_share, "prefix_hits": now.prefix_hits,
            "preemptions": now.preemptions, "tokens_discarded": now.tokens_discarded,
            "prefill_tokens": now.prefill_tokens, "tokens_aborted": aborted, "step_s": now.step_s,
            "decode_steps": now.decode_steps, "prefills": now.prefills, **now.speculation(), **counts,
            "flush_wait_s": self.parts.engine.latencies.flush_wait_s,
            **self.parts.engine.latencies.percentiles(), **self.parts.follower.counts(),
        })  # fmt: skip
        for row in rows:
            self.add_row({"t": unix_s(), "role": self.role, **row})

    async def built(self, parts: Future[Inference]) -> None:
        """Return when the engine is built."""
        from jaxroll.serving.engine_thread import EngineProxy

        self.parts = await asyncio.shield(
            asyncio.wrap_future(parts)
        )  # cancelling the wait must not cancel the construction
        self.proxy = EngineProxy(self.parts.host, self.loop)
        self.store.on_flushed(self.parts.host.wake)


def loop_thread(name: str, config: Config) -> LoopThread:
    """The event loop of a role.

    Another thread takes it over from an environment that blocks it, so early that leases, which are renewed three times
    in `lease_s`, survive several of them in a row. It fails if it is blocked for twice the lease time otherwise: its
    leases have expired by then.
    """
    lease_s = config.store.lease_s
    return LoopThread(name, max(BLOCKED_S, 2 * lease_s), min(HAND_OVER_S, lease_s / 15))


def install_signal_handlers(session: Session) -> threading.Event:
    """Stop the session on a stop signal, which also sets the returned event, and print stacks on SIGUSR1."""
    interrupted = threading.Event()

    def stop() -> None:
        interrupted.set()
        session.request_stop()

    lifeline.print_stacks_on_signal(session)
    lifeline.on_stop(stop)
    return interrupted


@dataclass(frozen=True)
class RoleSpec:
    """A role with an engine: its name, its coroutine, and its engine's mesh (from `first_device` on), slots, swaps."""

    role: str
    play: Callable[[EngineSession], Awaitable[None]]
    mesh: MeshConfig
    slots: int
    weight_swap: WeightSwap
    first_device: int = 0


def main(spec: RoleSpec, args: RoleArgs) -> int:
    """Run the role until it ends (0) or a signal stops it (EXIT_INTERRUPTED)."""
    process = EngineProcess(spec, args)
    interrupted = install_signal_handlers(process.open())
    process.run()
    return EXIT_INTERRUPTED if interrupted.is_set() else 0


def compile_engine(part: RoleSpec, config: Config, progress: RoleLog) -> None:
    """Compile the engine of `part` without weights and without a store, which fills the compilation cache."""
    from jaxroll.roles import build

    progress.start("compiling the engine")
    parts = build.inference(
        config,
        part.role.partition("-")[0],
        part.mesh,
        slots=part.slots,
        weight_swap=part.weight_swap,
        token="",
        progress=progress,
    )
    parts.engine.warmup(None)
    progress.end("compiling the engine")


class EngineProcess:
    """The scoring pool, loop thread and engine of a role; the engine runs on the thread that calls `run`.

    Construct it, then call `open` and `run`: the pool must start before JAX and gRPC are loaded.
    """

    session: EngineSession

    def __init__(self, spec: RoleSpec, args: RoleArgs) -> None:
        self.spec, self._args = spec, args
        self._pool = registry.scoring_pool(args.config, args.run_dir)
        if not (spec.role.startswith("sampler") and actor_names(args.config)):  # actors run the episodes then
            self._pool.start()

    def open(self) -> EngineSession:
        """The session, on a new loop thread. Loads JAX."""
        from jaxroll.roles import build  # noqa: F401 - loads JAX, after the scoring pool has started

        self._thread = loop_thread(self.spec.role, self._args.config)
        self.session = EngineSession(self.spec.role, self._args, self._pool, self._thread.loop)
        return self.session

    def run(self, device_lock: AbstractContextManager[object] | None = None, leader: Leader | None = None) -> None:
        """Run the role until it ends or its session is stopped. Its engine dispatches under `device_lock`.

        `leader` leads the other processes of the engine, if it has several hosts.
        """
        from jaxroll.roles import build, weights

        spec, args, session = self.spec, self._args, self.session
        built: Future[Inference] = Future()
        listener = None
        finished = self._thread.start(session.run(lambda: session.built(built), lambda: spec.play(session)))
        try:
            session.progress.start("building the engine")
            token, role = weights.weights_token(args.run_dir), spec.role.partition("-")[0]
            listener = None if session.seeding else build.relay_listener(args, role, token)
            with device_lock or contextlib.nullcontext():
                parts = build.inference(
                    args.config,
                    role,
                    spec.mesh,
                    slots=spec.slots,
                    weight_swap=spec.weight_swap,
                    token=token,
                    progress=session.progress,
                    tls=tls.load(args.run_dir),
                    device_lock=device_lock,
                    first_device=spec.first_device,
                    listener=listener,
                    leader=leader,
                )
            session.progress.end("building the engine")
            finished.add_done_callback(lambda _: parts.host.stop())
            parts.host.on_step = session.profiler.step
            built.set_result(parts)
            parts.host.run()
        finally:
            session.request_stop(at_once=True)
            ended(finished, STOP_S)
            if listener is not None:
                listener.close()
            self.close()

    def close(self) -> None:
        """End the loop thread and the pool. Call it only if `run` was not called, which does it itself."""
        self._thread.close()
        self._pool.close()


LOOK_S, SOON_S = 10.0, 1.0  # between two looks for other samplers; for members that could not leave before


class Vacating(Protocol):
    """Members that run while `works` is set, and can return their leases."""

    works: asyncio.Event

    async def vacate(self, generating: Callable[[], Collection[tuple[int, int]]]) -> bool:
        """Return leases and request none until `works` is set; True if some members go on (`sampler.Members`)."""
        ...


async def share_devices(session: EngineSession, members: Vacating) -> None:
    """Let members run for the first seconds of each step, while the learner waits for its batch, or no other can."""
    seeding, works, known, claimed = session.seeding, members.works, None, asyncio.Event()
    assert seeding is not None, "the devices are the learner's"
    seeding.on_claim.append(lambda: session.soon(claimed.set))

    async def others(version: Version | None = None) -> int:
        status = await session.store.status()
        there = {name for name in status["present"] if name.startswith("sampler-")} - seeding.names
        return sum(version is None or status["holders"].get(name) == str(version) for name in there)

    async def claim_of(step: int) -> None:
        while not seeding.is_claimed(step):
            await claimed.wait()
            claimed.clear()

    while True:
        if (version := await session.parts.follower.other_than(known, LOOK_S)) in (None, known):
            continue
        known, stays = version, False
        wait_s = seeding.begin(session.role, version.step, await others())
        while not seeding.is_claimed(version.step):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(claim_of(version.step), wait_s)
                break
            if (able := await others(version)) and (works.is_set() or stays):
                async with suspended(session.proxy):  # it would sample more after the last flush
                    stays = await members.vacate(session.proxy.generating)
                seeding.left(session.role)
            elif not able:
                works.set()
            wait_s = SOON_S if stays else LOOK_S
        works.set()  # for the next step: nothing is left to lease before its weights


def episode_counts(manager: RolloutManager, executors: Executors) -> dict[str, Any]:
    """Counts since the start: episodes finished and failed; environment calls, their repetitions and timeouts."""
    counts, asked = manager.counts, manager.env_calls
    executors.threads.note_leftover(manager.left_threads())
    faults = asked.faults + executors.processes.faults
    row: dict[str, Any] = {
        "episodes": counts.finished, "failed": dict(counts.failed), "env_calls": asked.calls,
        "env_retries": asked.retries, "env_timeouts": asked.overdue, "env_calls_abandoned": asked.abandoned,
        "env_faults": dict(faults), "env_restored": asked.restored, **executors.counts(),
        "reward_parts": {name: total / counts.finished for name, total in counts.parts.items()},
    }  # fmt: skip
    if not (sources := manager.by_source):
        return row
    failed = {f"{label} {kind}": n for label, of in sources.items() for kind, n in of.failed.items()}
    return row | {"sources": {label: of.means() for label, of in sources.items()}, "failed_by_source": failed}
