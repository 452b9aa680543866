"""A small chat model that thinks learns from the text after its thoughts, and nothing if the whole text is scored."""

import pytest

from tests.harness.train_process import Train, assert_sound

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(7200)]
STEPS, LIMIT_S = 240, 3000.0
CONTROL = ("--config.task.extract=none", "--config.task.reward=exact")


def accuracies(train: Train) -> tuple[float, float]:
    """Held-out accuracy at the start and at the end of a run, in percent."""
    assert train.finish(LIMIT_S) == 0, train.logs()
    assert_sound(train, steps=STEPS, alpha=1)
    report = train.report()
    return 100 * report["accuracy_start"], 100 * report["accuracy_end"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_gains_fifteen_points_and_the_control_none(tmp_path, seed):
    words = (f"--config.run.seed={seed}",)
    with Train(tmp_path / "run", *words, config="think_tags") as train:
        start, end = accuracies(train)
        assert 30 <= start <= 60 and end - start >= 15, (start, end)
    with Train(tmp_path / "control", *words, *CONTROL, config="think_tags") as train:
        assert accuracies(train) == (0, 0)
        rewards = train.query("SELECT DISTINCT reward FROM members WHERE state = 'done'")
        assert rewards == [(0.0,)], "a completion without tags was rewarded: the control can learn"
