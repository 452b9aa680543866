"""The learner role: claims batches in order, trains on them, publishes what it learned.

One thread dispatches JAX (the main one); the store is spoken to through a loop thread (`BlockingStore`), the weights
are served by the transfer room's listener thread. The order within a step is the contract of STORE.md:

    claim s → train → publish s+1 → ack s → (every C steps) checkpoint s+1 → durable s+1

It waits for the store only (claims). On SIGTERM it finishes its step, checkpoints, and leaves; killed at any other
instant it starts again from the last durable version, and the store replays the claims after it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping

import jax
import numpy as np

from jaxroll.config import Config, RoleArgs
from jaxroll.errors import (
    EXIT_INTERRUPTED,
    CheckpointDamaged,
    Closed,
    ConfigError,
    JaxRollError,
    NotReady,
    StaleClient,
)
from jaxroll.learner import weights
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families, pretrained
from jaxroll.records import Claim, Version
from jaxroll.roles import build
from jaxroll.roles.progress import Progress
from jaxroll.roles.restoring import start_of
from jaxroll.roles.weights import weights_token
from jaxroll.rpc import tls
from jaxroll.sharding import meshes, rules
from jaxroll.store.client import BlockingStore
from jaxroll.store.settings import END_OF_DATA
from jaxroll.transfer.publish import Exposure, Publisher

CLAIM_WAIT_S = 2.0
HOLDER_POLL_S = 0.2
FINISHED = "finished"
FORKED_FILE = ".forked"  # tells the supervisor that the others may start


def main(args: RoleArgs) -> int:
    """Train until the schedule's last step is done (0) or until told to stop (EXIT_INTERRUPTED)."""
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    session = LearnerSession(args, stop)
    try:
        return session.run()
    finally:
        session.close()


class LearnerSession:
    """One life of the learner."""

    def __init__(self, args: RoleArgs, stop: threading.Event) -> None:
        self.args, self.config, self._stop = args, args.config, stop
        self.store = BlockingStore(
            args.store_address or args.run_dir / "store.addr",
            role="learner", name="learner", config_digest=args.config_digest, patience_s=60.0,
            call_s=self.config.store.rpc_deadline_s, run_dir=args.run_dir,
        )  # fmt: skip
        self._end = FINISHED  # the reason with which the run is closed when this life ends it
        self.progress = Progress("learner", lambda row: self.store.report([row]))
        exposure = Exposure(tls.load(args.run_dir), self.config.store.mutual_tls, args.insecure)
        self.publisher = Publisher(
            self.config.transfer, args.run_dir, args.host, token=weights_token(args.run_dir), exposure=exposure
        )
        self.checkpoints = Checkpoints(args.run_dir / "checkpoints", self.config.learner.checkpoints_kept)

    def run(self) -> int:
        """From the last durable version to the end of the schedule: the exit code. Closed when the store ends it."""
        self.progress.start("building the learner")
        trainer = new_trainer(self.config)
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
        self._publish(trainer, version)  # first, so that samplers compile while we do
        self.progress.start("compiling the learner")
        trainer.warmup(self.progress)
        self.progress.end("compiling the learner")
        if durable is None:
            self._checkpoint(trainer, version)
        if version.step == 0:
            self._await_evaluator(version, self.config.transfer.deadline_s)  # the gain is measured from here
        while version.step < self.config.schedule.steps:
            waited = time.monotonic()
            claim = self._claim(version)
            if claim is None:
                break
            version = self._step(trainer, version, claim, time.monotonic() - waited)
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
        self.publisher.close()
        self.checkpoints.close()
        self.store.aclose()

    def _restore(self, trainer: Trainer) -> Version | None:
        """Put the newest checkpoint (or the warm start) into `trainer`; the version restored, None if nothing was.

        One without sums is damaged if the store knows it to be durable; else it is summed up now, since it counts as
        durable from `begin` on. A damaged checkpoint is said and passed over. Whether an older one will do is the
        store's to say: it will unless the claims after it are trimmed. CheckpointDamaged when no other is left.
        """
        lineages, durable_steps = self.store.welcome.lineages, self.store.status()["durable"]
        self._durable, self._fork = start_of(self.checkpoints, lineages, self.args.fork)
        if trainer.lora and (start := self._start(trainer)) is not None:
            trainer.set_params(start)  # adapters are put upon what the run starts from; no checkpoint holds that
        while self._durable is not None:
            try:
                trainer.state, _ = self.checkpoints.restore(
                    self._durable, trainer.abstract_state(), trainer.base_digest(),
                    durable=0 < durable_steps >= self._durable.step,
                )  # fmt: skip
            except CheckpointDamaged as error:
                self.progress(f"{error}")
                self._durable, self._fork = start_of(self.checkpoints, lineages, self.args.fork)
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
        if (warm := self.args.run_dir / "warm").is_dir():
            return weights.load(warm)
        return pretrained.weights(self.config.model, trainer.spec) if self.config.model.path else None

    def _no_start(self, refusal: StaleClient) -> JaxRollError:
        """Why there is nothing to start from, with the way out if a damaged checkpoint is the reason."""
        if not self.checkpoints.damaged:
            return refusal
        damaged = ", ".join(str(self.checkpoints.path(version)) for version in sorted(self.checkpoints.damaged))
        return ConfigError(
            "checkpoint", damaged, f"is damaged, and an older one will not do: {refusal}",
            "Put it back from a copy, or go on from the older one with --fork=STEP.",
        )  # fmt: skip

    def _claim(self, version: Version) -> Claim | None:
        """The batch of this step; None when a stop was asked for or the data has ended."""
        while not self._stop.is_set():
            try:
                return self.store.claim(version.lineage, version.step, CLAIM_WAIT_S)
            except NotReady:
                continue
            except Closed as closed:
                if str(closed) != END_OF_DATA:
                    raise
                self._end = END_OF_DATA
                break
        return None

    def _step(self, trainer: Trainer, version: Version, claim: Claim, wait_s: float) -> Version:
        """Train on `claim` and tell the world; the version that this made."""
        t0 = time.time()
        row = trainer.train(claim)
        t1 = time.time()
        after = Version(version.lineage, version.step + 1)
        if after.step % self.config.schedule.publish_every == 0 or after.step == self.config.schedule.steps:
            self._publish(trainer, after)
        self.store.ack(version)
        row |= {"t": time.time(), "role": "learner", "kind": "step", "step": after.step, "lineage": version.lineage,
                "t0": t0, "t1": t1, "train_s": t1 - t0, "wait_s": wait_s, "publish_s": time.time() - t1,
                "replayed": claim.replayed, "groups": [group.group for group in claim.groups]}  # fmt: skip
        self.store.report([row])
        if claim.checkpoint_wanted or after.step % self.config.learner.checkpoint_every == 0:
            self._checkpoint(trainer, after)
        self._settle_durable(wait=False)
        return after

    def _publish(self, trainer: Trainer, version: Version) -> None:
        self.store.publish(self.publisher.publish(version, trainer.params()))

    def _checkpoint(self, trainer: Trainer, version: Version) -> None:
        self.checkpoints.save(version, self.store.position, trainer.state, trainer.base_digest())
        self._durable = version

    def _settle_durable(self, *, wait: bool) -> None:
        """Tell the store which checkpoints have reached the disk; with `wait`, all of them."""
        for version in self.checkpoints.finished(wait=wait):
            self.store.durable(version)

    def _await_evaluator(self, version: Version, limit_s: float) -> None:
        """Wait until the evaluator holds `version`, which nobody else keeps, but not longer than `limit_s`."""
        if not self.config.evaluator.every:
            return
        self.progress(f"waiting until the evaluator has version {version}")
        deadline_s = time.monotonic() + limit_s
        while self.store.status()["holders"].get("evaluator") != str(version):
            if self._stop.wait(HOLDER_POLL_S) or time.monotonic() > deadline_s:
                return


def new_trainer(config: Config) -> Trainer:
    """A trainer with freshly initialised parameters on this process's mesh; ConfigError if they do not fit it."""
    text = build.tokenizer(config)
    spec = build.model_spec(config, text)
    families.check_mesh(spec, config.learner.mesh, "learner.mesh")
    return Trainer(config, spec, meshes.build(config.learner.mesh), rules.LEARNER, key=jax.random.key(config.run.seed))
