"""Whole runs with processes that are stopped for longer than a lease, or whose wall clock jumps by hours."""

from __future__ import annotations

import mmap
import signal
import struct
import threading
import time
from pathlib import Path

import psutil
import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.train_process import (
    SMALL,
    START_S,
    UNEQUAL_MESHES,
    Train,
    assert_sound,
    last_step,
    violated_invariants,
)

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
LEASE_S = 4.0
WORDS = (*UNEQUAL_MESHES, "--config.sft.steps=0", "--config.evaluator.every=5", "--config.schedule.steps=100000",
         "--config.learner.checkpoint_every=4", f"--config.store.lease_s={LEASE_S:g}",
         "--config.store.rpc_deadline_s=3", "--config.supervisor.backoff_s=0.1")  # fmt: skip
ONE_DEVICE = ("--config.learner.mesh.fsdp=1", "--config.sampler.mesh.tensor=1")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("sampler", "store", "learner", "evaluator", "supervisor"), ()),
        (("actor", "feeder"), ("--config.placement.actors=1", "--config.evaluator.every=0", *ONE_DEVICE)),
        (("colocated", "store"), ("--config.placement.colocated=true",)),
    ],
    ids=["roles", "with an actor", "in one process"],
)
def test_every_process_may_be_stopped_for_longer_than_its_lease(
    free_run_dir: Path, names: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """SIGSTOP for twice the lease, one process after the other: the run continues and no process is restarted."""
    pause = threading.Event()
    with Train(free_run_dir, *WORDS, *words) as train:
        train.until_step(6)
        for name in names:
            process = psutil.Process(train.process.pid) if name == "supervisor" else train.role(name)
            ended = len(train.query("SELECT 1 FROM log WHERE kind = 'lease_ended'"))
            process.send_signal(signal.SIGSTOP)
            try:
                pause.wait(2 * LEASE_S)
            finally:
                process.send_signal(signal.SIGCONT)
            train.rows += train._rows.rows()
            at = last_step(train.rows)
            train.until(lambda rows, at=at: last_step(rows) >= at + 3, f"steps after the {name} was stopped")
            assert process.is_running(), f"the {name} ended"
            if name == "store":  # its clock went on while it was stopped, so no lease may end
                assert len(train.query("SELECT 1 FROM log WHERE kind = 'lease_ended'")) == ended
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        assert train.report()["restarts"] == 0


def wait_for_a_write(checkpoints: Path) -> None:
    """Return while a checkpoint is being written, which takes some milliseconds."""
    deadline_s = time.monotonic() + START_S
    while not any("tmp" in path.name for path in checkpoints.iterdir()):
        assert time.monotonic() < deadline_s, "no checkpoint was written"
        time.sleep(0.0005)


def test_the_wall_clock_may_jump_by_hours(tmp_path: Path, wall_clock: mmap.mmap) -> None:
    """Forward five hours, then back ten, each while a checkpoint is written, with a role that starts in between.

    Durations remain correct.

    It is off for all code, in Python and in C, but for waits until a wall time, which end as they would have.
    """
    jumps = (18_000, -18_000, 0)
    words = (*SMALL, "--config.schedule.steps=100000", "--config.learner.checkpoint_every=4")
    with Train(tmp_path / "run", *words) as train:
        began_s = time.monotonic()
        train.until_step(4)
        for by_s in jumps:
            wait_for_a_write(tmp_path / "run" / "checkpoints")
            wall_clock[:16] = struct.pack("qq", by_s, 0)
            at = last_step(train.rows)
            train.until(lambda rows, at=at: last_step(rows) >= at + 8, f"steps at a clock that is off by {by_s} s")
            _, readings = struct.unpack("qq", wall_clock[:16])
            assert readings > 100 or not by_s, "few readings were shifted, so the test shows nothing"
            if by_s > 0:
                train.role("sampler").send_signal(signal.SIGKILL)
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        took_s = time.monotonic() - began_s
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        report = train.report()
        assert report["restarts"] == 1
        broken = [
            line for line in violated_invariants(train, report) if not line.startswith("overlap")
        ]  # depends on the machine's load
        assert broken == []
        steps = [row for row in train.rows if row["kind"] == "step"]
        for key in ("train_s", "wait_s", "publish_s"):
            assert all(0 <= row[key] <= took_s for row in steps), (key, [row[key] for row in steps])
        stopped_at = last_step(train.rows)
    with Train(tmp_path / "run", f"--config.schedule.steps={stopped_at + 3}", resume=True) as second:
        assert second.finish() == 0, second.logs()
        assert min(row["step"] for row in second.rows if row["kind"] == "step") == stopped_at + 1
