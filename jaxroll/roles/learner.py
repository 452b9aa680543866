"""Learner role: claims batches in order, trains on them and publishes the new weights.

    claim s → train → publish s+1 → acknowledge s → (every C steps) checkpoint s+1 → report s+1 durable

Steps overlap: while the devices compute step s, the claim of s+1 is requested and packed (`_claim_ahead`), and the
result of step s−1 is published and acknowledged (`BackgroundPublisher`).

Threads: the main thread dispatches JAX; a loop thread talks to the store (`BlockingStore`); a thread publishes; the
channel's listener serves weights.
Waits for: claims from the store, and the previous publication.
Stops: after the schedule's last step, or on SIGTERM, SIGINT or SIGHUP after its step and a checkpoint. If it is killed,
it starts again from the last durable version, and the store replays the claims after it.

On several hosts the process of the first one does all this; the others repeat its device work
(`jaxroll.learner.multihost`).
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jaxroll import lifeline
from jaxroll.clock import unix_s
from jaxroll.config import Config, RoleArgs, TransferConfig
from jaxroll.config.rules import channel_of
from jaxroll.errors import (
    EXIT_INTERRUPTED,
    CheckpointDamaged,
    Closed,
    ConfigError,
    InfraError,
    JaxRollError,
    NotReady,
    StaleClient,
)
from jaxroll.learner import weights
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.multihost import lockstep, processes
from jaxroll.learner.multihost.processes import Follower, Leader
from jaxroll.learner.trainer import Ready, Running, Trainer
from jaxroll.models import families, pretrained
from jaxroll.models.families import ModelSpec
from jaxroll.records import Version
from jaxroll.roles import build
from jaxroll.roles.weights import BackgroundPublisher, Progress, weights_token
from jaxroll.rpc import tls
from jaxroll.sharding import layout
from jaxroll.store.client import BlockingStore
from jaxroll.store.core.settings import END_OF_DATA
from jaxroll.store.core.state import Lineage, on_line
from jaxroll.transfer.channel_device import DevicePublisher
from jaxroll.transfer.publish import Exposure, Publisher

# --- The checkpoint to start from: the newest on the run's lineage, or the one that `--fork` names
#
# A fork has a name (STEP@NAME), so that a learner that dies and is started with the same arguments continues the fork
# that the store knows by that name, instead of making another.


def start_of(
    checkpoints: Checkpoints, lineages: Sequence[Lineage], claims: int, fork: str | None
) -> tuple[Version | None, str]:
    """The checkpoint to restore (None: none) and the name of the fork to make there ("": none).

    `lineages` are those that the store knows, `claims` the number of claims on the newest. ConfigError if `fork` names
    no checkpoint, or if the store's log does not belong to the checkpoints.
    """
    lines = list(lineages)
    _check_known(checkpoints, lines, claims if fork is None else None)
    if fork is not None:
        where, _, name = fork.partition("@")
        name = name or uuid.uuid4().hex
        if all(line.fork != name for line in lines):
            return checkpoints.at(where), name
    return checkpoints.latest(lambda version: on_line(lines, version)), ""


def _check_known(checkpoints: Checkpoints, lineages: list[Lineage], claims: int | None) -> None:
    """Raise ConfigError if the store's log is not the one under which these checkpoints were written.

    With a log that is missing or restored from an old copy the run would begin at an older step and reuse lineage
    numbers: its new checkpoints would be mistaken for the existing ones, or look older.
    """
    for version in reversed(checkpoints.versions()):
        ahead = claims is not None and version.step > claims and on_line(lineages, version)
        if version.lineage >= len(lineages) or ahead:
            known = f"lineages below {len(lineages)}" + (f" and {claims} claims" if ahead else "")
            raise ConfigError(
                "checkpoints", str(checkpoints.path(version)),
                f"store.db knows only {known}: it is missing, or older than this checkpoint",
                "Put back the store.db that belongs to the checkpoints, or move the newer checkpoints away.",
            )  # fmt: skip


def first_params(config: Config, run_dir: Path, spec: ModelSpec) -> Mapping[str, np.ndarray] | None:
    """The run's initial parameters (host arrays): the warm start, or the model of `model.path`. None for a fresh init.

    ConfigError if the config asks for a warm start and there is none: `jaxroll train` makes it, roles do not.
    """
    if (warm := run_dir / "warm").is_dir():
        return weights.load(warm)
    if config.sft.steps:
        raise ConfigError("sft.steps", config.sft.steps, f"the warm start is not in {warm}",
                          f"Run `jaxroll sft {run_dir}` first, or set sft.steps=0.")  # fmt: skip
    return pretrained.weights(config.model, spec) if config.model.path else None


# --- The process

CLAIM_WAIT_S = 2.0
AHEAD_WAIT_S = 3600.0  # longer than a step: the step's end ends this wait
DEVICE_POLL_S = 0.005  # between two checks whether the devices have finished, while a claim is awaited
HOLDER_POLL_S = 0.2
FINISHED = "finished"
FORKED_FILE = ".forked"  # the supervisor starts the other roles when this file exists


@dataclass(frozen=True)
class ColocationHooks:
    """Hooks for roles that share the learner's process: `trainer` constructs its trainer; `published` is called once
    the first weights of this process can be fetched (and the fork is made, if one is requested)."""

    trainer: Callable[..., Trainer]
    published: Callable[[], None]


ALONE = ColocationHooks(Trainer, lambda: None)


def main(args: RoleArgs) -> int:
    """Train until the schedule's last step is done (0) or a signal stops the process (EXIT_INTERRUPTED)."""
    stop = threading.Event()
    lifeline.on_stop(stop.set)
    others = processes.join(args, stop)
    if isinstance(others, Follower):
        return _run_follower(args, stop, others)
    if isinstance(others, Leader):
        return _run_leader(args, stop, others)
    return run_learner(args, stop)


def compile_programs(args: RoleArgs, progress: Progress) -> None:
    """Compile the learner's programs into the compilation cache."""
    progress.start("compiling the learner")
    new_trainer(args.config).warmup(progress)
    progress.end("compiling the learner")


def run_learner(
    args: RoleArgs, stop: threading.Event, leader: Leader | None = None, hooks: ColocationHooks = ALONE
) -> int:
    """Train until the schedule's last step is done (0) or `stop` is set (EXIT_INTERRUPTED)."""
    session = LearnerSession(args, stop, leader, hooks)
    try:
        return session.run()
    finally:
        session.close()


def _run_leader(args: RoleArgs, stop: threading.Event, leader: Leader) -> int:
    """Run as on one host; an error here ends the processes of all hosts."""
    with leader:
        code = run_learner(args, stop, leader)
        leader.end(code)
        return code


def _run_follower(args: RoleArgs, stop: threading.Event, leader: Follower) -> int:
    """Execute the leader's commands. A stop signal to this process is passed on to the leader."""
    lifeline.on_stop(leader.ask_to_stop)
    if stop.is_set():  # before the other hosts had joined
        leader.ask_to_stop()
    checkpoints = Checkpoints(args.run_dir / "checkpoints", args.config.learner.checkpoints_kept)
    with leader:
        trainer = new_trainer(args.config)

        def start() -> Mapping[str, np.ndarray]:
            params = first_params(args.config, args.run_dir, trainer.spec)
            if params is None:
                raise ConfigError("RUN", str(args.run_dir), "has initial parameters on the first host and none here",
                                  "All hosts of the learner need the run's folder and that of model.path.")  # fmt: skip
            return params

        code = lockstep.run_follower_steps(leader, trainer, checkpoints, start, _transfer_config(args.config).dtype)
        checkpoints.close()
        return code


@dataclass(frozen=True)
class Work:
    """A packed claim, ready at `t0` (unix seconds); the devices were idle for `wait_s` before it."""

    ready: Ready
    wait_s: float
    t0: float


class LearnerSession:
    """The learner of this process: its trainer, publisher and checkpoints, and the loop over steps."""

    def __init__(
        self,
        args: RoleArgs,
        stop: threading.Event,
        leader: Leader | None = None,
        hooks: ColocationHooks = ALONE,
    ) -> None:
        self.args, self.config, self._stop, self._hooks = args, args.config, stop, hooks
        self._make_trainer = (
            hooks.trainer if leader is None else functools.partial(lockstep.LeadingTrainer, leader.send)
        )
        self.store = BlockingStore(
            args.store_address or args.run_dir / "store.addr",
            role="learner", name="learner", config_digest=args.config_digest, patience_s=60.0,
            call_s=self.config.store.rpc_deadline_s, run_dir=args.run_dir,
        )  # fmt: skip
        self._end = FINISHED  # the reason with which this process closes the run
        self.progress = Progress("learner", lambda row: self.store.report([row]))
        self.publisher = _publisher(args)
        self.background = BackgroundPublisher(self.store, self.publisher)
        folder, kept = args.run_dir / "checkpoints", self.config.learner.checkpoints_kept
        self.checkpoints = lockstep.checkpoints(folder, kept, leader)

    def run(self) -> int:
        """Train from the last durable version to the end of the schedule. Raises Closed if the store ends the run."""
        self.progress.start("building the learner")
        trainer = new_trainer(self.config, self._make_trainer)
        durable = self._restore(trainer)
        try:
            version = self.store.begin(durable, self._fork)
        except Closed as closed:
            if str(closed) not in (FINISHED, END_OF_DATA):
                raise
            return 0  # the process before this one closed the run and died before its exit
        except StaleClient as refusal:
            raise self._cannot_start(refusal) from refusal
        if self.args.fork is not None:
            self.progress(f"forked: version {version}")
            (self.args.run_dir / FORKED_FILE).touch()
        self.progress.end("building the learner")
        self.progress.devices(trainer.layout.mesh, {"packed": str(trainer.programs.recipe.attention)})
        if trainer.sends_adapters:
            self.publisher.freeze(version, trainer.base_params())
        self._publish(trainer, version)  # first, so that samplers compile while we do
        self._hooks.published()
        self.progress.start("compiling the learner")
        trainer.warmup(self.progress)
        self.progress.end("compiling the learner")
        if durable is None:
            self._checkpoint(trainer, version)
        if version.step == 0:
            self._await_evaluator(version, self.config.transfer.deadline_s)  # the gain is measured from here
        work = self._claim(trainer, version)
        while work is not None:
            version, work = self._step(trainer, version, work)
            if work is None or self._stop.is_set():
                work = self._claim(trainer, version)
        self.background.settle()
        if self._durable != version:
            self._checkpoint(trainer, version)
        self._settle_durable(wait=True)
        if version.step < self.config.schedule.steps and self._end == FINISHED:
            return EXIT_INTERRUPTED
        self._await_evaluator(version, self.config.supervisor.final_eval_s)
        self.store.close_run(self._end)
        return 0

    def close(self) -> None:
        """Close the connection to the store, the publisher and the checkpoints."""
        self.background.close()
        self.publisher.close()
        self.checkpoints.close()
        self.store.aclose()

    def _restore(self, trainer: Trainer) -> Version | None:
        """Put the newest checkpoint (or the initial parameters) into `trainer`; the version restored, None without one.

        A checkpoint without checksums is damaged if the store knows it as durable; otherwise its checksums are computed
        now, because it counts as durable from `begin` on. A damaged checkpoint is reported and skipped. The store
        decides in `begin` if an older one is acceptable: the claims after it must not have been trimmed.
        CheckpointDamaged if no other is left.
        """
        status = self.store.status()
        lineages, claims, durable_steps = self.store.welcome.lineages, status["claims"], status["durable"]
        self._durable, self._fork = start_of(self.checkpoints, lineages, claims, self.args.fork)
        if trainer.lora and (start := self._initial_params(trainer)) is not None:
            trainer.set_params(start)  # the base of the adapters, which no checkpoint contains
        while self._durable is not None:
            try:
                trainer.state, _ = self.checkpoints.restore(
                    self._durable, trainer.abstract_state(), trainer.base_digest(),
                    durable=0 < durable_steps >= self._durable.step,
                )  # fmt: skip
            except CheckpointDamaged as error:
                self.progress(f"{error}")
                self._durable, self._fork = start_of(self.checkpoints, lineages, claims, self.args.fork)
                if self._durable is None or self._durable in self.checkpoints.damaged:
                    raise
                continue
            self.checkpoints.settle(self._durable)
            self.progress(f"restored version {self._durable}")
            if trainer.reference is not None and (start := self._initial_params(trainer)) is not None:
                trainer.set_reference(start)
            return self._durable
        if (start := self._initial_params(trainer)) is not None:
            trainer.set_params(start)
        return self._durable

    def _initial_params(self, trainer: Trainer) -> Mapping[str, np.ndarray] | None:
        return first_params(self.config, self.args.run_dir, trainer.spec)

    def _cannot_start(self, refusal: StaleClient) -> JaxRollError:
        """The error for a `begin` that the store refused, with the remedy if a damaged checkpoint is the cause."""
        if not self.checkpoints.damaged:
            return refusal
        damaged = ", ".join(str(self.checkpoints.path(version)) for version in sorted(self.checkpoints.damaged))
        return ConfigError(
            "checkpoint", damaged, f"is damaged, and the store does not accept an older one: {refusal}",
            "Restore it from a copy, or continue from the older one with --fork=STEP.",
        )  # fmt: skip

    def _claim(self, trainer: Trainer, version: Version) -> Work | None:
        """The batch of this step; None after the last step, after a stop request, and at the end of the data."""
        began = time.monotonic()
        while version.step < self.config.schedule.steps and not self._stop.is_set():
            try:
                claim = self.store.claim(version.lineage, version.step, CLAIM_WAIT_S)
            except NotReady:
                self.background.check()  # without new weights no batch for this step can come
                continue
            except Closed as closed:
                if str(closed) != END_OF_DATA:
                    raise
                self._end = END_OF_DATA
                break
            wait_s, t0 = time.monotonic() - began, unix_s()
            return Work(trainer.prepare(claim), wait_s, t0)
        return None

    def _claim_ahead(self, trainer: Trainer, version: Version, running: Running) -> Ready | None:
        """The packed batch of the step at `version`, if it arrives while the devices still compute `running`."""
        if version.step >= self.config.schedule.steps or not trainer.prepares_ahead:
            return None
        pending = self.store.claim_ahead(version.lineage, version.step, AHEAD_WAIT_S)
        while not (running.is_done() or self._stop.is_set()):
            if wait([pending], DEVICE_POLL_S).done:
                break
        if not pending.done():
            pending.cancel()
            return None
        try:
            claim = pending.result()
        except (NotReady, Closed, InfraError):
            return None  # `_claim` requests it again, with its own patience
        return trainer.prepare(claim)

    def _step(self, trainer: Trainer, version: Version, work: Work) -> tuple[Version, Work | None]:
        """Train on `work` and start publishing; the version made, and the work of the next step if it has arrived."""
        claim, running = work.ready.claim, trainer.dispatch_step(work.ready)
        after = Version(version.lineage, version.step + 1)
        ready = self._claim_ahead(trainer, after, running)
        row, t1 = trainer.await_step(running), unix_s()
        self.background.settle()  # a published version must be there to fetch: the publisher keeps the last two
        published = after.step % self.config.schedule.publish_every == 0 or after.step == self.config.schedule.steps
        weights = self.publisher.start(after, trainer.publishable_params()) if published else None
        row |= {"role": "learner", "kind": "step", "step": after.step, "lineage": version.lineage,
                "t0": work.t0, "t1": t1, "train_s": t1 - work.t0, "wait_s": work.wait_s,
                "replayed": claim.replayed, "groups": [group.group for group in claim.groups]}  # fmt: skip
        self.background.publish(version, row, weights)
        if claim.checkpoint_wanted or after.step % self.config.learner.checkpoint_every == 0:
            self.background.settle()
            self._checkpoint(trainer, after)
        self._settle_durable(wait=False)
        return after, Work(ready, 0.0, unix_s()) if ready else None

    def _publish(self, trainer: Trainer, version: Version) -> None:
        self.store.publish(self.publisher.publish(version, trainer.publishable_params()))
        self.publisher.drop_older(version)

    def _checkpoint(self, trainer: Trainer, version: Version) -> None:
        self.checkpoints.save(version, self.store.position, trainer.state, trainer.base_digest())
        self._durable = version

    def _settle_durable(self, *, wait: bool) -> None:
        """Report checkpoints that are on disk to the store (with `wait`, all of them), then remove older ones."""
        for version in self.checkpoints.finished(wait=wait):
            self.store.durable(version)  # raises if another learner has replaced this one
            self.checkpoints.remove_old(version)

    def _await_evaluator(self, version: Version, limit_s: float) -> None:
        """Wait up to `limit_s` until the evaluator has fetched `version`: only this process can serve it."""
        if not self.config.evaluator.every:
            return
        self.progress(f"waiting until the evaluator has version {version}")
        deadline_s = time.monotonic() + limit_s
        while self.store.status()["holders"].get("evaluator") != str(version):
            time.sleep(HOLDER_POLL_S)  # not Event.wait: a signal handler that sets the event in it would deadlock
            if self._stop.is_set() or time.monotonic() > deadline_s:
                return


def _publisher(args: RoleArgs) -> Publisher | DevicePublisher:
    """The publisher of the config's channel: for samplers of other processes, or of this one (`device`)."""
    transfer = _transfer_config(args.config)
    if channel_of(args.config) == "device":
        return DevicePublisher(transfer.dtype)
    exposure = Exposure(tls.load(args.run_dir), args.config.store.mutual_tls, args.insecure)
    return Publisher(transfer, args.run_dir, args.host, token=weights_token(args.run_dir), exposure=exposure)


def _transfer_config(config: Config) -> TransferConfig:
    """The config of weight transfers: adapters and their base travel in float32 and are rounded after merging."""
    if config.learner.lora_publish == "merged":
        return config.transfer
    return replace(config.transfer, dtype="float32")


def new_trainer(config: Config, make: Callable[..., Trainer] = Trainer) -> Trainer:
    """A trainer with freshly initialised parameters, built by `make`; ConfigError if they do not fit the mesh."""
    text = build.tokenizer(config)
    spec = build.model_spec(config, text)
    families.check_mesh(spec, config.learner.mesh, "learner.mesh")
    mesh, key = layout.build(config.learner.mesh), jax.random.key(config.run.seed)
    return make(config, spec, mesh, layout.LEARNER, key=key)
