"""Faults of the machine, with real processes without JAX: changed certificates, full and read-only disks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.errors import EXIT_FAILURE
from jaxroll.rpc import tls
from jaxroll.run_paths import RunPaths
from tests.harness.cluster import disks
from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, judge

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SMALL = (
    "schedule.groups_per_step=3",
    "schedule.group_size=4",
    "schedule.alpha=1",
    "schedule.steps=100000",
    "store.lease_s=5",
    "store.rpc_deadline_s=3",
)


@pytest.mark.soak
def test_certificates_are_rotated_under_a_run_without_a_restart_of_its_callers(
    tmp_path: Path, certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, note: Callable[[Row], None]
) -> None:
    """All get a new CA and new certificates, and the store restarts. Expired ones end it with the remedy."""
    tls.make_certificates(tmp_path / "made", [], 1)
    folder = RunPaths(tmp_path / "made").tls
    monkeypatch.setenv(tls.TLS_VARIABLE, str(folder))
    with Cluster(tmp_path / "run", *SMALL, "store.mutual_tls=true") as run:
        learner, sampler = run.learner(step_s=0.0), run.sampler(work_s=0.01)
        run.until_acked(3)
        shutil.rmtree(folder)
        tls.make_certificates(tmp_path / "made", [], 1)
        run.store.kill()
        run.store.start()
        at = run.acked()
        run.until_acked(at + 3)
        tls.make_certificates(tmp_path / "made", [], -1)
        learner.may_fail = sampler.may_fail = True
        run.store.kill()
        run.store.start()
        for role in (learner, sampler):
            run.until(lambda role=role: not role.alive, f"the end of {role.name}")
            log = role.log_file.read_text()
            assert "expired" in log and "jaxroll tls RUN" in log, log
        tls.make_certificates(tmp_path / "made", [], 1)
        at = run.acked()
        learner.start()
        sampler.start()
        run.until_acked(at + 3)
        learner.may_fail = sampler.may_fail = False
        note(judge(run, "certificates rotated and expired", 2, went_on_from=at, errors=2))


def test_a_store_whose_disk_is_full_for_a_while(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """The store ends with the cause at every start; when there is room again it continues."""
    with disks.small_disk(tmp_path / "run" / "run", 32) as disk, Cluster(tmp_path / "run", *SMALL) as run:
        run.learner(step_s=0.0)
        run.sampler(work_s=0.01)
        run.until_acked(3)
        disk.fill()
        run.store.may_fail = True
        for _ in range(2):
            run.until(lambda: not run.store.alive, "the end of the store")
            assert run.store.process.returncode == EXIT_FAILURE
            last = run.store.log_file.read_text().strip().splitlines()[-1]
            assert last.startswith("error: ") and f"MB are free at {disk.path}: make room" in last, last
            run.store.start()
        run.until(lambda: not run.store.alive, "its third end")
        disk.free()
        run.store.start()
        at = run.acked()
        run.until_acked(at + 3)
        run.store.may_fail = False
        note(judge(run, "16 disk full for a while", 1, went_on_from=at))


def test_a_store_whose_disk_becomes_read_only(tmp_path: Path, note: Callable[[Row], None]) -> None:
    image = tmp_path / "disk.img"
    with disks.failing_disk(tmp_path / "run" / "run", image, 64) as disk, Cluster(tmp_path / "run", *SMALL) as run:
        run.learner(step_s=0.0)
        run.sampler(work_s=0.01)
        run.until_acked(3)
        disk.fail(run.store.process.pid)
        run.store.may_fail = True
        run.until(lambda: not run.store.alive, "the end of the store")
        last = run.store.log_file.read_text().strip().splitlines()[-1]
        assert last.startswith("error: ") and f"MB are free at {disk.path}" in last and "remount" in last, last
        disk.repair()
        run.store.start()
        at = run.acked()
        run.until_acked(at + 3)
        run.store.may_fail = False
        note(judge(run, "16 disk read-only", 1, went_on_from=at))
