"""`python -m benchmarks.lib.paced …`: `python -m jaxroll …` whose devices take at least a given time.

The environment variable JAXROLL_PACE holds a `Pace` as JSON. Roles are the ordinary ones: the engine computes its
tokens and the trainer its gradients, then they sleep until the time of their work is over. So the timing of a run does
not depend on what else the machine does, as long as the computation takes less than the pace.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from jaxroll import lifeline
from jaxroll.control import program
from jaxroll.control.cli import main

VARIABLE = "JAXROLL_PACE"
MODULE = "benchmarks.lib.paced"


@dataclass(frozen=True)
class Pace:
    """Least seconds of a decode step, of a prefill call and of a training step."""

    decode_step_s: float = 0.0
    prefill_s: float = 0.0
    train_s: float = 0.0

    @staticmethod
    def ordered() -> Pace:
        """The pace from the environment variable."""
        return Pace(**json.loads(os.environ.get(VARIABLE, "{}")))


def pace_engine(pace: Pace) -> None:
    """Make decode dispatches and prefill calls of this process take their time, one after another."""
    from jaxroll.engine.device import Device, Dispatch

    prefill, decode, report = Device.prefill, Device.decode, Dispatch.report
    free = [0.0]  # when the paced device has done its work so far

    def paced_prefill(self: Device, *args: Any) -> None:
        free[0] = max(free[0], time.monotonic()) + pace.prefill_s
        prefill(self, *args)

    def paced_decode(self: Device, *args: Any) -> Dispatch:
        free[0] = max(free[0], time.monotonic())
        return decode(self, *args)

    def paced_report(self: Dispatch) -> Any:
        found = report(self)
        free[0] += found.steps * pace.decode_step_s
        time.sleep(max(0.0, free[0] - time.monotonic()))
        return found

    _replace(Device, prefill=paced_prefill, decode=paced_decode)
    _replace(Dispatch, report=paced_report)


def pace_trainer(pace: Pace) -> None:
    """Make the training steps of this process take their time."""
    from jaxroll.learner.trainer import Running, Trainer

    dispatch, await_step, is_done = Trainer.dispatch_step, Trainer.await_step, Running.is_done
    until = [0.0]

    def paced_dispatch(self: Trainer, *args: Any) -> Running:
        until[0] = time.monotonic() + pace.train_s
        return dispatch(self, *args)

    def paced_await(self: Trainer, *args: Any) -> Any:
        found = await_step(self, *args)
        time.sleep(max(0.0, until[0] - time.monotonic()))
        return found

    def paced_is_done(self: Running) -> bool:
        return time.monotonic() >= until[0] and is_done(self)

    _replace(Trainer, dispatch_step=paced_dispatch, await_step=paced_await)
    _replace(Running, is_done=paced_is_done)


def _replace(kind: type, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(kind, name, method)


def pace_children() -> None:
    """Start the roles of a run with this module."""
    build = program.build

    def paced_build(*args: Any, **options: Any) -> tuple[Any, ...]:
        return tuple(
            replace(spec, argv=tuple(MODULE if word == "jaxroll" else word for word in spec.argv))
            for spec in build(*args, **options)
        )

    program.build = paced_build


if __name__ == "__main__":
    role = sys.argv[1] if len(sys.argv) > 1 else ""
    if role == "train":
        pace_children()
    elif role == "sampler":
        pace_engine(Pace.ordered())
    elif role == "learner":
        pace_trainer(Pace.ordered())
    with lifeline.ending():
        sys.exit(main())
