"""Learner and sampler on two hosts each: namespaces with a network that is cut between the two hosts of a role."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from jaxroll import metrics
from tests.harness.namespaces import Hosts, missing
from tests.harness.train_process import START_S, UNEQUAL_MESHES, last_step, report_of
from tests.process.test_launch_over_ssh import launched, said

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(1500)]
LEASE_S = 6.0


def test_a_cut_between_two_hosts_of_a_role_restarts_the_role(tmp_path: Path) -> None:
    """The hosts of one role cannot reach each other, and all reach the store: the role starts again when they can."""
    if reason := missing():
        pytest.skip(f"namespaces: {reason}")
    with Hosts(5, tmp_path) as hosts:
        store, *others = hosts.addresses
        places = zip(("learner", "learner-1", "sampler-0", "sampler-0-1"), others, strict=True)
        words = (
            *(f"--on={role}={ip}" for role, ip in places), f"--on=store={store}", *UNEQUAL_MESHES,
            "--config.placement.learner_hosts=2", "--config.placement.sampler_hosts=2",
            "--config.sft.steps=0", "--config.schedule.steps=60", "--config.learner.checkpoint_every=5",
            f"--config.store.lease_s={LEASE_S}", "--config.store.rpc_deadline_s=4", "--config.supervisor.backoff_s=0.5",
        )  # fmt: skip
        with launched(tmp_path, *words, hosts=hosts) as process:
            rows, seen, pause = metrics.RowReader(tmp_path / "run" / "metrics.jsonl"), list[dict](), threading.Event()

            def until(step: int, restarts: int, limit_s: float) -> None:
                deadline_s = time.monotonic() + limit_s
                while time.monotonic() < deadline_s and process.poll() is None:
                    seen.extend(rows.rows())
                    if last_step(seen) >= step and sum(row.get("kind") == "restart" for row in seen) >= restarts:
                        return
                    pause.wait(0.2)
                pytest.fail(f"not at step {step} with {restarts} restarts:\n{said(tmp_path)}")

            until(3, 0, START_S)
            for one, other in (others[:2], others[2:]):
                restarts = sum(row.get("kind") == "restart" for row in seen)
                hosts.cut(one, other)
                until(0, restarts + 1, START_S)
                hosts.heal()
                until(last_step(seen) + 3, restarts + 1, 2 * START_S)
            assert process.wait(timeout=2 * START_S) == 0, said(tmp_path)
        seen.extend(rows.rows(closed=True))
    assert last_step(seen) == 60
    restarted = [row["process"] for row in seen if row.get("kind") == "restart"]
    assert {name.partition("-")[0] for name in restarted} == {"learner", "sampler"}
    report = report_of(tmp_path / "run")
    assert (report["conservation_residual"], report["groups_trained_twice"], report["steps"]) == (0, 0, 60)
    assert report["age_max"] <= 1
