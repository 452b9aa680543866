"""Two stores with one log (`store.standby`): the first one's machine is lost, and the second continues."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest

from jaxroll import metrics
from tests.harness.train_process import LEARNING, ROOT, last_step, report_of
from tests.process.test_separate_roles import LIMIT_S, free_port, start

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
STEPS = 16
CONFIG = (f"--config={ROOT / 'configs' / 'smoke.py'}", *LEARNING, f"--config.schedule.steps={STEPS}",
          "--config.store.standby=True", "--config.store.takeover_s=3", "--config.store.lease_s=6",
          "--config.store.rpc_deadline_s=4")  # fmt: skip


def log_of(database: Path) -> dict[int, bytes]:
    """The records of a log by position."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return dict(connection.execute("SELECT position, body FROM log"))


def until(step: int, rows: Path, processes: dict[str, subprocess.Popen], tmp_path: Path) -> None:
    """Wait until the metrics in `rows` reach `step`."""
    follower, seen = metrics.RowReader(rows), list[dict]()
    deadline_s, pause = time.monotonic() + LIMIT_S, threading.Event()
    while last_step(seen) < step:
        seen += follower.rows() if rows.exists() else []
        ended = [name for name, process in processes.items() if process.poll() is not None]
        assert not ended and time.monotonic() < deadline_s, f"step {last_step(seen)}, {ended} ended\n{logs(tmp_path)}"
        pause.wait(0.1)


def logs(tmp_path: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in tmp_path.glob("*.log"))


class Stores:
    """Two stores, a learner and a sampler, started by hand; all end with this context."""

    def __init__(self, tmp_path: Path, *words: str) -> None:
        self._tmp_path, self._words = tmp_path, (*CONFIG, *words)
        self._addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.roles = dict[str, subprocess.Popen]()

    def __enter__(self) -> Stores:
        both = ",".join(self._addresses)
        self.store(0)
        self.store(1)
        self.roles["learner"] = start("learner", self._tmp_path / "l", both, config=self._words)
        self.roles["sampler"] = start("sampler", self._tmp_path / "s", both, "--index=0", config=self._words)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.roles.values():
            process.kill()
            process.wait(timeout=10)

    def folder(self, index: int) -> Path:
        return self._tmp_path / "ab"[index]

    def store(self, index: int) -> None:
        """Start a store, the first time or again."""
        own, other = self._addresses[index], self._addresses[1 - index]
        words = (f"--peer={other}", f"--index={index}")
        self.roles[f"store {index}"] = start("store", self.folder(index), own, *words, config=self._words)

    def lose(self, index: int) -> dict[int, bytes]:
        """Kill a store and remove its folder; its log, which a frozen process left."""
        process = self.roles.pop(f"store {index}")
        process.send_signal(signal.SIGSTOP)
        lost = log_of(self.folder(index) / "store.db")
        process.kill()
        process.wait()
        shutil.rmtree(self.folder(index))
        return lost

    def until(self, index: int, step: int) -> None:
        """Wait until the metrics in the folder of a store reach a step."""
        until(step, self.folder(index) / "metrics.jsonl", self.roles, self._tmp_path)

    def finish(self, index: int, steps: int) -> None:
        """Wait for the end of the run, and assert the invariants of the log of a store."""
        for name in ("learner", "sampler"):
            assert self.roles[name].wait(timeout=LIMIT_S) == 0, logs(self._tmp_path)
        self.roles[f"store {index}"].terminate()
        assert self.roles[f"store {index}"].wait(timeout=60) == 0, logs(self._tmp_path)
        report = report_of(self.folder(index))
        assert (report["conservation_residual"], report["groups_trained_twice"], report["steps"]) == (0, 0, steps)
        assert report["age_max"] <= 1


def test_the_standby_continues_when_the_machine_of_the_store_is_lost(tmp_path: Path) -> None:
    with Stores(tmp_path) as stores:
        stores.until(1, 4)
        lost = stores.lose(0)
        stores.finish(1, STEPS)
    kept = log_of(tmp_path / "b" / "store.db")
    known = [position for position, body in lost.items() if kept.get(position) == body]
    assert known == list(range(1, len(known) + 1)), "the standby's log begins with that of the lost store"
    assert len(lost) - len(known) < 40, "more than what was on its way is missing"


@pytest.mark.soak
def test_the_two_stores_are_lost_in_turn(tmp_path: Path) -> None:
    """Each time the machine comes back with an empty disk, and its store becomes the standby of the other one."""
    steps = 40
    with Stores(tmp_path, f"--config.schedule.steps={steps}") as stores:
        stores.until(1, 4)
        stores.lose(0)
        stores.store(0)
        stores.until(0, 12)  # it has the metrics of the other one
        stores.lose(1)
        stores.store(1)
        stores.until(1, 24)
        stores.lose(0)
        stores.finish(1, steps)
