"""Whole runs of real processes: sampler and learner on unequal meshes, the store between them."""

import math
import subprocess

import pytest

from jaxroll import lifeline
from jaxroll.control import cli
from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.report import archive
from tests.control.test_run_folder_paths import PRINTABLE
from tests.harness import train_process
from tests.harness.train_process import SMALL, UNEQUAL_MESHES, Train, assert_sound, last_step

pytestmark = pytest.mark.process


@pytest.mark.timeout(600)
@pytest.mark.soak
@pytest.mark.parametrize("alpha", [0, 1, 2])
def test_no_trained_token_is_older_than_alpha(free_run_dir, alpha):
    """Each step is published and acknowledged before the next; with α > 0 the next step is claimed before that."""
    words = (f"--config.schedule.alpha={alpha}", f"--config.schedule.steps={5000 if alpha else 8}")
    with Train(free_run_dir, *SMALL, *words) as train:
        if alpha:  # a sampler slower than the learner completes most batches late: one that it does not is waited for
            train.until_step(8)
            train.until(lambda rows: bool(claimed_ahead(train)) and max(ages(rows)) >= 1, "a claim ahead, an old token")
            train.interrupt()
        assert train.finish() == (EXIT_INTERRUPTED if alpha else 0), train.logs()
        steps = last_step(train.rows)
        assert steps >= 8
        assert_sound(train, steps=steps, alpha=alpha)
        assert_steps_in_order(train, steps)
        assert alpha or (claimed_ahead(train) == [] and ages(train.rows) == {0})


def assert_steps_in_order(train: Train, steps: int) -> None:
    """Each step is claimed, its weights are published, it is acknowledged, and only then the next one is published."""
    at = positions(train)
    for step in range(steps):
        assert at[f"claimed {step}"] < at[f"published {step + 1}"] < at[f"acked {step}"]
        assert step == 0 or at[f"acked {step - 1}"] < at[f"published {step + 1}"]


def ages(rows: list[dict]) -> set[int]:
    """The ages of trained tokens in steps."""
    return {int(age) for row in rows if row["kind"] == "step" for age in row["age_hist"]}


def positions(train: Train) -> dict[str, int]:
    """Positions of claims, publications and acknowledgements in the log: "claimed 3" → its position."""
    rows = train.query(
        "SELECT kind, ROW_NUMBER() OVER (PARTITION BY kind ORDER BY position) - 1, position FROM log "
        "WHERE kind IN ('claimed', 'published', 'acked')"
    )
    return {f"{kind} {step}": position for kind, step, position in rows}


def claimed_ahead(train: Train) -> list[int]:
    """The steps that were claimed before the weights of the step before were published."""
    at = positions(train)
    return [step for step in range(1, len(at)) if at.get(f"claimed {step}", math.inf) < at.get(f"published {step}", 0)]


@pytest.mark.timeout(600)
def test_a_run_from_warm_start_to_report(free_run_dir, monkeypatch):
    monkeypatch.setattr(train_process, "ROLE_FLAGS", "")  # compiled as users' runs are
    # The deadline gives the evaluator time to compile; with two rows a micro-batch has one program instead of three.
    few = ("--config.schedule.steps=6", "--config.learner.micro_batch_rows=2", "--config.transfer.deadline_s=200")
    with Train(free_run_dir, *UNEQUAL_MESHES, *few) as train:
        train.until_step(1)
        learner = train.role("learner").nice()
        others = [train.role(name).nice() for name in ("sampler", "store")]
        assert others == [max(learner, lifeline.NICE)] * 2, "on a CPU the learner has priority"
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=6, alpha=1)
        assert_steps_in_order(train, 6)
        report = train.report()
        assert report["restarts"] == 0, train.logs()
        assert report["heldout_in_train"] == 0
        assert report["learner_mesh"]["fsdp"] == 2 and report["sampler_mesh"]["tensor"] == 2
        evals = [row for row in train.rows if row["kind"] == "eval"]
        assert evals[0]["step"] == 0 and evals[-1]["step"] == 6, "the gain is measured from the warm start to the end"
        assert all(row["n"] == 16 for row in evals), "not every item was answered at the pinned version"
        assert all(example["answer"].lower() == example["prompt"][::-1] for row in evals for example in row["examples"])
        assert (free_run_dir / "report.html").stat().st_size > 10_000
        assert {"learner", "sampler-0", "evaluator"} <= {row["role"] for row in train.rows if row["kind"] == "devices"}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_in_a_folder_with_every_printable_character(tmp_path):
    """Weights go through files in it, too; it is resumed, replayed and verified there. No file is made elsewhere."""
    name = "/".join("".join(PRINTABLE[start : start + 12]) for start in range(0, len(PRINTABLE), 12))
    assert set(name) == {*PRINTABLE, "/"}
    run = tmp_path / "parent" / name / "run"
    run.parent.mkdir(parents=True)  # for the outputs
    words = (*SMALL, "--config.transfer.channel=tensorstore", "--config.learner.checkpoint_every=2")
    with Train(run, *words, "--config.schedule.steps=5000") as train:
        train.until_step(4)
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        stopped_at = last_step(train.rows)
        assert_sound(train, steps=stopped_at, alpha=1)
    with Train(run, f"--config.schedule.steps={stopped_at + 3}", resume=True) as train:
        assert train.finish() == 0, train.logs()
        assert min(row["step"] for row in train.rows if row["kind"] == "step") == stopped_at + 1
        report = train.report()
        assert (report["conservation_residual"], report["groups_trained_twice"], report["restarts"]) == (0, 0, 0)
    assert cli.main(["replay", str(run)]) == 0 == cli.main(["checkpoints", str(run), "--verify"])
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and run not in path.parents]
    assert {path.name for path in outside} == {"run-first.out", "run-resumed.out"}, "the outputs of this test alone"


@pytest.mark.soak
def test_a_run_completes_though_the_reader_of_its_output_leaves(free_run_dir):
    """`jaxroll train … | head -1`"""
    with subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head:
        assert head.stdin is not None and head.stdout is not None
        with Train(free_run_dir, *SMALL, "--config.schedule.steps=6", stdout=head.stdin) as train:
            head.stdin.close()
            assert head.stdout.read().count(b"\n") == 1
            assert head.wait() == 0
            assert train.finish() == 0, train.logs()
            assert_sound(train, steps=6, alpha=1)
            assert "Traceback" not in train.logs() and "Broken pipe" not in train.logs(), train.logs()


def test_the_best_checkpoint_of_a_run_stays_and_is_named(synchronous_run):
    """Two of its four checkpoints are kept, and the best one."""
    values = {row["step"]: row["accuracy"] for row in synchronous_run.rows if row["kind"] == "eval"}
    best = max(values, key=lambda step: (values[step], -step))
    found = archive.checkpoint_facts(synchronous_run.run_dir, verify=True, keep_best="accuracy")
    assert found["best"] == {"version": f"0.{best}", "metric": "accuracy", "value": values[best]}
    assert [row["step"] for row in found["checkpoints"]] == sorted({best, 4, 6})
    assert not any(row["problem"] for row in found["checkpoints"])
    assert synchronous_run.report()["best_checkpoint"] == found["best"]
