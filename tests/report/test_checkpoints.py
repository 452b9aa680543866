"""`jaxroll checkpoints` lists the checkpoints on disk and names damaged ones, without importing JAX."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxroll import config as configs
from jaxroll.control import run_dir
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.state import TrainState
from jaxroll.records import Version
from jaxroll.report import archive
from tests.harness.run_folder import LogMaker

ROOT = Path(__file__).parents[2]
VERSIONS = (Version(0, 0), Version(0, 4), Version(1, 6))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints and no log."""
    path = run_dir.create(tmp_path_factory.mktemp("run") / "run", configs.parse(configs.defaults()), [])
    checkpoints = Checkpoints(path / "checkpoints", 3)
    for number, version in enumerate(VERSIONS):
        state = TrainState({"embed": jnp.full((64, 64), number, jnp.float32)}, (), jnp.int32(version.step))
        checkpoints.save(version, 100 + number, state)
        checkpoints.wait()
    checkpoints.close()
    return path


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


def change_a_bit(checkpoint: Path) -> str:
    """Change one bit in the checkpoint's largest file; return the file's name."""
    victim = max((p for p in (checkpoint / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    return victim.name


def test_every_checkpoint_is_listed_with_size_position_and_metadata(run: Path) -> None:
    found = archive.checkpoint_facts(run, verify=True)["checkpoints"]
    assert [(row["lineage"], row["step"]) for row in found] == [(0, 0), (0, 4), (1, 6)]
    assert [row["position"] for row in found] == [100, 101, 102]
    assert all(row["summed"] and not row["problem"] and row["durable"] is None for row in found)
    for row in found:
        files = [path for path in Path(row["path"]).rglob("*") if path.is_file()]
        assert row["size_bytes"] == sum(path.stat().st_size for path in files) > 64 * 64 * 4 // 50
        assert checkpoint_files.about(Path(row["path"])) == Checkpoints(run / "checkpoints", 1).about(
            Version(row["lineage"], row["step"])
        )


def test_the_best_one_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert archive.checkpoint_facts(run, verify=False, keep_best="accuracy")["best"] is None, "nothing is measured yet"
    row = {"t": 1.0, "role": "evaluator", "kind": "eval", "n": 2, "correct": "10"}
    evals = [row | {"lineage": 0, "step": step, "accuracy": value} for step, value in ((0, 0.2), (4, 0.75), (5, 0.9))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evals))
    assert archive.checkpoint_facts(run, verify=False)["best"] is None, "the run keeps none"
    found = archive.checkpoint_facts(run, verify=False, keep_best="accuracy")["best"]
    assert found == {"version": "0.4", "metric": "accuracy", "value": 0.75}, "0.5 has no checkpoint"
    archive.checkpoints_main(run, verify=False, as_json=False, keep_best="accuracy")
    assert "best by accuracy: 0.4, 0.75" in capsys.readouterr().out


def test_a_damaged_one_is_named_and_ends_the_command_with_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = change_a_bit(run / "checkpoints" / "0000.00000004")
    assert archive.checkpoints_main(run, verify=False, as_json=False) == 0, "without --verify no file is read"
    capsys.readouterr()
    assert archive.checkpoints_main(run, verify=True, as_json=False) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "DAMAGED" in line]
    assert len(lines) == 1 and lines[0].startswith("0.4 ") and f"{name} is not what was written" in lines[0]
    (run / "checkpoints" / "0001.00000006" / "about" / "metadata").write_text("{")
    assert archive.checkpoints_main(run, verify=False, as_json=True) == 1
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert "about/metadata cannot be read" in rows[2]["problem"] and rows[2]["position"] == -1


def test_a_checkpoint_that_cannot_be_opened_is_damaged_even_with_correct_sums(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sums were computed from a state that was already broken."""
    path = run / "checkpoints" / "0000.00000004"
    (path / "state" / "manifest.ocdbt").unlink()
    (path / "sums.json").unlink()
    checkpoint_files.write(path)
    assert archive.checkpoints_main(run, verify=True, as_json=False) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "DAMAGED" in line]
    assert len(lines) == 1 and lines[0].startswith("0.4 ") and "manifest.ocdbt is missing" in lines[0]


def test_a_checkpoint_removed_during_the_command_is_not_listed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run removes old checkpoints while the command reads them."""
    looked = checkpoint_files.damage

    def removed_while_read(path: Path) -> str:
        if path.name == "0000.00000000":
            path.rename(path.with_name(f"{path.name}.removed"))
            return "state is gone"
        return looked(path)

    monkeypatch.setattr(checkpoint_files, "damage", removed_while_read)
    found = archive.checkpoint_facts(run, verify=True)["checkpoints"]
    assert [row["step"] for row in found] == [4, 6] and not any(row["problem"] for row in found)


def test_unfinished_checkpoints_are_not_listed_and_missing_sums_are_reported(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "0001.00000008.orbax-checkpoint-tmp" / "about").mkdir(parents=True)
    (run / "checkpoints" / "0001.00000006" / "sums.json").unlink()
    assert archive.checkpoints_main(run, verify=False, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["0.0", "0.4", "1.6"]
    assert lines[4].endswith("its sums were not written")
    assert archive.checkpoints_main(run, verify=True, as_json=False) == 1, "--verify needs the sums"
    assert "NOT VERIFIED: it has no sums" in capsys.readouterr().out.splitlines()[4]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("step", "damaged"), [(4, True), (0, False)])
def test_a_durable_checkpoint_without_sums_is_damaged(run: Path, verify: bool, step: int, damaged: bool) -> None:
    """The log records that 0.4 made the claims before it durable; it records nothing about 0.0."""
    LogMaker().write(run)
    with contextlib.closing(sqlite3.connect(run / "store.db")) as log:
        columns = "lineage, step, shuffle_seed, groups, durable_lineage, unix_s"
        log.executemany(f"INSERT INTO claims ({columns}) VALUES (0, ?, 1, 1, 0, 1)", [(number,) for number in range(4)])
        log.commit()
    (run / "checkpoints" / f"0000.{step:08d}" / "sums.json").unlink()
    rows = {row["step"]: row for row in archive.checkpoint_facts(run, verify=verify)["checkpoints"]}
    assert rows[step]["durable"] == damaged and not rows[step]["summed"] and not rows[6]["problem"]
    assert ("sums.json is gone" in rows[step]["problem"]) == damaged
    assert bool(rows[step]["problem"]) == (damaged or verify)
    assert archive.checkpoints_main(run, verify=verify, as_json=True) == (damaged or verify)


@pytest.mark.process
def test_the_command_needs_no_jax(run: Path) -> None:
    change_a_bit(run / "checkpoints" / "0000.00000004")
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('jax', 'jaxlib', 'flax', 'orbax', 'optax')))\n"
        "from jaxroll.control import cli\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = [sys.executable, "-c", code, "checkpoints", str(run), "--verify", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert [bool(row["problem"]) for row in json.loads(done.stdout)["checkpoints"]] == [False, True, False]
