"""Attention kernels for GPU (cuDNN's, and JAX's Pallas kernels for Triton), for the arrays of one device.

`interpret` runs a Pallas kernel on any platform, slowly.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as flash
from jax.experimental.pallas.ops.gpu import paged_attention as pages
from jaxtyping import Array, Float, Int

from jaxroll.kernels.attention import lengthened
from jaxroll.kernels.choice import BLOCK

_SPLITS = 16  # parts of a long request that are computed in parallel
_PAGED_TOKENS = 64  # keys per block


def triton(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal attention within segments, by Pallas' flash attention. Outputs of padding (segment 0) are undefined."""
    # The kernel needs keys and values repeated for every query head.
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    q, k, v = (lengthened(x, BLOCK) for x in (q, k, v))
    ids = None if segments is None else lengthened(segments, BLOCK)
    scale = q.shape[-1] ** -0.5
    out = cast(Array, flash.mha(q, k, v, ids, sm_scale=scale, causal=True, interpret=interpret))
    return out[:, :T]


def cudnn(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], segments: None
) -> Float[Array, "B T N H"]:
    """Causal attention by cuDNN's flash kernel, without segments, which JAX would pass as a mask of T·T elements."""
    if segments is not None:
        raise ValueError("cuDNN's attention takes no segment ids: use triton or xla for packed rows")
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def paged(
    q: Float[Array, "S N H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "S J"],
    positions: Int[Array, " S"],
    *,
    interpret: bool = False,
) -> Float[Array, "S N H"]:
    """softmax(q·kᵀ / √H)·v over the keys at 0 … positions[s] of slot s's pages; 0 for a slot at -1."""
    P, U, J = keys.shape[1], keys.shape[2], tables.shape[1]
    entries = 1 << (J - 1).bit_length()
    named = jnp.pad(jnp.clip(tables, 0, P - 1), ((0, 0), (0, entries - J)))
    lengths = jnp.clip(positions + 1, 0, J * U).astype(jnp.int32)
    splits = min(_SPLITS, entries)
    at_once = min(entries // splits, max(1, _PAGED_TOKENS // U))
    scaled = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return pages.paged_attention(
        scaled, keys, values, named, lengths, k_splits=splits, pages_per_compute_block=at_once, interpret=interpret
    )
