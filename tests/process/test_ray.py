"""`jaxroll launch --on=ray` on a cluster of three Ray nodes on this machine, two of which are lost during the run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxroll import metrics
from tests.harness.train_process import LEARNING, ROOT, START_S, Train, assert_sound, last_step, trained_questions
from tests.harness.xla import ROLE_FLAGS
from tests.process.test_separate_roles import free_port

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(1200)]
STEPS = 60
WORDS = (*LEARNING, f"--config.schedule.steps={STEPS}", "--config.schedule.order=lease_order",
         "--config.schedule.in_flight_window=full", "--config.store.lease_s=12", "--config.learner.checkpoint_every=5",
         "--config.task.env=tests.harness.envs.slow_reward:slow_reward")  # fmt: skip
OBJECT_STORE_BYTES = 80 << 20
# A lost node is noticed after 3 s instead of 15 s; nothing is reported to the vendor.
RAY = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head and two nodes with one CPU each: store, learner and sampler are on different nodes."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxroll[ray]', or make venv")
    from ray.cluster_utils import Cluster

    for name, value in (RAY | {"XLA_FLAGS": ROLE_FLAGS, "JAXROLL_CACHE": str(ROOT / ".cache" / "jax")}).items():
        monkeypatch.setenv(name, value)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # of sockets, whose names must be short
    monkeypatch.setenv("RAY_TMPDIR", folder)
    made = Cluster()
    try:
        made.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        yield made
    finally:
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class Launched:
    """A run by `jaxroll launch --on=ray`; the interface of `Train` that the assertions need."""

    def __init__(self, folder: Path, cluster: Any, *more: str) -> None:
        self.run_dir, self.output, self._cluster = folder / "scratch", folder / "out", cluster
        self.rows: list[dict] = []
        self._rows = metrics.RowReader(self.run_dir / "metrics.jsonl")
        words = [
            "launch",
            "--on=ray",
            f"--address={cluster.address}",
            f"--config={ROOT / 'configs' / 'smoke.py'}",
            f"--run={folder / 'run'}",
            f"--scratch={self.run_dir}",
            f"--workdir={ROOT}",
            "--insecure",
            f"--python={sys.executable}",
            f"--port={free_port()}",
            *WORDS,
            *more,
        ]
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxroll", *words],
                cwd=ROOT,
                env=os.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    query, report, logs = Train.query, Train.report, Train.logs

    def until(self, seen: Callable[[list[dict]], bool], what: str) -> None:
        deadline, pause = time.monotonic() + 2 * START_S, threading.Event()
        while not seen(self.rows):
            assert self.process.poll() is None and time.monotonic() < deadline, f"waited for {what}\n{self.logs()}"
            self.rows += self._rows.rows()
            pause.wait(0.1)

    def lose_node_of(self, role: str) -> None:
        """Kill every process of the last node on which `role` runs, and add another node."""
        *_, node = [node for node in self._cluster.list_all_nodes() if role in _roles(node)]
        for one in [_raylet(node), *_raylet(node).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)

    def end(self) -> None:
        """Stop the driver, and with it all processes."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=60)
        self.process.kill()
        self.process.wait()
        self.rows += self._rows.rows(closed=True)

    def restarts(self) -> list[dict]:
        return [row for row in self.rows if row.get("kind") == "restart"]


def _raylet(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def _roles(node: Any) -> set[str]:
    found = set()
    for one in _raylet(node).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found |= set(one.cmdline()[3:4]) if one.cmdline()[1:3] == ["-m", "jaxroll"] else set()
    return found


def test_a_run_survives_the_loss_of_the_samplers_node_and_then_of_the_learners(cluster: Any, tmp_path: Path) -> None:
    launched = Launched(tmp_path, cluster)
    try:
        launched.until(lambda rows: last_step(rows) >= 3, "step 3")
        launched.lose_node_of("sampler")
        launched.until(lambda rows: len(launched.restarts()) == 1, "the restart of the sampler")
        at = last_step(launched.rows)
        launched.until(lambda rows: last_step(rows) >= at + 8, "steps after the sampler's restart")
        launched.lose_node_of("learner")
        launched.until(lambda rows: len(launched.restarts()) == 2, "the restart of the learner")
        assert launched.process.wait(timeout=2 * START_S) == 0, launched.logs()
    finally:
        launched.end()
    assert_sound(launched, steps=STEPS, alpha=2)  # type: ignore[arg-type]
    assert [row["process"] for row in launched.restarts()] == ["sampler-0", "learner"]
    assert all("Ray lost it on" in row["cause"] for row in launched.restarts()), launched.restarts()
    shown = subprocess.run(
        [sys.executable, "-m", "jaxroll", "inspect", str(launched.run_dir)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=START_S,
    ).stdout
    assert "Ray lost it on" in shown.partition("newest joins and leaves")[2], shown
    with Train(tmp_path / "local", *WORDS) as train:
        assert train.finish() == 0, train.logs()
        assert trained_questions(train) == trained_questions(launched)  # type: ignore[arg-type]


def test_a_sampler_on_two_nodes_survives_the_loss_of_its_second_one(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    launched = Launched(tmp_path, cluster, "--config.placement.sampler_hosts=2")
    try:
        launched.until(lambda rows: last_step(rows) >= 3, "step 3")
        launched.lose_node_of("sampler")
        launched.until(lambda rows: len(launched.restarts()) >= 1, "the restart of the sampler")
        at = last_step(launched.rows)
        launched.until(lambda rows: last_step(rows) >= at + 8, "steps after the sampler's restart")
        assert launched.process.wait(timeout=2 * START_S) == 0, launched.logs()
    finally:
        launched.end()
    assert_sound(launched, steps=STEPS, alpha=2)  # type: ignore[arg-type]
    assert {row["process"] for row in launched.restarts()} <= {"sampler-0", "sampler-0-1"}, launched.restarts()
