"""The model that a config names: an entry of `families`, or a Hugging Face folder with its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxroll.config import ModelConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.models import families, huggingface
from jaxroll.models.families import ModelSpec

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


def spec(config: ModelConfig, vocab_size: int) -> ModelSpec:
    """The model of `config.path` where one is given (which must hold the tokenizer's words), else of `config.size`."""
    if not config.path:
        return families.spec(config.size, vocab_size=vocab_size, compute_dtype=config.dtype)
    found = families.from_huggingface(_json(Path(config.path), _CONFIG), compute_dtype=config.dtype)
    if vocab_size > found.vocab_size:
        reason = f"its {_CONFIG} has {found.vocab_size} token ids and the tokenizer makes {vocab_size}"
        raise ConfigError(
            "model.path", config.path, reason, "Set tokenizer.kind = hf and tokenizer.path to its folder."
        )
    return found


def weights(config: ModelConfig, model: ModelSpec) -> dict[str, np.ndarray]:
    """The parameters (float32, flat names) in the safetensors files of `config.path`, one file or sharded by index."""
    folder = Path(config.path)
    if (folder / _INDEX).is_file():
        files = _json(folder, _INDEX)["weight_map"]
    elif (folder / _SINGLE).is_file():
        files = None
    else:
        raise ConfigError(
            "model.path", config.path, f"holds neither {_SINGLE} nor {_INDEX}", "Give a checkpoint's folder."
        )
    try:
        return huggingface.imported(model, _reader(folder, files))
    except (SafetensorError, OSError, DataError) as error:
        raise ConfigError(
            "model.path", config.path, str(error), "Is this the checkpoint of its config.json?"
        ) from error


def _reader(folder: Path, files: dict[str, str] | None) -> Callable[[str], np.ndarray]:
    """Reads one tensor by its name; KeyError for one that is nowhere. bfloat16 comes as float32."""

    def tensor(name: str) -> np.ndarray:
        path = folder / (files[name] if files is not None else _SINGLE)
        with safe_open(path, framework="flax") as file:
            if name not in file.keys():  # noqa: SIM118 - not a mapping
                raise KeyError(name)
            return np.asarray(file.get_tensor(name)).astype(np.float32)

    return tensor


def _json(folder: Path, name: str) -> dict:
    try:
        return json.loads((folder / name).read_text())
    except (OSError, json.JSONDecodeError) as error:
        reason = f"{name} cannot be read ({error})"
        raise ConfigError("model.path", str(folder), reason, "Give the folder of a Qwen3 checkpoint.") from error
