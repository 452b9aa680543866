"""The demo with three kills each of sampler, learner and store at random instants."""

import random
import signal
import threading

import pytest

from tests.harness.train_process import Train, assert_sound, differing, last_step, trained_again

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(1800)]
STEPS, LIMIT_S = 100, 600.0
VICTIMS = ("sampler", "learner", "store") * 3


@pytest.mark.parametrize("seed", [3])
def test_a_demo_survives_nine_kills(free_run_dir, seed):
    chance = random.Random(f"nine kills {seed}")
    victims = chance.sample(VICTIMS, len(VICTIMS))
    with Train(free_run_dir, f"--config.run.seed={seed}", config="demo") as train:
        for role in victims:
            train.until_step(last_step(train.rows) + chance.randint(2, 8), LIMIT_S)
            victim = train.role(role)
            threading.Event().wait(chance.uniform(0.0, 1.0))  # a random instant, from a fixed seed
            victim.send_signal(signal.SIGKILL)
        assert train.finish(LIMIT_S) == 0, train.logs()
    assert_sound(train, steps=STEPS, alpha=1)
    assert durable_groups_twice(train) == []
    report = train.report()
    assert report["restarts"] == len(VICTIMS)
    assert report["heldout_in_train"] == 0 and report["eval_steps"] == [0, STEPS]
    assert report["accuracy_gain_low"] >= 0.08, report
    again = trained_again(train.rows)
    assert len(again) >= 3, "the learner did not rewind after each of its three kills"
    assert differing(again) == {}, "a repeated step differs"


def durable_groups_twice(train: Train) -> list[tuple]:
    """(group, steps) of the groups that are in two durable steps, from RUN/store.db."""
    return train.query(
        "SELECT group_id, COUNT(*) FROM claim_groups WHERE step IN "
        "(SELECT step FROM claims WHERE durable_lineage IS NOT NULL) GROUP BY group_id HAVING COUNT(*) > 1"
    )
