"""A sampler of two processes with half of the parameters each: it samples as one process does and survives kills."""

import signal

import pytest

from tests.harness.train_process import (
    LEARNING,
    SAME,
    Train,
    assert_sound,
    last_step,
    trained_questions,
)

pytestmark = [pytest.mark.process, pytest.mark.soak]
TWO = "--config.placement.sampler_hosts=2"
STEPS = 3  # of the six steps of the run with one host


@pytest.mark.timeout(600)
def test_a_sampler_on_two_hosts_samples_as_on_one(tmp_path, synchronous_run):
    """With alpha = 0 every answer depends on all previous steps, so equal steps have equal tokens and log-probs."""
    words = (*LEARNING, "--config.schedule.alpha=0", f"--config.schedule.steps={STEPS}")
    with Train(tmp_path / "two", *words, TWO) as two:
        assert two.finish() == 0, two.logs()
        assert_sound(two, steps=STEPS, alpha=0)
    wanted = [asked for asked in trained_questions(synchronous_run) if asked[0] < STEPS]
    assert trained_questions(two) == wanted
    steps, others = ([row for row in run.rows if row["kind"] == "step"][:STEPS] for run in (two, synchronous_run))
    for mine, theirs in zip(steps, others, strict=True):
        assert [mine[key] for key in SAME] == [theirs[key] for key in SAME], f"step {mine['step']}"
        assert mine["grad_norm"] > 0
    assert not two.report()["restarts"]


@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_a_host(free_run_dir):
    """Both processes start again, and other samplers or they themselves play the members that were lost."""
    steps = 24
    words = (*LEARNING, TWO, f"--config.schedule.steps={steps}", "--config.supervisor.backoff_s=0.1",
             "--config.store.lease_s=6", "--config.store.rpc_deadline_s=4")  # fmt: skip
    with Train(free_run_dir, *words) as train:
        for which in (1, 0):
            train.until_step(last_step(train.rows) + 3)
            before = train.hosts("sampler")
            before[which].send_signal(signal.SIGKILL)
            killed_at = last_step(train.rows)
            train.until(lambda rows, at=killed_at: last_step(rows) > at + 1, "steps after the kill")
            assert not {one.pid for one in before} & {one.pid for one in train.children()}, "both processes are new"
        assert train.finish(400) == 0, train.logs()
        assert_sound(train, steps=steps, alpha=1)
        assert train.report()["restarts"] == 2
