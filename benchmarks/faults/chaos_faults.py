"""The faults of chaos.py by name. Each acts on a `Run`, undoes itself, and returns a description of its effect.

Here are those of processes and environments; `chaos_machine.py` and `chaos_network.py` have the others.

A fault that the machine does not allow, or whose target does not exist, raises Skipped; one whose effect was not seen,
or that came at another instant than its name says, raises Unseen. After faults with `ends` the
run may end by itself (it is resumed then); after all others it must continue. `alone` faults end the supervisor and are
not paired with each other.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import psutil

from benchmarks.faults.chaos_machine import (
    FEW_DESCRIPTORS,
    LITTLE_MEMORY,
    FillCache,
    FillDisk,
    FillWeights,
    MoveClock,
    NoMemory,
    NoNewTasks,
    ReadOnly,
)
from benchmarks.faults.chaos_network import Certificates, CutLink, CutNetwork
from benchmarks.faults.run import (
    ACTORS,
    INSTANT_S,
    LEASE_S,
    SAMPLERS,
    Run,
    Skipped,
    Unseen,
    Wrong,
    gone_is_fine,
    there,
    until,
)
from jaxroll.errors import EXIT_INTERRUPTED


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
        """Inject the fault; return a description of its effect. Raises Skipped, Unseen or Wrong."""
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
        with contextlib.suppress(psutil.NoSuchProcess):  # ended by its parent, which need not wait for it
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
            process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(psutil.NoSuchProcess):  # as above
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
        if not kills:
            raise Skipped(f"{target} ended by itself before the fault")
        return f"{target} killed {kills} times in {seconds:.1f} s"


GAVE_UP = "supervisor: gave up"  # before a run ends by itself
NO_PYTHON = "Fatal Python error: init_import_site"  # a signal ended the interpreter before it ran any code of ours


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
                raise Unseen(f"the supervisor was giving up, and ended with {code}")  # `Attack.look` judges and resumes
            after, resumes = "", True
            if self.during_resume:
                run.start()
                delay_s = chance.uniform(0.0, 10.0)
                time.sleep(delay_s)
                if resumes := run.alive:
                    run.signal(signal.SIGKILL)
                after = f", resumed and {'killed' if resumes else 'ended by itself'} {delay_s:.1f} s later"
            words, began_python = run.last_words(), NO_PYTHON not in run.output("err").read_text(errors="replace")
            run.start()
        if code is None:
            raise Wrong(f"the supervisor did not end after {name}\n{words}")
        expected = -signal.SIGKILL if self.signum == signal.SIGKILL else EXIT_INTERRUPTED
        if code != expected and not (early and (code == -self.signum or not began_python)):
            raise Wrong(f"the supervisor ended with {code} after {name}, not with {expected}\n{words}")
        effect = f"supervisor ended with {code} after {took_s:.1f} s{after}, resumed"
        if not resumes:
            raise Unseen(effect)
        return effect


def needed(name: str) -> set[str]:
    """The parts of a variant without which the fault has no target."""
    found = {"tls": name.startswith("tls_"), "links": name.startswith("cut_"), "actors": "actor" in name}
    found["files"] = name in ("weights_full", "cache_full")
    return {part for part, is_needed in (found | {"warm": name == AT_START}).items() if is_needed}


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
        if not taken:  # an episode may do it later
            raise Unseen("ordered, not yet carried out")
        return f"the environment did {self.order} {self.times} times"


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
        if not caught:
            raise Unseen(f"{self.target} killed without seeing {self.instant}")
        return f"{self.target} killed during {self.instant}"


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
    "weights_full": FillWeights(),
    "cache_full": FillCache(),
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
    "few_descriptors": FEW_DESCRIPTORS,
    "little_memory": LITTLE_MEMORY,
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
    "env_reenters": Order("reenter", 3),
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
