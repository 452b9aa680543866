"""Samplers on the learner's devices, for the first seconds of each step (`placement.learner_samplers`)."""

from __future__ import annotations

import itertools
import signal

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.train_process import LEARNING, Train, assert_sound, differing, last_step, trained_again

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SHARED = (
    *LEARNING,
    "--config.schedule.mode=sync",
    "--config.sampler.count=2",
    "--config.sampler.flush_tokens=8",
    "--config.sampler.decode_chunk=1",
    "--config.placement.learner_samplers=1",
    "--config.schedule.groups_per_step=8",
    "--config.sampler.concurrent_episodes=12",
    "--config.sampling.max_tokens=24",
    "--config.learner.row_tokens=64",
)
OF_LEARNER = "sampler-1"


def spans(train: Train, role: str) -> list[tuple[float, float]]:
    """The intervals in which a sampler sampled tokens, in order."""
    of = [row for row in train.rows if row["kind"] == "span" and row["what"] == "decode" and row["role"] == role]
    return sorted((row["t0"], row["t1"]) for row in of if row["tokens"])


def last(train: Train, kind: str, role: str) -> dict:
    return [row for row in train.rows if row["kind"] == kind and row["role"] == role][-1]


def test_a_sampler_works_on_the_learners_devices_and_its_rollouts_go_on_elsewhere(tmp_path):
    with Train(tmp_path / "run", *SHARED, "--config.learner.streaming=True", "--config.schedule.steps=16") as train:
        train.until_step(1)
        words = [process.cmdline() for process in train.children()]
        assert sorted(line[3] for line in words if line[1:3] == ["-m", "jaxroll"]) == [
            "feeder", "learner", "sampler", "store"
        ], "one sampler has no process of its own"  # fmt: skip
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=16, alpha=0)
    steps = [row for row in train.rows if row["kind"] == "step"]
    own = spans(train, OF_LEARNER)
    pairs = list(itertools.pairwise(steps))
    sampling = [any(before["t1"] <= t0 < row["t1"] for t0, _ in own) for before, row in pairs]
    assert sum(sampling) >= len(pairs) // 3, sampling  # the other sampler may take all work of a step
    for row in steps[1:]:
        assert not [one for one in own if one[0] < row["t1"] and one[1] > row["t0"]], "and not while the learner trains"
    moved = last(train, "stats", OF_LEARNER)["tokens_moved"]
    assert moved == last(train, "store", "store")["tokens_resumed"] > 0
    assert last(train, "stats", OF_LEARNER)["tokens_aborted"] == 0, "what goes on elsewhere is not wasted"


@pytest.mark.soak
def test_a_run_survives_kills_of_the_learner_with_its_sampler(free_run_dir):
    words = (*SHARED, "--config.schedule.steps=5000", "--config.learner.checkpoint_every=3",
             "--config.supervisor.backoff_s=0.1")  # fmt: skip
    with Train(free_run_dir, *words) as train:
        for kill in range(3):
            train.until_step(last_step(train.rows) + 4)
            train.role("learner").send_signal(signal.SIGKILL)
            train.until(lambda rows, died=kill + 1: deaths(rows) == died, f"the end of process {kill + 1}")
            killed_at, before = last_step(train.rows), len(spans(train, OF_LEARNER))
            train.until(lambda rows, at=killed_at: last_step(rows) > at + 3, f"steps after kill {kill + 1}")
            train.until(lambda _, had=before: len(spans(train, OF_LEARNER)) > had, "its sampler works again")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=0)
        assert differing(trained_again(train.rows)) == {}
        assert train.query("SELECT COUNT(*) FROM members WHERE state = 'leased'") == [(0,)]


def deaths(rows: list[dict]) -> int:
    return sum(row["kind"] == "restart" for row in rows)
