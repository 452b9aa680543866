"""Weights of an imported model: read from a folder (see `folders`), and conversion between layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxroll.config import ModelConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.models import folders, params
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import spec
from jaxroll.models.hf_names import name
from jaxroll.models.tensor_files import Converted, Leaf, Tensors

__all__ = ["leaves", "spec", "stored", "weights"]


def weights(config: ModelConfig, model: ModelSpec) -> Mapping[str, np.ndarray]:
    """The parameters in the folder `config.path`, float32 by flat name; each is read on access and not kept.

    ConfigError, before any is read, when a tensor is missing, unexpected or has a wrong shape.
    """
    raw = leaves(Path(config.path), model)
    return Converted(raw, lambda name: np.asarray(raw[name], np.float32))


def leaves(folder: Path, model: ModelSpec) -> Mapping[str, np.ndarray]:
    """As `weights`, from a folder of either kind, but in the stored dtype."""
    tensors = folders.weight_tensors(folder)
    try:
        stored(folder, model, tensors)
    except DataError as error:
        reason, remedy = str(error), "Is this the checkpoint of its config.json?"
        raise ConfigError("model.path", str(folder), reason, remedy) from error
    if folders.is_ours(folder):
        return tensors
    shapes = params.abstract(model)
    return Converted(shapes, lambda ours: leaf(ours, shapes[ours].shape, tensors.__getitem__))


def stored(folder: Path, model: ModelSpec, tensors: Tensors) -> dict[str, Leaf]:
    """The stored dtype and JaxRoll's shape of every parameter; DataError when one does not match `model`."""
    if wrong := folders.weights_error(folder, model, tensors):
        raise DataError(wrong)
    ours, found = folders.is_ours(folder), {}
    for own_name, leaf in params.abstract(model).items():
        held = tensors.leaf(own_name if ours else name(own_name))
        if not ours:
            check_shape(own_name, leaf.shape, held.shape)
        elif held.shape != leaf.shape:
            raise DataError(f"array {own_name!r} has shape {held.shape}; this model needs {leaf.shape}")
        found[own_name] = Leaf(held.dtype, leaf.shape)
    return found


# --- Conversion between Hugging Face's and JaxRoll's layouts: pure functions of numpy arrays
#
# Hugging Face's linear weights are [out, in] with heads and head dimension in one axis; JaxRoll's are
# [in, heads, head_dim]. The dtype is kept. `ours` is JaxRoll's name of a parameter, `at` its shape.


def imported(spec: ModelSpec, tensor: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """JaxRoll's parameters (float32) from `tensor(Hugging Face name)`; DataError for a missing or misshapen tensor."""
    return {ours: np.asarray(leaf(ours, at.shape, tensor), np.float32) for ours, at in params.abstract(spec).items()}


def exported(spec: ModelSpec, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face's tensors by name, contiguous, in the dtype of `values`."""
    return {name(ours): theirs(ours, np.asarray(values[ours])) for ours in params.abstract(spec)}


def leaf(ours: str, at: tuple[int, ...], tensor: Callable[[str], np.ndarray]) -> np.ndarray:
    """The parameter `ours` of shape `at`, contiguous; DataError for a missing or misshapen tensor."""
    try:
        value = np.asarray(tensor(name(ours)))
    except KeyError as error:
        raise DataError(f"the checkpoint has no tensor {name(ours)!r}, which {ours!r} is read from") from error
    check_shape(ours, at, value.shape)
    return np.ascontiguousarray((value.T if _transposed(ours) else value).reshape(at))


def check_shape(ours: str, at: tuple[int, ...], found: tuple[int, ...]) -> None:
    """Raise DataError when the shape `found` of the Hugging Face tensor is not that of the parameter `ours`."""
    if found != shape(ours, at):
        raise DataError(f"tensor {name(ours)!r} has shape {found}; {ours!r} of this model needs {shape(ours, at)}")


def shape(ours: str, at: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the Hugging Face tensor of the parameter `ours` with shape `at`; [out, in] for a linear weight."""
    if not _transposed(ours):
        return at
    inputs = at[:-1] if ours.endswith(".attn.o") else at[:1]
    return math.prod(at) // math.prod(inputs), math.prod(inputs)


def theirs(ours: str, value: np.ndarray) -> np.ndarray:
    """The Hugging Face tensor of the parameter `ours`, contiguous."""
    rows, *columns = shape(ours, value.shape)
    return np.ascontiguousarray(value.reshape(*columns, rows).T if _transposed(ours) else value)


def _transposed(ours: str) -> bool:
    return not (ours == "embed" or ours.endswith("norm"))
