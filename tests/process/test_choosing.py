"""Filtering, redundant members and two samplers in a whole run: the engines abort what nobody needs any more."""

import sqlite3

import pytest

from jaxroll.store.replay import replay_log
from tests.process.trains import LEARNING, Train, assert_sound

pytestmark = pytest.mark.process
STEPS = 5
CHOOSING = ("--config.schedule.alpha=0", f"--config.schedule.steps={STEPS}", "--config.schedule.redundant_members=2",
            "--config.schedule.filter=min_std", "--config.sampler.count=2", "--config.sampling.max_tokens=48",
            "--config.sampler.mesh.tensor=1")  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_synchronous_run_that_chooses_what_it_trains_on(free_run_dir):
    with Train(free_run_dir, *LEARNING, *CHOOSING) as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=STEPS, alpha=0)
        trained = train.query("SELECT id, size FROM groups WHERE claim_step IS NOT NULL")
        assert [size for _, size in trained] == [4] * (4 * STEPS)
        apart = train.query("SELECT group_id FROM members JOIN claim_groups USING (group_id)"
                            " WHERE members.state = 'done' GROUP BY group_id"
                            " HAVING MAX(reward) > MIN(reward)")  # fmt: skip
        assert len(apart) == 4 * STEPS, "a group without signal was trained"
        needless = train.query("SELECT COUNT(*) FROM members WHERE state = 'surplus' AND attempt > 0")[0][0]
        report = train.report()
        assert 0 < report["aborted_members"] <= needless
        assert report["aborted_tokens"] > 0
        holders = train.query("SELECT holder, COUNT(*) FROM members WHERE state = 'done' GROUP BY holder")
        assert {holder for holder, _ in holders} == {"sampler-0", "sampler-1"}
        with sqlite3.connect(f"file:{free_run_dir / 'store.db'}?mode=ro", uri=True) as db:
            assert replay_log(db).violations == []


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_one_step_samples_every_member_wholly_at_one_version(free_run_dir):
    with Train(free_run_dir, *LEARNING, "--config.schedule.mode=one_step", "--config.schedule.steps=8") as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=8, alpha=1)
        ages = train.query("SELECT claim_step - oldest_step, newest_step - oldest_step FROM members"
                           " JOIN groups ON id = group_id WHERE claim_step > 0 AND members.state = 'done'")  # fmt: skip
        assert {spread for _, spread in ages} == {0}, "a flip went through a running request"
        assert 1 in {age for age, _ in ages}, "nothing was sampled beside training"
