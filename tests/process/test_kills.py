"""`kill -9` of every role at random instants of one run, and of the supervisor itself."""

import random
import signal
import threading

import psutil
import pytest

from tests.harness.train_process import LEARNING, SMALL, Train, assert_sound, differing, last_step, trained_again

pytestmark = pytest.mark.process


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["sampler", "learner", "store"])
def test_a_run_survives_three_kills_of(role, free_run_dir):
    """After each kill the run continues; no group is trained twice into durable weights."""
    steps, chance = 60, random.Random(f"kills of {role}")
    words = (
        *LEARNING,
        f"--config.schedule.steps={steps}",
        "--config.learner.checkpoint_every=7",
        "--config.supervisor.backoff_s=0.1",
    )
    with Train(free_run_dir, *words) as train:
        for _ in range(3):
            train.until_step(last_step(train.rows) + 3)
            victim = train.role(role)
            threading.Event().wait(chance.uniform(0.0, 0.3))  # a random instant, from a fixed seed
            victim.send_signal(signal.SIGKILL)
            killed_at = last_step(train.rows)
            train.until(lambda rows, at=killed_at: last_step(rows) > at, f"a step after the {role} was killed")
        assert train.finish(400) == 0, train.logs()
        assert_sound(train, steps=steps, alpha=1)
        assert train.report()["restarts"] == 3
        again = trained_again(train.rows)
        assert differing(again) == {}, "a repeated step differs"
        if role == "learner":
            assert any(life["grad_norm"] for lives in again.values() for life in lives), (
                "no repeated step has a gradient"
            )


@pytest.mark.soak
@pytest.mark.parametrize("role", ["sampler", "learner"])
def test_a_role_that_gets_sigterm_comes_back(role, free_run_dir):
    """SIGTERM from outside, as in a preemption: the role leaves in order, restarts, and the run continues."""
    with Train(free_run_dir, *SMALL, "--config.schedule.steps=14", "--config.supervisor.backoff_s=0.1") as train:
        train.until_step(3)
        train.role(role).send_signal(signal.SIGTERM)
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=14, alpha=1)
        assert train.report()["restarts"] == 1


def test_no_child_outlives_a_killed_supervisor(free_run_dir):
    with Train(free_run_dir, *SMALL, "--config.schedule.steps=1000") as train:
        train.until_step(1)
        children = train.children()
        assert {"store", "learner", "sampler"} <= {name for p in children for name in p.cmdline()}
        train.process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not any(map(is_there, alive))


def is_there(process: psutil.Process) -> bool:
    """True if the process is alive and not a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
