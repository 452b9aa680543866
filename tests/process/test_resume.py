"""Ctrl-C or a closed terminal, then `--resume`: the run sees the same questions as an uninterrupted one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxroll import metrics, run_paths
from jaxroll.control import cli
from jaxroll.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_INTERRUPTED
from jaxroll.learner import checkpoint_files
from tests.harness.run_folder import run_of_format_1
from tests.harness.train_process import SMALL, Train, assert_sound, last_step, trained_questions

pytestmark = pytest.mark.process
MORE = 9  # steps after the resume


@pytest.mark.timeout(600)
@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_resume_after_a_clean_stop_sees_the_undisturbed_questions(tmp_path, signum):
    words = (*SMALL, "--config.learner.checkpoint_every=100")
    with Train(tmp_path / "split", *words, "--config.schedule.steps=5000") as first:
        first.until_step(5)
        first.process.send_signal(signum)
        assert first.finish(60) == EXIT_INTERRUPTED, first.logs()
        stopped_at = last_step(first.rows)
    steps = stopped_at + MORE
    with Train(tmp_path / "whole", *words, f"--config.schedule.steps={steps}") as train:
        assert train.finish() == 0, train.logs()
        undisturbed = trained_questions(train)
    with Train(tmp_path / "split", f"--config.schedule.steps={steps}", resume=True) as second:
        assert second.finish() == 0, second.logs()
        assert_sound(second, steps=steps, alpha=1)
        trained = [row["step"] for row in second.rows if row["kind"] == "step"]
        assert trained == list(range(stopped_at + 1, steps + 1)), "it did not continue after the last durable step"
        assert {row["lineage"] for row in second.rows if row["kind"] == "step"} == {0}, "a clean stop loses nothing"
        assert trained_questions(second) == undisturbed


@pytest.mark.timeout(600)
def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Step 9 trains groups of the earlier version's log, by its checkpoint; step 10 new ones."""
    older = run_of_format_1(tmp_path / "before")
    rows = len(metrics.read(older / "metrics.jsonl"))
    with Train(older, "--config.schedule.steps=10", "--config.evaluator.every=0", resume=True) as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=10, alpha=1)
        assert [row["step"] for row in train.rows if row["kind"] == "step"] == [9, 10]
    written = json.loads((older / "run.json").read_text())
    assert written["format"] == run_paths.FORMAT and written["config"]["schedule"]["weight_swap"] == "reprefill"
    after = metrics.read(older / "metrics.jsonl")
    assert len(after) > rows and {row["what"] for row in after if row["kind"] == "span"} >= {"weight_swap"}
    assert cli.main(["replay", str(older)]) == 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_run_whose_log_is_lost_goes_on_from_its_newest_checkpoint_if_that_is_asked_for(tmp_path: Path) -> None:
    """All processes are killed and the store's files removed. Without `--new-log` nothing changes: a run that restarted
    at step 0 would write checkpoints of lineage 0, which count as older than the others.
    """
    run = tmp_path / "run"
    words = (
        *SMALL,
        "--config.schedule.steps=100000",
        "--config.learner.checkpoint_every=2",
        "--config.supervisor.backoff_s=0.1",
    )
    with Train(run, *words) as first:
        first.until_step(4)
        first.role("learner").kill()
        first.until(lambda _: bool(checkpoints(run, "0001.*")), "a checkpoint of lineage 1")
    lost = set(trained_questions(first))
    for file in run.glob("store.*"):
        file.unlink()
    before, newest = checkpoints(run), max(checkpoint_files.versions(run / "checkpoints"))
    for _ in range(2):  # the second finds the store.db of the first
        with Train(run, resume=True) as second:
            assert second.finish() == EXIT_CONFIG, second.logs()
            assert "Put back the store.db" in second.output.read_text(), second.logs()
            assert "add --new-log" in second.output.read_text(), second.logs()
            assert last_step(second.rows) == 0
        assert checkpoints(run) == before
    steps = newest.step + MORE
    with Train(run, "--new-log", f"--config.schedule.steps={steps}", resume=True) as third:
        third.until_step(newest.step + 2)
        third.role("learner").kill()  # started again with the same option, it continues the new log
        assert third.finish() == 0, third.logs()
        trained = [row["step"] for row in third.rows if row["kind"] == "step"]
        assert (min(trained), max(trained)) == (newest.step + 1, steps)
        again = set(trained_questions(third))
        overlap = {step for step, _, _ in again} & {step for step, _, _ in lost}
        assert overlap and {one for one in again if one[0] in overlap} == {one for one in lost if one[0] in overlap}
        said = [str(row.get("text") or row.get("what")) for row in third.rows]
        assert any("begins a new log at checkpoint" in one for one in said) and any("lost: " in one for one in said)
        report = third.report()
        assert (report["conservation_residual"], report["groups_trained_twice"]) == (0, 0)
        assert third.query("SELECT COUNT(*), COUNT(DISTINCT step) FROM claims") == [(MORE, MORE)]
    assert cli.main(["replay", str(run)]) == 0


def checkpoints(run: Path, pattern: str = "*") -> set[tuple[str, int]]:
    """Every checkpoint and its modification time."""
    return {(path.name, path.stat().st_mtime_ns) for path in (run / "checkpoints").glob(pattern)}


def cut(checkpoint: Path) -> None:
    for path in checkpoint.glob("state/**/d/*"):
        path.write_bytes(path.read_bytes()[:10])


def junk(checkpoint: Path) -> None:
    for path in checkpoint.glob("state/**/d/*"):
        path.write_bytes(bytes(range(256)) * 20)


def without_manifest(checkpoint: Path) -> None:
    (checkpoint / "state" / "manifest.ocdbt").unlink()


def other_facts(checkpoint: Path) -> None:
    (checkpoint / "about" / "metadata").write_bytes(b"{")


COMMANDS = (("generate", "{run}", "hello"), ("weights", "export", "{run}", "{out}"), ("eval", "{run}"))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_damaged_checkpoint_ends_every_command_with_one_line(tmp_path: Path) -> None:
    """The commands themselves, and the learner of a resumed run, without replacements."""
    whole = tmp_path / "whole"
    with Train(whole, *SMALL, "--config.schedule.steps=2", "--config.learner.checkpoint_every=2") as first:
        assert first.finish() == 0, first.logs()
    for damage in (cut, junk, without_manifest, other_facts):
        run = tmp_path / damage.__name__
        shutil.copytree(whole, run)
        for checkpoint in (run / "checkpoints").iterdir():
            damage(checkpoint)
        for command in COMMANDS:
            words = [word.format(run=run, out=tmp_path / "out") for word in command]
            done = subprocess.run(
                [sys.executable, "-m", "jaxroll", *words],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
            assert done.returncode in (EXIT_FAILURE, EXIT_CONFIG), (damage.__name__, words, done.stderr)
            assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, (
                damage.__name__,
                words,
                done.stderr,
            )
            assert checkpoint.name in done.stderr
        with Train(run, "--config.schedule.steps=3", resume=True) as second:
            assert second.finish() != 0, damage.__name__
            assert "Traceback" not in second.logs() and checkpoint.name in second.logs()
