"""Faults of the store: killed during an append (7) and a compaction (8), disk full (16)."""

from __future__ import annotations

import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jaxroll.data.tasks import PromptPipeline
from jaxroll.errors import EXIT_FAILURE
from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, judge, replays
from tests.harness.cluster.scripted_store import StoreOrders

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
SMALL = (
    "schedule.groups_per_step=3",
    "schedule.group_size=4",
    "schedule.alpha=1",
    "schedule.steps=100000",
    "store.lease_s=5",
    "store.rpc_deadline_s=3",
)


def kill_the_store(run: Cluster, kills: int, seed: int) -> None:
    """Kill the store at a random moment after a few puts, restart it, and wait for puts to the new process."""
    chance, pause = random.Random(seed), threading.Event()
    sampler = run.samplers()[0]
    for _ in range(kills):
        wanted = len(sampler.said("put")) + chance.randint(3, 20)
        run.until(lambda wanted=wanted: len(sampler.said("put")) >= wanted, "puts")
        pause.wait(chance.uniform(0.0, 0.02))
        run.store.kill()
        run.store.start()
    at = run.acked()
    run.until_acked(at + 2)


def end(run: Cluster, fault: str, at: int) -> Row:
    """End a run of endless steps and judge it; a claim that was handed out more than once must not have changed."""
    row = judge(run, fault, run.store.kills, went_on_from=at)
    different = [step for step, claims in replays(run.learned()).items() if any(c != claims[0] for c in claims)]
    assert different == [], f"claims that changed: {different}"
    return row


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.soak)])
def test_7_a_store_killed_during_an_append(tmp_path: Path, note: Callable[[Row], None], kills: int) -> None:
    with Cluster(tmp_path / "run", *SMALL) as run:
        run.learner(step_s=0.0)
        for i in range(2):
            run.sampler(f"sampler-{i}", seed=i, work_s=0.01)
        kill_the_store(run, kills, seed=7)
        note(end(run, "7 store killed during an append", 0))


@pytest.mark.soak
@pytest.mark.parametrize("kills", [1, 10])
def test_7_with_the_real_feeder_no_prompt_is_skipped_or_repeated(
    tmp_path: Path, note: Callable[[Row], None], kills: int
) -> None:
    """The questions are those of an uninterrupted pipeline: none twice, none left out."""
    with Cluster(tmp_path / "run", *SMALL, real_feeder=True) as run:
        run.learner()
        run.sampler(seed=1)
        kill_the_store(run, kills, seed=70)
        note(end(run, "7 store and its real feeder killed", 0))
        rows = run.query("SELECT prompt_index FROM groups WHERE reissue_of IS NULL ORDER BY id")
        undisturbed = PromptPipeline(run.config)
        assert [index for (index,) in rows] == [next(undisturbed).index for _ in rows]


@pytest.mark.soak
@pytest.mark.parametrize("kills", [4, 40])
def test_8_a_store_killed_while_it_compacts(tmp_path: Path, note: Callable[[Row], None], kills: int) -> None:
    """It is killed when a snapshot's parts are on disk but not its mark: the state from before remains valid."""
    # Few questions: those of a long run, two per part and one part per commit, would take a minute to write.
    orders = StoreOrders(questions=20, compact_every=20, history_bytes=30_000, keep_bytes=100_000)
    with Cluster(tmp_path / "run", *SMALL, orders=orders) as run:
        run.learner(step_s=0.0)
        for i in range(2):
            run.sampler(f"sampler-{i}", seed=i, work_s=0.01)
        caught = 0
        for _ in range(kills):
            at = run.acked()
            run.until_acked(at + 2)
            run.until(lambda: unfinished_snapshots(run), "an unfinished snapshot", poll_s=0.001)
            run.store.kill()
            caught += unfinished_snapshots(run)
            run.store.start()
        at = run.acked()
        run.until_acked(at + 10)
        run.until(lambda: run.query("SELECT MIN(position) > 1 FROM log") == [(1,)], "the end of old history")
        assert caught >= kills / 4, "the kills missed the compactions"
        note(end(run, "8 store killed while compacting", 0))


def unfinished_snapshots(run: Cluster) -> int:
    """The number of snapshots on disk in parts that are newer than the newest complete one."""
    return run.query(
        "SELECT COUNT(DISTINCT position) FROM snapshot_parts "
        "WHERE position > (SELECT COALESCE(MAX(position), 0) FROM snapshots)"
    )[0][0]


def test_16_a_full_disk_ends_the_store_by_name_and_loses_nothing(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """RLIMIT_FSIZE keeps the store's files from growing. With room again, the next store process continues."""
    with Cluster(tmp_path / "run", *SMALL) as run:
        run.learner()
        for i in range(2):
            run.sampler(f"sampler-{i}", seed=i, tokens_low=2000, tokens_high=4000)
        run.until_acked(3)
        room = run.disk_bytes() + 200_000
        run.store.may_fail = True
        psutil.Process(run.store.process.pid).rlimit(resource.RLIMIT_FSIZE, (room, room))
        run.until(lambda: not run.store.alive, "the end of the store that cannot write")
        assert run.store.process.returncode == EXIT_FAILURE
        named = run.store.log_file.read_text()
        assert "store.db" in named
        assert "nothing can be made durable any more" in named
        assert len([row for row in run.sampled() if row["kind"] == "error"]) == 0
        run.store.start()
        run.store.may_fail = False
        at = run.acked()
        run.until_acked(at + 3)
        note(judge(run, "16 disk full", 1, went_on_from=at))
