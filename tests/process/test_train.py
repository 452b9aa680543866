"""Whole runs of real processes: sampler and learner on unequal meshes, the store between them."""

import pytest

from jaxroll import priority
from tests.process.trains import SMALL, UNEQUAL_MESHES, Train, assert_sound

pytestmark = pytest.mark.process


@pytest.mark.parametrize("alpha", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_no_trained_token_is_older_than_alpha(free_run_dir, alpha):
    with Train(free_run_dir, *SMALL, f"--config.schedule.alpha={alpha}", "--config.schedule.steps=8") as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=8, alpha=alpha)
        assert_steps_overlap_in_order(train, alpha=alpha)
        ages = {int(age) for row in train.rows if row["kind"] == "step" for age in row["age_hist"]}
        assert ages == {0} if alpha == 0 else max(ages) >= 1, "an asynchronous run that is never ahead shows nothing"


def assert_steps_overlap_in_order(train: Train, *, alpha: int) -> None:
    """Every step is published, then acknowledged, before the next is; with α > 0 the next is claimed before that."""
    rows = train.query(
        "SELECT kind, ROW_NUMBER() OVER (PARTITION BY kind ORDER BY position) - 1, position FROM log "
        "WHERE kind IN ('claimed', 'published', 'acked')"
    )
    at = {f"{kind} {step}": position for kind, step, position in rows}
    for step in range(8):
        assert at[f"claimed {step}"] < at[f"published {step + 1}"] < at[f"acked {step}"]
        assert step == 0 or at[f"acked {step - 1}"] < at[f"published {step + 1}"]
    ahead = [step for step in range(1, 8) if at[f"claimed {step}"] < at[f"published {step}"]]
    assert not ahead if alpha == 0 else ahead, "claimed while the step before was computed"


def test_a_run_from_warm_start_to_report(free_run_dir):
    with Train(free_run_dir, *UNEQUAL_MESHES, "--config.schedule.steps=6") as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=6, alpha=1)
        report = train.report()
        assert report["restarts"] == 0, train.logs()
        assert report["heldout_in_train"] == 0
        assert report["learner_mesh"]["fsdp"] == 2 and report["sampler_mesh"]["tensor"] == 2
        evals = [row for row in train.rows if row["kind"] == "eval"]
        assert evals[0]["step"] == 0 and evals[-1]["step"] == 6, "the gain is measured from the warm start to the end"
        assert all(row["n"] == 16 for row in evals), "every item is answered wholly at the pinned version"
        assert all(example["answer"].lower() == example["prompt"][::-1] for row in evals for example in row["examples"])
        assert (free_run_dir / "report.html").stat().st_size > 10_000
        assert {"learner", "sampler-0", "evaluator"} <= {row["role"] for row in train.rows if row["kind"] == "devices"}


def test_the_tensorstore_channel_carries_a_run(free_run_dir):
    words = (*SMALL, "--config.transfer.channel=tensorstore", "--config.schedule.steps=4")
    with Train(free_run_dir, *words) as train:
        train.until_step(1)
        learner = train.role("learner").nice()
        others = [train.role(name).nice() for name in ("sampler", "store")]
        assert others == [max(learner, priority.NICE)] * 2, "on a CPU all give way to the learner"
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=4, alpha=1)
