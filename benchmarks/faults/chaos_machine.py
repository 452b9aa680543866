"""Faults of chaos.py of the machine: disks, descriptors, memory, threads and the wall clock."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults import machine
from benchmarks.faults.run import INSTANT_S, SAMPLERS, Run, Skipped, gone_is_fine, needs_namespace, there, until
from jaxroll.run_paths import RunPaths

MEMORY_GONE_S = 20.0  # as in hooks/sitecustomize.py


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
class FillWeights:
    """No space left in the folder through which the weights go."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        needs_namespace(run)
        seconds = chance.uniform(3.0, 8.0)
        return f"{machine.fill(run.weights, seconds) >> 20} MB taken for {seconds:.1f} s in {run.weights.name}"


@dataclass(frozen=True)
class FillCache:
    """No space left in the compile cache, which is emptied, while a role that was killed compiles its programs."""

    ends = alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        needs_namespace(run)
        target, seconds = chance.choice(("learner", "evaluator", *SAMPLERS)), chance.uniform(15.0, 25.0)
        process = there(run, target)
        for path in run.cache.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        with gone_is_fine(target):
            process.kill()
        taken = machine.fill(run.cache, seconds)
        return f"{target} killed, and {taken >> 20} MB taken for {seconds:.1f} s in the compile cache"


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


@dataclass(frozen=True)
class Limit:
    """A limit on a `resource` (RLIMIT_*) of a role, for a while: what `most` returns for its process."""

    resource: int
    most: Callable[[psutil.Process], int]
    effect: str
    longest_s: float
    ends: bool = False
    alone = False

    def __call__(self, run: Run, chance: random.Random) -> str:
        target, seconds = chance.choice(run.roles), chance.uniform(3.0, self.longest_s)
        process = there(run, target)
        with gone_is_fine(target), machine.limited(process, self.resource, self.most(process)):
            time.sleep(seconds)
        return f"{target} {self.effect} for {seconds:.1f} s; it {'lives' if process.is_running() else 'ended'}"


FEW_DESCRIPTORS = Limit(psutil.RLIMIT_NOFILE, lambda role: role.num_fds(), "can open nothing more", 10.0, ends=True)
LITTLE_MEMORY = Limit(psutil.RLIMIT_AS, lambda role: role.memory_info().vms + (2 << 20), "may map 2 MB more", 8.0)


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
