"""The run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxroll
from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.control import preflight, run_dir
from jaxroll.errors import ConfigError


def test_run_json_says_what_ran_and_gives_the_config_back(tmp_path: Path) -> None:
    changed = configs.parse(configs.override(configs.defaults().to_dict(), ["run.seed=5", "task.args.x=[1,2]"]))
    path = run_dir.create(tmp_path / "a" / "run", changed, ["train", "--config=x"])
    values = json.loads((path / "run.json").read_text())
    assert run_dir.load_config(path) == changed
    assert values["digest"] == configs.digest(changed)
    assert values["jaxroll"] == jaxroll.__version__ and values["argv"] == ["train", "--config=x"]
    assert {"jax", "flax", "numpy"} <= values["versions"].keys() and values["python"].startswith("3.")
    assert values["devices"] == {} and values["created"] > 1.6e9 and "commit" in values
    assert (path / "logs").is_dir()


def test_a_run_is_never_made_over_another(tmp_path: Path) -> None:
    run_dir.create(tmp_path / "run", Config(), [])
    with pytest.raises(ConfigError, match="--resume"):
        run_dir.create(tmp_path / "run", Config(), [])


def test_runs_made_in_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir.time, "time", lambda: 1_700_000_000.0)
    made = [run_dir.create_unique(tmp_path, "demo", Config(), [], suffix="-seed3") for _ in range(3)]
    assert len(set(made)) == 3
    assert made[0].name.startswith("demo-2023111") and made[0].name.endswith("-seed3")
    assert [path.name.rpartition("-seed3")[2] for path in made] == ["", "-2", "-3"]


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_a_folder_without_a_run_is_a_config_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json|unreadable|no config"):
        run_dir.load(tmp_path)


def test_resuming_may_change_how_long_but_not_what(tmp_path: Path) -> None:
    path = run_dir.create(tmp_path / "run", Config(), [])
    longer = run_dir.resume(path, ["--config.schedule.steps=500"], preflight.check)
    assert longer.schedule.steps == 500 and run_dir.load_config(path) == longer
    assert run_dir.load(path)["digest"] == configs.digest(longer)
    with pytest.raises(ConfigError, match="middle of a run"):
        run_dir.resume(path, ["learner.learning_rate=1"], preflight.check)
    with pytest.raises(ConfigError, match="unknown key"):
        run_dir.resume(path, ["supervisor.patience=1"], preflight.check)
    with pytest.raises(ConfigError, match=r"evaluator\.mesh\.tensor"):
        run_dir.resume(path, ["evaluator.mesh.tensor=3"], preflight.check)
    assert run_dir.load_config(path) == longer


def test_the_link_moves_to_the_new_run_and_spares_a_real_folder(tmp_path: Path) -> None:
    first, second = (run_dir.create(tmp_path / name, Config(), []) for name in ("a", "b"))
    for path in (first, second):
        link = run_dir.link(path, "demo")
        assert link.is_symlink() and link.resolve() == path and os.readlink(link) == path.name
    assert first.is_dir()
    (tmp_path / "real").mkdir()
    assert run_dir.link(second, "real") == second
    assert not (tmp_path / "real").is_symlink()


@pytest.mark.process
def test_a_run_has_one_supervisor_and_its_lock_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from jaxroll.control import run_dir\n"
        "with run_dir.locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another process"), run_dir.locked(tmp_path):
            raise AssertionError
    finally:
        holder.kill()
        holder.communicate(timeout=10)
    with run_dir.locked(tmp_path):
        assert (tmp_path / ".lock").exists()


def test_runs_are_listed_with_their_progress_and_without_links(tmp_path: Path) -> None:
    path = run_dir.create(tmp_path / "x", Config(), [])
    rows = [{"kind": "step", "step": 4}, {"kind": "eval", "accuracy": 0.5}, {"kind": "step", "step": 7}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir.link(path, "demo")
    (tmp_path / "no-run").mkdir()
    (run,) = run_dir.find_runs(tmp_path)
    assert (run.path, run.steps, run.of_steps, run.accuracy) == (path, 7, 100, 0.5)
    assert run_dir.find_runs(tmp_path / "nowhere") == []
