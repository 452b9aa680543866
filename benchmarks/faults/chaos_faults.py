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
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.faults import machine
from benchmarks.faults.chaos_network import Certificates, CutLink, CutNetwork
from benchmarks.faults.run import (
    ACTORS,
    LEASE_S,
    SAMPLERS,
    Run,
    Skipped,
    Wrong,
    gone_is_fine,
    needs_namespace,
    there,
)
from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.run_paths import RunPaths

INSTANT_S = 15.0  # time for which a fault waits for the instant that it needs
POLL_S = 0.002
MEMORY_GONE_S = 20.0  # as in hooks/sitecustomize.py


class Fault(Protocol):
    """A fault of a user, a machine or an environment."""

    @property
    def ends(self) -> bool:
        """True if the run may end by itself after it."""
        ...

    @property
    def alone(self) -> bool:
        """True if it is not paired with another such fault."""
        ...

    def __call__(self, run: Run, chance: random.Random) -> str:
        """Inject the fault; return a description of its effect. Raises Skipped or Wrong."""
        ...


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

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        both = chance.sample(run.roles, 2)
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
class Slow:
    """A process that computes a fifth of the time, for longer than a lease."""

    targets: tuple[str, ...]
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(self.targets), chance.uniform(1.3, 2.5) * LEASE_S
        process, until_s = there(run, target), time.monotonic() + seconds
        with gone_is_fine(target):
            while time.monotonic() < until_s:
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.4)
                process.send_signal(signal.SIGCONT)
                time.sleep(0.1)
        return f"{target} had a fifth of the time for {seconds:.1f} s"


@dataclass(frozen=True)
class Flap:
    """`kill -9` of a process as often as it comes back, for longer than a lease."""

    targets: tuple[str, ...]
    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(self.targets), chance.uniform(1.3, 2.5) * LEASE_S
        there(run, target)
        until_s, kills = time.monotonic() + seconds, 0
        while time.monotonic() < until_s:
            if (process := run.find(target)) is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    kills += 1
            time.sleep(0.3)
        return f"{target} killed {kills} times in {seconds:.1f} s"


GAVE_UP = "supervisor: gave up"  # before a run ends by itself


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
            if code not in (None, -self.signum, EXIT_INTERRUPTED) and GAVE_UP in run.last_words(20):
                return f"the supervisor was giving up, and ended with {code}"  # `Attack.look` judges this and resumes
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
    """No space left in the file system of the run's folder, or in one of the `disks` below it."""

    ends = True
    alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        needs_namespace(run)
        seconds, folders = chance.uniform(3.0, 8.0), folders_of(run) if "disks" in run.variant else [run.run_dir]
        folder = chance.choice(folders)
        taken = machine.fill(folder, seconds)
        return f"{taken >> 20} MB taken for {seconds:.1f} s in {folder.name}"


@dataclass(frozen=True)
class ReadOnly:
    """Files in the run's folder, or in one below it, can be opened for reading only."""

    ends = True
    alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        needs_namespace(run)
        seconds, folder = chance.uniform(3.0, 8.0), chance.choice(folders_of(run))
        with machine.read_only(folder):
            time.sleep(seconds)
        return f"{folder.name} read-only for {seconds:.1f} s"


def small_disks(run_dir: Path) -> tuple[Path, ...]:
    """The folders of a run that are on disks of their own in the variant `disks`."""
    paths = RunPaths(run_dir)
    return paths.checkpoints, paths.logs, paths.tensorboard


def folders_of(run: Run) -> list[Path]:
    """The run's folder, and those of `small_disks` that exist."""
    return [path for path in (run.run_dir, *small_disks(run.run_dir)) if path.is_dir()]


def needed(name: str) -> set[str]:
    """The parts of a variant without which the fault has no target."""
    found = {"tls": name.startswith("tls_"), "links": name.startswith("cut_"), "actors": "actor" in name}
    return {part for part, is_needed in (found | {"warm": name == AT_START}).items() if is_needed}


@dataclass(frozen=True)
class FewDescriptors:
    """A role cannot open any more files or connections."""

    ends = True
    alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(run.roles), chance.uniform(3.0, 10.0)
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
        target, seconds = chance.choice(run.roles), chance.uniform(3.0, 8.0)
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
        target = chance.choice(sorted({name.partition("-")[0] for name in run.roles}))
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
    """A sampler, or an actor, can start neither threads nor processes while its scoring worker dies."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(run.players), chance.uniform(2.0, 6.0)
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
    ends: bool = False
    alone: bool = False

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


AT_START = "kill_warm_start"  # injected once, before the first step
FAULTS: dict[str, Fault] = {
    "kill_store": Kill(("store",)),
    "kill_sampler": Kill(SAMPLERS),
    "kill_actor": Kill(ACTORS),
    "kill_learner": Kill(("learner",)),
    "kill_evaluator": Kill(("evaluator",)),
    "kill_feeder": Kill(("feeder",)),
    "kill_scoring": Kill(("scoring",)),
    "kill_environment": Kill(("env",)),
    "kill_two": KillTogether(),
    "kill_supervisor": End(signal.SIGKILL),
    AT_START: KillTwice("sft", 15.0, ends=True),  # it is restarted once
    "kill_resume": End(signal.SIGKILL, during_resume=True),
    "sigint": End(signal.SIGINT),
    "sigterm": End(signal.SIGTERM),
    "sighup": End(signal.SIGHUP),
    "stop_store": Stop(("store",)),
    "stop_sampler": Stop(SAMPLERS),
    "stop_learner": Stop(("learner",)),
    "stop_evaluator": Stop(("evaluator",)),
    "stop_feeder": Stop(("feeder",)),
    "stop_actor": Stop(ACTORS),
    "stop_scoring": Stop(("scoring",)),
    "stop_supervisor": Stop(("supervisor",)),
    "slow_sampler": Slow(SAMPLERS),
    "slow_actor": Slow(ACTORS),
    "slow_scoring": Slow(("scoring",)),
    "flapping_sampler": Flap(SAMPLERS),
    "flapping_actor": Flap(ACTORS),
    "flapping_scoring": Flap(("scoring",)),
    "disk_full": FillDisk(),
    "read_only": ReadOnly(),
    "network_cut": CutNetwork(),
    "cut_store": CutLink("", "store"),
    "cut_learner": CutLink("learner", "store"),
    "cut_sampler": CutLink("sampler", "store"),
    "cut_evaluator": CutLink("evaluator", "store"),
    "cut_actor": CutLink("actor", "store"),
    "cut_sampler_weights": CutLink("sampler", "learner"),
    "cut_evaluator_weights": CutLink("evaluator", "learner"),
    "cut_actor_sampler": CutLink("actor", "sampler"),
    "tls_rotated": Certificates("same"),
    "tls_new_ca": Certificates("ca"),
    "tls_expired": Certificates("expired", ends=True),
    "tls_wrong": Certificates("wrong", ends=True),
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
    "env_type": Order("type", 3),
    "env_huge": Order("huge", 3),
    "env_empty": Order("empty", 3),
    "env_surrogate": Order("surrogate", 3),
    "env_threads": Order("threads"),
    "env_memory": Order("memory"),
    "env_slow_close": Order("slow_close", 3),
}
