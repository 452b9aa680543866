"""Filtering, redundant members and two samplers in a whole run: the engines abort surplus members."""

import sqlite3

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.store.log.replay import replay_log
from tests.harness.train_process import LEARNING, Train, assert_sound, last_step

pytestmark = pytest.mark.process
STEPS = 5
CHOOSING = ("--config.schedule.alpha=0", f"--config.schedule.steps={STEPS}", "--config.schedule.redundant_members=2",
            "--config.schedule.filter=min_std", "--config.sampler.count=2", "--config.sampling.max_tokens=48",
            "--config.sampler.mesh.tensor=1")  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_synchronous_run_with_filter_and_redundant_members(free_run_dir):
    with Train(free_run_dir, *LEARNING, *CHOOSING) as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=STEPS, alpha=0)
        trained = train.query("SELECT id, size FROM groups WHERE claim_step IS NOT NULL")
        assert [size for _, size in trained] == [4] * (4 * STEPS)
        apart = train.query(
            "SELECT group_id FROM members JOIN claim_groups USING (group_id)"
            " WHERE members.state = 'done' GROUP BY group_id"
            " HAVING MAX(reward) > MIN(reward)"
        )
        assert len(apart) == 4 * STEPS, "a group without signal was trained"
        needless = train.query("SELECT COUNT(*) FROM members WHERE state = 'surplus' AND attempt > 0")[0][0]
        report = train.report()
        assert 0 < report["aborted_members"] <= needless
        assert report["aborted_tokens"] > 0
        holders = train.query("SELECT holder, COUNT(*) FROM members WHERE state = 'done' GROUP BY holder")
        assert {holder for holder, _ in holders} == {"sampler-0", "sampler-1"}
        with sqlite3.connect(f"{(free_run_dir / 'store.db').absolute().as_uri()}?mode=ro", uri=True) as db:
            assert replay_log(db).violations == []


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_one_step_samples_every_member_wholly_at_one_version(free_run_dir):
    with Train(free_run_dir, *LEARNING, "--config.schedule.mode=one_step", "--config.schedule.steps=8") as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=8, alpha=1)
        ages = train.query(
            "SELECT claim_step - oldest_step, newest_step - oldest_step FROM members"
            " JOIN groups ON id = group_id WHERE claim_step > 0 AND members.state = 'done'"
        )
        assert {spread for _, spread in ages} == {0}, "a running request went through a weight swap"
        assert 1 in {age for age, _ in ages}, "nothing was sampled during training"


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_two_samplers_swap_weights_during_training_at_half_a_step_of_staleness(free_run_dir):
    words = (
        "--config.schedule.alpha=0.5",
        "--config.schedule.steps=5000",
        "--config.sampler.count=2",
        "--config.sampler.mesh.tensor=1",
        "--config.sft.steps=0",
        "--config.evaluator.every=0",
        "--config.sampler.slots=8",
        "--config.sampler.concurrent_episodes=8",
        "--config.learner.shared_prompt_tokens=16",
        "--config.learner.shared_prompt_rows=2",
        "--config.task.env=tests.harness.envs.dense_reward:dense_reward",
    )
    with Train(free_run_dir, *words) as train:
        train.until_step(1)
        # The test waits for slow starts: the run ends when each sampler has sampled at three versions, and old groups
        # and fresh ones were trained.
        train.until(
            lambda rows: (
                len(versions_by_sampler(train)) == 2
                and min(versions_by_sampler(train).values()) >= 3
                and {row["age_max"] for row in rows if row["kind"] == "step"} >= {0, 1}
            ),
            "weight swaps of both samplers, and both ages trained",
        )
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        computed = [row for row in train.rows if row["kind"] == "step" and row["logprob_mismatch_tokens"]]
        assert computed and all(row["shared_tokens"] > 0 for row in computed)
        assert max(row["logprob_mismatch_max"] for row in computed) < 1e-3, (
            "the log-probs of sampler and learner differ"
        )
        assert {row["age_max"] for row in train.rows if row["kind"] == "step"} == {0, 1}, (
            "at a half, some are a step old"
        )


def versions_by_sampler(train: Train) -> dict[str, int]:
    """The number of versions at which each sampler has finished members."""
    return dict(
        train.query("SELECT holder, COUNT(DISTINCT newest_step) FROM members WHERE state = 'done' GROUP BY holder")
    )
