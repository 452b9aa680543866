"""Turns at the devices, for roles that share them within a process: a fair lock, and a trainer that heeds it."""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from jaxroll import lifeline
from jaxroll.config import Config, RoleArgs
from jaxroll.errors import InfraError
from jaxroll.learner.state import Params
from jaxroll.learner.trainer import Ready, Running, Trainer
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.records import Claim
from jaxroll.roles import evaluator, sampler
from jaxroll.roles import session as sessions
from jaxroll.sharding.layout import Rules

if TYPE_CHECKING:  # it loads JAX, which must come after the scoring pools
    pass


class DeviceLock(AbstractContextManager):
    """A lock that is had in the order in which it was asked for: an engine between two steps asks again at once, and
    would keep a plain one from everybody else. Not reentrant."""

    def __init__(self) -> None:
        self._guard, self._taken = threading.Lock(), False
        self._asking: deque[threading.Semaphore] = deque()

    def __enter__(self) -> DeviceLock:
        with self._guard:
            if not self._taken:
                self._taken = True
                return self
            mine = threading.Semaphore(0)
            self._asking.append(mine)
        mine.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._asking:
                self._asking.popleft().release()  # it is theirs now, and stays taken
            else:
                self._taken = False


class LockedTrainer(Trainer):
    """A trainer whose programs are queued in turns. What only waits or reads (`finished`) takes none, and neither does
    what copies on each device for itself: the copy that is published, a checkpoint that is written or restored."""

    def __init__(
        self, turn: DeviceLock, config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules, *, key: jax.Array
    ) -> None:
        with turn:
            super().__init__(config, spec, mesh, rules, key=key)
        self._turn = turn

    def set_params(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer."""
        with self._turn:
            super().set_params(params)

    def set_reference(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer."""
        with self._turn:
            super().set_reference(params)

    def warmup(self, progress: Progress | None = None) -> None:
        """See Trainer."""
        with self._turn:
            super().warmup(progress)

    def prepare(self, claim: Claim) -> Ready:
        """See Trainer."""
        with self._turn:
            return super().prepare(claim)

    def dispatch_step(self, ready: Ready) -> Running:
        """See Trainer."""
        with self._turn:
            return super().dispatch_step(ready)

    def publishable_params(self) -> Params:
        """See Trainer."""
        with self._turn:
            return super().publishable_params()

    def base_params(self) -> Params:
        """See Trainer."""
        with self._turn:
            return super().base_params()


# --- All roles with devices in one process, which share its devices by turns (`placement.colocated`)
#
# For devices that one process alone can have, above all a single TPU chip, and for as many as the largest mesh wants.
# The
# learner has the main thread, every sampler and the evaluator a thread each; each of them is a client of the store as
# in
# a process of its own, and a schedule, a bound on age and a restart mean what they mean there. What is different: they
# live and die together.
#
# They dispatch by turns (`jaxroll.roles.colocated`), since several devices must get programs that speak to each other
# in one
# order. Devices compute what they are given one after the other: in a synchronous run either role has them to itself
# while it is at work, with α > 0 their programs alternate. Who only waits for a device has no turn, but an engine that
# reads the tokens of its step, and a learner whose models price or judge a claim's tokens.
#
# SIGTERM stops the learner, which finishes its step and checkpoints, then the others. When one fails, all end, and the
# process with its error.

LEAVE_S = sessions.STOP_S
LOOK_S = 0.1


def main(args: RoleArgs) -> int:
    """Sample, train and evaluate until the schedule's last step is done (0) or until told to stop
    (EXIT_INTERRUPTED)."""
    told, stop = threading.Event(), threading.Event()  # by a signal; by that, or by a part that failed
    lives = [sessions.EngineProcess(part, args) for part in role_specs(args)]
    from jaxroll.roles import learner

    turn = DeviceLock()
    others = [RoleThread(life, turn, stop.set) for life in lives]
    sessions.print_stacks_on_signal(*(life.open() for life in lives))
    lifeline.on_stop(lambda: (told.set(), stop.set()))

    def begin() -> None:
        if stop.is_set():
            return
        for other in others:
            other.start()

    # Not before there are weights of this life: those that the store knows may be of one that has ended.
    beside = learner.ColocationHooks(functools.partial(LockedTrainer, turn), begin)
    code = 1
    try:
        code = learner.run_learner(args, stop, beside=beside)
        if code == 0:  # the run is closed: the evaluator ends after its last answers
            evaluating = [other for other in others if other.name == "evaluator"]
            _wait_for(evaluating, args.config.supervisor.finish_s, told)
    finally:
        leave(others)
    errors = [other.error for other in others if other.error is not None]
    if errors and code != 0:  # else all is trained, and another life would find nothing to do
        raise errors[0]
    return code


def role_specs(args: RoleArgs) -> list[sessions.RoleSpec]:
    """What is played beside the learner."""
    found = [sampler.part(replace(args, index=index)) for index in range(args.config.sampler.count)]
    return [*found, evaluator.part(args.config)] if args.config.evaluator.every else found


def leave(others: Sequence[RoleThread]) -> None:
    """Ask all to end, and wait `LEAVE_S` for that; whoever is left has an `error`."""
    for other in others:
        other.ask_to_leave()
    _wait_for(others, LEAVE_S)
    for other in others:
        if other.is_alive() and other.error is None:
            other.error = InfraError(f"{other.name} did not leave within {LEAVE_S:g} s")
            print(f"error: {other.error}", file=sys.stderr, flush=True)


def _wait_for(others: Sequence[RoleThread], limit_s: float, stop: threading.Event | None = None) -> None:
    """Return when all have ended, after `limit_s`, or when `stop` is set."""
    until_s = time.monotonic() + limit_s
    while any(other.is_alive() for other in others) and time.monotonic() < until_s:
        if stop is not None and stop.is_set():
            return
        time.sleep(LOOK_S)  # not Event.wait: a signal that sets it then would wait for itself


class RoleThread(threading.Thread):
    """A life beside the learner's, on a thread of its own. `error` is what it failed by, told by `failed`."""

    def __init__(self, life: sessions.EngineProcess, turn: DeviceLock, failed: Callable[[], None]) -> None:
        super().__init__(name=life.part.role, daemon=True)
        self.error: BaseException | None = None
        self._life, self._turn, self._failed = life, turn, failed

    def run(self) -> None:
        """See Thread."""
        try:
            self._life.run(self._turn)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            traceback.print_exc()
            self.error = error
            self._failed()

    def ask_to_leave(self) -> None:
        """Soon it ends, if it has begun; else there is nothing to end but what it would have begun with."""
        if self.ident is None:
            self._life.close()
        elif self.is_alive():
            self._life.session.request_stop()
