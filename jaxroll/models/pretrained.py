"""The model that a config names, with its weights: an entry of `families`, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxroll.config import ModelConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.models import folders, huggingface
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import spec

__all__ = ["spec", "weights"]


def weights(config: ModelConfig, model: ModelSpec) -> dict[str, np.ndarray]:
    """The parameters (float32, flat names) in the safetensors files of `config.path`, one file or sharded by index."""
    folder = Path(config.path)
    files = folders.weight_files(folder)
    try:
        return huggingface.imported(model, _reader(folder, files))
    except (SafetensorError, OSError, DataError) as error:
        raise ConfigError(
            "model.path", config.path, str(error), "Is this the checkpoint of its config.json?"
        ) from error


def _reader(folder: Path, files: dict[str, str] | None) -> Callable[[str], np.ndarray]:
    """Reads one tensor by its name; KeyError for one that is nowhere. bfloat16 comes as float32."""

    def tensor(name: str) -> np.ndarray:
        with safe_open(folders.file_of(folder, files, name), framework="flax") as file:
            if name not in file.keys():  # noqa: SIM118 - not a mapping
                raise KeyError(name)
            return np.asarray(file.get_tensor(name)).astype(np.float32)

    return tensor
