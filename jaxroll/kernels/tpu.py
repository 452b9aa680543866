"""Attention kernels for TPU (JAX's Pallas kernels), for the arrays of one device.

They compile for TPU. On other platforms `splash` runs slowly with `interpret`, and `paged`, whose kernel has no such
argument, under `pltpu.force_tpu_interpret_mode`.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from jaxroll.kernels.attention import lengthened
from jaxroll.kernels.choice import BLOCK

_BLOCKS = (4 * BLOCK, 2 * BLOCK, BLOCK)
_LONG = 2048  # tokens of a row from which padding to the largest block costs less than small blocks
_PAGED_TOKENS = 512  # keys per block


def splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
    *,
    window: int = 0,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal attention within segments, by splash attention; no array has T·T elements, forward or backward.

    With a `window` above 0, a query sees that many keys, its own included. Outputs of padding (segment 0) are
    undefined.
    """
    _, T, N, H = q.shape
    block = block_tokens(T)
    q, k, v = (lengthened(x, block).swapaxes(1, 2) for x in (q * jnp.asarray(H**-0.5, q.dtype), k, v))
    kernel = _kernel(N, q.shape[2], block, window, interpret)
    if segments is None:
        out = jax.vmap(kernel)(q, k, v)
    else:
        ids = lengthened(segments, block)
        out = jax.vmap(lambda q, k, v, own: kernel(q, k, v, segment_ids=kernels.SegmentIds(own, own)))(q, k, v, ids)
    return cast(Array, out).swapaxes(1, 2)[:, :T]


def block_tokens(tokens: int) -> int:
    """The tokens of a block, to a multiple of which rows of `tokens` tokens are padded: from 2,048 tokens on 512."""
    if tokens >= _LONG:
        return _BLOCKS[0]
    padded = -(-tokens // BLOCK) * BLOCK
    return next(size for size in _BLOCKS if padded % size == 0)


def _kernel(heads: int, tokens: int, block: int, window: int, interpret: bool) -> kernels.SplashAttentionKernel:
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    shape = tokens, tokens
    one = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    causal = masks.MultiHeadMask([one] * heads)
    return kernels.make_splash_mha(causal, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)


def paged(
    q: Float[Array, "S N H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "S J"],
    positions: Int[Array, " S"],
) -> Float[Array, "S N H"]:
    """softmax(q·kᵀ / √H)·v over the keys at 0 … positions[s] of slot s's pages; 0 for a slot at -1."""
    # Queries are cast to float32, so that the running mean is accumulated in float32.
    _, P, U, H = keys.shape
    J = tables.shape[1]
    at_once = max(1, min(J, _PAGED_TOKENS // U))
    # The kernel fetches whole blocks of a table, including unused entries, so every entry must be a valid page.
    named = jnp.pad(jnp.clip(tables, 0, P - 1), ((0, 0), (0, -J % at_once)))
    lengths = jnp.clip(positions + 1, 0, J * U).astype(jnp.int32)
    wide = q.astype(jnp.float32) * H**-0.5
    return paged_attention(wide, keys, values, lengths, named, pages_per_compute_block=at_once).astype(q.dtype)
