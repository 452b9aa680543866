"""A learner of two processes with half of the parameters each: it trains as one process does and survives kills."""

import signal

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.train_process import LEARNING, Train, assert_sound, last_step, trained_questions

pytestmark = pytest.mark.process
TWO = "--config.placement.learner_hosts=2"
STREAMING = tuple(f"--config.{key}" for key in ("learner.streaming=true", "learner.micro_batch_rows=2",
                  "learner.row_tokens=64", "learner.checkpoint_every=100", "sampler.slots=1"))  # fmt: skip
STEPS = 3  # of the six steps of the run with one host


def steps_of(train: Train) -> list[dict]:
    return [row for row in train.rows if row["kind"] == "step"]


@pytest.mark.timeout(600)
def test_a_learner_on_two_hosts_trains_as_on_one(tmp_path, synchronous_run):
    """With alpha = 0 the answers also depend on all previous training steps. The two compute groups that end early."""
    words = (*LEARNING, "--config.schedule.alpha=0", f"--config.schedule.steps={STEPS}", *STREAMING)
    with Train(tmp_path / "two", *words, TWO) as two:
        assert two.finish() == 0, two.logs()
        assert_sound(two, steps=STEPS, alpha=0)
    assert sum(row["micro_batches_early"] for row in steps_of(two)) > 0
    one = steps_of(synchronous_run)[:STEPS]
    wanted = [asked for asked in trained_questions(synchronous_run) if asked[0] < STEPS]
    assert trained_questions(two) == wanted
    for mine, theirs in zip(steps_of(two), one, strict=True):
        for key in ("loss", "grad_norm", "reward_mean", "tokens_trained", "entropy"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), f"step {mine['step']}: {key}"
    assert one[-1]["grad_norm"] > 0
    assert list((tmp_path / "two" / "checkpoints").glob("*/sums.json")), "the checkpoint of both hosts has no sums"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_one_host_resumes_from_a_checkpoint_of_two(tmp_path):
    words = (*LEARNING, TWO, "--config.schedule.steps=12", "--config.learner.checkpoint_every=100")
    with Train(tmp_path / "run", *words) as first:
        first.until_step(3)
        # As in a preemption: it notifies the leader, and all processes restart.
        first.hosts("learner")[1].send_signal(signal.SIGTERM)
        first.until_step(last_step(first.rows) + 2)
        first.interrupt()
        assert first.finish(60) == EXIT_INTERRUPTED, first.logs()
        assert first.report()["restarts"] == 1
        stopped_at = last_step(first.rows)
    with Train(tmp_path / "run", "--config.placement.learner_hosts=1", resume=True) as second:
        assert second.finish() == 0, second.logs()
        assert_sound(second, steps=12, alpha=1)
        assert [row["step"] for row in steps_of(second)] == list(range(stopped_at + 1, 13)), (
            "a clean stop loses nothing"
        )


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["follower", "leader"])
def test_a_run_survives_the_death_of(which, free_run_dir):
    """All processes of the learner restart from the last version that all of them had written."""
    steps = 24
    words = (
        *LEARNING,
        TWO,
        f"--config.schedule.steps={steps}",
        "--config.learner.checkpoint_every=5",
        "--config.supervisor.backoff_s=0.1",
    )
    with Train(free_run_dir, *words) as train:
        for _ in range(2):
            train.until_step(last_step(train.rows) + 3)
            train.hosts("learner")[which == "follower"].send_signal(signal.SIGKILL)
            killed_at = last_step(train.rows)
            train.until(lambda rows, at=killed_at: last_step(rows) > at, f"a step after the {which} was killed")
        assert train.finish(400) == 0, train.logs()
        assert_sound(train, steps=steps, alpha=1)
        assert train.report()["restarts"] == 2
