"""All roles with devices in one process, which share its devices by turns (`placement.colocated`).

For devices that one process alone can have, above all a single TPU chip, and for as many as the largest mesh wants. The
learner has the main thread, every sampler and the evaluator a thread each; each of them is a client of the store as in
a process of its own, and a schedule, a bound on age and a restart mean what they mean there. What is different: they
live and die together.

They dispatch by turns (`jaxroll.roles.turns`), since several devices must get programs that speak to each other in one
order. Devices compute what they are given one after the other: in a synchronous run either role has them to itself
while it is at work, with α > 0 their programs alternate. Who only waits for a device has no turn, but an engine that
reads the tokens of its step, and a learner whose models price or judge a claim's tokens.

SIGTERM stops the learner, which finishes its step and checkpoints, then the others. When one fails, all end, and the
process with its error.
"""

from __future__ import annotations

import functools
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxroll.config import RoleArgs
from jaxroll.errors import InfraError
from jaxroll.roles import evaluator, sampler
from jaxroll.roles import session as sessions

if TYPE_CHECKING:  # it loads JAX, which must come after the scoring pools
    from jaxroll.roles.turns import Turn

LEAVE_S = sessions.STOP_S + 5.0


def main(args: RoleArgs) -> int:
    """Sample, train and evaluate until the schedule's last step is done (0) or until told to stop
    (EXIT_INTERRUPTED)."""
    config, stop = args.config, threading.Event()
    lives = [sessions.Life(part, args) for part in parts(args)]
    from jaxroll.roles import learner, turns

    turn = turns.Turn()
    beside = [Beside(life, turn, stop.set) for life in lives]
    sessions.show_when_asked(*(life.open() for life in lives))
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    for one in beside:
        one.start()
    try:
        code = learner.lived(args, stop, trainer=functools.partial(turns.trainer, turn))
        if code == 0:
            for one in beside:  # the run is closed: samplers end by themselves, the evaluator after its last answers
                one.join(config.supervisor.finish_s)
    finally:
        for one in beside:
            one.leave()
    for one in beside:
        if one.error is not None:
            raise one.error
    return code


def parts(args: RoleArgs) -> list[sessions.Part]:
    """What is played beside the learner."""
    found = [sampler.part(replace(args, index=index)) for index in range(args.config.sampler.count)]
    return [*found, evaluator.part(args.config)] if args.config.evaluator.every else found


class Beside(threading.Thread):
    """A life beside the learner, on a thread of its own. `error` is what it failed by, told by `failed`."""

    def __init__(self, life: sessions.Life, turn: Turn, failed: Callable[[], None]) -> None:
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

    def leave(self) -> None:
        """Ask it to end, and wait for that."""
        if self.is_alive():
            self._life.session.request_stop()
            self.join(LEAVE_S)
        if self.is_alive() and self.error is None:
            self.error = InfraError(f"{self.name} did not leave within {LEAVE_S:g} s")
