"""Faults 4, 5 and 6 on the real learner: killed in a step, between publish and ack, inside a checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll import wire
from jaxroll.errors import EXIT_CONFIG, NoCredit
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from tests.harness.blocking_store import BlockingStore
from tests.harness.cluster import kills
from tests.harness.cluster.real_roles import World
from tests.harness.cluster.rpc_calls import ack_of, durable_of
from tests.harness.cluster.scripted_groups import ScriptedSampler

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SMALL = {"schedule__alpha": 1, "schedule__steps": 8, "learner__checkpoint_every": 3, "learner__micro_batch_rows": 2}
REPLAYED = ("loss", "grad_norm", "entropy", "kl_behaviour", "ess", "tokens_computed", "reward_mean", "groups")


@pytest.mark.soak
def test_4_killed_in_a_step_it_gets_the_same_claim_and_computes_the_same_losses(tmp_path: Path, note) -> None:
    with World(tmp_path / "run", **SMALL) as run, sampling(run, up_to=20) as sampler:
        dying = kills.in_step(run, 5, 0.01)
        run.learner()
        run.until_step(5)  # reported before the learner can die with the claim of 5
        run.until((run.run_dir / "checkpoints" / "0000.00000003").exists, "the checkpoint that is restored")
        sampler.allow(10**9)
        dying.wait()
        run.learner()
        run.until_step(7)
        assert run.ended("learner") == 0, run.logs()
        first = {row["step"]: row for row in run.step_rows() if row["lineage"] == 0}
        again = {row["step"]: row for row in run.step_rows() if row["lineage"] == 1}
        assert sorted(first) == [1, 2, 3, 4, 5] and sorted(again) == [4, 5, 6, 7, 8]
        assert [row["replayed"] for row in again.values()] == [True, True, True, False, False]
        assert first[4]["grad_norm"] > 0 and first[5]["grad_norm"] > 0, "the steps before the kill learned nothing"
        for step in (4, 5):
            assert {key: again[step][key] for key in REPLAYED} == {key: first[step][key] for key in REPLAYED}
        handed = [row for row in run.tap.journal if row["kind"] == "claimed" and row["step"] == 5]
        assert {row["lineage"] for row in handed} == {0, 1}, "the claim was not handed to both processes"
        assert len({row["digest"] for row in handed}) == 1, "the claim differs after the restart"
        assert run.query("SELECT parent, fork_step FROM lineages WHERE lineage = 1") == [(0, 3)]
        note(run.judge("4 learner mid-step", 1))


def test_5_killed_between_publish_and_ack_the_published_weights_never_were(tmp_path: Path, note) -> None:
    with World(tmp_path / "run", **SMALL) as run, sampling(run, up_to=12) as sampler:
        run.learner()
        run.until((run.run_dir / "checkpoints" / "0000.00000003").exists, "the checkpoint that is restored")
        dying = kills.Dying(run, "learner", "Ack", lambda call: ack_of(call) == 4)
        sampler.allow(20)
        dying.wait()
        assert run.query("SELECT MAX(step) FROM versions") == [(5,)], "5 was published"
        assert run.query("SELECT MAX(step) FROM claims WHERE trained_lineage IS NOT NULL") == [(3,)], "4 was not acked"
        sampler.allow(24)
        run.until(lambda: (Version(0, 5), 20) in sampler.leased, "a lease with the weights that the rewind will disown")
        run.learner()
        run.until(lambda: run.query("SELECT * FROM lineages WHERE lineage = 1"), "the rewind")
        assert "lineage" in refused_lease(run, Version(0, 5))
        run.until(lambda: run.query("SELECT * FROM versions WHERE lineage = 1"), "weights of the new lineage")
        assert "of an ended lineage, load 1.3 first" in refused_lease(run, Version(0, 5))
        sampler.allow(10**9)
        assert run.ended("learner") == 0, run.logs()
        assert run.query("SELECT parent, fork_step FROM lineages WHERE lineage = 1") == [(0, 3)]
        versions = [version for version, _ in sampler.leased]
        assert versions == sorted(versions), "a sampler leased for the old lineage after its weight swap"
        assert publishes_before_leases(run)
        disowned = run.query("SELECT id, reason FROM groups WHERE state = 'EXPIRED'")
        assert disowned and {reason for _, reason in disowned} == {"lineage"}
        reissued = run.query("SELECT reissue_of FROM groups WHERE reissue_of IS NOT NULL")
        assert sorted(reissued) == sorted((group,) for group, _ in disowned), "a prompt was lost with its tokens"
        note(run.judge("5 learner after publish", 1))


def sampling(run: World, up_to: int = 10**9) -> ScriptedSampler:
    """A scripted sampler that stamps tokens with versions as a real one does."""
    return ScriptedSampler(run.tap.address, run.config, stamp=lambda newest: newest, up_to=up_to)


def refused_lease(run: World, version: Version) -> str:
    """The store's reason to refuse a lease to a sampler with the weights of `version`."""
    store = BlockingStore(run.tap.address, role="sampler", name="sampler-9", config_digest=configs.digest(run.config))
    with contextlib.closing(store), pytest.raises(NoCredit) as refusal:
        store.lease(version, 4)
    return str(refusal.value)


def publishes_before_leases(run: World) -> bool:
    """True if after the beginning of every lineage the first lease follows the first publication."""
    published = True
    for kind, body in run.query("SELECT kind, body FROM log ORDER BY position"):
        if kind == "began":
            published = wire.decode(body, ev.Began).parent is None and published
        elif kind == "published":
            published = True
        elif kind == "leased" and not published:
            return False
    return True


@pytest.mark.soak
def test_6_killed_in_a_checkpoint_it_restores_the_one_before(tmp_path: Path, note) -> None:
    with World(tmp_path / "run", **SMALL) as run, sampling(run):
        folder = run.run_dir / "checkpoints"
        run.learner()
        run.until_step(1)
        half = kills.in_checkpoint(run)
        whole = names(folder)
        assert half not in whole and len(leftovers(folder)) == 1
        durable = run.query("SELECT COALESCE(MAX(step) + 1, 0) FROM claims WHERE durable_lineage IS NOT NULL")[0][0]
        run.learner()
        assert run.ended("learner") == 0, run.logs()
        assert run.query("SELECT fork_step FROM lineages WHERE lineage = 1") == [(durable,)]
        assert leftovers(folder) == [], "partial files of the killed writer remain"
        assert half not in names(folder), "the version of the dead lineage exists"
        note(run.judge("6 learner mid-checkpoint", 1))


@pytest.mark.soak
def test_6_a_damaged_checkpoint_is_passed_over_unless_the_older_one_is_of_no_use(tmp_path: Path, note) -> None:
    """Fall back to the older one with a warning while the store still has the claims after it; else name the remedy."""
    with World(tmp_path / "run", **SMALL) as run, sampling(run):
        folder = run.run_dir / "checkpoints"
        run.learner()
        kills.Dying(run, "learner", "Durable", lambda call: durable_of(call) == Version(0, 8)).wait()
        assert names(folder)[-1] == "0000.00000008", "the checkpoint is complete; only the store was not notified"
        change_a_bit(folder / "0000.00000008")

        run.learner()
        kills.Dying(run, "learner", "Durable", lambda call: durable_of(call) == Version(1, 8), answered=True).wait()
        said = run.events("learner")
        assert any("0000.00000008 cannot be read" in text for text in said), said
        assert "restored version 0.6" in said
        heal = change_a_bit(folder / "0001.00000008")

        run.learner()
        assert run.ended("learner") == EXIT_CONFIG, "a restart would not help"
        log = run.logs()
        assert "0001.00000008': is damaged, and the store does not accept an older one" in log and "--fork" in log
        heal()

        run.learner()
        assert run.ended("learner") == 0, run.logs()
        note(run.judge("6 checkpoint damaged", 2))


def names(folder: Path) -> list[str]:
    """The whole checkpoints."""
    return sorted(path.name for path in folder.iterdir() if "tmp" not in path.name)


def leftovers(folder: Path) -> list[str]:
    """The others."""
    return [path.name for path in folder.iterdir() if "tmp" in path.name]


def change_a_bit(checkpoint: Path):
    """Damage the largest file, which holds arrays; return a function that restores the bit."""
    victim = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)

    def change() -> None:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 0x10
        victim.write_bytes(data)

    change()
    return change
