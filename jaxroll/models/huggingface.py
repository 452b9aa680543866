"""Hugging Face names and layouts ↔ our tree: pure renaming and reshaping of numpy arrays, no files, no torch.

Their linear weights are [out, in] with heads and head dimension in one axis; ours are [in, heads, head_dim]. A value
keeps the dtype of its source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from jaxroll.errors import DataError
from jaxroll.models import params
from jaxroll.models.families import ModelSpec
from jaxroll.models.hf_names import name


def imported(spec: ModelSpec, tensor: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters (float32) read from `tensor(their name)`; DataError for a tensor that is missing or misshapen."""
    return {ours: np.asarray(leaf(ours, at.shape, tensor), np.float32) for ours, at in params.abstract(spec).items()}


def exported(spec: ModelSpec, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their tensors by their names, contiguous, in the dtype of `values`."""
    return {name(ours): theirs(ours, np.asarray(values[ours])) for ours in params.abstract(spec)}


def leaf(ours: str, at: tuple[int, ...], tensor: Callable[[str], np.ndarray]) -> np.ndarray:
    """Our parameter of shape `at`, contiguous; DataError for a tensor that is missing or misshapen."""
    try:
        value = np.asarray(tensor(name(ours)))
    except KeyError as error:
        raise DataError(f"the checkpoint has no tensor {name(ours)!r}, which {ours!r} is read from") from error
    check_shape(ours, at, value.shape)
    return np.ascontiguousarray((value.T if _transposed(ours) else value).reshape(at))


def check_shape(ours: str, at: tuple[int, ...], found: tuple[int, ...]) -> None:
    """Nothing, or DataError when their tensor of our parameter (of shape `at`) has another shape than it should."""
    if found != shape(ours, at):
        raise DataError(f"tensor {name(ours)!r} has shape {found}; {ours!r} of this model needs {shape(ours, at)}")


def shape(ours: str, at: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of their tensor of our parameter of shape `at`: [out, in] where it is a linear weight."""
    if not _transposed(ours):
        return at
    inputs = at[:-1] if ours.endswith(".attn.o") else at[:1]
    return math.prod(at) // math.prod(inputs), math.prod(inputs)


def theirs(ours: str, value: np.ndarray) -> np.ndarray:
    """Their tensor of our parameter, contiguous."""
    rows, *columns = shape(ours, value.shape)
    return np.ascontiguousarray(value.reshape(*columns, rows).T if _transposed(ours) else value)


def _transposed(ours: str) -> bool:
    return not (ours == "embed" or ours.endswith("norm"))
