"""What stands in a Hugging Face folder, read without JAX: the model it describes, and the files of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from jaxroll.config import ModelConfig
from jaxroll.errors import ConfigError
from jaxroll.models import families
from jaxroll.models.families import ModelSpec

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


def spec(config: ModelConfig, vocab_size: int) -> ModelSpec:
    """The model of `config.path` where one is given (which must hold the tokenizer's words), else of `config.size`."""
    if not config.path:
        return families.spec(config.size, vocab_size=vocab_size, compute_dtype=config.dtype)
    try:
        found = families.from_huggingface(_json(Path(config.path), _CONFIG), compute_dtype=config.dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "model.path", config.path, f"its {_CONFIG} holds no number where one is needed ({error})", "Copy it again."
        ) from error
    if vocab_size > found.vocab_size:
        reason = f"its {_CONFIG} has {found.vocab_size} token ids and the tokenizer makes {vocab_size}"
        raise ConfigError(
            "model.path", config.path, reason, "Set tokenizer.kind = hf and tokenizer.path to its folder."
        )
    return found


def weight_files(folder: Path) -> dict[str, str] | None:
    """The file of every tensor by the tensor's name, from the index; None where one file holds them all."""
    if (folder / _INDEX).is_file():
        files = _json(folder, _INDEX).get("weight_map")
        if isinstance(files, dict):
            return files
        raise ConfigError("model.path", str(folder), f"its {_INDEX} has no weight_map", "Copy it again.")
    if (folder / _SINGLE).is_file():
        return None
    raise ConfigError("model.path", str(folder), f"holds neither {_SINGLE} nor {_INDEX}", "Give a checkpoint's folder.")


def file_of(folder: Path, files: dict[str, str] | None, tensor: str) -> Path:
    """Where a tensor stands; KeyError when the index does not name it."""
    return folder / (files[tensor] if files is not None else _SINGLE)


def check_weights(config: ModelConfig, model: ModelSpec) -> None:
    """Nothing, or ConfigError when the weights of `config.path` cannot be those of `model`. Reads headers only."""
    folder = Path(config.path)
    files = weight_files(folder)
    names = sorted(set(files.values())) if files is not None else [_SINGLE]
    try:
        held = sum(_elements(folder / name) for name in names)
    except (SafetensorError, OSError) as error:
        raise ConfigError("model.path", config.path, str(error), "Copy the checkpoint again.") from error
    needed = families.parameter_count(model)
    if held < needed:  # more is no harm: a tied head may be written out
        reason = f"its weights hold {held} numbers and the model of its {_CONFIG} has {needed}"
        raise ConfigError("model.path", config.path, reason, f"Is this the checkpoint of its {_CONFIG}?")


def _elements(path: Path) -> int:
    with safe_open(path, framework="numpy") as file:
        names: Iterable[str] = file.keys()
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def _json(folder: Path, name: str) -> dict:
    try:
        found = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        reason = f"{name} cannot be read ({error})"
        raise ConfigError("model.path", str(folder), reason, "Give the folder of a Qwen3 checkpoint.") from error
    if not isinstance(found, dict):
        raise ConfigError("model.path", str(folder), f"{name} is not a JSON object", "Copy it again.")
    return found
