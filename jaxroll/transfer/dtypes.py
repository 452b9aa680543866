"""Parameters that have come, in the dtypes that an engine computes with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Params = dict[str, jax.Array]


def cast(arrays: Params, dtypes: Mapping[str, np.dtype]) -> Params:
    """`arrays` with those in another dtype than `dtypes` names cast on their devices, the others as they are."""
    names = tuple(name for name, array in arrays.items() if array.dtype != dtypes[name])
    if not names:
        return arrays
    caster = _caster(tuple(arrays[n].sharding for n in names), tuple(str(dtypes[n]) for n in names))
    return arrays | dict(zip(names, caster([arrays[n] for n in names]), strict=True))


@functools.lru_cache(maxsize=8)
def _caster(shardings: tuple[jax.sharding.Sharding, ...], dtypes: tuple[str, ...]) -> Any:
    """The jitted cast of a list of arrays; kept, so that later versions do not compile again."""
    return jax.jit(
        lambda arrays: [array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True)],
        out_shardings=list(shardings),
    )
