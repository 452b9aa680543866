"""Real learners and samplers for tests, started one by one, which call the store through a tap."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jaxroll import config as configs
from jaxroll import metrics
from jaxroll.config import Config
from jaxroll.control import run_dir
from jaxroll.lifeline import PARENT_ENV
from tests.harness.cluster import criteria
from tests.harness.cluster.rpc_tap import Tap
from tests.harness.xla import ROLE_FLAGS

ROOT = Path(__file__).resolve().parents[3]
START_S, LIMIT_S = 120.0, 240.0
# One device per role, no warm start, no evaluator, short answers: a run takes seconds.
NANO = {
    "model.size": "nano", "placement.platform": "cpu", "evaluator.every": 0, "sft.steps": 0, "sampler.slots": 8,
    "schedule.groups_per_step": 4, "schedule.group_size": 4, "learner.learning_rate": 3e-3, "learner.warmup_steps": 1,
    "schedule.in_flight_window": "full", "store.lease_s": 20.0, "transfer.deadline_s": 30.0,
}  # fmt: skip


def config_of(changes: dict[str, object]) -> Config:
    """`NANO` with `changes`, keys as on the command line."""
    values = configs.defaults()
    words = [f"--config.{key}={value}" for key, value in (NANO | changes).items()]
    return configs.parse(configs.override(configs.to_dict(configs.parse(values)), words))


class World:
    """One run: a store, a tap before it, and the roles that a test starts. All processes end with the `with` block."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self.config = config_of({key.replace("__", "."): value for key, value in changes.items()})
        self.run_dir = run_dir.create(folder, self.config, ["test"])
        self._stack = contextlib.ExitStack()
        self._follower = metrics.RowReader(self.run_dir / "metrics.jsonl")
        self.rows: list[dict] = []
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> World:
        self._stack.callback(self._end)
        try:
            self._start("store", ["-m", "tests.harness.cluster.store_process", str(self.run_dir), str(os.getpid())])
            self.until((self.run_dir / "store.addr").exists, "the store's address")
            self.tap = self._stack.enter_context(Tap(self.run_dir))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def learner(self) -> subprocess.Popen:
        """Start the learner."""
        return self._role("learner")

    def sampler(self) -> subprocess.Popen:
        """Start sampler-0."""
        return self._role("sampler", "--index=0")

    def evaluator(self, address: str = "") -> subprocess.Popen:
        """Start the evaluator, which reaches the store at `address` (default: the tap)."""
        return self._role("evaluator", address=address)

    def kill(self, name: str) -> None:
        """Kill the role with SIGKILL and wait for its end."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(20)

    def ended(self, name: str, limit_s: float = LIMIT_S) -> int:
        """Wait for a role to end by itself; return its exit code."""
        try:
            return self.processes[name].wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the {name} did not end within {limit_s:g} s\n{self.logs()}", pytrace=False)

    def until(self, seen: Callable[[], object], what: str, limit_s: float = START_S) -> None:
        """Wait until `seen()` is true; fail the test with all logs if that takes too long."""
        deadline_s, pause = time.monotonic() + limit_s, threading.Event()
        while not seen():
            store = self.processes["store"].poll()
            if store is not None or time.monotonic() > deadline_s:
                over = f"the store ended with {store}" if store is not None else f"{limit_s:g} s are over"
                pytest.fail(f"waited for {what}: {over}\n{self.logs()}", pytrace=False)
            pause.wait(0.02)

    def until_step(self, step: int) -> None:
        """Wait until `step` steps are trained."""
        self.until(lambda: max((row["step"] for row in self.step_rows()), default=0) >= step, f"step {step}")

    def step_rows(self) -> list[dict]:
        """The learner's rows so far, oldest first; a step that was trained again occurs again."""
        self.rows += self._follower.rows()
        return [row for row in self.rows if row.get("kind") == "step"]

    def events(self, role: str) -> list[str]:
        """The texts of the events of `role` so far."""
        self.rows += self._follower.rows()
        return [row["text"] for row in self.rows if row.get("kind") == "event" and row["role"] == role]

    def judge(self, fault: str, injected: int, *, survived: str = "") -> criteria.Row:
        """End the store, assert all common criteria, and return the row of `fault`.

        The run must have reached its last step, or `survived` describes its end.
        """
        rows = self.step_rows()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes["store"].terminate()
            self.processes["store"].wait(20)
        assert criteria.conservation_residual(self.run_dir) == 0
        account = self.tap.account()
        late = [*criteria.overdue(account), *criteria.unanswered(account)]
        assert late == [], f"calls that exceeded their deadline or got no answer: {late}"
        last = {row["step"]: row for row in rows}
        twice = criteria.trained_twice([(step - 1, last[step]["groups"]) for step in sorted(last)])
        twice |= criteria.durable_twice(self.run_dir)
        assert not twice, f"groups in two durable steps: {twice}"
        age = max((row["age_max"] for row in rows), default=0)
        assert age <= math.ceil(self.config.schedule.alpha), f"a token of age {age} was trained"
        lost = criteria.lost_puts(self.run_dir, self.tap.journal)
        assert lost == [], f"lost acknowledged puts: {lost}"
        assert survived or sorted(last) == list(range(1, self.config.schedule.steps + 1)), "the run did not go on"
        return criteria.Row(fault, injected, survived or f"{len(last)} steps", len(lost), len(twice), age)

    def query(self, sql: str, *values: object) -> list[tuple]:
        """Rows of RUN/store.db."""
        with contextlib.closing(
            sqlite3.connect(f"{(self.run_dir / 'store.db').absolute().as_uri()}?mode=ro", uri=True)
        ) as db:
            return db.execute(sql, values).fetchall()

    def logs(self) -> str:
        """The last lines of all logs."""
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def _role(self, name: str, *words: str, address: str = "") -> subprocess.Popen:
        who = "sampler-0" if name == "sampler" else name
        command = ["-m", "jaxroll", name, f"--run={self.run_dir}", f"--store={address or self.tap.address}", *words]
        return self._start(who, command)

    def _start(self, name: str, words: list[str]) -> subprocess.Popen:
        env = {**os.environ, "JAXROLL_CACHE": str(ROOT / ".cache" / "jax"), PARENT_ENV: str(os.getpid())}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        env["XLA_FLAGS"] = ROLE_FLAGS  # a role that is started alone adds its own devices
        with (self.run_dir / "logs" / f"{name}.log").open("a") as out:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.run_dir,
                env=env,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def _end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.send_signal(signal.SIGKILL)
            process.wait(20)
