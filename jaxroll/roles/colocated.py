"""Colocated roles: learner, samplers and evaluator in one process, which share its devices (`placement.colocated`).

For devices that only one process can open, above all a single TPU chip. Each role is a client of the store, as in a
process of its own; schedules, the limit on age and restarts work as there, but all roles live and die together.
With `placement.learner_samplers` some samplers share the learner's process, and the other roles have their own. They
sample at the start of a step, while the learner waits for its batch (`policy.step_times.Seeding`).

Threads: the main thread runs the learner; every sampler and the evaluator has a JAX thread and an asyncio loop thread.
Waits for: the `DeviceLock`, before each dispatch: devices that communicate need programs in one order. Roles that wait
for a device do not hold the lock, except an engine that reads the tokens of its step, and a learner whose reference
model or critic evaluates a claim. Devices run programs one after the other: in a synchronous run one role uses them at
a time; with α > 0 programs of both alternate.
Stops: SIGTERM stops the learner, which finishes its step and checkpoints, and then the others. If one role fails, all
end, and the process raises its error.

With `run.deterministic` the same roles share one thread and a virtual clock (`sim.world.Deterministic`); the parts
that take virtual time are here.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from jaxroll import lifeline
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import has_evaluator, learner_samplers, own_samplers
from jaxroll.errors import InfraError
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.state import Params
from jaxroll.learner.trainer import Metrics, Ready, Running, Trainer
from jaxroll.models.families import ModelSpec
from jaxroll.policy.step_times import Seeding
from jaxroll.protocols import Progress
from jaxroll.records import Claim, Version, VersionRef
from jaxroll.roles import evaluator, sampler
from jaxroll.roles import session as sessions
from jaxroll.sharding import Rules
from jaxroll.transfer.channel_device import DevicePublisher

if TYPE_CHECKING:  # it loads JAX, which must come after the scoring pools
    pass


class DeviceLock(AbstractContextManager):
    """A lock that is granted in the order of the requests. Not reentrant.

    An engine requests it again immediately after each step; with a plain lock it would starve the other roles.
    Holders of `shared` have devices of their own, so they hold it at the same time, but not with any other.
    """

    def __init__(self) -> None:
        self._guard, self._holders, self._is_shared = threading.Lock(), 0, False
        self._waiting: deque[tuple[threading.Semaphore, bool]] = deque()
        self.shared = _Shared(self)

    def __enter__(self) -> DeviceLock:
        self.acquire(shared=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, *, shared: bool) -> None:
        """Wait until the lock is free, or held by `shared` ones only."""
        with self._guard:
            mine = threading.Semaphore(0)
            self._waiting.append((mine, shared))
            self._grant()
        mine.acquire()

    def release(self) -> None:
        """Pass the lock on, if no other one holds it."""
        with self._guard:
            self._holders -= 1
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            first, shared = self._waiting[0]
            if self._holders and not (shared and self._is_shared):
                return
            self._waiting.popleft()
            self._holders, self._is_shared = self._holders + 1, shared
            first.release()


class _Shared(AbstractContextManager):
    def __init__(self, lock: DeviceLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire(shared=True)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class LockedTrainer(Trainer):
    """A trainer that dispatches its programs under a device lock.

    Methods that only wait or read do not take the lock, nor do copies that each device makes for itself: those for
    publishing and for checkpoints.
    """

    def __init__(
        self, lock: DeviceLock, config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules, *, key: jax.Array
    ) -> None:
        with lock:
            super().__init__(config, spec, mesh, rules, key=key)
        self._lock = lock

    def set_params(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer."""
        with self._lock:
            super().set_params(params)

    def set_reference(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer."""
        with self._lock:
            super().set_reference(params)

    def warmup(self, progress: Progress | None = None) -> None:
        """See Trainer."""
        with self._lock:
            super().warmup(progress)

    def prepare(self, claim: Claim) -> Ready:
        """See Trainer."""
        with self._lock:
            return super().prepare(claim)

    def stream(self, part: Claim) -> None:
        """See Trainer."""
        with self._lock:
            super().stream(part)

    def dispatch_step(self, ready: Ready) -> Running:
        """See Trainer."""
        with self._lock:
            return super().dispatch_step(ready)

    def publishable_params(self) -> Params:
        """See Trainer."""
        with self._lock:
            return super().publishable_params()

    def base_params(self) -> Params:
        """See Trainer."""
        with self._lock:
            return super().base_params()


# --- Parts of a learner that take virtual time


@dataclass(frozen=True)
class TimedStep(Running):
    """A dispatched step that ends at `end_s` of the virtual clock."""

    end_s: float
    now_s: Callable[[], float]

    def is_done(self) -> bool:
        """True once the clock shows its end."""
        return self.now_s() >= self.end_s


class TimedTrainer(Trainer):
    """A trainer whose steps take `train_s` of their tokens and micro-batches, by the clock `now_s`."""

    def __init__(
        self,
        train_s: Callable[[int, int], float],
        now_s: Callable[[], float],
        config: Config,
        spec: ModelSpec,
        mesh: Mesh,
        rules: Rules,
        *,
        key: jax.Array,
    ) -> None:
        super().__init__(config, spec, mesh, rules, key=key)
        self._train_s, self._now_s = train_s, now_s

    def dispatch_step(self, ready: Ready) -> TimedStep:
        """See Trainer."""
        running, batches = super().dispatch_step(ready), [batch for of in ready.packed for batch in of]
        tokens = sum(batch.streams["tokens"].size for batch in batches)
        end_s = self._now_s() + self._train_s(tokens, len(batches))
        return TimedStep(ready, running.reports, running.of_critic, end_s, self._now_s)

    async def await_step(self, running: Running) -> Metrics:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See Trainer; the virtual clock goes on meanwhile."""
        assert isinstance(running, TimedStep)
        await asyncio.sleep(max(0.0, running.end_s - self._now_s()))
        return super().await_step(running)


class TimedPublisher(DevicePublisher):
    """Weights that can be fetched `publish_s` after the step."""

    def __init__(self, dtype: str, publish_s: float) -> None:
        super().__init__(dtype)
        self._publish_s = publish_s

    async def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See DevicePublisher."""
        await asyncio.sleep(self._publish_s)
        return super().finish(version, started)


class WrittenCheckpoints(Checkpoints):
    """Checkpoints that are on disk at the learner's next look, so that the speed of the disk changes nothing."""

    def finished(self, *, wait: bool) -> list[Version]:
        """See Checkpoints."""
        return super().finished(wait=True)


# --- The process

LEAVE_S = sessions.STOP_S
POLL_S = 0.1


def main(args: RoleArgs) -> int:
    """Sample, train and evaluate until the schedule's last step is done (0) or until a signal stops the process
    (EXIT_INTERRUPTED)."""
    interrupted, stop = threading.Event(), threading.Event()  # by a signal; by a signal or by a role that failed
    number = lambda spec: int(spec.role.partition("-")[2] or 0)  # noqa: E731
    engines = [sessions.EngineProcess(spec, replace(args, index=number(spec))) for spec in role_specs(args)]
    from jaxroll.roles import learner

    lock, names = DeviceLock(), learner_samplers(args.config)
    seeding = Seeding(names, time.monotonic, threading.Lock()) if names else None
    others = [RoleThread(engine, lock.shared if names else lock, stop.set) for engine in engines]
    opened = [engine.open() for engine in engines]
    lifeline.print_stacks_on_signal(*opened)
    for session in opened:
        session.seeding = seeding
    lifeline.on_stop(lambda: (interrupted.set(), stop.set()))

    def begin() -> None:
        if stop.is_set():
            return
        for other in others:
            other.start()

    # Start the others only after this process has published weights: those that the store knows may be of a process
    # that has ended.
    hooks = learner.ColocationHooks(functools.partial(LockedTrainer, lock), begin, seeding)
    code = 1
    try:
        code = learner.run_learner(args, stop, hooks=hooks)
        if code == 0:  # the run is closed: the evaluator ends after its last answers
            evaluating = [other for other in others if other.name == "evaluator"]
            _wait_for(evaluating, args.config.supervisor.final_eval_s, interrupted)
    finally:
        stop_all(others)
    errors = [other.error for other in others if other.error is not None]
    if errors and code != 0:  # with code 0 all steps are trained, and a restart would find nothing to do
        raise errors[0]
    return code


def role_specs(args: RoleArgs) -> list[sessions.RoleSpec]:
    """The roles that share the process with the learner: all that use devices, or samplers (`learner_samplers`)."""
    config, own = args.config, len(own_samplers(args.config))
    found = [sampler.role_spec(replace(args, index=index)) for index in range(config.sampler.count)]
    if learner_samplers(config):
        size = config.sampler.mesh.devices
        return [replace(each, first_device=n * size) for n, each in enumerate(found[own:])]
    return [*found, evaluator.role_spec(config)] if has_evaluator(config) else found


def stop_all(others: Sequence[RoleThread]) -> None:
    """Ask all threads to end and wait up to `LEAVE_S`; a thread that has not ended then has an `error`."""
    for other in others:
        other.request_stop()
    _wait_for(others, LEAVE_S)
    for other in others:
        if other.is_alive() and other.error is None:
            other.error = InfraError(f"{other.name} did not stop within {LEAVE_S:g} s")
            print(f"error: {other.error}", file=sys.stderr, flush=True)


def _wait_for(others: Sequence[RoleThread], limit_s: float, stop: threading.Event | None = None) -> None:
    """Return when all have ended, after `limit_s`, or when `stop` is set."""
    until_s = time.monotonic() + limit_s
    while any(other.is_alive() for other in others) and time.monotonic() < until_s:
        if stop is not None and stop.is_set():
            return
        time.sleep(POLL_S)  # not Event.wait: a signal handler that sets the event in it would deadlock


class RoleThread(threading.Thread):
    """A role with an engine, on its own thread. `error` is the exception that ended it; `failed` is called then."""

    def __init__(
        self, engine: sessions.EngineProcess, lock: AbstractContextManager, failed: Callable[[], None]
    ) -> None:
        super().__init__(name=engine.spec.role, daemon=True)
        self.error: BaseException | None = None
        self._engine, self._lock, self._failed = engine, lock, failed

    def run(self) -> None:
        """See Thread."""
        try:
            self._engine.run(self._lock)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            traceback.print_exc()
            self.error = error
            self._failed()

    def request_stop(self) -> None:
        """Make the thread end soon; one that was never started releases what it holds at once."""
        if self.ident is None:
            self._engine.close()
        elif self.is_alive():
            self._engine.session.request_stop()
