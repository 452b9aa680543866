"""Learner role: claims batches in order, trains on them and publishes the new weights.

    claim s → train → publish s+1 → acknowledge s → (every C steps) checkpoint s+1 → report s+1 durable

Steps overlap: while the devices compute step s, the claim of s+1 is requested and packed (`_claim_ahead`), and the
result of step s−1 is published and acknowledged (`BackgroundPublisher`).

Threads: the main thread runs JAX and writes checkpoints, job by job (`DeviceThread`); `LearnerSession` runs on the
asyncio loop thread; the channel's listener serves weights.
Waits for: claims from the store, and the previous publication.
Stops: after the schedule's last step, or on SIGTERM, SIGINT or SIGHUP after its step and a checkpoint. If it is killed,
it starts again from the last durable version, and the store replays the claims after it.
On several hosts: the process of the first one does all this, the others repeat its device work (`learner.multihost`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxroll import lifeline, metrics
from jaxroll.clock import unix_s
from jaxroll.config import RoleArgs
from jaxroll.errors import (
    EXIT_INTERRUPTED,
    CheckpointDamaged,
    Closed,
    ConfigError,
    InfraError,
    JaxRollError,
    NotReady,
    StaleClient,
    described,
    exit_code,
)
from jaxroll.loop_thread import DeviceThread, LoopThread
from jaxroll.models import folders
from jaxroll.policy import selection
from jaxroll.records import Claim, LogStart, Version
from jaxroll.roles.weights import (
    BackgroundPublisher,
    OnThread,
    Profiler,
    RoleLog,
    UpdateBarrier,
)
from jaxroll.store.client import STORE_PATIENCE_S, StoreClient
from jaxroll.store.core.admission import END_OF_DATA
from jaxroll.store.core.state import on_line

if TYPE_CHECKING:  # these load JAX: a process imports them where it starts, and a simulation never
    from jaxroll.learner.checkpoint import Checkpoints
    from jaxroll.learner.multihost import Follower, Leader
    from jaxroll.learner.trainer import Ready, Running, Trainer
    from jaxroll.policy.step_times import Seeding
    from jaxroll.transfer.channel_device import DevicePublisher
    from jaxroll.transfer.ends import Publisher

# --- The process

CLAIM_WAIT_S, AHEAD_WAIT_S = 2.0, 3600.0  # the second is longer than a step, whose end ends that wait
DEVICE_POLL_S, HOLDER_POLL_S = 0.005, 0.2  # between two checks: of devices while a claim is awaited, of the evaluator
LAST_ROWS_S = 2.0  # for progress rows that are not sent yet at the end
FINISHED = "finished"


@dataclass(frozen=True)
class ColocationHooks:
    """Hooks for roles that share the learner's process: `trainer` constructs its trainer; `published` is called once
    the first weights of this process can be fetched (and the fork is made, if one is requested); `seeding` says when
    samplers use its devices."""

    trainer: Callable[..., Trainer] | None = None  # None: `Trainer`
    published: Callable[[], None] = lambda: None
    seeding: Seeding | None = None


def main(args: RoleArgs) -> int:
    """Train until the schedule's last step is done (0) or a signal stops the process (EXIT_INTERRUPTED)."""
    from jaxroll.learner import multihost
    from jaxroll.learner.multihost import Follower, Leader

    stop = threading.Event()
    lifeline.on_stop(stop.set)
    others = multihost.join(args.hosts("learner"), args.coordinator, stop.set)
    if isinstance(others, Follower):
        return _run_follower(args, stop, others)
    if isinstance(others, Leader):
        return _run_leader(args, stop, others)
    return run_learner(args, stop)


def compile_programs(args: RoleArgs, progress: RoleLog) -> None:
    """Compile the learner's programs into the compilation cache."""
    from jaxroll.roles import build

    progress.start("compiling the learner")
    build.trainer(args.config).warmup(progress)
    progress.end("compiling the learner")


def run_learner(
    args: RoleArgs, stop: threading.Event, leader: Leader | None = None, hooks: ColocationHooks = ColocationHooks()
) -> int:
    """Train until the schedule's last step is done (0) or `stop` is set (EXIT_INTERRUPTED). Uses JAX on this thread."""
    device, thread = DeviceThread(), LoopThread("learner", blocked_s=math.inf)
    try:
        session = thread.start(_run(args, stop, leader, hooks, device))
        session.add_done_callback(lambda _: device.stop())
        device.run()
        return session.result()
    finally:
        thread.close()


async def _run(
    args: RoleArgs, stop: threading.Event, leader: Leader | None, hooks: ColocationHooks, device: DeviceThread
) -> int:
    """Connect to the store, build what the session needs, and run it."""
    from jaxroll.learner import multihost
    from jaxroll.roles import build

    store = await StoreClient.connect(
        args.store_address or args.paths.store_address,
        role="learner", name="learner", config_digest=args.config_digest,
        patience_s=STORE_PATIENCE_S, call_s=args.config.store.rpc_deadline_s, run_dir=args.run_dir,
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as ends:
        limit = ends.enter_context(lifeline.ClosingLimit())
        ends.push_async_callback(store.aclose)
        folder, kept = args.paths.checkpoints, args.config.learner.checkpoints_kept
        checkpoints = await device(lambda: multihost.checkpoints(folder, kept, leader))
        ends.push_async_callback(device, checkpoints.close)
        publisher = await device(lambda: build.publisher(args, others=leader))
        ends.push_async_callback(device, publisher.close)
        make = hooks.trainer if leader is None else partial(multihost.LeadingTrainer, leader.send)
        session = LearnerSession(
            args, store, checkpoints, publisher, lambda: build.trainer(args.config, make), stop=stop, on_device=device,
            on_thread=asyncio.to_thread, published=hooks.published, seeding=hooks.seeding,
        )  # fmt: skip
        ends.push_async_callback(session.close)
        try:
            return await session.run()
        except Exception as error:
            limit.failed(described(error), exit_code(error))
            raise


def _run_leader(args: RoleArgs, stop: threading.Event, leader: Leader) -> int:
    """Run as on one host; an error here ends the processes of all hosts."""
    with leader:
        code = run_learner(args, stop, leader)
        leader.end(code)
        return code


def _run_follower(args: RoleArgs, stop: threading.Event, leader: Follower) -> int:
    """Execute the leader's commands. A stop signal to this process is passed on to the leader."""
    from jaxroll.learner import multihost, weights
    from jaxroll.learner.checkpoint import Checkpoints
    from jaxroll.roles import build

    lifeline.on_stop(leader.ask_to_stop)
    if stop.is_set():  # before the other hosts had joined
        leader.ask_to_stop()
    checkpoints = Checkpoints(args.paths.checkpoints, args.config.learner.checkpoints_kept)
    with leader:
        trainer = build.trainer(args.config)

        def start() -> Mapping[str, np.ndarray]:
            params = weights.initial_of_role(args.config, args.run_dir, trainer.spec)
            if params is None:
                raise ConfigError(
                    "RUN",
                    str(args.run_dir),
                    "has initial parameters on the first host and none here",
                    "All hosts of the learner need the run's folder and that of model.path.",
                )
            return params

        with contextlib.closing(build.publisher(replace(args, host=leader.host), announce=leader.serves)) as publisher:
            code = multihost.run_follower_steps(leader, trainer, checkpoints, start, publisher)
        checkpoints.close()
        return code


@dataclass(frozen=True)
class PackedClaim:
    """A packed claim, ready at `t0`; before it the devices were idle for `wait_s`, and `streamed` from … to (unix)."""

    ready: Ready
    wait_s: float
    t0: float
    streamed: Sequence[tuple[float, float]] = ()


class LearnerSession:
    """The learner: its trainer, publisher and checkpoints, and the loop over steps, on one event loop.

    `on_device` runs jobs that use JAX or the disk, `on_thread` those that only wait; under a virtual clock both may run
    them in place. `published` is called once the first weights can be fetched.
    """

    device_poll_s = DEVICE_POLL_S

    def __init__(
        self,
        args: RoleArgs,
        store: StoreClient,
        checkpoints: Checkpoints,
        publisher: Publisher | DevicePublisher,
        make_trainer: Callable[[], Trainer],
        *,
        stop: threading.Event,
        on_device: OnThread,
        on_thread: OnThread,
        published: Callable[[], None] = lambda: None,
        seeding: Seeding | None = None,
    ) -> None:
        self.args, self.config, self.store, self._stop = args, args.config, store, stop
        self.checkpoints, self.publisher = checkpoints, publisher
        self._make_trainer, self._published, self._on_device = make_trainer, published, on_device
        self._seeding = seeding
        self._log: LogStart | None = LogStart()  # for a checkpoint after the last trained step
        self._end = FINISHED  # the reason with which this process closes the run
        self._loop, self._rows = asyncio.get_running_loop(), asyncio.Queue[dict]()
        self._reporting = asyncio.ensure_future(self._report())
        for row in lifeline.restarts("learner"):
            self._add_row(row)
        self.progress = RoleLog("learner", self._add_row)
        self.profiler = Profiler("learner", args.paths.profiles, self._add_row)
        store.on_profile = self.profiler.ask
        self.background = BackgroundPublisher(store, publisher, on_thread)
        self._transfer_s = folders.with_transfer_deadline(self.config).transfer.deadline_s
        self._barrier = UpdateBarrier(self.background, store, self.config.schedule.mode, self._transfer_s)

    async def run(self) -> int:
        """Train from the last durable version to the end of the schedule. Raises Closed if the store ends the run."""
        self.progress.start("building the learner")
        trainer = await self._on_device(self._make_trainer)
        status = await self.store.status()
        durable = await self._on_device(lambda: self._restore(trainer, status))
        try:
            log = self._new_log(durable) if durable and self._fork == selection.NEW_LOG else None
            version = await self.store.begin(durable, self._fork, log)
        except Closed as closed:
            if str(closed) not in (FINISHED, END_OF_DATA):
                raise
            return 0  # the process before this one closed the run and died before its exit
        except StaleClient as refusal:
            raise self._cannot_start(refusal) from refusal
        if self._fork:
            self.progress(f"forked: version {version}")
        if self.args.fork is not None or self.args.new_log:
            self.args.paths.forked.touch()
        self.progress.end("building the learner")
        self.progress.devices(trainer.layout.mesh, {"packed": str(trainer.programs.recipe.attention)})
        if trainer.sends_adapters:
            await self._on_device(lambda: self.publisher.freeze(version, trainer.base_params()))
        await self._publish(trainer, version)  # first, so that samplers compile while we do
        await self._on_device(self._published)
        self.progress.start("compiling the learner")
        await self._on_device(lambda: trainer.warmup(self.progress))
        self.progress.end("compiling the learner")
        if durable is None or (self.config.learner.keep_best and durable != version):
            await self._checkpoint(trainer, version)  # also of a new lineage's first version, which may be the best
        if version.step == 0:
            await self._await_evaluator(version, self._transfer_s)  # the gain is measured from here
        work = await self._claim(trainer, version)
        while work is not None:
            version, work = await self._step(trainer, version, work)
            if work is None or self._stop.is_set():
                work = await self._claim(trainer, version)
        await self._on_device(self.profiler.close)
        await self.background.settle()
        if self._durable != version:
            await self._checkpoint(trainer, version)
        await self._settle_durable(wait=True)
        if version.step < self.config.schedule.steps and self._end == FINISHED:
            return EXIT_INTERRUPTED
        if not await self._await_evaluator(version, self.config.supervisor.final_eval_s):
            return EXIT_INTERRUPTED  # a closed run is not served again: no evaluator could fetch the last weights
        await self.store.close_run(self._end)
        return 0

    async def close(self) -> None:
        """End the background tasks and a trace, and send the rows that are left."""
        await self.background.close()
        if self.profiler.order is not None:
            await self._on_device(self.profiler.close)
            await asyncio.sleep(0)  # its row enters the queue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_ROWS_S):
                await self._rows.join()
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)

    def _add_row(self, row: dict) -> None:
        self._loop.call_soon_threadsafe(self._rows.put_nowait, row)

    async def _report(self) -> None:
        """Send progress rows in order. An error ends this task only: the session's next call has the same error."""
        while True:
            await self.store.report([await self._rows.get()])
            self._rows.task_done()

    def _restore(self, trainer: Trainer, status: Mapping[str, Any]) -> Version | None:
        """Put the newest checkpoint (or the initial parameters) into `trainer`; the version restored, None without one.

        A checkpoint without checksums is damaged if the store knows it as durable; otherwise its checksums are computed
        now, because it counts as durable from `begin` on. A damaged checkpoint is reported and skipped. The store
        decides in `begin` if an older one is acceptable: the claims after it must not have been trimmed.
        CheckpointDamaged if no other is left.
        """
        self._durable, self._fork = self._start_of(status["claims"])
        if trainer.lora and (start := self._initial_params(trainer)) is not None:
            trainer.set_params(start)  # the base of the adapters, which no checkpoint contains
        while self._durable is not None:
            trainer.release()
            self.checkpoints.sync(self._durable)
            try:
                given = self._durable, trainer.abstract_state(), trainer.base_digest()
                is_durable = 0 < status["durable"] >= self._durable.step
                trainer.state, _ = self.checkpoints.restore(*given, durable=is_durable)
            except CheckpointDamaged as error:
                self.progress(f"{error}")
                self._durable, self._fork = self._start_of(status["claims"])
                if self._durable is None or self._durable in self.checkpoints.damaged:
                    raise
                continue
            self.checkpoints.settle(self._durable)
            self.progress(f"restored version {self._durable}")
            self._log = self.checkpoints.log_start(self._durable)
            if trainer.reference is not None and (start := self._initial_params(trainer)) is not None:
                trainer.set_reference(start)
            return self._durable
        if (start := self._initial_params(trainer)) is not None:
            trainer.set_params(start)
        return self._durable

    def _start_of(self, claims: int) -> tuple[Version | None, str]:
        lines, args = list(self.store.welcome.lineages), self.args
        return selection.start_of(self.checkpoints, lines, claims, args.fork, partial(on_line, lines), args.new_log)

    def _new_log(self, version: Version) -> LogStart:
        """The part of the lost log that the checkpoint of `version` has; reports what is lost."""
        if self._log is None:
            reason = "an earlier JaxRoll wrote it, without the position in the data"
            remedy = "Put back store.db from a copy, or start a new run from its weights (`jaxroll weights export`)."
            raise ConfigError("--new-log", str(self.checkpoints.path(version)), reason, remedy)
        rows = metrics.read(self.args.paths.metrics)
        used = [row.get("lineage") or 0 for row in rows if row.get("kind") == "step"]
        used += [each.lineage for each in self.checkpoints.versions()]  # damaged ones among them
        for line in selection.lost_with_log(rows, version, self._log):
            self.progress(line)
        return self._log.until(version, max(used) + 1)

    def _initial_params(self, trainer: Trainer) -> Mapping[str, np.ndarray] | None:
        from jaxroll.learner import weights

        return weights.initial_of_role(self.config, self.args.run_dir, trainer.spec)

    def _cannot_start(self, refusal: StaleClient) -> JaxRollError:
        """The error for a `begin` that the store refused, with the remedy if a damaged checkpoint is the cause."""
        if not self.checkpoints.damaged:
            return refusal
        damaged = ", ".join(str(self.checkpoints.path(version)) for version in sorted(self.checkpoints.damaged))
        reason = f"is damaged, and the store does not accept an older one: {refusal}"
        remedy = "Restore it from a copy, or continue from the older one with --fork=STEP."
        return ConfigError("checkpoint", damaged, reason, remedy)

    async def _claim(self, trainer: Trainer, version: Version) -> PackedClaim | None:
        """The batch of this step; None after the last step, a stop request, and the end of the data."""
        began, step, streamed, computed_s, known = self._loop.time(), version.step, [], 0.0, None
        while step < self.config.schedule.steps and not self._stop.is_set():
            left_s = self._seeding.learner_waits_s(step) if self._seeding else 0.0  # for samplers on these devices
            if self.config.learner.streaming and known is None and not left_s:
                known = []
            try:
                more = {"known": known, "computed_s": computed_s}
                claim = await self.store.claim(version.lineage, step, min(left_s or math.inf, CLAIM_WAIT_S), **more)
            except NotReady:
                self.background.check()  # without new weights no batch for this step can come
                continue
            except Closed as closed:
                if str(closed) != END_OF_DATA:
                    raise
                self._end = END_OF_DATA
                break
            if claim.whole:
                wait_s, t0 = self._loop.time() - began - computed_s, unix_s()
                return PackedClaim(await self._prepare(trainer, claim, computed_s), wait_s, t0, streamed)
            known, at = [*(known or ()), *(group.group for group in claim.groups)], unix_s()
            await self._on_device(lambda claim=claim: trainer.stream(claim))
            if (end := unix_s()) - at >= DEVICE_POLL_S:  # less is no work of the devices
                streamed, computed_s = [*streamed, (at, end)], computed_s + end - at
        return None

    async def _claim_ahead(self, trainer: Trainer, version: Version, running: Running) -> Ready | None:
        """The packed batch of the step at `version`, if it arrives while the devices still compute `running`."""
        if version.step >= self.config.schedule.steps or not trainer.prepares_ahead:
            return None
        pending = asyncio.ensure_future(self.store.claim(version.lineage, version.step, AHEAD_WAIT_S, ahead=True))
        try:
            while not (running.is_done() or self._stop.is_set() or pending.done()):
                await asyncio.wait([pending], timeout=self.device_poll_s)
            if not pending.done():
                return None
            claim = pending.result()
        except (NotReady, Closed, InfraError):
            return None  # `_claim` requests it again, with its own patience
        finally:
            pending.cancel()  # also if this call is cancelled: nothing else awaits the task
        return await self._prepare(trainer, claim)

    async def _prepare(self, trainer: Trainer, claim: Claim, computed_s: float = 0.0) -> Ready:
        """The packed claim, of which `computed_s` were computed before."""
        if self._seeding:
            self._seeding.claimed(claim.step, sum(len(group.members) for group in claim.groups), computed_s)
        return await self._on_device(lambda: trainer.prepare(claim))

    async def _step(self, trainer: Trainer, version: Version, work: PackedClaim) -> tuple[Version, PackedClaim | None]:
        """Train on `work` and start publishing; the version made, and the work of the next step if it has arrived."""
        if self.profiler.order is not None:
            await self._on_device(self.profiler.step)
        claim, running = work.ready.claim, await self._on_device(lambda: trainer.dispatch_step(work.ready))
        after = Version(version.lineage, version.step + 1)
        ready = await self._claim_ahead(trainer, after, running)
        row, t1 = await self._on_device(lambda: trainer.await_step(running)), unix_s()
        following = PackedClaim(ready, 0.0, unix_s()) if ready else None
        if self._barrier.is_used and following is None:
            following = await self._claim(trainer, after)
        await self.background.settle()  # a published version must be there to fetch: the publisher keeps the last two
        published = after.step % self.config.schedule.publish_every == 0 or after.step == self.config.schedule.steps
        start = lambda: self.publisher.start(after, trainer.publishable_params())  # noqa: E731
        weights = await self._on_device(start) if published else None
        early_s, early = sum(b - a for a, b in work.streamed), {"streamed": work.streamed} if work.streamed else {}
        row |= {"role": "learner", "kind": "step", "step": after.step, "lineage": version.lineage, **early,
                "t0": work.t0, "t1": t1, "train_s": t1 - work.t0 + early_s, "wait_s": work.wait_s,
                "replayed": claim.replayed, "groups": [group.group for group in claim.groups]}  # fmt: skip
        self._log = claim.after
        await self.background.publish(version, row, weights)
        await self._barrier.wait(after)
        if claim.checkpoint_wanted or after.step % self.config.learner.checkpoint_every == 0:
            await self.background.settle()
            await self._checkpoint(trainer, after)
        await self._settle_durable(wait=False)
        return after, replace(following, t0=unix_s()) if following else None

    async def _publish(self, trainer: Trainer, version: Version) -> None:
        ref = await self._on_device(lambda: self.publisher.publish(version, trainer.publishable_params()))
        await self.store.publish(ref)
        self.publisher.drop_older(version)

    async def _checkpoint(self, trainer: Trainer, version: Version) -> None:
        position = self.store.position
        values, log = (version, position, trainer.state), self._log
        await self._on_device(lambda: self.checkpoints.save(*values, trainer.base_digest(), log))
        self._durable = version

    async def _settle_durable(self, *, wait: bool) -> None:
        """Report checkpoints that are on disk to the store (with `wait`, all of them), then remove older ones."""
        for version in await self._on_device(lambda: self.checkpoints.finished(wait=wait)):
            await self.store.durable(version)  # raises if another learner has replaced this one
            spared = await self._spared() if self.config.learner.keep_best else ()
            await self._on_device(lambda version=version, spared=spared: self.checkpoints.remove_old(version, spared))

    async def _spared(self) -> list[Version]:
        """The best checkpoint so far, and the version that the evaluator measures now (`learner.keep_best`)."""
        status = await self.store.status()
        values = {Version(lineage, step): value for lineage, step, value in status["measured"]}
        found = selection.best(values, self.checkpoints.versions())
        keeps = {str(found), status["holders"].get("evaluator")}
        return [version for version in self.checkpoints.versions() if str(version) in keeps]

    async def _await_evaluator(self, version: Version, limit_s: float) -> bool:
        """Wait up to `limit_s` until the evaluator has `version`, served only here. False if asked to stop."""
        if not self.config.evaluator.every:
            return True
        self.progress(f"waiting until the evaluator has version {version}")
        deadline_s = self._loop.time() + limit_s
        while (await self.store.status())["holders"].get("evaluator") != str(version):
            await asyncio.sleep(HOLDER_POLL_S)
            if self._stop.is_set():
                return False
            if self._loop.time() > deadline_s:
                break
        return True
