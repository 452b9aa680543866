"""Starts the processes of a program, watches them by pid, starts dead ones again, and stops them in order.

One thread, one loop: start what is due, handle ended processes (`policy` decides), show what is new in the metrics.
The run is complete when its leader (the learner, or the process it shares) ends with 0; then the evaluator may finish,
and the others are asked to leave: learner, evaluator, actors, samplers, store. An interrupt asks them in that order; a
second one kills them. SIGHUP (the terminal is gone) asks them too, and never kills: a shell that ends sends it twice.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxroll import disk, lifeline, metrics
from jaxroll.clock import Clock, MonotonicClock, unix_s
from jaxroll.config import SupervisorConfig
from jaxroll.control import child as policy
from jaxroll.control.child import Child, last_error, tail
from jaxroll.control.program import ProcessSpec
from jaxroll.errors import EXIT_FAILURE, EXIT_INTERRUPTED, ConfigError, InfraError
from jaxroll.run_paths import RunPaths

TICK_S = 0.1
READY_S = 180.0
STOP_ORDER = ("colocated", "learner", "sft", "evaluator", "actor", "sampler", "store")


class Observer(Protocol):
    """A receiver of the run's rows and events."""

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """New metrics rows."""
        ...

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Called about ten times a second with the state of every process."""
        ...

    def say(self, text: str) -> None:
        """A sentence worth keeping on the screen."""
        ...


class Guarded:
    """An observer whose errors end nothing: the first of each method is reported, and all are counted.

    A row that raises costs itself only.
    """

    def __init__(self, observer: Observer, report: Callable[[str], None]) -> None:
        self._observer, self._report = observer, report
        self.failures: Counter[str] = Counter()

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """See Observer.rows."""
        for row in rows:
            self._call("rows", [row])

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """See Observer.tick."""
        self._call("tick", processes)

    def say(self, text: str) -> None:
        """See Observer.say."""
        self._call("say", text)

    def _call(self, method: str, argument: object) -> None:
        try:
            getattr(self._observer, method)(argument)
        except Exception as error:  # noqa: BLE001  # recorded; the run must not depend on its view
            self.failures[method] += 1
            if self.failures[method] == 1:
                at = traceback.extract_tb(error.__traceback__)[-1]
                self._report(
                    f"the view failed in `{method}`, the run goes on: {type(error).__name__}: {error} "
                    f"({Path(at.filename).name}:{at.lineno})"
                )


@dataclass(frozen=True)
class ProcessView:
    """The view of a process: `state` is waiting, starting, running, backoff, stopping or done."""

    name: str
    state: str
    seconds: float


@dataclass
class _Slot:
    """A process of the program, alive or not."""

    spec: ProcessSpec
    child: policy.Process | None = None
    history: policy.RestartHistory = field(default_factory=policy.RestartHistory)
    since_s: float = 0.0  # when the present state began
    due_s: float | None = 0.0  # when to start it; None while it runs or is done
    done: bool = False
    stopping: bool = False


class WakeSignal:
    """Wakes the thread that waits. `ring` may interrupt `wait` in its own thread, as the handler of a signal does:
    with an Event, whose lock is not reentrant, `set` would then wait forever.
    """

    def __init__(self) -> None:
        self._rung: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Let `wait` return."""
        self._rung.put(None)

    def wait(self, timeout_s: float) -> None:
        """Return when it was rung, or after `timeout_s`."""
        with contextlib.suppress(queue.Empty):
            self._rung.get(timeout=timeout_s)


class Supervisor:
    """Run a program until its leader is done, a process is given up, or the user interrupts. Use it once.

    `after` of a spec is honoured at its first start only; a restarted process finds its peers by patience.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        config: SupervisorConfig,
        observer: Observer,
        *,
        leader: str = "learner",
        environ: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        start: Callable[[ProcessSpec, Path, Mapping[str, str]], policy.Process] = Child,
    ) -> None:
        self._slots = {spec.name: _Slot(spec) for spec in specs}
        self._run_dir, self._config, self._leader = run_dir, config, leader
        self._observer, self._start = Guarded(observer, self._note), start
        self._environ = dict(os.environ if environ is None else environ)
        self._clock = clock or MonotonicClock()
        self._begun: set[str] = set()
        self._interrupts = 0
        self._hung_up = False
        self._bell = WakeSignal()
        self._paths = RunPaths(run_dir)
        self._follower = metrics.RowReader(self._paths.metrics, at_end=True)
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        self._tracker = metrics.JsonlTracker(self._paths.metrics, self._observer.say)
        self._unreadable = False  # whether the metrics could not be read the last time
        self._missing = 0  # samplers that plans ask for (`sampler.least_count`)

    def run(self) -> int:
        """The exit code: 0 complete, 130 interrupted, 64 a refused config, 1 anything else. Nothing is left running."""
        previous = {signum: signal.signal(signum, self._interrupt) for signum in lifeline.stop_signals()}
        try:
            code = self._watch()
            self._stop_all()
        finally:
            self._kill_all()
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            self._tracker.close()
        self._show()
        return code

    def _interrupt(self, signum: int, frame: object) -> None:
        if signum == signal.SIGHUP:
            self._hung_up = True
        else:
            self._interrupts += 1
        self._bell.ring()

    def _watch(self) -> int:
        """Until the leader is done or the run must end; the exit code."""
        for slot in self._slots.values():
            if slot.spec.ready_file is not None:
                slot.spec.ready_file.unlink(missing_ok=True)  # of an earlier process
            slot.since_s = self._clock.now_s()
        finish_by_s: float | None = None
        while True:
            if self._interrupts or self._hung_up:
                self._observer.say(f"Stopping in order: {self._order()}. Interrupt again to kill.")
                return EXIT_INTERRUPTED
            failure = self._advance()
            if failure is not None:
                return failure
            if self._slots[self._leader].done:
                finish_by_s = finish_by_s or self._clock.now_s() + self._config.final_eval_s
                if self._evaluated(finish_by_s):
                    return 0
            self._pause()

    def _advance(self) -> int | None:
        """Start the processes that are due and handle ended ones; an exit code when the run must end."""
        if self._missing and not self._slots[self._leader].done:
            self._start_missing()
        for slot in self._slots.values():
            try:
                self._start_if_due(slot)
            except ConfigError as error:
                self._observer.say(str(error))
                return EXIT_FAILURE
            except InfraError as error:
                if (failure := self._not_started(slot, error)) is not None:
                    return failure
            code = slot.child.poll() if slot.child is not None else None
            if code is not None:
                failure = self._ended(slot, code)
                if failure is not None:
                    return failure
        return None

    def _start_missing(self) -> None:
        """Start samplers again that had left in order, as many as the run asks for."""
        leads = lambda slot: slot.spec.gang in ("", slot.spec.name)  # noqa: E731 - others start with it
        spare = [slot for slot in self._slots.values() if slot.spec.role == "sampler" and slot.done and leads(slot)]
        for slot in spare[: self._missing]:
            for mate in self._gang(slot):
                mate.done, mate.due_s, mate.since_s = False, self._clock.now_s(), self._clock.now_s()
            self._missing -= 1
            self._observer.say(f"{slot.spec.name} starts again: the run needs it.")

    def _start_if_due(self, slot: _Slot) -> None:
        now = self._clock.now_s()
        if slot.due_s is None or now < slot.due_s:
            return
        unready = [name for name in slot.spec.after if not self._ready(name)]
        if unready and slot.spec.name not in self._begun:
            if now - slot.since_s > READY_S:
                reason = f"{', '.join(unready)} not ready after {READY_S:.0f} s"
                raise ConfigError(slot.spec.name, "waiting", reason, f"See {self._log(unready[0])}.")
            return
        slot.child = self._start(slot.spec, self._log(slot.spec.name), self._environ)
        slot.due_s, slot.since_s = None, now
        self._begun.add(slot.spec.name)

    def _ready(self, name: str) -> bool:
        file = self._slots[name].spec.ready_file
        return name in self._begun and (file is None or file.exists())

    def _ended(self, slot: _Slot, code: int) -> int | None:
        """Act on the end of a process; an exit code when the run must end."""
        now = self._clock.now_s()
        assert slot.child is not None
        pid, cause, slot.child = slot.child.pid, slot.child.cause, None
        verdict = policy.after_exit(slot.spec.name, code, now - slot.since_s, slot.history, self._config)
        slot.since_s = now
        if slot.spec.optional:
            slot.done = True
            if code:
                self._note(f"{slot.spec.name} ended {policy.exit_text(code)}; see {self._log(slot.spec.name)}")
            return None
        match verdict:
            case policy.Done():
                slot.done = True
                if slot.spec.role == "store" and not self._slots[self._leader].done:
                    return self._give_up(slot, EXIT_FAILURE, "the store ended before the learner")
            case policy.Restart() if slot.spec.gang and self._slots[self._leader].done:
                slot.done = True  # it fell on its way out, after all that it was for
            case policy.Restart(delay_s, history):
                slot.history = history
                for mate in self._gang(slot):
                    mate.due_s, mate.since_s, mate.done = now + delay_s, now, False
                error = last_error(self._log(slot.spec.name))
                self._tracker.log(
                    {
                        "t": unix_s(),
                        "role": "supervisor",
                        "kind": "restart",
                        "process": slot.spec.name,
                        "pid": pid,
                        "code": code,
                        **({"cause": cause} if cause else {}),
                        **({"error": error} if error else {}),
                    }
                )
                why = f" ({cause})" if cause else ""
                self._observer.say(
                    f"{slot.spec.name} died {policy.exit_text(code)}{why}; it starts again in {delay_s:.1f} s."
                )
            case policy.GiveUp(reason) if code != policy.EXIT_CONFIG and self._other_store(slot):
                slot.done = True
                self._note(f"gave up: {reason}; the other store goes on")
                self._observer.say(f"{slot.spec.name} is not started again: {reason}. The other store goes on.")
            case policy.GiveUp(reason) if self._slots[self._leader].done:
                slot.done = True  # all is trained; what is lost is at most the last evaluation
                self._note(f"gave up after the end of the training: {reason}")
                self._observer.say(f"{slot.spec.name} is not started again: {reason}. All is trained.")
            case policy.GiveUp(reason):
                return self._give_up(slot, code if code > 0 else EXIT_FAILURE, f"{reason}{cause and ': '}{cause}")
        return None

    def _other_store(self, slot: _Slot) -> bool:
        """True if `slot` is one of two stores and the other one is not given up."""
        stores = [other for other in self._slots.values() if other.spec.role == "store" == slot.spec.role]
        return any(other is not slot and not other.done for other in stores)

    def _not_started(self, slot: _Slot, error: InfraError) -> int | None:
        """Try again later, as after a death; an exit code when that was tried too often."""
        now = self._clock.now_s()
        if slot.spec.optional:
            slot.done, slot.due_s = True, None
            self._note(str(error))
            return None
        match policy.after_exit(slot.spec.name, EXIT_FAILURE, 0.0, slot.history, self._config):
            case policy.Restart(delay_s, history):
                slot.history, slot.due_s, slot.since_s = history, now + delay_s, now
                self._observer.say(f"{error}; the next attempt follows in {delay_s:.1f} s.")
                return None
            case _:
                # The log may be what cannot be written: then the process's own words about its disk are lost.
                advice = disk.remedy(error.__cause__ or error, self._paths.logs)
                return self._give_up(slot, EXIT_FAILURE, f"{error}, {slot.history.deaths + 1} times", advice)

    def _gang(self, slot: _Slot) -> list[_Slot]:
        """End the other processes of the gang of `slot`; return the slots to start again, `slot` first."""
        gang = slot.spec.gang
        mates = [other for other in self._slots.values() if gang and other.spec.gang == gang and other is not slot]
        self._kill([mate for mate in mates if mate.child is not None])
        return [slot, *mates]

    def _give_up(self, slot: _Slot, code: int, reason: str, advice: str = "") -> int:
        slot.done = True
        log = self._log(slot.spec.name)
        self._note(f"gave up: {reason}")
        self._observer.say(f"The run ends: {reason}.{advice and ' '}{advice}\nThe last lines of {log}:\n{tail(log)}")
        return code if code == policy.EXIT_CONFIG else EXIT_FAILURE

    def _evaluated(self, by_s: float) -> bool:
        """True if the evaluator, if there is one, has ended by itself or has had its time."""
        if all(slot.done for slot in self._slots.values() if slot.spec.role == "evaluator"):
            return True
        if self._clock.now_s() < by_s:
            return False
        self._observer.say(
            f"The last evaluation took longer than supervisor.final_eval_s = {self._config.final_eval_s:g} s."
        )
        return True

    def _order(self) -> str:
        ranks = [
            (role, [slot.spec.name for slot in self._slots.values() if slot.spec.role == role]) for role in STOP_ORDER
        ]
        return ", ".join(names[0] if len(names) == 1 else f"{len(names)} {role}s" for role, names in ranks if names)

    def _stop_all(self) -> None:
        """Ask every process to leave, in order, each rank with `stop_s` of patience, then kill it."""
        for role in STOP_ORDER:
            rank = [slot for slot in self._slots.values() if slot.spec.role == role and slot.child is not None]
            for slot in rank:
                assert slot.child is not None
                slot.stopping, slot.since_s = True, self._clock.now_s()
                slot.child.terminate()
            self._wait_for(rank)

    def _wait_for(self, rank: Sequence[_Slot]) -> None:
        by_s = self._clock.now_s() + self._config.stop_s
        while True:
            for slot in rank:
                if slot.child is not None and slot.child.poll() is not None:
                    slot.child, slot.done = None, True
            left = [slot for slot in rank if slot.child is not None]
            if not left:
                return
            if self._clock.now_s() > by_s or self._interrupts >= 2:
                names = ", ".join(slot.spec.name for slot in left)
                self._observer.say(
                    f"{names} did not leave within {self._config.stop_s:g} s: killed."
                    if self._interrupts < 2
                    else f"{names} killed."
                )
                self._kill(left)
                return
            self._pause()

    def _kill_all(self) -> None:
        self._kill([slot for slot in self._slots.values() if slot.child is not None])

    def _kill(self, slots: Sequence[_Slot]) -> None:
        for slot in slots:
            assert slot.child is not None
            slot.child.kill()
            slot.child, slot.done = None, True

    def _pause(self) -> None:
        self._show()
        self._bell.wait(TICK_S)

    def _note(self, text: str) -> None:
        self._tracker.log({"t": unix_s(), "role": "supervisor", "kind": "event", "text": text})

    def _new_rows(self) -> list[dict[str, Any]]:
        try:
            rows = self._follower.rows()
        except OSError as error:
            if not self._unreadable:
                self._observer.say(f"{self._paths.metrics}: {error.strerror}. The run goes on without showing steps.")
            self._unreadable = True
            return []
        self._unreadable = False
        for row in rows:
            if row.get("what") == "plan" and isinstance(more := row.get("more"), int):
                self._missing = self._missing + more if more else 0
        return rows

    def _show(self) -> None:
        self._observer.rows(self._new_rows())
        self._observer.tick([self._view(slot) for slot in self._slots.values()])

    def _view(self, slot: _Slot) -> ProcessView:
        now = self._clock.now_s()
        if slot.done:
            state = "done"
        elif slot.child is None:
            state = "backoff" if slot.spec.name in self._begun else "waiting"
        elif slot.stopping:
            state = "stopping"
        else:
            state = "running" if self._ready(slot.spec.name) else "starting"
        return ProcessView(slot.spec.name, state, now - slot.since_s)

    def _log(self, name: str) -> Path:
        return self._paths.log_of(name)
