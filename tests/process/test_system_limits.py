"""Whole runs with processes at a limit of the system, and in bare environments such as a service's."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.faults import machine
from benchmarks.faults.verdict import lost_puts, read_journal
from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.envs import talkative
from tests.harness.train_process import LEARNING, ROOT, SMALL, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
WORDS = (
    *LEARNING,
    "--config.schedule.steps=100000",
    "--config.learner.checkpoint_every=3",
    "--config.supervisor.backoff_s=0.1",
)
TINY = (
    "--config.sft.steps=0", "--config.evaluator.every=0", "--config.sampler.slots=4",
    "--config.schedule.groups_per_step=2", "--config.schedule.group_size=2",
    "--config.task.env=tests.harness.envs.dense_reward:dense_reward", *WORDS[-3:],
)  # fmt: skip


@pytest.mark.parametrize("role", ["sampler", "learner", "store"])
@pytest.mark.parametrize("limit", ["descriptors", "memory"])
def test_a_role_at_a_limit_of_the_system(role: str, limit: str, free_run_dir: Path) -> None:
    """The role copes, or dies and is restarted; the other roles keep running and the run continues."""
    with Train(free_run_dir, *WORDS) as train:
        train.until_step(4)
        victim = train.role(role)
        others = {p.pid for name in ("sampler", "learner", "store") if name != role for p in [train.role(name)]}
        kind, least = {
            "descriptors": (resource.RLIMIT_NOFILE, 8),  # below the next free number, also when a connection ends
            "memory": (resource.RLIMIT_AS, victim.memory_info().vms + 2**20),
        }[limit]
        was = resource.prlimit(victim.pid, kind)
        resource.prlimit(victim.pid, kind, (least, was[1]))
        at = last_step(train.rows)
        train.until(lambda rows: last_step(rows) >= at + 8, f"steps with a {role} at its limit of {limit}")
        if victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
            resource.prlimit(victim.pid, kind, was)
        assert all(psutil.pid_exists(pid) for pid in others), "another role died"
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        assert train.report()["restarts"] <= 2


@contextlib.contextmanager
def no_more_tasks(process: psutil.Process) -> Iterator[None]:
    """The process can start neither threads nor processes."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(machine.no_more_tasks(process))
        except machine.Refused as reason:  # it needs a cgroup of pids, as root is not bound by RLIMIT_NPROC
            pytest.skip(str(reason))
        yield


def test_roles_that_can_start_neither_threads_nor_processes(free_run_dir: Path) -> None:
    """One role after the other, its child processes killed: it copes, or dies and is restarted; no other role dies."""
    roles = ("sampler", "learner", "store")
    with Train(free_run_dir, *TINY, "--config.learner.mesh.fsdp=1", "--config.sampler.mesh.tensor=1") as train:
        train.until_step(2)
        for role in roles:
            victim, others = train.role(role), {train.role(name).pid for name in roles if name != role}
            with no_more_tasks(victim):
                for child in victim.children():
                    child.kill()
                train.rows += train._rows.rows()
                at = last_step(train.rows)
                train.until(lambda rows, at=at: last_step(rows) >= at + 5, f"steps with a {role} without new tasks")
            assert all(psutil.pid_exists(pid) for pid in others), f"another role died\n{train.logs()}"
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        assert train.report()["restarts"] <= 2 * len(roles)


@pytest.mark.parametrize("role", ["sampler", "learner", "store"])
def test_a_role_without_free_memory_ends_with_that_cause_and_is_restarted(
    role: str, free_run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the role takes all memory up to its limit, so that the role's own allocations fail."""
    for name in ("memory", "journal"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"CHAOS_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # what one thread of a role takes, its other threads have not
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "benchmarks" / "faults" / "hooks"), str(ROOT)]))
    with Train(free_run_dir, *TINY) as train:
        train.until_step(4)
        victim = train.role(role)
        (tmp_path / "memory" / role).touch()
        train.until(lambda rows: any(row["kind"] == "restart" for row in rows), f"the end of the {role}")
        assert not psutil.pid_exists(victim.pid)
        at = last_step(train.rows)
        train.until(lambda rows: last_step(rows) >= at + 6, f"steps after the end of the {role}")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
    with contextlib.closing(sqlite3.connect(free_run_dir / "store.db")) as db:
        assert lost_puts(db, read_journal(tmp_path / "journal")) == []
    (death,) = [row for row in train.rows if row["kind"] == "restart"]
    assert (tmp_path / "memory" / f"{role}.{victim.pid}").read_text() == "used up"
    assert death["pid"] == victim.pid and "out of memory" in death["cause"], death
    words = [sys.executable, "-m", "jaxroll", "inspect", str(free_run_dir)]
    assert "out of memory" in subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("evaluator", ("--config.evaluator.every=2",)),
        ("actor", ("--config.placement.actors=1",)),
        ("feeder", ()),
    ],
)
def test_an_evaluator_an_actor_or_a_feeder_without_free_memory(
    role: str, words: tuple[str, ...], free_run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copes, or ends with that cause and is started again; no other process ends, and the run continues."""
    for name in ("memory", "journal"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"CHAOS_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "benchmarks" / "faults" / "hooks"), str(ROOT)]))
    one_device = ("--config.learner.mesh.fsdp=1", "--config.sampler.mesh.tensor=1")
    with Train(free_run_dir, *TINY, *one_device, *words) as train:
        train.until_step(4)
        victim = train.role(role)
        others = {train.role(name).pid for name in ("sampler", "learner", "store")}
        (tmp_path / "memory" / role).touch()
        free_again_s = time.time() + 30.0  # the hook holds all memory for 20 s, if the process lives so long
        kind = "eval" if role == "evaluator" else "step"
        train.until(
            lambda rows: any(row["kind"] == kind and row["t"] > free_again_s for row in rows),
            f"work with and after a {role} without memory",
        )
        at = last_step(train.rows)
        train.until(lambda rows: last_step(rows) >= at + 6, f"steps after the {role} had no memory")
        assert all(psutil.pid_exists(pid) for pid in others), "another role died"
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
    with contextlib.closing(sqlite3.connect(free_run_dir / "store.db")) as db:
        assert lost_puts(db, read_journal(tmp_path / "journal")) == []
    assert (tmp_path / "memory" / f"{role}.{victim.pid}").read_text() == "used up"
    deaths = [row for row in train.rows if row["kind"] == "restart"]
    assert all(row["process"].startswith(role) and "out of memory" in row["cause"] for row in deaths), deaths


def test_without_a_locale_a_home_or_a_place_for_scratch_and_with_much_to_say(
    free_run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONIOENCODING": "latin-1",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "TMPDIR": str(tmp_path / "missing"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOME", raising=False)
    words = (*SMALL, "--config.task.env=tests.harness.envs.talkative:talkative", "--config.schedule.steps=8")
    with Train(free_run_dir, *words) as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=8, alpha=1)
        assert train.report()["restarts"] == 0
    log = (free_run_dir / "logs" / "sampler-0.log").read_bytes()
    assert log.count(b"line ") >= talkative.LINES, log[-3000:]


def test_a_terminal_that_is_gone_leaves_a_checkpoint(free_run_dir: Path) -> None:
    """After SIGHUP, which the kernel sends when the terminal's connection is lost, `--resume` repeats no step."""
    with Train(free_run_dir, *WORDS[:-2], "--config.learner.checkpoint_every=1000") as first:
        first.until_step(5)
        first.process.send_signal(signal.SIGHUP)
        assert first.finish() == EXIT_INTERRUPTED, first.logs()
        stopped_at = last_step(first.rows)
    with Train(free_run_dir, f"--config.schedule.steps={stopped_at + 2}", resume=True) as second:
        assert second.finish() == 0, second.logs()
        trained = [row["step"] for row in second.rows if row["kind"] == "step"]
        assert trained == [stopped_at + 1, stopped_at + 2]
        second.rows = first.rows + second.rows
        assert_sound(second, steps=stopped_at + 2, alpha=1)
