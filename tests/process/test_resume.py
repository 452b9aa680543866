"""Ctrl-C and `--resume`: two lives of a run see the questions that one life would have seen."""

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.process.trains import SMALL, Train, assert_sound, last_step, trained_questions

pytestmark = pytest.mark.process
STEPS = 14


@pytest.mark.timeout(600)
def test_resume_after_ctrl_c_sees_the_undisturbed_questions(tmp_path):
    words = (*SMALL, f"--config.schedule.steps={STEPS}", "--config.learner.checkpoint_every=100")
    with Train(tmp_path / "whole", *words) as train:
        assert train.finish() == 0, train.logs()
        undisturbed = trained_questions(train)
    with Train(tmp_path / "split", *words) as first:
        first.until_step(5)
        first.interrupt()
        assert first.finish(60) == EXIT_INTERRUPTED, first.logs()
        stopped_at = last_step(first.rows)
        assert 5 <= stopped_at < STEPS
    with Train(tmp_path / "split", resume=True) as second:
        assert second.finish() == 0, second.logs()
        assert_sound(second, steps=STEPS, alpha=1)
        steps = [row["step"] for row in second.rows if row["kind"] == "step"]
        assert steps == list(range(stopped_at + 1, STEPS + 1)), "it goes on where the last durable step ended"
        assert {row["lineage"] for row in second.rows if row["kind"] == "step"} == {0}, "a clean stop loses nothing"
        assert trained_questions(second) == undisturbed
