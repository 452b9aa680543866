"""Slow roles: a learner ten times slower (12), one member a hundred times slower (13)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, judge

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
MEMBER_TOKENS = 4000
MEMBER: dict[str, Any] = {"tokens_low": MEMBER_TOKENS // 2, "tokens_high": MEMBER_TOKENS}
MEMBER_BYTES = 9 * MEMBER_TOKENS + 1000  # int32, uint8, float32, and the fields around them


@pytest.mark.parametrize("steps", [16, pytest.param(200, marks=pytest.mark.soak)])
def test_12_a_learner_ten_times_slower_is_waited_for(tmp_path: Path, note: Callable[[Row], None], steps: int) -> None:
    """Memory and disk stay within the size of window and checkpoints, and samplers get no answer but `wait`."""
    shape = (
        "schedule.groups_per_step=3",
        "schedule.group_size=4",
        "schedule.alpha=2",
        f"schedule.steps={2 * steps}",
        "store.rpc_deadline_s=5",
        "store.keep_trajectories_mb=0",
    )
    with Cluster(tmp_path / "run", *shape) as run:
        run.allow(steps)
        quick = run.learner("learner-quick", step_s=0.02, checkpoint_every=2)
        samplers = [run.sampler(f"sampler-{i}", seed=i, lease_wait_s=0.1, **MEMBER) for i in range(2)]
        run.until_acked(steps)
        quick.stop()
        memory, disk, retained = [run.store.rss_bytes], [run.disk_bytes()], []
        run.allow(2 * steps)
        run.learner("learner-slow", step_s=0.2, checkpoint_every=2)
        with run.observer() as observer:
            for step in range(steps + 1, 2 * steps):
                run.until_acked(step)
                memory.append(run.store.rss_bytes)
                disk.append(run.disk_bytes())
                retained.append(observer.status()["retained_bytes"])
            window = observer.status()["in_flight_window_max"]
        run.finish()
        in_flight = (window + 2 * 3 + 3) * 4 * MEMBER_BYTES  # window, two claims until a checkpoint, one being trained
        assert max(retained) <= in_flight
        assert max(disk) <= 3 * in_flight + 8 * 2**20, f"disk {max(disk)}"  # the WAL is merged every 4 MB
        assert max(memory) <= memory[0] + 2 * in_flight + 8 * 2**20, f"memory grew from {memory[0]} to {max(memory)}"
        assert {row["answer"] for row in run.sampled() if row["kind"] == "put"} == {"OK"}
        assert not [row for sampler in samplers for row in sampler.said("refused")]
        assert any(sampler.said("no credit") for sampler in samplers), (
            "no sampler ever waited: the learner was not slow"
        )
        note(judge(run, "12 learner ten times slower", 1, went_on_from=steps))


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_13_one_member_a_hundred_times_slower(tmp_path: Path, note: Callable[[Row], None], policy: str) -> None:
    """Every fourth group has one. `shrink` closes these groups with three members, `wait` waits; none is skipped."""
    shape = (
        "schedule.groups_per_step=3",
        "schedule.group_size=4",
        "schedule.alpha=1",
        "schedule.steps=8",
        f"schedule.straggler={policy}",
        "schedule.straggler_deadline_s=2",
        "store.lease_s=3",
        "store.rpc_deadline_s=2",
    )
    with Cluster(tmp_path / "run", *shape) as run:
        run.learner()
        sampler = run.sampler(
            slots=24, work_s=0.02, slow_member=2, slow_every=4, slow_factor=1000 if policy == "shrink" else 100
        )
        run.finish(120)
        trained = run.query("SELECT id, size, reason FROM groups WHERE claim_step IS NOT NULL ORDER BY id")
        assert [group for group, _, _ in trained] == list(range(24)), "a group was skipped"
        slow = [(size, reason) for group, size, reason in trained if group % 4 == 0]
        others = {(size, reason) for group, size, reason in trained if group % 4}
        assert others == {(4, "")}
        assert set(slow) == ({(3, "straggler")} if policy == "shrink" else {(4, "")})
        claimed = {
            group: len(members) for row in run.learned() if row["kind"] == "claim" for group, members in row["groups"]
        }
        assert {claimed[group] for group in range(0, 24, 4)} == ({3} if policy == "shrink" else {4})
        late = {row["answer"] for row in sampler.said("put") if row["key"][1] == 2 and row["key"][0] % 4 == 0}
        assert late <= ({"SURPLUS"} if policy == "shrink" else {"OK"})
        note(judge(run, f"13 a member 100x slower, {policy}", len(slow), went_on_from=0))
