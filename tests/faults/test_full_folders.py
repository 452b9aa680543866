"""Full disks under the folders of a run that its roles do not write: `profiles`, `launch` and `tinker`.

tests/process/test_full_disks.py has those that its roles write, and tests/peers/test_more.py those of trackers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxroll.config import Config, LearnerConfig, ModelConfig
from jaxroll.control import cli
from jaxroll.errors import EXIT_FAILURE
from jaxroll.roles import weights
from jaxroll.roles.weights import ProfileOrder, Profiler
from jaxroll.tinker.trainer import Trainer
from tests.harness.cluster import disks

ROOT = Path(__file__).parents[2]


def test_a_role_trains_on_without_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room for a trace, then a disk that is full when it is written: both are named, and neither stays."""
    rows = list[dict[str, Any]]()
    profiler = Profiler("learner", tmp_path / "profiles", rows.append)
    step = jax.jit(lambda x: x @ x)

    def profiled(request: str) -> list[str]:
        rows.clear()
        profiler.ask(ProfileOrder("learner", request, 2, 600.0))
        for _ in range(4):
            step(jnp.ones((8, 8))).block_until_ready()
            profiler.step()
        return [row["state"] for row in rows]

    with disks.small_disk(tmp_path / "profiles", 64) as disk:
        assert profiled("first") == ["failed"]
        assert rows[-1]["reason"].startswith(f"64 MB are free at {disk.path}, a profile needs 1024 MB")
        monkeypatch.setattr(weights, "FREE_MB", 0)
        disk.fill(leave_bytes=8192)
        assert profiled("second") == ["started", "failed"]
        assert "No space left on device" in rows[-1]["reason"] and str(disk.path) in rows[-1]["reason"]
        disk.free()
        assert list(disk.path.iterdir()) == [], "a part of a trace"
        assert profiled("third") == ["started", "ended"]
        assert len(list(disk.path.rglob("*.xplane.pb"))) == 1


@pytest.mark.parametrize("what", ["launch", "run"])
def test_nothing_is_launched_from_a_full_disk(what: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """One line names the file and the remedy; with room the same command hands the job over."""
    run, tools = tmp_path / "run", tmp_path / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text(f"#!/bin/bash\necho job >> {tmp_path}/jobs\n")
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    words = ["launch", f"--config={ROOT}/configs/rlvr_tiny.py", "--on=slurm", f"--run={run}", f"--scratch={tmp_path}"]
    with disks.small_disk(run if what == "run" else run / "launch", 4) as disk:
        disk.fill()
        assert cli.main(words) == EXIT_FAILURE
        (line,) = capsys.readouterr().err.splitlines()
        assert "No space left on device" in line and f"0 MB are free at {disk.path}: make room" in line
        disk.free()
        assert [file for file in disk.path.rglob("*") if file.is_file() and file.name not in ("token", ".lock")] == []
        assert not (tmp_path / "jobs").exists()
        assert cli.main(words) == 0 and (tmp_path / "jobs").read_text() == "job\n"


def test_a_state_that_does_not_fit_is_not_saved_and_the_older_one_stays(tmp_path: Path) -> None:
    settings = replace(Config(), model=ModelConfig(size="nano"), learner=replace(LearnerConfig(), micro_batch_rows=4))
    trainer = Trainer(settings, tmp_path)
    model = trainer.create(4, 0)
    with disks.small_disk(tmp_path / "tinker", 16) as disk:
        folder = disk.path / "model" / "weights" / "one"
        trainer.save(model, folder, whole=True, about={"base_model": "first"})
        disk.fill(leave_bytes=8192)
        with pytest.raises(OSError, match="No space left on device") as caught:
            trainer.save(model, folder, whole=True, about={"base_model": "second"})
        assert caught.value.filename == str(folder)
        assert [path.name for path in folder.parent.iterdir()] == ["one"], "a part of a state"
        disk.free()
        assert trainer.about(folder)["base_model"] == "first"
        assert trainer.load(folder, optimizer=True).params.keys() == model.params.keys()
        trainer.save(model, folder, whole=True, about={"base_model": "second"})
        assert trainer.about(folder)["base_model"] == "second"
