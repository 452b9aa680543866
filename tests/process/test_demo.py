"""The demo as a user runs it: it learns, its report's invariants hold, and the control does not learn."""

import os
import threading
import time

import pytest

from tests.harness.train_process import Train, assert_sound, violated_invariants

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(1200)]
LIMIT_S = 900.0
STEPS = 100


class Watch(threading.Thread):
    """Context manager that measures a run's longest silence and the machine's largest load."""

    def __init__(self, output):
        super().__init__(daemon=True)
        self.output, self.silence_s, self.load, self._over = output, 0.0, 0.0, threading.Event()

    def run(self):
        size, since = 0, time.monotonic()
        while not self._over.wait(0.05):
            self.load = max(self.load, os.getloadavg()[0])
            self.silence_s = max(self.silence_s, time.monotonic() - since)
            if (now := self.output.stat().st_size) > size:
                size, since = now, time.monotonic()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc):
        self._over.set()
        self.join(10)


def finished(run_dir, *overrides, config="demo"):
    """Run to the end; return the run, its report and the measurements."""
    train = Train(run_dir, *overrides, config=config)
    with train, Watch(train.output) as watch:
        assert train.finish(LIMIT_S) == 0, train.logs()
    assert 1 < watch.silence_s < 10, "the run was silent for too long"
    return train, train.report(), watch


def assert_invariants(train, report, watch):
    """Assert the report's invariants. The demo alone causes a load of up to 5; with other load it overlaps less."""
    assert violated_invariants(train, report) == [], f"the largest load during the run was {watch.load:.0f}"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_and_keeps_every_promise(free_run_dir, seed):
    train, report, watch = finished(free_run_dir, f"--config.run.seed={seed}")
    assert_sound(train, steps=STEPS, alpha=1)
    assert report["accuracy_gain"] >= 0.15 and report["accuracy_gain_low"] >= 0.08, report
    assert report["heldout_items"] == 512 and report["heldout_in_train"] == 0
    assert report["eval_steps"] == [0, STEPS] and report["restarts"] == 0
    assert report["learner_mesh"]["fsdp"] == 2 and report["sampler_mesh"]["tensor"] == 2
    assert_invariants(train, report, watch)


@pytest.mark.parametrize("alpha", [0, 2])
def test_the_demo_learns_at_other_bounds_of_age(free_run_dir, alpha):
    train, report, watch = finished(free_run_dir, f"--config.schedule.alpha={alpha}")
    assert_sound(train, steps=STEPS, alpha=alpha)
    ages = {int(age) for row in train.rows if row["kind"] == "step" for age in row["age_hist"]}
    assert {0, min(alpha, 1)} <= ages <= set(range(alpha + 1)), "ages are not within α, or do not vary"
    assert report["accuracy_gain_low"] >= 0.08, report
    assert_invariants(train, report, watch)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shuffled_rewards_teach_nothing(free_run_dir, seed):
    train, report, _ = finished(free_run_dir, f"--config.run.seed={seed}", config="demo_shuffled")
    assert_sound(train, steps=STEPS, alpha=1)
    assert report["accuracy_gain"] < 0.04, report
