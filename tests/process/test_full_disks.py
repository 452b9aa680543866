"""Whole runs on disks that are full for a while or become read-only: each folder of a run alone, and all of them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxroll.run_paths import RunPaths
from tests.harness.cluster import disks
from tests.harness.train_process import ROOT, SMALL, UNEQUAL_MESHES, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
STEPS, FULL_MB = 40, 96
WORDS = (
    *SMALL,
    f"--config.schedule.steps={STEPS}",
    "--config.learner.checkpoint_every=3",
    "--config.supervisor.backoff_s=0.2",
)


@contextlib.contextmanager
def disk_for(what: str, base: Path) -> Iterator[tuple[disks.Disk, Path, tuple[str, ...], dict[str, str]]]:
    """A small disk that holds `what` of a run: the disk, the run's folder, more arguments, more environment."""
    run = base / "run"
    match what:
        case "run":
            folder, words, env = run, (), {}
        case "transfer":
            folder, env = base / "weights", {}
            words = ("--config.transfer.channel=tensorstore", f"--config.transfer.path={folder}")
        case "cache":
            folder, words, env = base / "cache", (), {"JAXROLL_CACHE": str(base / "cache")}
        case _:
            folder, words, env = run / what, (), {}
    with disks.small_disk(folder, FULL_MB) as disk:
        yield disk, run, words, env


@pytest.mark.parametrize("what", ["checkpoints", "logs", "tb", "transfer", "cache", "run"])
def test_a_disk_that_is_full_for_a_while(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run continues when there is room again, or it ends with the cause and `--resume` completes it."""
    with disk_for(what, tmp_path) as (disk, run, words, env):
        if what == "cache":
            disk.fill(leave_bytes=2**18)  # the start reads and writes here
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with Train(run, *WORDS, *words) as first:
            first.until_step(5)
            filled_for_a_while(first, disk)
            assert_completed(first, disk)
        assert what != "cache" or any(path.name.startswith("jit_") for path in disk.path.iterdir()), "another cache"


def test_a_disk_that_is_full_when_the_warm_start_is_written(tmp_path: Path) -> None:
    """Neither a part of the warm start nor an untrained model is taken for it."""
    words = (*UNEQUAL_MESHES, "--config.evaluator.every=0", "--config.sft.steps=60", *WORDS[len(SMALL) :])
    with disks.small_disk(tmp_path / "run", FULL_MB) as disk, Train(tmp_path / "run", *words) as first:
        first.until(lambda rows: any("warm start step" in row.get("text", "") for row in rows), "the warm start")
        filled_for_a_while(first, disk)
        assert_completed(first, disk)
        assert RunPaths(tmp_path / "run").warm_start_done.exists()


def filled_for_a_while(train: Train, disk: disks.Disk) -> None:
    """Fill the disk for eight seconds, or until the run ends."""
    disk.fill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        train.process.wait(8)
    disk.free()


def assert_completed(first: Train, disk: disks.Disk) -> None:
    """Assert that the run, or its resumption after an end that names the disk, trains all steps, and is sound."""
    run, code = first.run_dir, first.finish()
    rows = first.rows
    if code:
        output = first.output.read_text()
        assert "MB are free at" in output and str(disk.path) in output and "Traceback" not in output, output
        with Train(run, resume=True) as second:
            assert second.finish() == 0, second.logs()
        rows, second.rows = rows + second.rows, rows + second.rows
        assert_sound(second, steps=STEPS, alpha=1)
    else:
        assert_sound(first, steps=STEPS, alpha=1)
    command = [sys.executable, "-m", "jaxroll", "checkpoints", str(run), "--verify"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("what", ["checkpoints", "run"])
def test_a_disk_that_becomes_read_only(what: str, tmp_path: Path) -> None:
    """The run ends with the cause; after the disk is repaired `--resume` completes it, and nothing durable is lost."""
    folder = tmp_path / "run" / what if what != "run" else tmp_path / "run"
    with disks.failing_disk(folder, tmp_path / "disk.img", 256) as disk:
        with Train(tmp_path / "run", *WORDS, "--config.supervisor.max_restarts=1") as first:
            first.until_step(5)
            disk.fail(first.process.pid)
            code = first.finish()
            output = first.output.read_text()
        assert code == 1 and str(folder) in output and "Read-only file system" in output, first.logs()
        assert "remount that disk" in output and "Traceback (most" not in output.rpartition("The run ends")[2], output
        disk.repair()
        durable = last_step(first.rows)
        with Train(tmp_path / "run", "--config.supervisor.max_restarts=10", resume=True) as second:
            assert second.finish() == 0, second.logs()
            assert min(row["step"] for row in second.rows if row["kind"] == "step") <= durable + 1
            second.rows = first.rows + second.rows
            assert_sound(second, steps=STEPS, alpha=1)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.mark.parametrize("what", ["logs", "tb", "transfer", "cache"])
def test_a_disk_beside_the_run_that_becomes_read_only(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run needs none of these to be sound: it goes on, or it ends with the cause and continues after the repair."""
    folder, words = tmp_path / "run" / what, tuple[str, ...]()
    if what == "cache":
        folder = tmp_path / "cache"
        monkeypatch.setenv("JAXROLL_CACHE", str(folder))
    if what == "transfer":
        folder = tmp_path / "weights"
        words = ("--config.transfer.channel=tensorstore", f"--config.transfer.path={folder}")
    with disks.failing_disk(folder, tmp_path / "disk.img", 256) as disk:
        with Train(tmp_path / "run", *WORDS, *words, "--config.supervisor.max_restarts=1") as first:
            first.until_step(5)
            if what == "cache":  # otherwise nothing is left to be written
                for path in [path for path in folder.rglob("*") if path.is_file()]:
                    path.unlink(missing_ok=True)
            disk.fail(first.process.pid)
            if what == "cache":
                first.role("learner").kill()
            code = first.finish()
            output = first.output.read_text()
        rows = first.rows
        if what == "cache":
            assert code == 0 and any(row["kind"] == "restart" for row in rows), "the learner compiles again"
            assert not [path for path in folder.rglob("*") if path.is_file()], "the disk was read-only"
        if code:
            assert str(folder) in output and "Read-only file system" in output, first.logs()
            disk.repair()
            with Train(tmp_path / "run", "--config.supervisor.max_restarts=10", resume=True) as second:
                assert second.finish() == 0, second.logs()
                rows = second.rows = rows + second.rows
                assert_sound(second, steps=STEPS, alpha=1)
        else:
            assert_sound(first, steps=STEPS, alpha=1)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
