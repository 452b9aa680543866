"""A `jaxroll train` of real processes for tests: follow its metrics, kill its roles, read its log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

from jaxroll import lifeline, metrics
from jaxroll.report.record import checks
from tests.harness.xla import ROLE_FLAGS

ROOT = Path(__file__).resolve().parents[2]
UNEQUAL_MESHES = ("--config.learner.mesh.fsdp=2", "--config.sampler.mesh.tensor=2")
SMALL = ("--config.sft.steps=0", "--config.evaluator.every=0", *UNEQUAL_MESHES)
LEARNING = (
    *SMALL,
    "--config.task.env=tests.harness.envs.dense_reward:dense_reward",
)  # parameters change from the first step on
SYNCHRONOUS = (
    *LEARNING, "--config.evaluator.every=2", "--config.schedule.alpha=0", "--config.schedule.steps=6",
    "--config.transfer.deadline_s=200", "--config.learner.checkpoint_every=2", "--config.learner.checkpoints_kept=2",
    "--config.learner.keep_best=accuracy",
)  # fmt: skip  # the deadline gives the evaluator time to compile before the first step
START_S, LIMIT_S = 240.0, 480.0  # also on a busy machine
SAME = ("groups", "loss", "grad_norm", "tokens_trained", "tokens_computed", "reward_mean")  # keys of a step


class Train:
    """A context manager for `jaxroll train` on configs/NAME.py (or `--resume`), which ends all its processes.

    Its output goes to a file; with `stdout`, standard output goes there instead.
    """

    def __init__(
        self, run_dir: Path, *overrides: str, config: str = "smoke", resume: bool = False, stdout: IO | None = None
    ) -> None:
        self.run_dir = run_dir
        words = ["--resume"] if resume else [f"--config={ROOT / 'configs' / config}.py"]
        self.output = run_dir.parent / f"{run_dir.name}-{'resumed' if resume else 'first'}.out"
        self._rows = metrics.RowReader(run_dir / "metrics.jsonl", at_end=resume)
        own = {"XLA_FLAGS": ROLE_FLAGS, lifeline.PARENT_ENV: str(os.getpid())}  # it does not outlive a killed pytest
        self.rows: list[dict] = []
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxroll", "train", f"--run={run_dir}", *words, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=stdout or out,
                stderr=out,
                cwd=ROOT,
                start_new_session=True,
                env={"JAXROLL_CACHE": str(ROOT / ".cache" / "jax"), **os.environ, **own},
            )

    def __enter__(self) -> Train:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            for process in [*self.children(), psutil.Process(self.process.pid)]:
                _signal(process, signal.SIGKILL)
        self.process.wait(timeout=10)

    def until(self, seen: Callable[[list[dict]], bool], what: str, limit_s: float = START_S) -> None:
        """Wait until `seen(all rows so far)` is true; fail the test with all logs if that takes too long."""
        deadline = time.monotonic() + limit_s
        pause = threading.Event()
        while True:
            self.rows += self._rows.rows()
            if seen(self.rows):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                state = f"ended with {self.process.poll()}" if self.process.poll() is not None else "is still running"
                pytest.fail(f"waited {limit_s:g} s for {what}; the run {state}\n{self.logs()}", pytrace=False)
            pause.wait(0.05)

    def until_step(self, step: int, limit_s: float = START_S) -> None:
        """Wait until `step` steps are trained."""
        self.until(lambda rows: last_step(rows) >= step, f"step {step}", limit_s)

    def finish(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the run's end; return its exit code."""
        try:
            code = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {limit_s:g} s\n{self.logs()}", pytrace=False)
        self.rows += self._rows.rows(closed=True)
        return code

    def children(self) -> list[psutil.Process]:
        """The processes of the roles and their children."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def hosts(self, role: str) -> list[psutil.Process]:
        """The processes of the learner or the sampler by their number: that of process 0 first."""
        found = {}
        for process in self.children():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words[1:4] == ["-m", "jaxroll", role]:
                    option = "--index=" if role == "learner" else "--process="
                    found[int(next((w.partition("=")[2] for w in words if w.startswith(option)), "0"))] = process
        return [found[number] for number in sorted(found)]

    def role(self, name: str) -> psutil.Process:
        """The process of a role that has started: `learner`, `sampler` or `store`."""
        deadline, pause = time.monotonic() + START_S, threading.Event()
        while time.monotonic() < deadline:
            for process in self.children():
                try:
                    if process.cmdline()[1:4] == ["-m", "jaxroll", name]:
                        return process
                except (psutil.Error, IndexError):
                    continue
            pause.wait(0.05)
        pytest.fail(f"no {name} came up\n{self.logs()}", pytrace=False)

    def interrupt(self) -> None:
        """Send SIGINT to the supervisor, as the terminal does for Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def logs(self) -> str:
        """The last lines of all logs."""
        files = [self.output, *sorted((self.run_dir / "logs").glob("*.log"))]
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists()
        )

    def query(self, sql: str) -> list[tuple]:
        """Rows of RUN/store.db."""
        with sqlite3.connect(f"{(self.run_dir / 'store.db').absolute().as_uri()}?mode=ro", uri=True) as db:
            return db.execute(sql).fetchall()

    def report(self) -> dict:
        """The output of `jaxroll report RUN --json`."""
        return report_of(self.run_dir)


def report_of(run_dir: Path) -> dict:
    """The output of `jaxroll report RUN --json`."""
    words = [sys.executable, "-m", "jaxroll", "report", str(run_dir), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def trained_again(rows: Sequence[dict]) -> dict[int, list[dict]]:
    """The rows of every step that was trained more than once."""
    lives = defaultdict(list)
    for row in rows:
        if row.get("kind") == "step":
            lives[row["step"]].append({key: row[key] for key in SAME})
    return {step: found for step, found in lives.items() if len(found) > 1}


def differing(lives: Mapping[int, list[dict]]) -> dict[int, list[dict]]:
    """The steps whose rows are not all equal."""
    return {step: found for step, found in lives.items() if any(life != found[0] for life in found)}


def violated_invariants(train: Train, report: dict) -> list[str]:
    """The report's violated invariants."""
    config = json.loads((train.run_dir / "run.json").read_text())["config"]
    return [f"{c.name}: {c.found}, {c.bound}" for c in checks(report, config) if c.holds is False]


def last_step(rows: Sequence[dict]) -> int:
    """The newest trained step."""
    return max((row["step"] for row in rows if row.get("kind") == "step"), default=0)


def trained_questions(train: Train) -> list[tuple[int, int, str]]:
    """(step, place, question hash) of every claimed group, in training order."""
    return train.query(
        "SELECT c.step, c.place, g.question_hash FROM claim_groups c JOIN groups g ON g.id = c.group_id "
        "ORDER BY c.step, c.place"
    )


def assert_sound(train: Train, *, steps: int, alpha: int) -> None:
    """Assert the invariants of every run."""
    assert last_step(train.rows) == steps
    twice = train.query("SELECT group_id, COUNT(*) FROM claim_groups GROUP BY group_id HAVING COUNT(*) > 1")
    assert twice == [], f"groups in two claims: {twice}"
    states = dict(train.query("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    durable = train.query("SELECT COUNT(*) FROM claims WHERE durable_lineage IS NOT NULL")[0][0]
    assert durable == steps, (durable, states)
    report = train.report()
    assert report["conservation_residual"] == 0
    assert report["groups_trained_twice"] == 0
    assert report["age_max"] <= alpha
    assert report["compiles_after_warmup"] == 0


def _signal(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
