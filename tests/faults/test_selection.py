"""Selection of groups in runs of real processes: filtered groups are replaced, surplus members are aborted early."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from jaxroll.store.log.replay import replay_log
from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, judge

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
STEPS = 6


def test_every_third_prompt_is_rejected_and_replaced_in_a_synchronous_run(
    tmp_path: Path, note: Callable[[Row], None]
) -> None:
    shape = (
        "schedule.groups_per_step=2",
        "schedule.group_size=2",
        "schedule.alpha=0",
        f"schedule.steps={STEPS}",
        "schedule.filter=min_std",
    )
    with Cluster(tmp_path / "run", *shape) as run:
        run.learner()
        run.sampler(dull_every=3)
        run.finish()
        trained = run.query("SELECT prompt_index FROM groups WHERE claim_step IS NOT NULL ORDER BY id")
        teaching = [index for index in range(100) if index % 3]
        assert [index for (index,) in trained] == teaching[: 2 * STEPS], (
            "a prompt with a learning signal was passed over"
        )
        rejected = run.query("SELECT prompt_index, state, reason FROM groups WHERE claim_step IS NULL ORDER BY id")
        assert {(state, reason) for _, state, reason in rejected} == {("EXPIRED", "filtered: rewards too alike")}
        assert [index for index, _, _ in rejected] == [index for index in range(trained[-1][0]) if index % 3 == 0]
        judged = run.query(
            "SELECT members, reward_sum, trained FROM questions JOIN groups USING (question_hash)"
            " WHERE prompt_index = 3"
        )
        assert judged == [(2, 2.0, 0)]
        note(judge(run, "filtered groups", len(rejected), went_on_from=0))
        with closing(sqlite3.connect(run.run_dir / "store.db")) as db:
            assert replay_log(db).violations == []


def test_a_task_that_teaches_nothing_ends_the_run_and_says_so(tmp_path: Path) -> None:
    shape = (
        "schedule.groups_per_step=2",
        "schedule.group_size=2",
        "schedule.alpha=0",
        "schedule.steps=6",
        "schedule.filter=pass_rate",
        "schedule.filter_limit=2",
    )
    with Cluster(tmp_path / "run", *shape) as run:
        learner, sampler = run.learner(), run.sampler(dull_every=1)
        run.until(lambda: not (learner.alive or sampler.alive), "the end of both")
        (closed,) = learner.said("closed")
        assert "pass_rate rejected 4 groups for claim 0" in closed["text"]
        assert "pass rate too high" in closed["text"]
        assert run.query("SELECT COUNT(*) FROM groups WHERE state = 'EXPIRED'") in ([(4,)], [(5,)]), (
            "one may have been in progress"
        )


def test_slow_members_are_taken_back_and_their_sampler_learns_it_at_once(
    tmp_path: Path, note: Callable[[Row], None]
) -> None:
    """Member 1 of every group takes a minute; one member of three is redundant. Leases last a minute too: an abort
    that came only with their renewal, every twenty seconds, would free no slot in time."""
    shape = (
        "schedule.groups_per_step=2",
        "schedule.group_size=2",
        "schedule.alpha=0",
        f"schedule.steps={STEPS}",
        "schedule.redundant_members=1",
        "store.lease_s=60",
    )
    with Cluster(tmp_path / "run", *shape) as run:
        run.learner()
        sampler = run.sampler(slots=6, slow_member=1, slow_factor=3000, work_s=0.02)
        run.finish(30)
        trained = run.query("SELECT id, size FROM groups WHERE claim_step IS NOT NULL ORDER BY id")
        assert trained == [(group, 2) for group in range(2 * STEPS)]
        surplus = run.query("SELECT group_id, member FROM members WHERE state = 'surplus' ORDER BY group_id")
        assert surplus == [(group, 1) for group in range(2 * STEPS)]
        ended = {tuple(key) for row in sampler.said("ended") for key in row["keys"]}
        told = [{(group, 1, 1) for group in range(2 * steps)} for steps in (STEPS - 1, STEPS)]
        assert told[0] <= ended <= told[1], (
            "a sampler was not notified (of the last step the end of the run may come first)"
        )
        assert not sampler.said("lost"), "a member was aborted only at a renewal"
        note(judge(run, "redundant members, one fails slow", 2 * STEPS, went_on_from=0))
        with closing(sqlite3.connect(run.run_dir / "store.db")) as db:
            assert replay_log(db).violations == []


@pytest.mark.parametrize("replicate", [pytest.param("spread", marks=pytest.mark.soak), "together"])
def test_no_sampler_takes_everything_while_another_is_idle(
    tmp_path: Path, note: Callable[[Row], None], replicate: str
) -> None:
    """Each of two samplers could hold a whole step. The first may get all of the first step, but of no other."""
    shape = (
        "schedule.groups_per_step=4",
        "schedule.group_size=4",
        "schedule.alpha=0",
        f"schedule.steps={STEPS}",
        f"schedule.group_placement={replicate}",
    )
    with Cluster(tmp_path / "run", *shape) as run:
        run.allow(0)
        run.learner(step_s=1.0)
        both = [run.sampler(name, slots=16, lease_wait_s=0.2, work_s=0.1) for name in ("sampler-0", "sampler-1")]
        turned_away = lambda one: any(row["reason"].startswith("window") for row in one.said("no credit"))  # noqa: E731
        run.until(lambda: all(map(turned_away, both)), "two samplers with free slots")
        run.allow(STEPS)
        run.finish()
        held = run.query(
            "SELECT claim_step, group_id, holder, COUNT(*) FROM members JOIN groups ON id = group_id"
            " WHERE claim_step > 0 GROUP BY claim_step, group_id, holder"
        )
        steps = {step: [row for row in held if row[0] == step] for step in range(1, STEPS)}
        shared = [step for step, rows in steps.items() if len({holder for _, _, holder, _ in rows}) == 2]
        assert len(shared) >= STEPS - 2, f"steps {shared} of {list(steps)} were shared"
        split = {group for _, group, _, count in held if count < 4}
        assert bool(split) == (replicate == "spread"), f"groups {split} went to both samplers"
        note(judge(run, f"two samplers, {replicate}", 2, went_on_from=0))
