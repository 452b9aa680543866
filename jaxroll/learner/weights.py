"""Parameters in a folder that other tools can open: safetensors, with the model and the tokenizer beside them as JSON.

    model.safetensors   float32 arrays under our flat names
    model.json          the ModelSpec
    tokenizer.json      what `jaxroll.text.tokenizers` needs to be built again

A warm start is such a folder; unlike a checkpoint it knows nothing of an optimizer or a run.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxroll.errors import ConfigError
from jaxroll.models.families import ModelSpec

_ARRAYS, _MODEL, _TOKENIZER = "model.safetensors", "model.json", "tokenizer.json"


def save(folder: Path, params: Mapping[str, Any], spec: ModelSpec, tokenizer: Mapping[str, Any]) -> None:
    """Write everything beside `folder`, then put it there in one rename; what was there before is replaced."""
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in jax.device_get(dict(params)).items()}
    save_file(arrays, unfinished / _ARRAYS)
    (unfinished / _MODEL).write_text(json.dumps(dataclasses.asdict(spec), indent=1))
    (unfinished / _TOKENIZER).write_text(json.dumps(dict(tokenizer), indent=1, ensure_ascii=False))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def load(folder: Path) -> dict[str, np.ndarray]:
    """The parameters, as float32 host arrays under our flat names."""
    path = _file(folder, _ARRAYS)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ConfigError("weights", str(path), f"not a safetensors file ({error})", "Write it again.") from error


def model_spec(folder: Path) -> ModelSpec:
    """The model that the parameters belong to."""
    try:
        return ModelSpec(**_json(folder, _MODEL))
    except TypeError as error:
        raise ConfigError("weights", str(folder), f"{_MODEL} describes no model of this version ({error})") from error


def tokenizer(folder: Path) -> dict[str, Any]:
    """What `save` was told about the tokenizer."""
    return _json(folder, _TOKENIZER)


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = _file(folder, name)
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError("weights", str(path), f"not JSON ({error})", "Write it again.") from error


def _file(folder: Path, name: str) -> Path:
    path = Path(folder) / name
    if not path.is_file():
        raise ConfigError("weights", str(folder), f"holds no {name}", "Give a folder that `jaxroll sft` wrote.")
    return path
