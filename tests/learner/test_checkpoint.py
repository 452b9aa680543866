"""Checkpoints: bit-exact, onto other meshes, whole or absent, and clear about what does not fit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import disk
from jaxroll.config import MeshConfig
from jaxroll.errors import CheckpointDamaged, ConfigError, InfraError
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.state import TrainState
from jaxroll.learner.step import CompileCounter
from jaxroll.records import Cut, LogStart, Version
from tests.harness.cluster import disks
from tests.harness.xla import FAST_COMPILATION


@pytest.fixture
def folder(free_run_dir):
    return free_run_dir / "checkpoints"


def same_bits(first, second) -> bool:
    pairs = zip(jax.tree.leaves(jax.device_get(first)), jax.tree.leaves(jax.device_get(second)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture
def trainer(small_config, make_claim, make_trainer):
    """On fsdp=2, one step old: moments and counters are not all zero."""
    trainer = make_trainer(small_config(mesh=MeshConfig(fsdp=2)))
    trainer.train(make_claim())
    return trainer


def saved(folder, trainer, *versions, kept=3) -> Checkpoints:
    checkpoints = Checkpoints(folder, kept)
    for number, version in enumerate(versions):
        checkpoints.save(version, 100 + number, trainer.state)
        assert checkpoints.wait() == [version]
        checkpoints.remove_old(version)
    return checkpoints


def test_a_restored_state_equals_the_saved_one(folder, trainer):
    checkpoints = saved(folder, trainer, Version(0, 7))
    assert checkpoints.latest() == Version(0, 7)
    state, position = Checkpoints(folder, 3).restore(Version(0, 7), trainer.abstract_state())
    assert position == 100 and same_bits(state, trainer.state)
    assert jax.tree.structure(state) == jax.tree.structure(trainer.state)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(lambda leaf: leaf.sharding, trainer.state)
    checkpoints.close()


@pytest.mark.parametrize("by_s", [18_000, -18_000])
def test_a_wall_clock_that_is_set_while_a_checkpoint_is_written(folder, trainer, monkeypatch, by_s):
    checkpoints, wall_s = Checkpoints(folder, 3), time.time
    checkpoints.save(Version(0, 7), 100, trainer.state)
    monkeypatch.setattr(time, "time", lambda: wall_s() + by_s)
    assert checkpoints.wait() == [Version(0, 7)]
    checkpoints.close()


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)])
def test_onto_another_mesh(folder, trainer, small_config, make_trainer, mesh):
    checkpoints = saved(folder, trainer, Version(0, 7))
    other = make_trainer(small_config(mesh=mesh, micro_batch_rows=4))
    state, _ = checkpoints.restore(Version(0, 7), other.abstract_state())
    assert same_bits(state, trainer.state)
    embed = state.params["embed"]
    assert embed.sharding.mesh.size == mesh.devices
    checkpoints.close()


def test_training_goes_on_as_if_nothing_had_happened(folder, trainer, make_claim):
    checkpoints = saved(folder, trainer, Version(0, 1))
    undisturbed = trainer.train(make_claim(2, age=1))
    want = jax.device_get(trainer.state)
    trainer.state, _ = checkpoints.restore(Version(0, 1), trainer.abstract_state())
    assert trainer.train(make_claim(2, age=1))["loss"] == undisturbed["loss"]
    assert same_bits(trainer.state, want)
    checkpoints.close()


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [MeshConfig(tensor=2), MeshConfig(data=4)])
def test_training_resumes_on_another_mesh_with_the_same_results(
    folder, trainer, make_claim, small_config, make_trainer, mesh
):
    """The claims are the same and so are the losses, up to the order in which another mesh takes its sums."""
    checkpoints = saved(folder, trainer, Version(0, 1))
    undisturbed = [trainer.train(make_claim(step)) for step in (2, 3, 4)]
    other = make_trainer(small_config(mesh=mesh, micro_batch_rows=4))
    other.state, _ = checkpoints.restore(Version(0, 1), other.abstract_state())
    resumed = [other.train(make_claim(step)) for step in (2, 3, 4)]
    for key in ("loss", "entropy", "grad_norm"):
        want, got = ([row[key] for row in rows] for rows in (undisturbed, resumed))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4, err_msg=key)
        assert len(set(want)) == 3, "a curve that does not move would prove little"
    checkpoints.close()


def test_the_state_may_be_donated_while_it_is_being_written(folder, trainer, make_claim):
    """The next steps overwrite the buffers before the write has ended; the checkpoint is of the moment of `save`."""
    checkpoints = Checkpoints(folder, 3)
    want = jax.tree.map(np.array, jax.device_get(trainer.state))
    checkpoints.save(Version(0, 1), 1, trainer.state)
    for step in (2, 3):
        trainer.train(make_claim(step))
    checkpoints.wait()
    state, _ = checkpoints.restore(Version(0, 1), trainer.abstract_state())
    assert same_bits(state, want)
    assert not same_bits(state, trainer.state)
    checkpoints.close()


def test_saving_compiles_nothing(folder, trainer):
    unlike_any_other = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), trainer.state)  # whose save compiled something
    checkpoints, counter = Checkpoints(folder, 3), CompileCounter()
    checkpoints.save(Version(0, 1), 1, unlike_any_other)
    checkpoints.close()
    counter.close()
    assert counter.count == 0


def test_the_last_ones_are_kept_and_a_higher_lineage_is_newer(folder, trainer):
    versions = [Version(0, 1), Version(0, 2), Version(0, 30), Version(1, 3)]
    checkpoints = saved(folder, trainer, *versions, kept=2)
    assert checkpoints.versions() == (Version(0, 30), Version(1, 3))
    assert checkpoints.latest() == Version(1, 3)
    assert checkpoints.about(Version(1, 3))["position"] == 103
    log = LogStart(Cut(7, (9, 11), b"\x00\xff", 12), ((None, 0), (0, 2)))
    checkpoints.save(Version(1, 4), 104, trainer.state, log=log)
    checkpoints.wait()
    assert [checkpoints.log_start(Version(1, step)) for step in (3, 4)] == [None, log]
    checkpoints.close()


def test_nothing_is_removed_before_the_store_knows_of_the_newer_one(folder, trainer):
    """A learner that another one has replaced is refused there: it must not remove what its successor started from."""
    checkpoints = Checkpoints(folder, 1)
    for version in (Version(0, 1), Version(0, 2)):
        checkpoints.save(version, 1, trainer.state)
        assert checkpoints.wait() == [version]
    assert checkpoints.versions() == (Version(0, 1), Version(0, 2))
    checkpoints.remove_old(Version(0, 2))
    assert checkpoints.versions() == (Version(0, 2),)
    checkpoints.close()


def test_the_version_that_became_durable_is_never_removed(folder, trainer):
    """Even where others look newer, as those of a lineage that the log has lost."""
    for foreign in (Version(1, 1), Version(2, 9)):
        for item in ("about", "state"):
            (folder / f"{foreign.lineage:04d}.{foreign.step:08d}" / item).mkdir(parents=True)
    checkpoints = saved(folder, trainer, Version(0, 3), Version(0, 4), kept=1)
    assert checkpoints.versions() == (Version(0, 4), Version(1, 1), Version(2, 9))
    checkpoints.close()


def test_folders_that_a_successor_writes_are_left(folder, trainer):
    for name in ("0000.00000009", "0001.00000009", "0002.00000001"):
        (folder / f"{name}.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    saved(folder, trainer, Version(1, 1)).close()
    assert [path.name for path in folder.iterdir() if "tmp" in path.name] == ["0002.00000001.orbax-checkpoint-tmp"]


def test_a_checkpoint_that_cannot_be_opened_is_never_durable(tmp_path, trainer):
    """Under such a path Orbax does not find what it has written, leaves it as it is, and reports success."""
    checkpoints = Checkpoints(tmp_path / "lr=[1e-4]" / "checkpoints", 3)
    checkpoints.save(Version(0, 7), 1, trainer.state)
    with pytest.raises(InfraError, match=r"0000\.00000007 was written and cannot be read \(.*manifest"):
        checkpoints.wait()
    assert not (checkpoints.path(Version(0, 7)) / checkpoint_files.SUMS).exists()
    checkpoints.close()


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "d", "ocdbt.process_0", "ocdbt.process_0/d"])
def test_a_state_that_lacks_a_part_is_noticed_without_its_sums(folder, lost):
    checkpoints = Checkpoints(folder, 1)
    large = jax.random.normal(jax.random.key(0), (256, 256))  # small arrays lie in the database itself
    checkpoints.save(Version(0, 7), 1, TrainState({"embed": large}, (), jnp.int32(7)))
    checkpoints.close()
    path = checkpoints.path(Version(0, 7))
    assert checkpoint_files.unreadable(path, every_byte=True) == ""
    (path / "state" / lost).rename(folder.parent / "lost")
    assert "state" in checkpoint_files.unreadable(path, every_byte=True)


def test_an_array_that_is_not_there_is_named(folder, trainer):
    checkpoints = saved(folder, trainer, Version(0, 7))
    path = checkpoints.path(Version(0, 7))
    about = json.loads((path / "about" / "metadata").read_text())
    for arrays, named in (
        ({"params['more']": ["float32", 3]}, "more"),
        ({"params['embed']": ["float32", 1, 1]}, "embed"),
    ):
        changed = about | {"arrays": about["arrays"] | arrays}
        (path / "about" / "metadata").write_text(json.dumps(changed))
        assert named in checkpoint_files.unreadable(path)
    checkpoints.close()


def test_saving_a_version_again_keeps_the_one_on_disk(folder, trainer):
    checkpoints = saved(folder, trainer, Version(0, 1))
    before = (folder / "0000.00000001").stat().st_mtime_ns
    checkpoints.save(Version(0, 1), 5, trainer.state)
    assert checkpoints.wait() == [Version(0, 1)]
    assert (folder / "0000.00000001").stat().st_mtime_ns == before
    checkpoints.close()


def test_an_empty_or_missing_folder_has_no_latest(folder, trainer):
    checkpoints = Checkpoints(folder, 3)
    assert checkpoints.latest() is None and checkpoints.versions() == () and checkpoints.wait() == []
    with pytest.raises(InfraError, match=r"no whole checkpoint 0\.5 \(there are: none\)"):
        checkpoints.restore(Version(0, 5), trainer.abstract_state())


def test_half_written_folders_are_ignored_and_then_removed(folder, trainer):
    unfinished = folder / "0000.00000009.orbax-checkpoint-tmp"
    for item in ("state", "about"):
        (unfinished / item).mkdir(parents=True)
    (folder / "0000.00000010").mkdir()  # a copy that was interrupted
    assert Checkpoints(folder, 3).latest() is None
    checkpoints = saved(folder, trainer, Version(0, 1))
    assert checkpoints.latest() == Version(0, 1)
    assert not unfinished.exists()
    checkpoints.close()


def test_reading_does_not_disturb_a_write_going_on(folder, trainer):
    writing = folder / "0000.00000009.orbax-checkpoint-tmp"
    writing.mkdir(parents=True)
    Checkpoints(folder, 3).latest()
    assert writing.exists()


def test_a_damaged_checkpoint_is_named_with_the_way_out(folder, trainer):
    checkpoints = saved(folder, trainer, Version(0, 1), Version(0, 2))
    for path in (folder / "0000.00000002" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(InfraError, match=r"0000\.00000002 cannot be read.*remove that folder"):
        checkpoints.restore(Version(0, 2), trainer.abstract_state())
    state, _ = checkpoints.restore(Version(0, 1), trainer.abstract_state())
    assert same_bits(state, trainer.state)
    checkpoints.close()


@pytest.mark.parametrize("kind", ["arrays", "metadata", "sums"])
def test_one_flipped_bit_is_found_wherever_it_is(folder, trainer, kind):
    """Arrays carry no sum of their own: without ours a flipped bit would be restored and trained on."""
    checkpoints = saved(folder, trainer, Version(0, 1), Version(0, 2))
    files = [path for path in (folder / "0000.00000002").rglob("*") if path.is_file()]
    found = {
        "arrays": max(files, key=lambda path: path.stat().st_size),
        "metadata": next(path for path in files if path.name == "_METADATA"),
        "sums": next(path for path in files if path.name == "sums.json"),
    }
    data = bytearray(found[kind].read_bytes())
    data[len(data) // 2] ^= 0x80
    found[kind].write_bytes(data)
    assert checkpoints.latest() == Version(0, 2), "nothing has read it yet"
    with pytest.raises(CheckpointDamaged, match=r"0000\.00000002 cannot be read"):
        checkpoints.restore(Version(0, 2), trainer.abstract_state())
    assert checkpoints.latest() == Version(0, 1) and checkpoints.damaged == {Version(0, 2)}
    checkpoints.close()


@pytest.mark.parametrize("file", ["sums.json", "metadata", "d"], ids=["sums", "metadata", "arrays"])
def test_a_lack_of_descriptors_is_no_damage(folder, trainer, monkeypatch, file):
    """Otherwise the learner would resume from an older checkpoint, and train durable steps again."""
    checkpoints = saved(folder, trainer, Version(0, 1), Version(0, 2))

    def refusing(opened):
        def refused(path, *of, **how):
            if file in (path.name, path.parent.name):
                raise OSError(errno.EMFILE, "Too many open files", str(path))
            return opened(path, *of, **how)

        return refused

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many open files"):
        where, name = (Path, "open") if file == "d" else (disk, "opened")
        patch.setattr(where, name, refusing(getattr(where, name)))
        checkpoints.restore(Version(0, 2), trainer.abstract_state())
    assert not checkpoints.damaged and checkpoints.latest() == Version(0, 2)
    checkpoints.close()


@pytest.mark.parametrize("text", ['{"fimes": {}}', '{"files": 3}', "[]", "7", '{"files": ["ab"]}', ""])
def test_sums_that_are_no_sums_are_damage_like_any_other(folder, trainer, text):
    """A flipped bit may leave JSON that says something else."""
    checkpoints = saved(folder, trainer, Version(0, 1), Version(0, 2))
    (folder / "0000.00000002" / "sums.json").write_text(text)
    with pytest.raises(CheckpointDamaged, match=r"sums\.json is damaged|a is gone"):
        checkpoints.restore(Version(0, 2), trainer.abstract_state())
    assert checkpoints.latest() == Version(0, 1)
    checkpoints.close()


def test_a_file_that_is_gone_is_named(folder, trainer):
    checkpoints = saved(folder, trainer, Version(0, 1))
    victim = max((folder / "0000.00000001").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    victim.unlink()
    with pytest.raises(CheckpointDamaged, match=f"{victim.name} is gone"):
        checkpoints.restore(Version(0, 1), trainer.abstract_state())
    checkpoints.close()


def test_a_whole_folder_without_checksums_can_be_restored(folder, trainer):
    """Its writer was killed between the rename and the checksums, so the store has not recorded it as durable."""
    checkpoints = saved(folder, trainer, Version(0, 1))
    sums = folder / "0000.00000001" / "sums.json"
    written = sums.read_text()
    sums.unlink()
    state, _ = checkpoints.restore(Version(0, 1), trainer.abstract_state())
    assert same_bits(state, trainer.state) and not sums.exists(), "a reader writes nothing"
    checkpoints.settle(Version(0, 1))
    assert sums.read_text() == written
    checkpoints.close()


def test_a_restored_checkpoint_is_synced_also_if_it_has_checksums(folder, trainer, monkeypatch):
    """Its writer was killed between the checksums and the sync: the checksums may be in the system's memory alone."""
    checkpoints, synced = saved(folder, trainer, Version(0, 1)), []
    monkeypatch.setattr(disk, "sync", lambda path, **_: synced.append(path))
    checkpoints.settle(Version(0, 1))
    at = folder / "0000.00000001"
    assert {*at.rglob("*"), at, folder} <= set(synced)

    def broken(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(disk, "sync", broken)
    with pytest.raises(InfraError, match=r"0000\.00000001 does not reach the disk: .*Read-only.*remount that disk"):
        checkpoints.settle(Version(0, 1))
    checkpoints.close()


def test_without_sums_one_that_was_durable_is_damaged(folder, trainer):
    """Checksums are written before a checkpoint counts as durable, so here they were removed."""
    checkpoints = saved(folder, trainer, Version(0, 1), Version(0, 2))
    checkpoints.restore(Version(0, 2), trainer.abstract_state(), durable=True)
    (folder / "0000.00000002" / "sums.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"0000\.00000002 cannot be read \(sums\.json is gone"):
        checkpoints.restore(Version(0, 2), trainer.abstract_state(), durable=True)
    assert checkpoints.latest() == Version(0, 1)
    checkpoints.close()


@pytest.mark.process
def test_durable_checkpoints_have_checksums_whenever_their_writer_is_killed(folder):
    """The order is: whole, checksums, durable. If the writer is killed in between, durable ones can be verified."""
    env, code = {**os.environ, "XLA_FLAGS": FAST_COMPILATION}, WRITER.replace("]), 2)", "]), 10_000)")
    writer = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, env=env)
    assert writer.stdout is not None
    durable = [int(writer.stdout.readline()) for _ in range(6)]
    writer.send_signal(signal.SIGKILL)
    durable += [int(line) for line in writer.stdout if line.endswith("\n")]
    writer.wait(timeout=30)
    writer.stdout.close()
    checkpoints = Checkpoints(folder, 2)
    assert {version.step for version in checkpoints.versions()} >= set(durable)
    assert not any(checkpoint_files.damage(checkpoints.path(Version(0, step)), durable=True) for step in durable)


def test_another_model_is_refused_by_the_name_of_an_array(folder, trainer, small_config):
    from jaxroll.learner import state
    from jaxroll.learner import state as optimizer
    from jaxroll.models import families

    checkpoints = saved(folder, trainer, Version(0, 1))
    transform = optimizer.build(small_config().learner).transform
    wider = replace(families.spec("nano", vocab_size=24), hidden=128)
    with pytest.raises(ConfigError, match=r"checkpoint 0\.1 = .*(down|gate|up).*more arrays differ"):
        checkpoints.restore(Version(0, 1), state.abstract(wider, trainer.layout, transform))
    checkpoints.close()


def test_at_least_one_must_be_kept(folder):
    with pytest.raises(ConfigError, match="checkpoints_kept"):
        Checkpoints(folder, 0)


WRITER = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.state import TrainState
from jaxroll.records import Cut, LogStart, Version
checkpoints = Checkpoints(Path(sys.argv[1]), 2)
for step in range(10_000):
    params = {f"layer.{i}": jnp.full((256, 256), step, jnp.float32) for i in range(8)}
    checkpoints.save(Version(0, step), step, TrainState(params, (), jnp.int32(step)))
    for version in checkpoints.finished(wait=False):
        print(version.step, flush=True)
        checkpoints.remove_old(version)
"""


@pytest.mark.process
@pytest.mark.parametrize("durable", [1, 4])
def test_killed_while_writing_what_was_durable_is_whole(folder, durable):
    """A real kill -9 in the middle of saves: every version that was reported is still there, or a newer one."""
    import jax.numpy as jnp

    from jaxroll.learner.state import TrainState

    env = {**os.environ, "XLA_FLAGS": FAST_COMPILATION}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True, env=env)
    guard = time.monotonic() + 120
    last = -1
    for line in writer.stdout:
        last = int(line)
        if last >= durable or time.monotonic() > guard:
            break
    writer.send_signal(signal.SIGKILL)
    writer.wait(timeout=30)
    writer.stdout.close()
    checkpoints = Checkpoints(folder, 2)
    newest = checkpoints.latest()
    assert newest is not None and newest.step >= last >= durable
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = TrainState(
        {f"layer.{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=here) for i in range(8)},
        (),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=here),
    )
    for version in checkpoints.versions():
        state, position = checkpoints.restore(version, shapes)
        assert position == version.step == int(state.step)
        assert all((np.asarray(leaf) == version.step).all() for leaf in state.params.values())
    checkpoints.save(Version(1, newest.step + 1), 0, state)
    assert checkpoints.wait() == [Version(1, newest.step + 1)]
    assert not [path for path in folder.iterdir() if "tmp" in path.name]
    checkpoints.close()


@pytest.mark.process  # threads of orbax report errors late, when a test may run in which warnings are errors
def test_a_full_disk_is_named_when_saving_and_when_closing(tmp_path, trainer):
    """Not by an error of the library, which is what `close` left of the first one."""
    with disks.small_disk(tmp_path / "disk", 4) as disk:
        checkpoints = Checkpoints(disk.path / "checkpoints", kept=2)
        checkpoints.folder.mkdir()
        disk.fill()
        with pytest.raises(InfraError, match=rf"writing a checkpoint to .*MB are free at {disk.path}"):
            checkpoints.save(Version(0, 1), 0, trainer.state)
            checkpoints.wait()
        with contextlib.suppress(InfraError):
            checkpoints.close()
        assert checkpoints.versions() == ()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_after_a_write_without_room_the_same_process_writes_whole_checkpoints(tmp_path, trainer):
    """Wherever the disk became full: the same version again, and the next one, have all their parts."""
    failed = 0
    for leave_bytes in range(50_000, 500_000, 50_000):
        with disks.small_disk(tmp_path / f"disk-{leave_bytes}", 40) as disk:
            checkpoints = Checkpoints(disk.path / "checkpoints", kept=3)
            checkpoints.save(Version(0, 1), 1, trainer.state)
            checkpoints.wait()
            disk.fill(leave_bytes)
            try:
                checkpoints.save(Version(0, 2), 2, trainer.state)
                checkpoints.wait()
            except InfraError:
                failed += 1
            disk.free()
            for step in (2, 3):
                checkpoints.save(Version(0, step), step, trainer.state)
                checkpoints.wait()
                assert checkpoint_files.unreadable(checkpoints.path(Version(0, step)), every_byte=True) == ""
            checkpoints.close()
    assert failed >= 5, "the disk was hardly ever full"
