"""Faults of samplers: killed idle (1), killed during a group (2), stuck at an old version (17), join and leave (19)."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, acknowledged, judge

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SMALL = ("schedule.groups_per_step=3", "schedule.group_size=4", "schedule.alpha=1", "store.rpc_deadline_s=2")


def test_1_a_sampler_killed_idle_costs_nothing(tmp_path: Path, note: Callable[[Row], None]) -> None:
    with Cluster(
        tmp_path / "run", *SMALL, "schedule.in_flight_window=full", "schedule.steps=12", "store.lease_s=20"
    ) as run:
        run.allow(4)
        run.learner()
        first = run.sampler("sampler-0", seed=1)
        run.sampler("sampler-1", seed=2)
        run.until_acked(4)
        window = run.status()["in_flight_window"]
        run.until(lambda: run.status()["counts"]["READY"] == window, "a full window, in which every sampler is idle")
        first.kill()
        run.allow(12)
        run.until_acked(6)
        first.start()
        run.finish()
        assert run.query("SELECT COUNT(*) FROM members WHERE attempt > 1") == [(0,)], "the killed sampler had a lease"
        note(judge(run, "1 sampler killed idle", 1, went_on_from=4))


def test_2_a_sampler_killed_during_a_group_costs_only_the_missing_members(
    tmp_path: Path, note: Callable[[Row], None]
) -> None:
    """Its puts stay; its leased members go to another sampler when the lease ends, and not before."""
    with Cluster(tmp_path / "run", *SMALL, "schedule.steps=8", "store.lease_s=3") as run:
        run.learner()
        first = run.sampler("sampler-0", seed=1, slots=12, slow_member=3, slow_factor=1e6)
        half_done = lambda: len(acknowledged(first.rows)) >= 6  # noqa: E731
        run.until(half_done, "some members of every group")
        run.sampler("sampler-1", seed=2, slots=12)
        first.kill()
        kept = acknowledged(first.rows)
        run.finish()
        rows = run.query("SELECT group_id, member, attempt, digest, holder FROM members")
        members = {(group, member): (attempt, digest, holder) for group, member, attempt, digest, holder in rows}
        for (group, member, attempt), digest in kept.items():
            assert members[group, member] == (attempt, digest, "sampler-0"), "a finished member was sampled again"
        held = run.granted("sampler-0") - set(kept)
        assert {key[1] for key in held} >= {3}, "it held no lease when it was killed"
        again = {key for key, (attempt, _, _) in members.items() if attempt > 1}
        assert again <= {key[:2] for key in held}, "more was sampled again than was missing"
        assert {(members[key][0], members[key][2]) for key in again} == {(2, "sampler-1")}
        assert {key[:2] for key in held if key[1] == 3} <= again, "missing members were not leased again"
        note(judge(run, "2 sampler killed during a group", 1, went_on_from=0))


def test_17_a_sampler_stuck_at_an_old_version_gets_no_leases(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """With α = 1 a sampler two versions behind gets no leases; the other continues, and no group expires."""
    with Cluster(tmp_path / "run", *SMALL, "schedule.steps=12", "store.lease_s=20") as run:
        run.allow(0)
        run.learner()
        stuck = run.sampler("sampler-0", seed=1, follows=False, lease_wait_s=0.1)
        run.until(lambda: stuck.said("put"), "a put of the sampler that will be stuck")
        run.allow(12)
        run.sampler("sampler-1", seed=2)
        run.finish()
        why = {row["reason"].partition(":")[0] for row in stuck.said("no credit")}
        assert "weights" in why, f"the refusal does not name its old weights: {why}"
        sql = "SELECT MAX(g.claim_step) FROM members m JOIN groups g ON g.id = m.group_id WHERE holder = 'sampler-0'"
        oldest = run.query(sql)
        assert oldest[0][0] <= 2, "it got leases for which its weights were too old"
        assert run.status()["expired"] == {}, "groups expired that should not have been leased"
        note(judge(run, "17 sampler stuck at an old version", 1, went_on_from=2))


@pytest.mark.parametrize("changes", [8, pytest.param(60, marks=pytest.mark.soak)])
def test_19_samplers_join_and_leave_under_load(tmp_path: Path, note: Callable[[Row], None], changes: int) -> None:
    """They leave by SIGTERM, which returns their leases at once, and by SIGKILL, after which their leases expire."""
    chance, steps = random.Random(19), 1000
    with Cluster(tmp_path / "run", *SMALL, f"schedule.steps={steps}", "store.lease_s=3") as run:
        learner = run.learner(step_s=0.0)
        for i in range(2):
            run.sampler(f"sampler-{i}", seed=i)
        for i in range(changes):
            at = run.acked()
            run.until_acked(at + chance.randint(1, 3))
            present = [role for role in run.samplers() if role.alive]
            if len(present) > 1 and chance.random() < 0.5:
                leaver = chance.choice(present)
                run.until(lambda leaver=leaver: leaver.said("life"), "its arrival")
                leaver.kill() if chance.random() < 0.5 else leaver.stop()
            else:
                run.sampler(f"sampler-{i + 2}", seed=i + 2, work_s=chance.choice((0.01, 0.05)))
        at = run.acked()
        run.until_acked(at + 2)
        joiners = [role for role in run.samplers() if role.alive and role.name not in ("sampler-0", "sampler-1")]
        if joiners:
            run.until(lambda: any(role.said("put") for role in joiners), "a put of a sampler that joined")
        assert learner.stop() == 0
        for role in run.samplers():
            if role.alive:
                run.until(lambda role=role: role.said("life"), "its arrival")
                assert role.stop() == 0
            assert role.process.returncode in (0, -signal.SIGKILL)
        note(judge(run, "19 samplers join and leave", changes, went_on_from=at))
        joined = {role.name for role in run.samplers() if role.said("life")}
        put = {holder for (holder,) in run.query("SELECT DISTINCT holder FROM members WHERE digest <> ''")}
        assert put >= {name for name in joined if acknowledged(run.roles[name].rows)}
        assert put - {"sampler-0", "sampler-1"}, "no sampler that joined got work"
        assert run.query("SELECT COUNT(*) FROM groups WHERE state = 'DEAD'") == [(0,)], "a group died of its samplers"
