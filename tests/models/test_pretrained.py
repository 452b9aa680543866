"""A Hugging Face folder, whole or sharded, gives the model and the parameters that were written."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxroll.config import MeshConfig, ModelConfig
from jaxroll.errors import ConfigError
from jaxroll.models import families, params, pretrained
from jaxroll.sharding import layout

SPEC = families.spec("nano", vocab_size=48)


def written(folder: Path, shards: int = 1, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Our parameters, after writing them to `folder` as a Qwen3 checkpoint in `shards` files."""
    mesh = layout.build(MeshConfig())
    values = {k: np.asarray(v) for k, v in params.init(SPEC, jax.random.key(0), mesh, layout.LEARNER).items()}
    values = {k: v.astype(dtype).astype(np.float32) for k, v in values.items()}
    tensors = {k: v.astype(dtype) for k, v in pretrained.exported(SPEC, values).items()}
    folder.mkdir()
    config = {
        "model_type": "qwen3", "vocab_size": SPEC.vocab_size, "num_hidden_layers": SPEC.layers,
        "hidden_size": SPEC.width, "num_attention_heads": SPEC.heads, "num_key_value_heads": SPEC.kv_heads,
        "head_dim": SPEC.head_dim, "intermediate_size": SPEC.hidden, "rope_theta": SPEC.rope_theta,
        "rms_norm_eps": SPEC.norm_eps, "tie_word_embeddings": SPEC.tied_embeddings, "hidden_act": "silu",
    }  # fmt: skip
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
    model = pretrained.spec(config, vocab_size=40)
    assert (model.layers, model.width, model.vocab_size) == (SPEC.layers, SPEC.width, 48)
    read = pretrained.weights(config, model)
    assert read.keys() == values.keys()
    assert all(np.array_equal(read[name], values[name]) for name in values)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"model\.path.*48 token ids.*tokenizer"):
        pretrained.spec(ModelConfig(path=str(tmp_path / "hf")), vocab_size=49)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    config = ModelConfig(path=str(tmp_path / "hf"))
    with pytest.raises(ConfigError, match=r"holds neither"):
        pretrained.weights(config, pretrained.spec(config, 48))
    with pytest.raises(ConfigError, match=r"config\.json"):
        pretrained.spec(ModelConfig(path=str(tmp_path)), 48)
