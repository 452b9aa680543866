"""Arrays of 8 bits with scales: the rule for keys and values in the pages of an engine, and for its weights.

A number x is stored as q = x / s, rounded to int8 or float8_e4m3fn, and read as q · s. The scale s belongs to a token
and key-value head (`rows`), or to an output of a product (`columns`); it maps the largest |x| of its numbers to the
largest number of the dtype. The arithmetic of the rule is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

DTYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}  # by their names in the config
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_LEAST = 1e-30  # numbers that are all 0 need a scale, too


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """`values` of 8 bits, and their float32 `scales`, without the axes that have a scale in common."""

    values: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return self.values.dtype


Pool = Array | Quantised  # of keys or values


def rows(x: Float[Array, "*rows H"], dtype: str) -> Quantised:
    """`x` with a scale for every vector along the last axis: those of `rows`."""
    values, scales = _stored(x, dtype, (x.ndim - 1,))
    return Quantised(values, scales[..., 0])


def of_rows(stored: Quantised, dtype: jnp.dtype) -> Float[Array, "*rows H"]:
    """The numbers that `rows` stored."""
    return (stored.values.astype(jnp.float32) * stored.scales[..., None]).astype(dtype)


def columns(weight: Float[Array, "*axes"], dtype: str, inputs: Sequence[int]) -> Quantised:
    """`weight` with a scale for every output: those of its axes that are not `inputs`."""
    values, scales = _stored(weight, dtype, tuple(inputs))
    return Quantised(values, jnp.squeeze(scales, tuple(inputs)))


def of_columns(stored: Array | Quantised, dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """The numbers that `columns` stored, if the inputs are the first axes; a weight that is not quantized as it is."""
    if not isinstance(stored, Quantised):
        return stored.astype(dtype)
    inputs = range(stored.values.ndim - stored.scales.ndim)
    return (stored.values.astype(jnp.float32) * jnp.expand_dims(stored.scales, tuple(inputs))).astype(dtype)


def _stored(x: Array, dtype: str, axes: tuple[int, ...]) -> tuple[Array, Array]:
    wide, most = x.astype(jnp.float32), _LARGEST[dtype]
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axes, keepdims=True), _LEAST) / most
    found = jnp.clip(wide / scales, -most, most)
    return (jnp.round(found) if dtype == "int8" else found).astype(DTYPES[dtype]), scales


# --- pools: pages of tokens in the compute dtype, or quantized


def as_in(pool: Pool, new: Shaped[Array, "*rows H"]) -> Pool:
    """`new` as `pool` holds such numbers."""
    if not isinstance(pool, Quantised):
        return new
    return rows(new, next(name for name, dtype in DTYPES.items() if dtype == pool.dtype))


def as_read(new: Float[Array, "*rows H"], dtype: str) -> Float[Array, "*rows H"]:
    """`new` as a later token reads it from a pool of `dtype` ("": as it is)."""
    return of_rows(rows(new, dtype), new.dtype) if dtype else new


def read(pool: Pool, part: Callable[[Array], Array], dtype: jnp.dtype) -> Array:
    """`part` of a pool in `dtype`, if it is quantized; it is applied to values and scales."""
    return of_rows(jax.tree.map(part, pool), dtype) if isinstance(pool, Quantised) else part(pool)
