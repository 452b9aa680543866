"""A Hugging Face folder, whole or sharded, gives the model and the parameters that were written."""

import dataclasses
import json
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxroll import sharding
from jaxroll.config import MeshConfig, ModelConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import weights
from jaxroll.models import families, folders, hf_config, params
from jaxroll.models.folders import Converted, TensorShape

MOE = Path(__file__).parents[1] / "golden" / "qwen3" / "moe"
SPEC = families.spec("nano", vocab_size=48)


def written(folder: Path, shards: int = 1, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Our parameters, after writing them to `folder` as a Qwen3 checkpoint in `shards` files."""
    mesh = sharding.build(MeshConfig())
    values = {k: np.asarray(v) for k, v in params.init(SPEC, jax.random.key(0), mesh, sharding.LEARNER).items()}
    values = {k: v.astype(dtype).astype(np.float32) for k, v in values.items()}
    tensors = {k: v.astype(dtype) for k, v in params.exported(SPEC, values).items()}
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "vocab_size": SPEC.vocab_size,
        "num_hidden_layers": SPEC.layers,
        "hidden_size": SPEC.width,
        "num_attention_heads": SPEC.heads,
        "num_key_value_heads": SPEC.kv_heads,
        "head_dim": SPEC.head_dim,
        "intermediate_size": SPEC.hidden,
        "rope_theta": SPEC.rope_theta,
        "rms_norm_eps": SPEC.norm_eps,
        "tie_word_embeddings": SPEC.tied_embeddings,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return values
    files = {name: f"model-{number % shards + 1}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return values


@pytest.mark.parametrize(("shards", "dtype"), [(1, np.float32), (3, np.float32), (2, ml_dtypes.bfloat16)])
def test_written_arrays_are_read_back(tmp_path: Path, shards: int, dtype: type) -> None:
    values = written(tmp_path / "hf", shards, dtype)
    config = ModelConfig(path=str(tmp_path / "hf"))
    model = params.spec(config, vocab_size=40)
    assert (model.layers, model.width, model.vocab_size) == (SPEC.layers, SPEC.width, 48)
    read = params.weights(config, model)
    assert read.keys() == values.keys()
    assert all(np.array_equal(read[name], values[name]) for name in values)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"model\.path.*48 token ids.*tokenizer"):
        params.spec(ModelConfig(path=str(tmp_path / "hf")), vocab_size=49)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    config = ModelConfig(path=str(tmp_path / "hf"))
    with pytest.raises(ConfigError, match=r"holds neither"):
        params.weights(config, params.spec(config, 48))
    with pytest.raises(ConfigError, match=r"config\.json"):
        params.spec(ModelConfig(path=str(tmp_path)), 48)


def test_a_slice_of_a_parameter_is_read_alone(tmp_path: Path) -> None:
    """Every parameter, also of experts, in both kinds of folder; numpy reports what it allocates to tracemalloc."""
    big = dataclasses.replace(
        SPEC, family="qwen3_moe", vocab_size=4096, width=128, hidden=512, experts=8, experts_per_token=2
    )
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=at.shape).astype(np.float32) for name, at in params.abstract(big).items()}
    for folder in (ours := tmp_path / "ours", theirs := tmp_path / "theirs"):
        folder.mkdir()
    leaves = {name: TensorShape(value.dtype, value.shape) for name, value in values.items()}
    weights.write(ours, leaves, values.__getitem__, big, {})
    save_file(params.exported(big, values), theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(hf_config.to_huggingface(big, "float32")))
    for folder in (ours, theirs):
        config = ModelConfig(path=str(folder))
        read = params.weights(config, params.spec(config, 64))
        assert isinstance(read, Converted)
        for name, value in values.items():
            index = tuple(slice(n // 4, n // 2) for n in value.shape)
            tracemalloc.start()
            found = read.slice_of(name, index)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert np.array_equal(found, value[index]), name
            assert peak < 3 * found.nbytes + 20_000, (name, peak, value.nbytes)


def test_router_biases_that_a_folder_lacks_start_at_zero_and_are_kept(tmp_path: Path) -> None:
    config = ModelConfig(path=str(MOE), router_bias=True)
    spec = params.spec(config, 280)
    folders.check_weights(config, spec)
    read = params.weights(config, spec)
    plain = params.weights(ModelConfig(path=str(MOE)), params.spec(ModelConfig(path=str(MOE)), 280))
    biases = read.keys() - plain.keys()
    assert len(biases) == spec.layers and all(not np.any(read[name]) for name in biases)
    assert all(np.array_equal(read[name], plain[name]) for name in plain)
    moved = {name: value + 1 if name in biases else value for name, value in read.items()}
    weights.save(tmp_path / "kept", moved, spec, {})
    again = ModelConfig(path=str(tmp_path / "kept"))
    kept = params.weights(again, params.spec(again, 280))
    assert kept.keys() == read.keys() and all(np.all(kept[name] == 1) for name in biases)
    with pytest.raises(ConfigError, match=r"model\.router_bias = True: .*qwen3_moe has no biases.*router_loss"):
        hf_config.to_huggingface(spec, "float32")
