"""`--resume --fork=STEP`: a finished run forks once at a step without trajectories, also if the learner dies."""

import signal

import pytest

from tests.harness.train_process import SMALL, Train

pytestmark = pytest.mark.process
STEPS, FORK = 24, 4

LINE = "SELECT step FROM claims JOIN line ON line.lineage = durable_lineage AND step < upto ORDER BY step"
QUESTIONS = (
    "SELECT c.step, g.question_hash FROM claim_groups c JOIN groups g ON g.id = c.group_id WHERE c.lineage {} 0"
    f" AND c.step >= {FORK} ORDER BY c.step, g.question_hash"
)


@pytest.mark.timeout(600)
def test_a_finished_run_forks_once_and_trains_the_same_questions_again(tmp_path):
    words = (*SMALL, f"--config.schedule.steps={STEPS}", "--config.learner.checkpoint_every=2",
             "--config.learner.checkpoints_kept=40", "--config.supervisor.backoff_s=0.1")  # fmt: skip
    with Train(tmp_path / "run", *words) as first:
        assert first.finish() == 0, first.logs()
    with Train(tmp_path / "run", f"--fork={FORK}", resume=True) as forked:
        forked.until(lambda rows: any(row.get("lineage") == 1 and row.get("step", 0) > FORK for row in rows), "a step")
        forked.role("learner").send_signal(signal.SIGKILL)
        assert forked.finish() == 0, forked.logs()
        steps = [row["step"] for row in forked.rows if row["kind"] == "step"]
        assert (min(steps), max(steps)) == (FORK + 1, STEPS)
        claimed = dict(forked.query("SELECT step, COUNT(*) FROM claims GROUP BY step"))
        assert claimed == {step: 1 + (step >= FORK) for step in range(STEPS)}, "the restarted learner forked again"
        assert [step for (step,) in forked.query(LINE)] == list(range(STEPS))
        before, after = (forked.query(QUESTIONS.format(sign)) for sign in ("=", ">"))
        assert before == after, "the new lineage does not train on the questions of the old one"
        report = forked.report()
        assert (report["conservation_residual"], report["groups_trained_twice"]) == (0, 0)
