"""The run's folder: creating, reading, listing, locking and linking it."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import jaxroll
from jaxroll import config as configs
from jaxroll.config import Config, RoleArgs
from jaxroll.control import cli, commands, preflight, run_dir, train
from jaxroll.errors import ConfigError
from jaxroll.run_paths import RunPaths
from tests.harness.run_folder import make_run

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.py"


def test_run_json_restores_the_config(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe{", b"\x00", b"[" * 100_000, b'{"config": []}', b'{"config": {}, "created": "now"}',
     b'{"config": {}, "created": NaN}', b'{"config": {}, "created": 1e400}', b'{"config": {}, "devices": 3}',
     b'{"config": {}, "digest": null}', b'{"config": null}', b"9" * 5000],
    ids=lambda data: ascii(data[:40]),
)  # fmt: skip
def test_a_malformed_run_file_is_a_config_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"x/run\.json.*Restore the file from a copy"):
        run_dir.load(tmp_path / "x")
    assert run_dir.find_runs(tmp_path) == []


def test_a_run_file_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    os.mkfifo(file)  # a reader would wait for a writer
    with pytest.raises(ConfigError, match="not a file"):
        run_dir.load(tmp_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="not a file"):
        run_dir.load(tmp_path)
    file.unlink()
    with file.open("wb") as out:
        out.truncate(2**40)
    with pytest.raises(ConfigError, match="larger than"):
        run_dir.load(tmp_path)
    file.unlink()
    file.symlink_to("run.json")
    with pytest.raises(ConfigError, match=r"unreadable: .*links"):
        run_dir.load(tmp_path)


def bad_places(folder: Path) -> list[Path]:
    """Paths at which no run folder can be made."""
    (folder / "file").write_text("")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere/at/all")
    return [
        folder / "file",
        folder / "file" / "below",
        folder / "loop",
        folder / "loop" / "x",
        folder / "dangling",
        Path("/proc/nothing"),
    ]


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    for place in bad_places(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        for attempt in (
            lambda path: run_dir.create(path, Config(), []),
            lambda path: run_dir.create_unique(path, "run", Config(), []),
            run_dir.load,
        ):
            with pytest.raises(ConfigError, match=r"cannot be made|no run here|unreadable"):
                attempt(place)
        assert sorted(tmp_path.rglob("*")) == before


def test_remains_of_a_run_are_not_taken_for_a_new_run(tmp_path: Path) -> None:
    for name in ("store.db", "checkpoints"):
        (tmp_path / name / name / "of a run").mkdir(parents=True)
        with pytest.raises(ConfigError, match=rf"{name} of a run.*Restore run\.json"):
            run_dir.create(tmp_path / name, Config(), [])
        assert [path.name for path in (tmp_path / name).iterdir()] == [name]


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_dir.create(tmp_path / "run", Config(), [])
    before = (path / "run.json").read_bytes()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_dir.os, "replace", full)
    for attempt in (
        lambda: run_dir.resume(path, ["schedule.steps=7"], lambda config: None),
        lambda: run_dir.note_devices(path, "learner", {"platform": "cpu"}),
        lambda: run_dir.create(tmp_path / "other", Config(), []),
    ):
        with pytest.raises(ConfigError, match="No space left"):
            attempt()
    with pytest.raises(ConfigError, match="No space left"):
        run_dir.link(path, "demo")
    assert (path / "run.json").read_bytes() == before
    assert [file.name for file in path.iterdir() if file.name.startswith(".run")] == []


def test_a_run_whose_logs_are_a_file_is_refused(tmp_path: Path) -> None:
    path = run_dir.create(tmp_path / "run", Config(), [])
    (path / "logs").rmdir()
    (path / "logs").touch()
    with pytest.raises(ConfigError, match=r"logs.*File exists"):
        run_dir.resume(path, [], lambda config: None)


READ_ONLY = """
import subprocess, sys
from jaxroll.control import cli
subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[1]], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", sys.argv[1]], check=True)
for words in (["train", "--run=r", "--resume"], ["store", "--run=r"], ["sft", "--run=r"], ["tls", "r"],
              ["train", f"--config={sys.argv[2]}", "--run=new"], ["demo", f"--config={sys.argv[2]}"],
              ["learner", f"--config={sys.argv[2]}"]):
    print(words[0], cli.main(words), flush=True)
"""


@pytest.mark.process
def test_a_read_only_file_system_is_refused_without_a_traceback(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not create a mount namespace")
    run_dir.create(tmp_path / "r", configs.load(SMOKE), [])
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", READ_ONLY, str(tmp_path), str(SMOKE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        [command, "64"] for command in ("train", "store", "sft", "tls", "train", "demo", "learner")
    ], done.stdout + done.stderr
    assert done.stderr.count("Read-only file system") == 7, done.stderr


def test_resuming_may_change_only_keys_about_length_supervision_and_memory(tmp_path: Path) -> None:
    path = run_dir.create(tmp_path / "run", Config(), [])
    changed = ["--config.schedule.steps=500", "learner.remat=offload", "sampler.draft_tokens=2"]
    longer = run_dir.resume(path, changed, preflight.check)
    assert longer.schedule.steps == 500 and longer.learner.remat == "offload" and run_dir.load_config(path) == longer
    assert run_dir.load(path)["digest"] == configs.digest(longer)
    with pytest.raises(ConfigError, match="middle of a run"):
        run_dir.resume(path, ["learner.learning_rate=1"], preflight.check)
    with pytest.raises(ConfigError, match="unknown key"):
        run_dir.resume(path, ["supervisor.patience=1"], preflight.check)
    with pytest.raises(ConfigError, match=r"evaluator\.mesh\.tensor"):
        run_dir.resume(path, ["evaluator.mesh.tensor=3"], preflight.check)
    assert run_dir.load_config(path) == longer


def test_resuming_may_change_the_address_and_budget_of_the_judge_of_a_source(tmp_path: Path) -> None:
    """As it may those of `task.reward_args`, and nothing else of a source."""
    judge = {"url": "http://a:1/v1", "model": "m"}
    source = {"label": "a", "name": "gcd", "reward": "judge", "reward_args": {"judge": judge}}
    other = {"label": "b", "name": "lcm"}
    config = configs.parse({"task": {"mixture": [source, other]}})
    path = run_dir.create(tmp_path / "run", config, [])

    def resumed(*mixture: object) -> list[dict]:
        return run_dir.resume(path, [f"task.mixture={json.dumps(mixture)}"], lambda config: None).task.mixture

    moved = source | {"reward_args": {"judge": judge | {"url": "http://b:2/v1", "budget_calls": 9}}}
    assert resumed(moved, other) == run_dir.load_config(path).task.mixture == [moved, other]
    for mixture, key in (
        (
            [source | {"reward_args": {"judge": judge | {"model": "n"}}}, other],
            r"mixture\[0\]\.reward_args\.judge\.model",
        ),
        ([moved, other | {"weight": 2.0}], r"task\.mixture\[1\]\.weight"),
        ([moved], r"task\.mixture"),
        ([moved, other | {"reward_args": {"judge": judge}}], r"task\.mixture\[1\]\.reward_args"),
    ):
        with pytest.raises(ConfigError, match=rf"{key} = .*middle of a run"):
            resumed(*mixture)
    assert run_dir.load_config(path).task.mixture == [moved, other]


def test_a_run_file_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_dir.create(tmp_path / "run", Config(), [])
    before = (path / "run.json").read_bytes()
    monkeypatch.setattr(run_dir, "RUN_FILE_BYTES", len(before) + 50)
    with pytest.raises(ConfigError, match=r"larger than 0 MiB.*few-shot"):
        run_dir.write(path, run_dir.load(path) | {"more": "x" * 60})
    assert (path / "run.json").read_bytes() == before


def test_resuming_may_change_the_address_of_the_judge_of_a_held_out_set_and_no_set(tmp_path: Path) -> None:
    """The saved prompts are those of these sets."""
    judge = {"url": "http://a:1/v1", "model": "m"}
    held = {"name": "gcd", "items": 4, "reward": "judge", "reward_args": {"judge": judge}}
    path = run_dir.create(tmp_path / "run", configs.parse({"evaluator": {"sets": {"a": held}}}), [])

    def resumed(**sets: object) -> dict[str, Any]:
        return run_dir.resume(path, [f"evaluator.sets={json.dumps(sets)}"], lambda config: None).evaluator.sets

    moved = held | {"reward_args": {"judge": judge | {"url": "http://b:2/v1"}}}
    assert resumed(a=moved) == run_dir.load_config(path).evaluator.sets == {"a": moved}
    for sets, key in (
        ({"a": moved, "b": {"name": "lcm", "items": 4}}, r"sets\.b"),
        ({"a": moved | {"items": 5}}, r"sets\.a\.items"),
        ({}, r"sets\.a"),
    ):
        with pytest.raises(ConfigError, match=rf"evaluator\.{key}( =|:) .*middle of a run.*run\.json"):
            resumed(**sets)
    assert run_dir.load_config(path).evaluator.sets == {"a": moved}


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
    step = {"t": 2.0, "t0": 1.0, "t1": 2.0, "train_s": 1.0, "wait_s": 0.0, "publish_s": 0.0, "age_hist": {}}
    step |= {"role": "learner", "kind": "step"}
    held = {"t": 2.0, "role": "evaluator", "kind": "eval", "step": 4, "n": 2, "correct": "10", "accuracy": 0.5}
    rows = [{"kind": "step", "step": None}, {"kind": "step", "step": "9"}, {"kind": "eval"}]
    rows += [step | {"step": 4}, held, step | {"step": 7}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir.link(path, "demo")
    (tmp_path / "no-run").mkdir()
    (run,) = run_dir.find_runs(tmp_path)
    assert (run.path, run.steps, run.of_steps, run.accuracy) == (path, 7, 100, 0.5)
    assert run_dir.find_runs(tmp_path / "nowhere") == []


def test_a_new_disk_may_be_mounted_where_the_checkpoints_go(tmp_path: Path) -> None:
    """A folder with nothing but a file system's own entries is not taken for the remains of another run."""
    (tmp_path / "run" / "checkpoints" / "lost+found").mkdir(parents=True)
    assert run_dir.create(tmp_path / "run", Config(), []) == tmp_path / "run"
    (tmp_path / "other" / "checkpoints" / "0000.00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has lost its run\.json"):
        run_dir.create(tmp_path / "other", Config(), [])


def test_a_repeated_warm_start_counts_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it replaced the one before, it may leave none, and the resumed run would train a fresh model."""
    path = run_dir.create(tmp_path / "run", configs.load(SMOKE), [])
    marks, done = [], RunPaths(path).warm_start_done
    done.touch()

    def main(args: RoleArgs) -> int:
        marks.append(args.paths.warm_start_done.exists())
        return len(marks) - 1

    monkeypatch.setattr(cli.lifeline, "bind_from_env", lambda: True)
    monkeypatch.setattr(commands.importlib, "import_module", lambda _: types.SimpleNamespace(main=main))
    assert cli.main(["sft", f"--run={path}"]) == 0 and done.exists()
    assert cli.main(["sft", f"--run={path}"]) == 1 and not done.exists()
    assert marks == [False, False]


def test_a_complete_run_is_not_started_again_unless_it_gets_more_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its learner does not publish again, so evaluator and samplers would wait for weights until the run fails."""
    path = make_run(tmp_path / "run", steps=3, steps_wanted=3)
    monkeypatch.setattr(train.program, "build", lambda *_, **__: pytest.fail("roles are started"))
    with sqlite3.connect(path / "store.db") as db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('closed', 'stopped')")
    assert not train.is_complete(path, 3)
    with sqlite3.connect(path / "store.db") as db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('closed', 'finished')")
    assert train.is_complete(path, 3) and not train.is_complete(path, 4)
    assert cli.main(["train", str(path), "--resume"]) == 0
    assert "All 3 steps of this run are trained" in capsys.readouterr().out


def test_a_damaged_log_is_named_before_a_run_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", steps=3, steps_wanted=3)
    database = path / "store.db"
    for damaged in (b"no database", database.read_bytes()[:100] + b"x" * 10_000):
        database.write_bytes(damaged)
        assert cli.main(["train", str(path), "--resume"]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "store.db" in error and "jaxroll replay" in error
