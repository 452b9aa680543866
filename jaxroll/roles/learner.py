"""Where a learner starts: the newest checkpoint on the run's line, or the one it was told to fork at.

A fork is named, as STEP@NAME, so that a learner that dies and is started with the same words does not fork again, but
goes on along the fork that the store knows by that name.
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


def start_of(
    checkpoints: Checkpoints, lineages: Sequence[Lineage], claims: int, fork: str | None
) -> tuple[Version | None, str]:
    """The checkpoint to restore (None: none) and the name of the fork to make there ("": none).

    `lineages` are the run's, as the store has them, `claims` how many it has made on the newest. ConfigError when
    `fork` names no checkpoint, and when the store does not know what the checkpoints were trained on.
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
    """ConfigError when the store's log is not the one under which these checkpoints were written.

    With a log that is missing or was put back from an old copy the run would begin at an older step, and open lineages
    whose numbers are taken: what it writes would look older than what is there, or be taken for it.
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
    """What a run starts from (host arrays): the warm start, or the model of the path. None for a fresh init.

    ConfigError when the config asks for a warm start and there is none: roles do not make it, `jaxroll train` does.
    """
    if (warm := run_dir / "warm").is_dir():
        return weights.load(warm)
    if config.sft.steps:
        raise ConfigError("sft.steps", config.sft.steps, f"the warm start is not in {warm}",
                          f"Run `jaxroll sft {run_dir}` first, or set sft.steps=0.")  # fmt: skip
    return pretrained.weights(config.model, spec) if config.model.path else None


# --- The learner role: claims batches in order, trains on them, publishes what it learned
#
# One thread dispatches JAX (the main one); the store is spoken to through a loop thread (`BlockingStore`), the weights
# are served by the transfer room's listener thread. The order within a step is the contract of STORE.md:
#
#     claim s → train → publish s+1 → ack s → (every C steps) checkpoint s+1 → durable s+1
#
# Steps overlap: while the devices compute step s, the claim of s+1 is asked for and laid out (`_ahead`), and what step
# s-1 made is published and acknowledged (`BackgroundPublisher`). It waits for the store only: for claims, and
# for the publication before this one. On SIGTERM, SIGINT or SIGHUP it finishes its
# step, checkpoints, and leaves; killed at any other instant it starts again from the last durable version, and the
# store
# replays the claims after it.
#
# On several hosts all this is done by the process on the first one. The others do after it what lies on all of them:
# see
# `hosts` and `lockstep`.

CLAIM_WAIT_S = 2.0
AHEAD_WAIT_S = 3600.0  # longer than a step takes, whose end is what ends this wait
DEVICE_POLL_S = 0.005  # how often it is looked whether the devices are through, while a claim is awaited
HOLDER_POLL_S = 0.2
FINISHED = "finished"
FORKED_FILE = ".forked"  # tells the supervisor that the others may start


@dataclass(frozen=True)
class ColocationHooks:
    """What a learner does for others in its process: `trainer` is made in place of a Trainer, `published` is called
    when the first weights of this life can be fetched, and a fork is done if one is asked for."""

    trainer: Callable[..., Trainer]
    published: Callable[[], None]


ALONE = ColocationHooks(Trainer, lambda: None)


def main(args: RoleArgs) -> int:
    """Train until the schedule's last step is done (0) or until told to stop (EXIT_INTERRUPTED)."""
    stop = threading.Event()
    lifeline.on_stop(stop.set)
    others = processes.join(args, stop)
    if isinstance(others, Follower):
        return _run_follower(args, stop, others)
    if isinstance(others, Leader):
        return _run_leader(args, stop, others)
    return run_learner(args, stop)


def run_learner(
    args: RoleArgs, stop: threading.Event, leader: Leader | None = None, beside: ColocationHooks = ALONE
) -> int:
    """One life of the learner, until the schedule's last step is done (0) or `stop` is set (EXIT_INTERRUPTED)."""
    session = LearnerSession(args, stop, leader, beside)
    try:
        return session.run()
    finally:
        session.close()


def _run_leader(args: RoleArgs, stop: threading.Event, leader: Leader) -> int:
    """As on one host; what goes wrong here ends all processes."""
    with leader:
        code = run_learner(args, stop, leader)
        leader.end(code)
        return code


def _run_follower(args: RoleArgs, stop: threading.Event, leader: Follower) -> int:
    """What the leader says, done. Asked to leave, this process asks the leader."""
    lifeline.on_stop(leader.ask_to_stop)
    if stop.is_set():  # while the others were not there yet
        leader.ask_to_stop()
    checkpoints = Checkpoints(args.run_dir / "checkpoints", args.config.learner.checkpoints_kept)
    with leader:
        trainer = new_trainer(args.config)

        def start() -> Mapping[str, np.ndarray]:
            params = first_params(args.config, args.run_dir, trainer.spec)
            if params is None:
                raise ConfigError("RUN", str(args.run_dir), "the first host found a start there, this one none",
                                  "All its hosts need the run's folder, and that of model.path.")  # fmt: skip
            return params

        code = lockstep.run_follower_steps(leader, trainer, checkpoints, start, _sent(args.config).dtype)
        checkpoints.close()
        return code


@dataclass(frozen=True)
class Work:
    """A claim that is ready to be trained: since `t0` (unix seconds), after the devices waited `wait_s` for it."""

    ready: Ready
    wait_s: float
    t0: float


class LearnerSession:
    """One life of the learner."""

    def __init__(
        self,
        args: RoleArgs,
        stop: threading.Event,
        leader: Leader | None = None,
        beside: ColocationHooks = ALONE,
    ) -> None:
        self.args, self.config, self._stop, self._beside = args, args.config, stop, beside
        self._made = beside.trainer if leader is None else functools.partial(lockstep.LeadingTrainer, leader.send)
        self.store = BlockingStore(
            args.store_address or args.run_dir / "store.addr",
            role="learner", name="learner", config_digest=args.config_digest, patience_s=60.0,
            call_s=self.config.store.rpc_deadline_s, run_dir=args.run_dir,
        )  # fmt: skip
        self._end = FINISHED  # the reason with which the run is closed when this life ends it
        self.progress = Progress("learner", lambda row: self.store.report([row]))
        self.publisher = _publisher(args)
        self.teller = BackgroundPublisher(self.store, self.publisher)
        folder, kept = args.run_dir / "checkpoints", self.config.learner.checkpoints_kept
        self.checkpoints = lockstep.checkpoints(folder, kept, leader)

    def run(self) -> int:
        """From the last durable version to the end of the schedule: the exit code. Closed when the store ends it."""
        self.progress.start("building the learner")
        trainer = new_trainer(self.config, self._made)
        durable = self._restore(trainer)
        try:
            version = self.store.begin(durable, self._fork)
        except Closed as closed:
            if str(closed) not in (FINISHED, END_OF_DATA):
                raise
            return 0  # we died between the last word and the exit
        except StaleClient as refusal:
            raise self._no_start(refusal) from refusal
        if self.args.fork is not None:
            self.progress(f"forked: version {version}")
            (self.args.run_dir / FORKED_FILE).touch()
        self.progress.end("building the learner")
        self.progress.devices(trainer.layout.mesh, {"packed": str(trainer.programs.recipe.attention)})
        if trainer.sends_adapters:
            self.publisher.freeze(version, trainer.base_params())
        self._publish(trainer, version)  # first, so that samplers compile while we do
        self._beside.published()
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
        self.teller.settle()
        if self._durable != version:
            self._checkpoint(trainer, version)
        self._settle_durable(wait=True)
        if version.step < self.config.schedule.steps and self._end == FINISHED:
            return EXIT_INTERRUPTED
        self._await_evaluator(version, self.config.supervisor.finish_s)
        self.store.close_run(self._end)
        return 0

    def close(self) -> None:
        """Let go of the store and of the snapshots."""
        self.teller.close()
        self.publisher.close()
        self.checkpoints.close()
        self.store.aclose()

    def _restore(self, trainer: Trainer) -> Version | None:
        """Put the newest checkpoint (or the warm start) into `trainer`; the version restored, None if nothing was.

        One without sums is damaged if the store knows it to be durable; else it is summed up now, since it counts as
        durable from `begin` on. A damaged checkpoint is said and passed over. Whether an older one will do is the
        store's to say: it will unless the claims after it are trimmed. CheckpointDamaged when no other is left.
        """
        status = self.store.status()
        lineages, claims, durable_steps = self.store.welcome.lineages, status["claims"], status["durable"]
        self._durable, self._fork = start_of(self.checkpoints, lineages, claims, self.args.fork)
        if trainer.lora and (start := self._start(trainer)) is not None:
            trainer.set_params(start)  # adapters are put on what the run starts from; no checkpoint holds that
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
            if trainer.reference is not None and (start := self._start(trainer)) is not None:
                trainer.set_reference(start)
            return self._durable
        if (start := self._start(trainer)) is not None:
            trainer.set_params(start)
        return self._durable

    def _start(self, trainer: Trainer) -> Mapping[str, np.ndarray] | None:
        """What the run starts from (host arrays): the warm start, or the model of the path. None for a fresh init."""
        return first_params(self.config, self.args.run_dir, trainer.spec)

    def _no_start(self, refusal: StaleClient) -> JaxRollError:
        """Why there is nothing to start from, with the way out if a damaged checkpoint is the reason."""
        if not self.checkpoints.damaged:
            return refusal
        damaged = ", ".join(str(self.checkpoints.path(version)) for version in sorted(self.checkpoints.damaged))
        return ConfigError(
            "checkpoint", damaged, f"is damaged, and an older one will not do: {refusal}",
            "Put it back from a copy, or go on from the older one with --fork=STEP.",
        )  # fmt: skip

    def _claim(self, trainer: Trainer, version: Version) -> Work | None:
        """The batch of this step; None after the last one, when a stop was asked for or the data has ended."""
        began = time.monotonic()
        while version.step < self.config.schedule.steps and not self._stop.is_set():
            try:
                claim = self.store.claim(version.lineage, version.step, CLAIM_WAIT_S)
            except NotReady:
                self.teller.check()  # what is not published cannot come back as a batch
                continue
            except Closed as closed:
                if str(closed) != END_OF_DATA:
                    raise
                self._end = END_OF_DATA
                break
            wait_s, t0 = time.monotonic() - began, unix_s()
            return Work(trainer.prepare(claim), wait_s, t0)
        return None

    def _ahead(self, trainer: Trainer, version: Version, running: Running) -> Ready | None:
        """The batch of the step at `version`, if it comes while the devices are still at the one before, `running`."""
        if version.step >= self.config.schedule.steps or not trainer.prepares_ahead:
            return None
        asked = self.store.claim_ahead(version.lineage, version.step, AHEAD_WAIT_S)
        while not (running.is_done() or self._stop.is_set()):
            if wait([asked], DEVICE_POLL_S).done:
                break
        if not asked.done():
            asked.cancel()
            return None
        try:
            claim = asked.result()
        except (NotReady, Closed, InfraError):
            return None  # asked again once there is nothing else to do, with new patience
        return trainer.prepare(claim)

    def _step(self, trainer: Trainer, version: Version, work: Work) -> tuple[Version, Work | None]:
        """Train on `work` and have it told; the version that this made, and the work of the next step if it is here."""
        claim, running = work.ready.claim, trainer.dispatch_step(work.ready)
        after = Version(version.lineage, version.step + 1)
        ready = self._ahead(trainer, after, running)
        row, t1 = trainer.await_step(running), unix_s()
        self.teller.settle()  # who is told of a version finds it: the publisher keeps the last two
        published = after.step % self.config.schedule.publish_every == 0 or after.step == self.config.schedule.steps
        weights = self.publisher.start(after, trainer.publishable_params()) if published else None
        row |= {"role": "learner", "kind": "step", "step": after.step, "lineage": version.lineage,
                "t0": work.t0, "t1": t1, "train_s": t1 - work.t0, "wait_s": work.wait_s,
                "replayed": claim.replayed, "groups": [group.group for group in claim.groups]}  # fmt: skip
        self.teller.publish(version, row, weights)
        if claim.checkpoint_wanted or after.step % self.config.learner.checkpoint_every == 0:
            self.teller.settle()
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
        """Tell the store which checkpoints have reached the disk; with `wait`, all of them. Then remove older ones."""
        for version in self.checkpoints.finished(wait=wait):
            self.store.durable(version)  # raises when another learner has replaced this one
            self.checkpoints.remove_old(version)

    def _await_evaluator(self, version: Version, limit_s: float) -> None:
        """Wait until the evaluator holds `version`, which nobody else keeps, but not longer than `limit_s`."""
        if not self.config.evaluator.every:
            return
        self.progress(f"waiting until the evaluator has version {version}")
        deadline_s = time.monotonic() + limit_s
        while self.store.status()["holders"].get("evaluator") != str(version):
            time.sleep(HOLDER_POLL_S)  # not Event.wait: a signal that sets it then would wait for itself
            if self._stop.is_set() or time.monotonic() > deadline_s:
                return


def _publisher(args: RoleArgs) -> Publisher | DevicePublisher:
    """Where samplers have the weights from: of another process, or of this one."""
    sent = _sent(args.config)
    if channel_of(args.config) == "device":
        return DevicePublisher(sent.dtype)
    exposure = Exposure(tls.load(args.run_dir), args.config.store.mutual_tls, args.insecure)
    return Publisher(sent, args.run_dir, args.host, token=weights_token(args.run_dir), exposure=exposure)


def _sent(config: Config) -> TransferConfig:
    """How parameters travel: adapters and what they are put on as they are, to be rounded when they are merged."""
    if config.learner.lora_publish == "merged":
        return config.transfer
    return replace(config.transfer, dtype="float32")


def new_trainer(config: Config, made: Callable[..., Trainer] = Trainer) -> Trainer:
    """A trainer with freshly initialised parameters, `made` as Trainer is; ConfigError if they do not fit the mesh."""
    text = build.tokenizer(config)
    spec = build.model_spec(config, text)
    families.check_mesh(spec, config.learner.mesh, "learner.mesh")
    mesh, key = layout.build(config.learner.mesh), jax.random.key(config.run.seed)
    return made(config, spec, mesh, layout.LEARNER, key=key)
