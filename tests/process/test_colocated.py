"""Learner, samplers and evaluator in one process that take turns on the same devices (`placement.colocated`)."""

from __future__ import annotations

import signal

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.train_process import (
    LEARNING,
    SAME,
    SYNCHRONOUS,
    Train,
    assert_sound,
    differing,
    last_step,
    trained_again,
    trained_questions,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
TOGETHER = "--config.placement.colocated=True"
EVALUATED = "--config.evaluator.every=2"


def roles(train: Train) -> list[str]:
    """The roles of the processes that the supervisor started."""
    words = [process.cmdline() for process in train.children()]
    return sorted(line[3] for line in words if line[1:3] == ["-m", "jaxroll"])


def steps_of(train: Train) -> list[dict]:
    """The keys of each step that must be equal."""
    return [{key: row[key] for key in SAME} for row in train.rows if row["kind"] == "step"]


def accuracies(train: Train) -> dict[int, tuple[int, list]]:
    """By step, the number of questions and the correct ones."""
    return {row["step"]: (row["n"], row["correct"]) for row in train.rows if row["kind"] == "eval"}


def channels(train: Train) -> list[str]:
    """The channels through which the engines received weights."""
    return [channel for (channel,) in train.query("SELECT DISTINCT channel FROM versions")]


def test_a_synchronous_run_in_one_process_is_that_of_processes_of_their_own(tmp_path, synchronous_run):
    """With two devices in unequal meshes, questions, losses and evaluations are equal bit for bit."""
    apart = synchronous_run
    with Train(tmp_path / "together", *SYNCHRONOUS, TOGETHER) as together:
        together.until_step(1)
        assert roles(together) == ["colocated", "feeder", "store"], "the feeder is a child of the store"
        assert together.finish() == 0, together.logs()
        assert_sound(together, steps=6, alpha=0)
    assert any(step["grad_norm"] for step in steps_of(together)), "it learns something"
    assert steps_of(together) == steps_of(apart)
    first, second = accuracies(together), accuracies(apart)
    both = first.keys() & second.keys()  # an evaluator skips a version that is replaced while it is busy
    assert {0, 6} <= both and {step: first[step] for step in both} == {step: second[step] for step in both}
    assert trained_questions(together) == trained_questions(apart)
    assert [channels(train) for train in (apart, together)] == [["auto"], ["device"]]


ADAPTERS = ("--config.learner.lora_rank=4", "--config.learner.lora_publish=adapters")
PPO = ("--config.learner.algorithm=ppo", "--config.learner.critic=init")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("channel", "words"),
    [
        ("device", ADAPTERS),
        ("device", PPO),
        ("tcp", ()),
        ("tensorstore", ()),
        ("device", ("--config.schedule.alpha=2",)),
    ],
    ids=["adapters", "ppo", "tcp", "tensorstore", "ahead"],
)
def test_what_roles_may_be_is_the_same_in_one_process(tmp_path, channel, words):
    words = (*words, EVALUATED, TOGETHER, f"--config.transfer.channel={channel}", "--config.schedule.steps=6")
    with Train(tmp_path / "run", *LEARNING, *words) as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=6, alpha=2)
        assert channels(train) == [channel]
        assert any(row["grad_norm"] for row in train.rows if row["kind"] == "step"), "it learns something"
        assert 6 in accuracies(train)


@pytest.mark.soak
def test_a_run_in_one_process_survives_its_kills_and_goes_on_apart(free_run_dir):
    """After a kill the store still lists weights of the ended process; no role may start with them."""
    words = (
        *LEARNING,
        EVALUATED,
        TOGETHER,
        "--config.schedule.steps=5000",
        "--config.learner.checkpoint_every=3",
        "--config.supervisor.backoff_s=0.1",
        "--config.sampler.count=2",
    )
    with Train(free_run_dir, *words) as train:
        for kill in range(2):
            train.until_step(last_step(train.rows) + 4)
            train.role("colocated").send_signal(signal.SIGKILL)
            train.until(lambda rows, died=kill + 1: restarts(rows) == died, f"the end of process {kill + 1}")
            killed_at = last_step(train.rows)
            train.until(lambda rows, at=killed_at: last_step(rows) > at, f"a step after kill {kill + 1}")
            train.until(lambda rows, at=killed_at: evaluated(rows) > at, f"an evaluation after kill {kill + 1}")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        stopped_at = last_step(train.rows)
        assert_sound(train, steps=stopped_at, alpha=1)
        assert train.report()["restarts"] == 2
        assert differing(trained_again(train.rows)) == {}
        leased = train.query("SELECT COUNT(*) FROM members WHERE state = 'leased'")
        assert leased == [(0,)], "a clean stop returns all leases"
    words = ("--config.placement.colocated=False", f"--config.schedule.steps={stopped_at + 3}")
    with Train(free_run_dir, *words, resume=True) as second:
        assert second.finish() == 0, second.logs()
        assert_sound(second, steps=stopped_at + 3, alpha=1)
        assert evaluated(second.rows) == stopped_at + 3
    with Train(free_run_dir, TOGETHER, resume=True) as over:
        assert over.finish() == 0, over.logs()
        assert restarts(over.rows) == 0, "a finished run ends at once"


def restarts(rows: list[dict]) -> int:
    return sum(row["kind"] == "restart" for row in rows)


def evaluated(rows: list[dict]) -> int:
    """The newest evaluated step."""
    return max((row["step"] for row in rows if row["kind"] == "eval"), default=0)
