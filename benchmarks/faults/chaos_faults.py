"""The faults of chaos.py by name. Each acts on a `Run`, undoes itself, and returns a description of its effect.

A fault that the machine does not allow, or whose target does not exist, raises Skipped. After faults with `ends` the
run may end by itself (it is resumed then); after all others it must continue. `alone` faults end the supervisor and are
not paired with each other.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from benchmarks.faults import machine
from benchmarks.faults.run import LEASE_S, Run
from jaxroll.errors import EXIT_INTERRUPTED

ROLES = ("store", "learner", "sampler-0", "sampler-1", "evaluator")
INSTANT_S = 15.0  # time for which a fault waits for the instant that it needs
POLL_S = 0.002
MEMORY_GONE_S = 20.0  # as in hooks/sitecustomize.py


class Skipped(Exception):
    """The fault did not take place; the message is the reason."""


class Wrong(Exception):
    """The run's reaction is a violation, which the message names."""


class Fault(Protocol):
    """A fault of a user, a machine or an environment."""

    ends: bool
    alone: bool

    def __call__(self, run: Run, chance: random.Random) -> str:
        """Inject the fault; return a description of its effect. Raises Skipped or Wrong."""
        ...


def there(run: Run, target: str) -> psutil.Process:
    """The target's process."""
    found = run.wait_for(target)
    if found is None:
        raise Skipped(f"no {target}")
    return found


@contextlib.contextmanager
def gone_is_fine(target: str) -> Iterator[None]:
    """Turn the early end of the target into Skipped."""
    try:
        yield
    except psutil.NoSuchProcess:
        raise Skipped(f"{target} ended by itself before the fault") from None


@dataclass(frozen=True)
class Kill:
    """`kill -9` of a process that the run replaces."""

    targets: tuple[str, ...]
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target = chance.choice(self.targets)
        process = there(run, target)
        with gone_is_fine(target):
            process.kill()
        return f"{target} (pid {process.pid}) killed"


@dataclass(frozen=True)
class KillTogether:
    """`kill -9` of two processes within a few milliseconds."""

    targets: tuple[str, ...] = ROLES
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        both = chance.sample(self.targets, 2)
        for target in both:
            Kill((target,))(run, chance)
        return f"{' and '.join(both)} killed"


@dataclass(frozen=True)
class Stop:
    """SIGSTOP for longer than a lease, then SIGCONT."""

    targets: tuple[str, ...]
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(self.targets), chance.uniform(1.3, 2.5) * LEASE_S
        process = there(run, target)
        with gone_is_fine(target):
            process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)
        return f"{target} stopped for {seconds:.1f} s"


@dataclass(frozen=True)
class End:
    """A signal to the supervisor, and `--resume` after its end, perhaps killed while it resumes."""

    signum: int
    during_resume: bool = False
    ends = False
    alone = True

    def __call__(self, run: Run, chance: random.Random) -> str:
        name = signal.Signals(self.signum).name
        with run.lock:
            began, early = time.monotonic(), not run.processes()  # no role has started: any end is right
            code = run.signal(self.signum)
            took_s = time.monotonic() - began
            after = ""
            if self.during_resume:
                run.start()
                delay_s = chance.uniform(0.0, 10.0)
                time.sleep(delay_s)
                if run.alive:
                    run.signal(signal.SIGKILL)
                after = f", resumed and killed {delay_s:.1f} s later"
            words = run.last_words()
            run.start()
        if code is None:
            raise Wrong(f"the supervisor did not end after {name}\n{words}")
        expected = -signal.SIGKILL if self.signum == signal.SIGKILL else EXIT_INTERRUPTED
        if code != expected and not (early and code == -self.signum):
            raise Wrong(f"the supervisor ended with {code} after {name}, not with {expected}\n{words}")
        return f"supervisor ended with {code} after {took_s:.1f} s{after}, resumed"


@dataclass(frozen=True)
class FillDisk:
    """No space left in the file system of the run's folder."""

    ends = True
    alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        needs_namespace(run)
        seconds = chance.uniform(3.0, 8.0)
        taken = machine.fill(run.run_dir.parent, seconds)
        return f"{taken >> 20} MB taken for {seconds:.1f} s"


@dataclass(frozen=True)
class ReadOnly:
    """Files in the run's folder can be opened for reading only."""

    ends = True
    alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        needs_namespace(run)
        seconds = chance.uniform(3.0, 8.0)
        with machine.read_only(run.run_dir):
            time.sleep(seconds)
        return f"run folder read-only for {seconds:.1f} s"


@dataclass(frozen=True)
class CutNetwork:
    """No packet passes between the roles."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        needs_namespace(run)
        seconds = chance.uniform(2.0, 2.0 * LEASE_S)
        with machine.network_cut():
            time.sleep(seconds)
        return f"no network for {seconds:.1f} s"


def needs_namespace(run: Run) -> None:
    """Skip the fault if this process has no separate namespaces."""
    if run.no_namespace:
        raise Skipped(run.no_namespace)


@dataclass(frozen=True)
class FewDescriptors:
    """A role cannot open any more files or connections."""

    ends = True
    alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(ROLES), chance.uniform(3.0, 10.0)
        process = there(run, target)
        with gone_is_fine(target):
            open_now = process.num_fds()
            with machine.limited(process, psutil.RLIMIT_NOFILE, open_now):
                time.sleep(seconds)
        return f"{target} has no more than {open_now} descriptors for {seconds:.1f} s"


@dataclass(frozen=True)
class LittleMemory:
    """A role cannot map more memory."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(ROLES), chance.uniform(3.0, 8.0)
        process = there(run, target)
        with gone_is_fine(target):
            room = process.memory_info().vms + (2 << 20)
            with machine.limited(process, psutil.RLIMIT_AS, room):
                time.sleep(seconds)
        state = "lives" if process.is_running() else "ended"
        return f"{target} may map 2 MB more for {seconds:.1f} s; it {state}"


@dataclass(frozen=True)
class NoMemory:
    """Every allocation of a role fails (`hooks/sitecustomize.py`)."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target = chance.choice(("store", "learner", "sampler", "evaluator"))
        order = run.memory / target
        for note in run.memory.iterdir():
            note.unlink()  # a process that lived on may be hit again, and its note has the same name
        order.touch()
        taken = until(lambda: not order.exists(), INSTANT_S)
        order.unlink(missing_ok=True)
        if not taken:
            raise Skipped(f"no {target}")
        (by,) = run.memory.iterdir()
        pid = int(by.suffix[1:])
        ended = until(lambda: not psutil.pid_exists(pid), 1.5 * MEMORY_GONE_S)
        return f"{target} (pid {pid}) had no free memory and {'ended' if ended else 'lived on'}"


@dataclass(frozen=True)
class NoNewTasks:
    """A sampler can start neither threads nor processes while its scoring worker dies."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(("sampler-0", "sampler-1")), chance.uniform(2.0, 6.0)
        process = there(run, target)
        try:
            with gone_is_fine(target), machine.no_more_tasks(process):
                for child in process.children():
                    child.kill()
                time.sleep(seconds)
        except machine.Refused as reason:
            raise Skipped(str(reason)) from reason
        return f"{target} lost its workers and could start nothing for {seconds:.1f} s"


@dataclass(frozen=True)
class MoveClock:
    """The wall clock of all processes jumps."""

    sign: int
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        by_s = self.sign * chance.choice((5.0, 60.0, 3600.0, 86400.0)) * chance.uniform(0.5, 1.5)
        run.set_clock(run.clock_offset() + by_s)
        return f"the clock jumped by {by_s:+.0f} s"


@dataclass(frozen=True)
class Order:
    """The environment misbehaves once, as the order says."""

    order: str
    times: int = 1
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        for number in range(self.times):
            (run.orders / f"{self.order}.{number}").touch()
        taken = until(lambda: not any(run.orders.glob(f"{self.order}.*")), INSTANT_S)
        return f"the environment did {self.order} {self.times} times" if taken else "ordered, not yet carried out"


@dataclass(frozen=True)
class CloseOutput:
    """The reader of the supervisor's output ends."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        with run.lock:
            if run.reader is None or run.reader.poll() is not None:
                raise Skipped("there is no reader any more")
            run.reader.kill()
            run.reader.wait(30)
        return "the reader of the supervisor's output has ended"


@dataclass(frozen=True)
class KillAt:
    """`kill -9` of a role at an instant that shows in the run's folder."""

    target: str
    instant: str
    watching: Callable[[Run], contextlib.AbstractContextManager[Callable[[], bool]]]
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        process = there(run, self.target)
        with self.watching(run) as seen:
            caught = until(seen, 2 * INSTANT_S)
        with gone_is_fine(self.target):
            process.kill()
        return f"{self.target} killed {'during' if caught else 'without seeing'} {self.instant}"


@dataclass(frozen=True)
class KillTwice:
    """`kill -9` of a role, and again while it starts: the learner restores, the store rebuilds itself."""

    target: str
    within_s: float
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        process, delay_s = there(run, self.target), chance.uniform(0.0, self.within_s)
        with gone_is_fine(self.target):
            process.kill()
        until(lambda: not process.is_running(), 10.0)
        there(run, self.target)
        time.sleep(delay_s)
        with gone_is_fine(self.target):
            there(run, self.target).kill()
        return f"{self.target} killed, and again {delay_s:.1f} s after it came back"


def until(seen: Callable[[], Any], limit_s: float) -> bool:
    """Wait up to `limit_s` until `seen()` is true; return True if it is."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while time.monotonic() < deadline:
        if seen():
            return True
        pause.wait(POLL_S)
    return False


@contextlib.contextmanager
def compacting(run: Run) -> Iterator[Callable[[], bool]]:
    """A function that is true if parts of a snapshot of the store are on disk but not its mark."""
    sql = "SELECT 1 FROM snapshot_parts WHERE position > (SELECT COALESCE(MAX(position), 0) FROM snapshots) LIMIT 1"
    try:
        connection = sqlite3.connect(f"{(run.run_dir / 'store.db').absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise Skipped(f"no database to watch: {error}") from error
    with contextlib.closing(connection) as db:

        def seen() -> bool:
            try:
                return bool(db.execute(sql).fetchone())
            except sqlite3.Error:  # a starting store has locked it
                return False

        yield seen


@contextlib.contextmanager
def writing_checkpoint(run: Run) -> Iterator[Callable[[], bool]]:
    """A function that is true if a checkpoint exists without its sums or its final name."""

    def seen() -> bool:
        try:
            folders = [path for path in (run.run_dir / "checkpoints").iterdir() if path.is_dir()]
        except OSError:
            return False
        return any(not (path / "sums.json").exists() for path in folders)

    yield seen


WORKERS = ("sampler-0", "sampler-1")
FAULTS: dict[str, Fault] = {
    "kill_store": Kill(("store",)),
    "kill_sampler": Kill(WORKERS),
    "kill_learner": Kill(("learner",)),
    "kill_evaluator": Kill(("evaluator",)),
    "kill_feeder": Kill(("feeder",)),
    "kill_scoring": Kill(("scoring",)),
    "kill_environment": Kill(("env",)),
    "kill_two": KillTogether(),
    "kill_supervisor": End(signal.SIGKILL),
    "kill_resume": End(signal.SIGKILL, during_resume=True),
    "sigint": End(signal.SIGINT),
    "sigterm": End(signal.SIGTERM),
    "sighup": End(signal.SIGHUP),
    "stop_store": Stop(("store",)),
    "stop_sampler": Stop(WORKERS),
    "stop_learner": Stop(("learner",)),
    "stop_evaluator": Stop(("evaluator",)),
    "stop_feeder": Stop(("feeder",)),
    "disk_full": FillDisk(),
    "read_only": ReadOnly(),
    "network_cut": CutNetwork(),
    "few_descriptors": FewDescriptors(),
    "little_memory": LittleMemory(),
    "no_memory": NoMemory(),
    "no_new_tasks": NoNewTasks(),
    "clock_forward": MoveClock(1),
    "clock_back": MoveClock(-1),
    "stderr_flood": Order("flood"),
    "output_gone": CloseOutput(),
    "kill_compaction": KillAt("store", "a compaction", compacting),
    "kill_checkpoint": KillAt("learner", "a checkpoint's write", writing_checkpoint),
    "kill_restore": KillTwice("learner", 8.0),
    "kill_recovery": KillTwice("store", 2.0),
    "env_raises": Order("raise", 5),
    "env_infra": Order("infra", 5),
    "env_exits": Order("exit"),
    "env_interrupts": Order("interrupt"),
    "env_cancels": Order("cancel"),
    "env_hangs": Order("hang", 3),
    "env_blocks": Order("block"),
    "env_bool": Order("bool", 3),
    "env_nan": Order("nan", 3),
    "env_words": Order("words", 3),
}
