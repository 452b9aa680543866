"""`jaxroll weights`: there and back bit for bit, one tensor in memory at a time, and clear about what does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from jaxroll import config as configs
from jaxroll import sharding as layouts
from jaxroll.config import MeshConfig, ModelConfig
from jaxroll.control import run_dir
from jaxroll.errors import CheckpointDamaged, ConfigError, DataError
from jaxroll.learner import lora, peft
from jaxroll.learner import state as optimizer
from jaxroll.learner import state as states
from jaxroll.learner import weights as own
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.lora import Lora
from jaxroll.learner.state import TrainState
from jaxroll.models import families, folders, params
from jaxroll.models.folders import TensorShape
from jaxroll.records import Version
from jaxroll.text import tokenizers
from jaxroll.tools import generate, weights

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
GOLDENS = pytest.mark.parametrize("variant", ["tied", "untied"])
WHOLE = 10**12  # bytes of a file: all in one


def exported(source: Path, out: Path, dtype: str = weights.AS_STORED, shard_bytes: int = WHOLE) -> str:
    with weights.opened(source, None) as held:
        return weights.export(held, out, dtype, shard_bytes)


def same_tensors(first: Path, second: Path) -> bool:
    one, other = folders.opened_folder(first), folders.opened_folder(second)
    assert one is not None and other is not None and one.keys() == other.keys()
    return all(one.leaf(name) == other.leaf(name) and one[name].tobytes() == other[name].tobytes() for name in one)


@GOLDENS
@pytest.mark.parametrize("shard_bytes", [WHOLE, 40_000])
def test_import_then_export_changes_no_bit(tmp_path: Path, variant: str, shard_bytes: int) -> None:
    weights.import_folder(GOLDEN / variant, tmp_path / "ours", weights.AS_STORED)
    said = exported(tmp_path / "ours", tmp_path / "theirs", shard_bytes=shard_bytes)
    assert same_tensors(GOLDEN / variant, tmp_path / "theirs")
    files = sorted(path.name for path in (tmp_path / "theirs").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < WHOLE) and f" in {len(files)} file" in said
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / variant, tmp_path / "theirs")
    )
    assert {key: after[key] for key in before} == before
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        for folder in ("ours", "theirs"):
            assert (tmp_path / folder / name).read_bytes() == (GOLDEN / variant / name).read_bytes()


@GOLDENS
def test_an_imported_folder_serves_as_the_model_of_a_config(tmp_path: Path, variant: str) -> None:
    weights.import_folder(GOLDEN / variant, tmp_path / "ours", weights.AS_STORED)
    read = []
    for path in (GOLDEN / variant, tmp_path / "ours"):
        config = ModelConfig(path=str(path))
        spec = folders.spec(config, vocab_size=280)
        folders.check_weights(config, spec)
        read.append((spec, params.weights(config, spec)))
    (spec, theirs), (same_spec, ours) = read
    assert spec == same_spec and theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) and ours[name].dtype == np.float32 for name in ours)


def test_a_cast_is_the_nearest_bfloat16_and_back(tmp_path: Path) -> None:
    weights.import_folder(GOLDEN / "tied", tmp_path / "ours", "bfloat16")
    wide, narrow = (
        params.leaves(GOLDEN / "tied", SPEC := folders.described(GOLDEN / "tied")),
        own.load(tmp_path / "ours"),
    )
    for name in wide:
        assert np.array_equal(narrow[name], wide[name].astype(ml_dtypes.bfloat16).astype(np.float32))
    exported(tmp_path / "ours", tmp_path / "theirs", "float32")
    assert folders.described(tmp_path / "theirs") == SPEC
    assert folders.weight_tensors(tmp_path / "theirs").leaf("model.norm.weight").dtype == np.float32


def test_other_readers_read_what_is_written(tmp_path: Path) -> None:
    exported(_imported(tmp_path), tmp_path / "theirs")
    read = safe_open(tmp_path / "theirs" / "model.safetensors", "numpy")
    ours = folders.weight_tensors(tmp_path / "theirs")
    with read as file:
        assert set(file.keys()) == set(ours) and file.metadata() == {"format": "pt"}
        assert all(np.array_equal(file.get_tensor(name), ours[name]) for name in ours)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """The largest array is less than a tenth of the model: the traced peak stays near that array."""
    spec = families.ModelSpec("wide", 64, 4, 128, 4, 2, 16, 4096)
    leaves = {name: TensorShape(np.dtype(np.float32), leaf.shape) for name, leaf in params.abstract(spec).items()}
    (tmp_path / "ours").mkdir()
    own.write(tmp_path / "ours", leaves, lambda name: np.ones(leaves[name].shape, np.float32), spec, {})
    largest = max(leaf.size_bytes for leaf in leaves.values())
    total = sum(leaf.size_bytes for leaf in leaves.values())
    tracemalloc.start()
    exported(tmp_path / "ours", tmp_path / "theirs", shard_bytes=total // 3)
    weights.import_folder(tmp_path / "theirs", tmp_path / "again", weights.AS_STORED)
    read = params.weights(ModelConfig(path=str(tmp_path / "theirs")), spec)
    assert sum(float(read[name].sum()) for name in read) == families.parameter_count(spec)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * largest + 2**20 < total / 3


# --- from a run


@pytest.fixture
def run(tmp_path: Path) -> weights.OfRun:
    """A run's folder with a checkpoint that was written from fsdp=2."""
    config = configs.parse(configs.override(configs.to_dict(configs.parse(configs.defaults())), ["model.size=nano"]))
    path = run_dir.create(tmp_path / "run", config, [])
    spec = families.spec("nano", vocab_size=24)
    values = params.init(spec, jax.random.key(3), layouts.build(MeshConfig(fsdp=2)), layouts.LEARNER)
    checkpoints = Checkpoints(path / "checkpoints", 3)
    moments = {name: jax.numpy.zeros(8) for name in ("mu", "nu")}
    for step in (1, 2):
        checkpoints.save(Version(0, step), step, TrainState(_plus(values, step), moments, jax.numpy.int32(step)))
        checkpoints.wait()
    checkpoints.close()
    return weights.OfRun(path, config)


def _plus(values: dict[str, jax.Array], step: int) -> dict[str, jax.Array]:
    return {name: value + step for name, value in values.items()}


def test_a_checkpoint_is_exported_without_its_mesh(tmp_path: Path, run: weights.OfRun) -> None:
    for source, step in ((run.path, 2), (run.path / "checkpoints" / "0000.00000001", 1)):
        out = tmp_path / f"hf-{step}"
        with weights.opened(source, run) as held:
            weights.export(held, out, weights.AS_STORED, WHOLE)
        config = ModelConfig(path=str(out))
        spec = params.spec(config, vocab_size=24)
        want = params.init(spec, jax.random.key(3), layouts.build(MeshConfig()), layouts.LEARNER)
        read = params.weights(config, spec)
        assert read.keys() == want.keys()
        assert all(np.array_equal(read[name], np.asarray(want[name] + step)) for name in want)
        said = json.loads((out / "config.json").read_text())
        assert (said["eos_token_id"], said["pad_token_id"], said["rope_theta"]) == (2, 0, 1e4)


def test_the_best_checkpoint_is_exported_by_its_name(run: weights.OfRun) -> None:
    with (
        pytest.raises(ConfigError, match=r"--checkpoint.*learner\.keep_best is empty"),
        weights.opened(run.path, run, weights.BEST),
    ):
        pass
    learner = replace(run.config.learner, keep_best="accuracy")
    keeps = replace(run, config=replace(run.config, learner=learner))
    with (
        pytest.raises(ConfigError, match=r"has a value of accuracy yet"),
        weights.opened(run.path, keeps, weights.BEST),
    ):
        pass
    row = {"t": 1.0, "role": "evaluator", "kind": "eval", "n": 1, "correct": "1", "lineage": 0}
    rows = (row | {"step": step, "accuracy": value} for step, value in ((1, 0.5), (2, 0.25)))
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for which, folder in ((weights.BEST, "0000.00000001"), (weights.NEWEST, "0000.00000002")):
        with weights.opened(run.path, keeps, which) as held:
            assert held.description.endswith(folder)
    checkpoint = run.path / "checkpoints" / "0000.00000001"
    with pytest.raises(ConfigError, match=r"is not a run"), weights.opened(checkpoint, keeps, weights.BEST):
        pass


def test_a_run_without_adapters_exports_none(tmp_path: Path, run: weights.OfRun) -> None:
    for source, of in ((run.path, run), (tmp_path, None)):
        with pytest.raises(ConfigError, match=r"SOURCE = .*has no adapters.*lora_rank"):
            weights.export_adapters(source, of, tmp_path / "peft", weights.AS_STORED)
    assert not (tmp_path / "peft").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, run: weights.OfRun) -> None:
    victim = max((run.path / "checkpoints" / "0000.00000002").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    damaged = pytest.raises(CheckpointDamaged, match=r"0000\.00000002 cannot be read.*not what was written")
    with damaged, weights.opened(run.path, run) as held:
        weights.export(held, tmp_path / "hf", weights.AS_STORED, WHOLE)
    assert not (tmp_path / "hf").exists()


@pytest.mark.process
@pytest.mark.timeout(240)
def test_the_commands(tmp_path: Path, run: weights.OfRun) -> None:
    """Import is refused where something is, and says so with exit code 64; export finds the run's newest checkpoint."""

    def jaxroll(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jaxroll", "weights", *words]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)

    done = jaxroll("export", str(run.path), "out", "--dtype=bfloat16")
    assert done.returncode == 0 and "0000.00000002 -> " in done.stdout, done.stderr
    refused = jaxroll("import", "out", "out")
    assert refused.returncode == 64 and "it exists already" in refused.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


# --- what does not fit


def _imported(tmp_path: Path) -> Path:
    weights.import_folder(GOLDEN / "tied", tmp_path / "ours", weights.AS_STORED)
    return tmp_path / "ours"


def _changed(tmp_path: Path, change) -> Path:
    """A copy of the untied golden whose tensors `change` has seen."""
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / "untied", folder)
    tensors = dict(folders.weight_tensors(folder))
    tensors = {name: np.array(value) for name, value in tensors.items()}
    change(tensors)
    (folder / "model.safetensors").unlink()
    leaves = {name: TensorShape(value.dtype, value.shape) for name, value in tensors.items()}
    folders.write(folder / "model.safetensors", leaves, tensors.__getitem__)
    return folder


UP = "model.layers.1.mlp.up_proj.weight"
MISFITS = {
    "missing": (
        lambda tensors: tensors.pop(UP),
        r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight', which 'layers\.01\.mlp\.up' is read from",
    ),
    "unexpected": (
        lambda tensors: tensors.update({"model.layers.2.mlp.bias": np.zeros(3, np.float32)}),
        r"a tensor 'model\.layers\.2\.mlp\.bias', which this model does not have",
    ),
    "misshapen": (
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:-1]}),
        r"'lm_head\.weight' has shape \(287, 40\); 'head' of this model needs \(288, 40\)",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, kind: str) -> None:
    change, words = MISFITS[kind]
    folder = _changed(tmp_path, change)
    with pytest.raises(ConfigError, match=words) as error:
        weights.import_folder(folder, tmp_path / "ours", weights.AS_STORED)
    assert error.value.remedy and not (tmp_path / "ours").exists()
    assert not list(tmp_path.glob(".ours*")), "nothing half-written stays"


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    folder = _changed(tmp_path, lambda tensors: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ConfigError, match=r"model\.safetensors has \d+ bytes and its header needs \d+"):
        weights.import_folder(folder, tmp_path / "ours", weights.AS_STORED)


def test_an_invalid_file_or_one_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(DataError, match="is not a safetensors file"):
        folders.opened(tmp_path / "model.safetensors")
    (tmp_path / folders.INDEX).write_text('{"weight_map": {"a": "../secret"}}')
    with pytest.raises(DataError, match="not a file of the folder"):
        folders.opened_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    folder, secret = shutil.copytree(GOLDEN / "tied", tmp_path / "snapshots" / "folder"), tmp_path / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(os.path.relpath(secret, folder))
    with pytest.raises(ConfigError, match=rf"{name}.*leads out of the folder") as error:
        weights.import_folder(folder, tmp_path / "ours", weights.AS_STORED)
    assert error.value.remedy and not (tmp_path / "ours").exists()


def test_links_of_an_export_are_not_followed_either(tmp_path: Path) -> None:
    ours = _imported(tmp_path)
    (ours / "vocab.json").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=r"vocab\.json.*leads out of the folder"):
        exported(ours, tmp_path / "theirs")


def test_the_links_of_hugging_face_s_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    shutil.copytree(GOLDEN / "tied", blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (tmp_path / "linked").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "linked"):
        weights.import_folder(folder, tmp_path / "ours", weights.AS_STORED)
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (tmp_path / "ours" / name).read_bytes() == (GOLDEN / "tied" / name).read_bytes()
            assert not (tmp_path / "ours" / name).is_symlink()
        shutil.rmtree(tmp_path / "ours")


def test_an_invalid_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run, nor a checkpoint"):
        exported(GOLDEN / "tied", tmp_path / "out")
    with pytest.raises(ConfigError, match="is a JaxRoll folder already"):
        weights.import_folder(_imported(tmp_path), tmp_path / "out", weights.AS_STORED)


def test_the_names_are_those_that_the_module_declares() -> None:
    from jaxroll.models import hf_config

    for spec in (families.spec("nano"), families.spec("qwen3_8b")):
        assert list(hf_config.ours(spec)) == list(params.abstract(spec))


# --- adapters


@pytest.mark.soak
def test_adapters_are_served_and_exported_merged(tmp_path: Path) -> None:
    """A run that trains adapters on a fresh init: evaluation and export see one array for each parameter."""
    words = ["model.size=nano", "learner.lora_rank=2", "learner.lora_alpha=6"]
    config = configs.parse(configs.override(configs.to_dict(configs.parse(configs.defaults())), words))
    run = weights.OfRun(run_dir.create(tmp_path / "run", config, []), config)
    text = tokenizers.CharTokenizer("abc")
    tokenizers.note(run.path, text)
    adapters, spec = Lora.of(config.learner), families.spec("nano", vocab_size=text.vocab_size)
    layout = layouts.Layout(layouts.build(MeshConfig(fsdp=2)), layouts.LEARNER)
    base = params.init(spec, jax.random.key(config.run.seed), layout.mesh, layout.rules)
    chance = np.random.default_rng(5)
    trained_ones = {
        name: jax.device_put(chance.normal(size=leaf.shape).astype(np.float32), leaf.sharding)
        for name, leaf in lora.init(spec, layout, adapters, jax.random.key(0)).items()
    }
    state = states.fresh(trained_ones, spec, layout, optimizer.build(config.learner).transform, adapters)
    checkpoints = Checkpoints(run.path / "checkpoints", 3)
    checkpoints.save(Version(0, 3), 9, state, lora.digest(base))
    checkpoints.wait()
    want = lora.merged(spec, layout, adapters, base, trained_ones)
    served, version, _ = generate.newest_params(config, spec, run.path, layout)
    assert version == Version(0, 3) and all(np.array_equal(served[name], want[name]) for name in want)
    with weights.opened(run.path, run) as held:
        assert "adapters merged" in weights.export(held, tmp_path / "hf", weights.AS_STORED, WHOLE)
    hf = ModelConfig(path=str(tmp_path / "hf"))
    read = params.weights(hf, params.spec(hf, text.vocab_size))
    for name in want:
        np.testing.assert_allclose(read[name], want[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert np.array_equal(read[name], base[name]) != adapters.adapts(name)
    weights.export_adapters(run.path, run, tmp_path / "peft", weights.AS_STORED)
    back = peft.read(replace(config.learner, lora_path=str(tmp_path / "peft")), spec)
    assert all(np.array_equal(back[name], trained_ones[name]) for name in trained_ones)
    checkpoints.save(Version(0, 4), 9, state, "another base")
    checkpoints.wait()
    checkpoints.close()
    same_compiler = "trained on other parameters.*same bits only with the jax version"
    with pytest.raises(ConfigError, match=same_compiler), weights.opened(run.path, run):
        pass
    with pytest.raises(ConfigError, match="trained on other parameters"):
        generate.newest_params(config, spec, run.path, layout)
