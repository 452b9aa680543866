"""The model that a config names, with its weights: an entry of `families`, or a folder (see `folders`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxroll.config import ModelConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.models import folders, huggingface, params
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import spec
from jaxroll.models.tensor_files import Converted, Leaf, Tensors

__all__ = ["leaves", "spec", "stored", "weights"]


def weights(config: ModelConfig, model: ModelSpec) -> Mapping[str, np.ndarray]:
    """The parameters in the folder `config.path`, float32 by flat name; each is read when asked for, not kept.

    ConfigError before any is read when a tensor is missing, misshapen or unexpected.
    """
    raw = leaves(Path(config.path), model)
    return Converted(raw, lambda name: np.asarray(raw[name], np.float32))


def leaves(folder: Path, model: ModelSpec) -> Mapping[str, np.ndarray]:
    """Our parameters from a folder of either kind, as `weights`, but in the dtype in which they are stored."""
    tensors = folders.weight_tensors(folder)
    try:
        stored(folder, model, tensors)
    except DataError as error:
        reason, remedy = str(error), "Is this the checkpoint of its config.json?"
        raise ConfigError("model.path", str(folder), reason, remedy) from error
    if folders.is_ours(folder):
        return tensors
    shapes = params.abstract(model)
    return Converted(shapes, lambda ours: huggingface.leaf(ours, shapes[ours].shape, tensors.__getitem__))


def stored(folder: Path, model: ModelSpec, tensors: Tensors) -> dict[str, Leaf]:
    """Dtype and shape (ours) of every parameter as the folder holds it; DataError when one is not as `model` has it."""
    if wrong := folders.misfit(folder, model, tensors):
        raise DataError(wrong)
    ours, found = folders.is_ours(folder), {}
    for name, leaf in params.abstract(model).items():
        held = tensors.leaf(name if ours else huggingface.name(name))
        if not ours:
            huggingface.check_shape(name, leaf.shape, held.shape)
        elif held.shape != leaf.shape:
            raise DataError(f"array {name!r} has shape {held.shape}; this model needs {leaf.shape}")
        found[name] = Leaf(held.dtype, leaf.shape)
    return found
