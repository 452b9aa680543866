"""Fault 19: two learners with the same run id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, judge

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
SMALL = (
    "schedule.groups_per_step=3",
    "schedule.group_size=4",
    "schedule.alpha=1",
    "schedule.steps=20",
    "store.lease_s=5",
    "store.rpc_deadline_s=3",
)


def test_19_a_second_learner_fences_the_first(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """The first learner is refused with the reason at its next call, and no later call of it has an effect."""
    with Cluster(tmp_path / "run", *SMALL) as run:
        run.allow(7)
        first = run.learner("learner-0")
        run.sampler("sampler-0", seed=1)
        run.until_acked(7)
        second = run.learner("learner-1")
        run.until(lambda: second.said("publish"), "the second learner's beginning")
        first.may_fail = True
        run.allow(20)
        run.until(lambda: not first.alive, "the end of the first learner")
        run.until(lambda: not second.alive, "the end of the second learner")
        assert first.process.returncode == 1
        assert "another learner began after this one" in first.said("error")[-1]["text"]
        began = second.said("begin")[0]
        assert began["durable"] == [0, 5]
        assert began["version"] == [1, 5], "the steps after the checkpoint are not trained again in a new lineage"
        run.until(lambda: not run.roles["sampler-0"].alive, "the sampler's end")
        assert run.status()["durable"] == 20
        note(judge(run, "19 two learners with one run id", 1, went_on_from=7, errors=1))
