"""Folders of weights: what goes in comes out, a new one replaces the old whole, what is no such folder is named."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxroll.config import Config, MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import weights
from jaxroll.models import families
from tests.harness.cluster import disks

TOKENIZER = {"kind": "char", "path": "", "alphabet": "abcü"}


def test_parameters_model_and_tokenizer_come_back(free_run_dir, small_config, make_trainer):
    trainer = make_trainer(small_config(mesh=MeshConfig(fsdp=2)))
    weights.save(free_run_dir / "warm", trainer.state.params, trainer.spec, TOKENIZER)
    got = weights.load(free_run_dir / "warm")
    assert got.keys() == trainer.state.params.keys()
    for name, value in jax.device_get(trainer.state.params).items():
        np.testing.assert_array_equal(got[name], value)
    assert weights.model_spec(free_run_dir / "warm") == trainer.spec
    assert weights.tokenizer(free_run_dir / "warm") == TOKENIZER
    trainer.set_params(got)


def test_a_second_save_replaces_the_first_and_leaves_no_other_folder(free_run_dir, small_config, make_trainer):
    trainer = make_trainer(small_config())
    for fill in (1.0, 2.0):
        params = {name: np.full(value.shape, fill) for name, value in trainer.state.params.items()}
        weights.save(free_run_dir / "warm", params, trainer.spec, {})
    assert all(
        (value == 2.0).all() and value.dtype == np.float32 for value in weights.load(free_run_dir / "warm").values()
    )
    assert [path.name for path in free_run_dir.iterdir()] == ["warm"]
    with safe_open(free_run_dir / "warm" / "model.safetensors", "numpy") as opened:  # other tools can read it
        assert "embed" in opened.keys()  # noqa: SIM118


def test_a_folder_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_end(tmp_path, monkeypatch):
    synced: list[tuple[int, bool]] = []  # inode, and whether the folder had its name then
    sync = os.fsync

    def fsync(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, (tmp_path / "warm").exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with weights.written_whole(tmp_path / "warm") as unfinished:
        for name in ("a", "b"):
            (unfinished / name).write_text(name)
    held = {path.stat().st_ino for path in (tmp_path / "warm").rglob("*")}
    assert len(held) == 2
    assert held <= {inode for inode, has_name in synced if not has_name}
    assert (tmp_path.stat().st_ino, True) in synced


def test_a_folder_that_does_not_reach_the_disk_leaves_the_one_before(tmp_path, monkeypatch):
    with weights.written_whole(tmp_path / "warm") as unfinished:
        (unfinished / "a").write_text("before")

    def fsync(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"), weights.written_whole(tmp_path / "warm") as unfinished:
        (unfinished / "a").write_text("after")
    assert [path.name for path in tmp_path.iterdir()] == ["warm"]
    assert (tmp_path / "warm" / "a").read_text() == "before"


def test_a_warm_start_on_a_full_disk_is_no_warm_start(tmp_path):
    """There is neither a part of it nor anything else; it is written when there is room again."""
    params = {"embed": np.ones((256, 256), np.float32), "head": np.ones((256, 256), np.float32)}
    spec = families.spec("nano")
    with disks.small_disk(tmp_path / "run", 1) as disk:
        for left in (0, 2**12, 2**18, 2**18 + 2**12, 2**19):
            disk.fill(leave_bytes=left)
            with pytest.raises(OSError, match=r"No space.*/run/"):  # the disk to make room on
                weights.save(disk.path / "warm", params, spec, TOKENIZER)
            assert [path.name for path in disk.path.iterdir()] == [".filler"]
            assert weights.initial_folder(Config(), disk.path) is None
        disk.free()
        weights.save(disk.path / "warm", params, spec, TOKENIZER)
        assert weights.initial_folder(Config(), disk.path) == disk.path / "warm"
        assert weights.load(disk.path / "warm")["head"].sum() == 2**16


def test_a_wrong_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        weights.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        weights.load(tmp_path)
    (tmp_path / "model.json").write_text('{"planets": 9}')
    with pytest.raises(ConfigError, match="describes no model of this version"):
        weights.model_spec(tmp_path)
    (tmp_path / "text.json").write_text("[")
    with pytest.raises(ConfigError, match="not JSON"):
        weights.tokenizer(tmp_path)
