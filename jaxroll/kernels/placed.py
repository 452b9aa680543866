"""Attention by a chosen implementation, over the devices of a layout; the fused kernels for one device.

The fused kernels import Pallas when they are called, because that takes time.

The compiler cannot partition a fused kernel. So rows, slots and heads are divided here by `shard_map` with the layout's
rules, and every device runs the kernel on its part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxroll import sharding as layouts
from jaxroll.kernels.attention import grouped, lengthened, visible
from jaxroll.kernels.choice import BLOCK, WINDOWED, XLA
from jaxroll.sharding import Layout

Attend = Callable[[Array, Array, Array], Array]  # q [B, T, N, H], k and v [B, T, K, H]

_QUERIES = ("rows", None, "query_heads", "head_dim")
_KEYS = ("rows", None, "key_heads", "head_dim")
_TOKENS = ("rows", "tokens", "heads", "head_dim")  # queries outside attention
_GATHERED = ("rows", None, "kv_heads", "head_dim")  # keys and values of whole rows
_ROWS = ("rows", None)
_SLOTS = ("slots", None, None, "heads", "head_dim")
_POOL = ("slots", "kv_heads", None, "tokens", "head_dim")


def rows(name: str, tokens: int, segments: Int[Array, "B T"] | None, layout: Layout | None, window: int = 0) -> Attend:
    """Causal attention over rows of `tokens`, within `segments` if given (0 is padding), by the implementation `name`.

    With a `window` above 0, a query sees that many keys, its own included. The XLA implementation builds its mask once
    for all layers; it is the only one that works without a layout.
    """
    if name == XLA:
        return partial(_masked, visible(tokens, segments, window))
    # `choice` selects a kernel without windows only if no sample is longer than the window.
    kernel = _row_kernel(name)
    kernel = partial(kernel, window=window) if name in WINDOWED and 0 < window < tokens else kernel
    return partial(_divided_rows, kernel, segments, _needed(name, layout))


def exchanged(attend: Attend, layout: Layout | None) -> Attend:
    """`attend` for tokens that are divided over the mesh axis sequence.

    If sequence and tensor together divide the query heads, an all-to-all exchanges tokens for heads and back.
    Otherwise queries stay divided over their tokens, and keys and values are gathered.
    """
    if layout is None or layout.mesh.shape["sequence"] == 1:
        return attend
    parts = layout.mesh.shape["sequence"] * layout.mesh.shape["tensor"]

    def over_parts(q: Array, k: Array, v: Array) -> Array:
        queries, keys = (_TOKENS, _GATHERED) if q.shape[2] % parts else (_QUERIES, _KEYS)
        q, k, v = (layout.constrain(x, of) for x, of in ((q, queries), (k, keys), (v, keys)))
        return layout.constrain(layout.constrain(attend(q, k, v), queries), _TOKENS)

    return over_parts


def pages(name: str, layout: Layout | None) -> Callable[..., Array]:
    """One more token over the paged cache by the kernel `name`, with the arguments of `paged_on_gpu` for all shards."""
    layout = _needed(name, layout)
    paged = paged_on_gpu if layouts.platform(layout.mesh) == "gpu" else paged_on_tpu
    return partial(_divided_pages, paged, layout)


def continued(layout: Layout | None) -> Callable[..., Array]:
    """More tokens of rows over one shard of the paged cache by splash attention, with the arguments of `splash_behind`,
    but pools of one shard [1, K, P, U, H]."""
    return partial(_divided_continued, _needed("splash", layout))


def _divided_continued(
    layout: Layout, q: Array, k: Array, v: Array, keys: Array, values: Array, *of_rows: Array
) -> Array:
    """`of_rows`: tables [R, J], starts [R] and lengths [R]."""

    def one(q: Array, k: Array, v: Array, keys: Array, values: Array, *of_rows: Array) -> Array:
        return splash_behind(q, k, v, keys[0], values[0], *of_rows)

    queries, new, pool = _spec(layout, _QUERIES, q), _spec(layout, _KEYS, k), _spec(layout, _POOL, keys)
    each = (_spec(layout, ("rows", None)[: array.ndim], array) for array in of_rows)
    return _divided(one, layout, (queries, new, new, pool, pool, *each), queries)(q, k, v, keys, values, *of_rows)


def _masked(mask: Array, q: Array, k: Array, v: Array) -> Array:
    return grouped(q, k, v, mask)


def _row_kernel(name: str) -> Callable[..., Array]:
    return {"splash": splash, "triton": triton, "cudnn": cudnn}[name]


def _divided_rows(
    kernel: Callable[..., Array], segments: Int[Array, "B T"] | None, layout: Layout, q: Array, k: Array, v: Array
) -> Array:
    queries, keys = _spec(layout, _QUERIES, q), _spec(layout, _KEYS, k)
    if segments is None:
        return _divided(lambda *own: kernel(*own, None), layout, (queries, keys, keys), queries)(q, k, v)
    specs = (queries, keys, keys, _spec(layout, _ROWS, segments))
    return _divided(kernel, layout, specs, queries)(q, k, v, segments)


def _divided_pages(
    kernel: Callable[..., Array],
    layout: Layout,
    q: Array,
    keys: Array,
    values: Array,
    tables: Array,
    starts: Array,
    reach: Array,
) -> Array:
    """Attention of q [D, S/D, 1, N, H] over keys and values [D, K, P, U, H]; `reach` is not used by the kernels."""

    def one(q: Array, keys: Array, values: Array, tables: Array, starts: Array) -> Array:
        # D is the number of groups of devices, so each holds one shard.
        return kernel(q[0, :, 0], keys[0], values[0], tables[0], starts[0])[None, :, None]

    queries, pool = _spec(layout, _SLOTS, q), _spec(layout, _POOL, keys)
    specs = (queries, pool, pool, _spec(layout, ("slots", None, None), tables), _spec(layout, ("slots", None), starts))
    return _divided(one, layout, specs, queries)(q, keys, values, tables, starts)


def _divided(
    kernel: Callable[..., Array], layout: Layout, specs: tuple[PartitionSpec, ...], out: PartitionSpec
) -> Callable[..., Array]:
    return jax.shard_map(kernel, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)


def _spec(layout: Layout, logical: tuple[str | None, ...], array: Array) -> PartitionSpec:
    return layout.sharding(logical, array.shape).spec


def _needed(name: str, layout: Layout | None) -> Layout:
    if layout is None:
        raise ValueError(f"attention by {name} needs a layout: a mesh, and rules that divide the work over it")
    return layout


# --- Attention kernels for GPU (cuDNN's, and JAX's Pallas kernels for Triton), for the arrays of one device
#
# `interpret` runs a Pallas kernel on any platform, slowly.

_SPLITS = 16  # parts of a long request that are computed in parallel
_GPU_KEYS = 64  # keys per block


def triton(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal attention within segments, by Pallas' flash attention. Outputs of padding (segment 0) are undefined."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    # The kernel needs keys and values repeated for every query head.
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    q, k, v = (lengthened(x, BLOCK) for x in (q, k, v))
    ids = None if segments is None else lengthened(segments, BLOCK)
    scale = q.shape[-1] ** -0.5
    out = cast(Array, mha(q, k, v, ids, sm_scale=scale, causal=True, interpret=interpret))
    return out[:, :T]


def cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Causal attention by cuDNN's flash kernel, without segments, which JAX would pass as a mask of T·T elements."""
    if segments is not None:
        raise ValueError("cuDNN's attention takes no segment ids: use triton or xla for packed rows")
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def paged_on_gpu(
    q: Float[Array, "S N H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "S J"],
    positions: Int[Array, " S"],
    *,
    interpret: bool = False,
) -> Float[Array, "S N H"]:
    """softmax(q·kᵀ / √H)·v over the keys at 0 … positions[s] of slot s's pages; 0 for a slot at -1."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    P, U, J = keys.shape[1], keys.shape[2], tables.shape[1]
    entries = 1 << (J - 1).bit_length()
    named = jnp.pad(jnp.clip(tables, 0, P - 1), ((0, 0), (0, entries - J)))
    lengths = jnp.clip(positions + 1, 0, J * U).astype(jnp.int32)
    splits = min(_SPLITS, entries)
    at_once = min(entries // splits, max(1, _GPU_KEYS // U))
    scaled = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return paged_attention(
        scaled, keys, values, named, lengths, k_splits=splits, pages_per_compute_block=at_once, interpret=interpret
    )


# --- Attention kernels for TPU (JAX's Pallas kernels), for the arrays of one device
#
# They compile for TPU. On other platforms `splash` runs slowly with `interpret`, and `paged`, whose kernel has no such
# argument, under `pltpu.force_tpu_interpret_mode`.

_BLOCKS = (4 * BLOCK, 2 * BLOCK, BLOCK)
_LONG = 2048  # tokens of a row from which padding to the largest block costs less than small blocks
_TPU_KEYS = 512  # keys per block
_PADDING = 1 << 30  # above all ids of segments
# The fused backward kernel writes the queries' gradient once per block of keys, and their sum is taken behind it. So a
# block has as many keys as fit the vector memory at 128 numbers per head, and rows of more blocks have two kernels.
_BACKWARD_KEYS, _COPIES = 2048, 12


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
    undefined. In rows of 2,048 tokens or more, blocks of queries and keys without a common segment are neither fetched
    nor computed, so a row costs its segments and not its square; such rows are computed one after the other.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    _, T, N, H = q.shape
    block = block_tokens(T)
    q, k, v = (lengthened(x, block).swapaxes(1, 2) for x in (q * jnp.asarray(H**-0.5, q.dtype), k, v))
    tokens = q.shape[2]
    keys = backward_keys(tokens, block, H)
    kernel = _splash_kernel(N, tokens, block, keys, window, interpret)
    if segments is None:
        out = jax.vmap(kernel)(q, k, v)
    elif T < _LONG:
        ids = lengthened(segments, block)
        out = jax.vmap(lambda q, k, v, own: kernel(q, k, v, segment_ids=SegmentIds(own, own)))(q, k, v, ids)
    else:
        ids = separate_padding(lengthened(segments, block), block)
        out = jax.lax.map(
            lambda row: sparse(kernel, row[3], block, keys or block)(*row[:3], segment_ids=SegmentIds(row[3], row[3])),
            (q, k, v, ids),
        )
    return cast(Array, out).swapaxes(1, 2)[:, :T]


def splash_behind(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "R J"],
    starts: Int[Array, " R"],
    lengths: Int[Array, " R"],
    *,
    interpret: bool = False,
) -> Float[Array, "R T N H"]:
    """Causal attention of `lengths` new tokens of each row, which also see its tokens 0 … starts - 1 in the pages.

    Keys have their rotation, so their order does not matter: a row's pages come first, as far as they are in use, then
    its new keys. Blocks of pages behind `starts` are neither fetched by the kernel nor computed. Rows are computed one
    after the other, each with a copy of its pages. Outputs behind `lengths` are undefined.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    T, N, H = q.shape[1:]
    K, P, U = keys.shape[:3]
    known, block = tables.shape[1] * U, block_tokens(T)
    q, k, v = (lengthened(x, block).swapaxes(1, 2) for x in (q * jnp.asarray(H**-0.5, q.dtype), k, v))
    new = q.shape[2]
    wide = block_tokens(known + new)
    before = -(-(known + new) // wide) * wide - new
    kernel = _splash_kernel(N, new, block, None, 0, interpret, before, wide)
    index = jnp.arange(before + new)

    def one(row: tuple[Array, ...]) -> Array:
        q, k, v, table, start, length = row

        def seen(pool: Array, new: Array) -> Array:
            found = pool[:, jnp.clip(table, 0, P - 1)].reshape(K, known, H)
            return jnp.concatenate([jnp.pad(found, ((0, 0), (0, before - known), (0, 0))), new], axis=1)

        # Each block of padding behind the new tokens sees itself, so that its outputs are finite.
        behind = jnp.where(index < before + length, 1, _PADDING + index // wide)
        ids = jnp.where(index < before, jnp.where(index < start, 1, 0), behind)
        own = ids[before:]
        visited = _common_blocks(kernel.fwd_mask_info, own, ids, block, wide)
        skipping = type(kernel)(visited, None, None, **kernel.kwargs)
        return skipping(q, seen(keys, k), seen(values, v), segment_ids=SegmentIds(own, ids))

    return jax.lax.map(one, (q, k, v, tables, starts, lengths)).swapaxes(1, 2)[:, :T]


def separate_padding(segments: Int[Array, "*rows T"], block: int) -> Int[Array, "*rows T"]:
    """`segments` in which the padding of each block of `block` tokens is a segment of its own, above all others.

    It then costs one block of queries and keys, and has a maximum, so its outputs are finite.
    """
    padding = _PADDING + jnp.arange(segments.shape[-1], dtype=jnp.int32) // block
    return jnp.where(segments > 0, segments, jnp.broadcast_to(padding, segments.shape))


def sparse(kernel: Any, ids: Int[Array, " T"], block: int, keys: int) -> Any:
    """A splash kernel that skips the blocks whose queries and keys have no segment of `ids` in common.

    `kernel` has blocks of `block` tokens, and of `keys` tokens for keys in the pass that computes their gradient. Exact
    if `ids` do not decrease; otherwise blocks are computed that could be skipped. The result is a kernel of the same
    class, for the one row that has these segments.
    """
    forward, queries, keys_values = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    return type(kernel)(
        _common_blocks(forward, ids, ids, block, block),
        None if queries is None else _common_blocks(queries, ids, ids, block, block),
        None if keys_values is None else _common_blocks(keys_values, ids, ids, block, keys, by_keys=True),
        **kernel.kwargs,
    )


def _common_blocks(
    info: Any, of_queries: Array, of_keys: Array, queries: int, keys: int, *, by_keys: bool = False
) -> Any:
    """The blocks that a kernel visits, [1, queries, keys], less those without a common segment; ids are [T].

    The kernel takes the keys' block that `data_next` names, or with `by_keys` the queries' block, and visits all of one
    block's before the next. A block that it skips names the data of the next one that it computes: no other is fetched.
    """
    named, shape = jnp.asarray(info.data_next, jnp.int32)[0], info.data_next.shape[1:]
    row, column = jnp.arange(shape[0])[:, None], jnp.arange(shape[1])[None]
    of_query, of_key = (named, column) if by_keys else (row, named)
    own, other = of_queries.reshape(-1, queries), of_keys.reshape(-1, keys)
    common = (own.min(1)[of_query] <= other.max(1)[of_key]) & (other.min(1)[of_key] <= own.max(1)[of_query])
    computed = jnp.asarray(info.block_mask)[0] * common
    order, flat = (computed.T, named.T.ravel()) if by_keys else (computed, named.ravel())
    at = jnp.where(order.ravel() > 0, jnp.arange(order.size), order.size)
    following = jax.lax.cummin(at, reverse=True)
    following = jnp.where(following < order.size, following, following[0])  # behind the last one: the next head's first
    data = flat[following].reshape(order.shape)
    data = (data.T if by_keys else data).astype(info.data_next.dtype)
    return info._replace(data_next=data[None], block_mask=computed.astype(info.block_mask.dtype)[None])


def block_tokens(tokens: int) -> int:
    """The tokens of a block, to a multiple of which rows of `tokens` tokens are padded: from 2,048 tokens on 512."""
    if tokens >= _LONG:
        return _BLOCKS[0]
    padded = -(-tokens // BLOCK) * BLOCK
    return next(size for size in _BLOCKS if padded % size == 0)


def backward_keys(tokens: int, block: int, head: int) -> int | None:
    """The keys of a block in the fused backward kernel, for padded rows of `tokens`; None if two kernels are better.

    Two kernels compute the gradients of queries and of keys and values from two computations of the scores; the fused
    one computes them once, and needs memory for as many copies of the queries' gradient as a row has blocks of keys.
    """
    most = max(block, _BACKWARD_KEYS * 128 // max(head, 128))
    keys = max(size for size in range(block, min(most, tokens) + 1, block) if tokens % size == 0)
    return keys if tokens <= _COPIES * keys else None


def _splash_kernel(
    heads: int,
    tokens: int,
    block: int,
    keys: int | None,
    window: int,
    interpret: bool,
    before: int = 0,
    wide: int = 0,
) -> Any:
    """The kernel of rows of `tokens` tokens in blocks of `block`. It has no backward pass for rows behind `before`
    earlier keys, which all queries may see, with blocks of `wide` keys."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if wide:
        sizes = kernels.BlockSizes(block_q=block, block_kv=wide, block_kv_compute=wide)
        causal = masks.MultiHeadMask([masks.CausalMask((tokens, before + tokens), before)] * heads)
        return kernels.make_splash_mha(causal, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=keys or block,
        block_kv_dkv_compute=block,
        block_q_dq=None if keys else block,
        block_kv_dq=None if keys else block,
        use_fused_bwd_kernel=keys is not None,
    )
    shape = tokens, tokens
    one = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    causal = masks.MultiHeadMask([one] * heads)
    return kernels.make_splash_mha(causal, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)


def paged_on_tpu(
    q: Float[Array, "S N H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "S J"],
    positions: Int[Array, " S"],
) -> Float[Array, "S N H"]:
    """softmax(q·kᵀ / √H)·v over the keys at 0 … positions[s] of slot s's pages; 0 for a slot at -1."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    # Queries are cast to float32, so that the running mean is accumulated in float32.
    _, P, U, H = keys.shape
    J = tables.shape[1]
    at_once = max(1, min(J, _TPU_KEYS // U))
    # The kernel fetches whole blocks of a table, including unused entries, so every entry must be a valid page.
    named = jnp.pad(jnp.clip(tables, 0, P - 1), ((0, 0), (0, -J % at_once)))
    lengths = jnp.clip(positions + 1, 0, J * U).astype(jnp.int32)
    wide = q.astype(jnp.float32) * H**-0.5
    return paged_attention(wide, keys, values, lengths, named, pages_per_compute_block=at_once).astype(q.dtype)
