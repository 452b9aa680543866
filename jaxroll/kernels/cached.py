"""Attention over a KV cache: paged (a loop over pages), and contiguous (levels of increasing length).

B rows of T consecutive queries each, N query heads, K key-value heads, H head dimension; a pool of P pages of U tokens;
a row's table lists its J pages in order. Query t of row b is at position starts[b] + t and sees the keys at positions
0 … starts[b] + t of the row's pages; with a `window` above 0, only the last `window` of them. The output of a row that
sees no key is finite but undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxroll.kernels.attention import exact_precision
from jaxroll.sharding import layout as layouts
from jaxroll.sharding.layout import Layout

_MASKED = -1e30  # finite, so that a row that sees no key stays finite
_CHUNK_TOKENS = 32  # small pages are read several at a time, because every iteration of the loop has a fixed cost
_CPU_ROWS = 4


def paged(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "B J"],
    starts: Int[Array, " B"],
    reach: Int[Array, " blocks"],
    window: int = 0,
) -> Float[Array, "B T N H"]:
    """softmax(q·kᵀ / √H)·v, page by page with a running maximum and sum (Milakov & Gimelshein, arXiv 1805.02867).

    The rows form equal, consecutive blocks; of block i only the first reach[i] pages are read (see `reach`). All blocks
    use the same operations, and a page beyond the end of a row adds exact zeros. So a row's result does not depend, to
    the bit, on the lengths of other rows, its slot or its pages.
    """
    B, T, N, H = q.shape
    K, U = keys.shape[0], keys.shape[2]
    rows, pages = -(-B // len(reach)), _pages_at_once(U)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages)))
    wide = q.reshape(B, T, K, N // K, H).transpose(2, 0, 3, 1, 4)

    def block(i: Int[Array, ""], out: Float[Array, "K B G T H"]) -> Float[Array, "K B G T H"]:
        at = jnp.minimum(i * rows, B - rows)  # the last block may overlap the previous one and compute rows twice
        here = lambda x, axis=0: jax.lax.dynamic_slice_in_dim(x, at, rows, axis)  # noqa: E731
        mean = _block(here(wide, 1), keys, values, here(tables), here(starts), -(-reach[i] // pages), window)
        return jax.lax.dynamic_update_slice_in_dim(out, mean, at, axis=1)

    nothing = jnp.zeros(wide.shape, jnp.float32)
    out = block(jnp.int32(0), nothing) if len(reach) == 1 else jax.lax.fori_loop(0, len(reach), block, nothing)
    return out.transpose(1, 3, 0, 2, 4).reshape(B, T, N, H).astype(q.dtype)


def _block(
    wide: Float[Array, "K R G T H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "R J"],
    starts: Int[Array, " R"],
    chunks: Int[Array, ""],
    window: int,
) -> Float[Array, "K R G T H"]:
    """The rows of one block over their first `chunks` chunks of pages, in float32."""
    K, R, G, T, H = wide.shape
    pages, exact = _pages_at_once(keys.shape[2]), exact_precision(wide.dtype)
    C = pages * keys.shape[2]
    queries = wide.reshape(K, R, G * T, H)
    positions = jnp.broadcast_to((starts[:, None] + jnp.arange(T))[:, None], (R, G, T)).reshape(R, G * T)

    def chunk(j: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, out = carry
        here = jax.lax.dynamic_slice_in_dim(tables, j * pages, pages, axis=1)
        k, v = keys[:, here].reshape(K, R, C, H), values[:, here].reshape(K, R, C, H)
        # Keys are the left operand: as the right one, the CPU backend would first transpose every page.
        scores = jnp.einsum("kbuh,kbqh->kbqu", k, queries, precision=exact, preferred_element_type=jnp.float32)
        # At the first key inside the window, the sums over keys before it are multiplied by an exact zero.
        scores = jnp.where(_seen(j * C + jnp.arange(C), positions[..., None], window), scores * H**-0.5, _MASKED)
        higher = jnp.maximum(best, jnp.max(scores, axis=-1))
        weights, fading = jnp.exp(scores - higher[..., None]), jnp.exp(best - higher)
        gained = jnp.einsum(
            "kbqu,kbuh->kbqh", weights.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32
        )
        return higher, total * fading + jnp.sum(weights, axis=-1), out * fading[..., None] + gained

    each = (K, R, G * T)
    nothing = jnp.full(each, _MASKED, jnp.float32), jnp.zeros(each, jnp.float32), jnp.zeros((*each, H), jnp.float32)
    _, total, out = jax.lax.fori_loop(0, chunks, chunk, nothing)
    return (out / jnp.maximum(total, 1e-30)[..., None]).reshape(K, R, G, T, H)


def _seen(keys: Int[Array, " C"], queries: Int[Array, "*B 1"], window: int) -> Bool[Array, "*B C"]:
    """True where a query at one position sees a key at another."""
    seen = keys <= queries
    return seen & (keys > queries - window) if window else seen


def blocks(rows: int, layout: Layout | None) -> int:
    """The number of blocks into which the loop divides `rows` rows of one query each.

    On a CPU blocks are small, so that a long row slows only the rows of its block. On other platforms an iteration
    costs more than its computation, so all rows form one block.
    """
    platform = jax.default_backend() if layout is None else layouts.platform(layout.mesh)
    return -(-rows // _CPU_ROWS) if platform == "cpu" else 1


def reach(starts: Int[Array, "*shards B"], queries: int, page_tokens: int, blocks: int = 1) -> Int[Array, " blocks"]:
    """The number of pages of the longest row of each block, for B rows in `blocks` blocks; the maximum over shards."""
    count = starts.shape[-1]
    rows = -(-count // blocks)
    begins = np.minimum(np.arange(blocks) * rows, count - rows)
    members = jnp.asarray(starts)[..., begins[:, None] + np.arange(rows)]
    last = jnp.max(members, axis=-1).reshape(-1, blocks).max(axis=0)
    return (last + queries - 1) // page_tokens + 1


def _pages_at_once(page_tokens: int) -> int:
    return max(1, _CHUNK_TOKENS // page_tokens)


# --- contiguous KV cache: attention of one more token
#
# B rows of one query each, N query heads, K key-value heads (N = K·G), H head dimension; level l holds C_l tokens of
# every row, the first level those from position 0 on. A row at position p sees the positions 0 … p. The output of a row
# at -1 is finite but undefined.

_LEVEL_TOKENS = 64
_LEAST_TOKENS = 32  # on the CPU, products with fewer columns take longer than with this many
_MOST_LEVELS = 8

Sums = tuple[Float[Array, "B K G"], Float[Array, "B K G"], Float[Array, "B K G H"]]  # running maximum, sum, output


def levels(tokens: int, page_tokens: int) -> tuple[int, ...]:
    """The lengths C_l of the levels, multiples of `page_tokens` with room for `tokens`; a short rest joins the last."""
    whole = -(-tokens // page_tokens) * page_tokens
    each = page_tokens * -(-max(_LEVEL_TOKENS, -(-whole // _MOST_LEVELS)) // page_tokens)
    lengths = [each] * (whole // each)
    left = whole - sum(lengths)
    if left and (left >= _LEAST_TOKENS or not lengths):
        return (*lengths, left)
    return (*lengths[:-1], lengths[-1] + left)


def dense(
    q: Float[Array, "B 1 N H"],
    keys: Sequence[Float[Array, "B K H C"]],
    values: Sequence[Float[Array, "B K C H"]],
    positions: Int[Array, " B"],
    last: Int[Array, ""],
    window: int = 0,
) -> Float[Array, "B 1 N H"]:
    """softmax(q·kᵀ / √H)·v, one level at a time with a running maximum and sum; levels beyond `last` are skipped.

    A level beyond the end of a row adds exact zeros, so a row's result does not depend, to the bit, on the lengths of
    other rows or on its slot. The tokens are the last axis of keys, which is the layout of the CPU's products.
    """
    B, _, N, H = q.shape
    K = keys[0].shape[1]
    wide = q.reshape(B, K, N // K, H)
    each = wide.shape[:-1]
    sums: Sums = jnp.full(each, _MASKED, jnp.float32), jnp.zeros(each, jnp.float32), jnp.zeros(wide.shape, jnp.float32)
    begin = 0
    for k, v in zip(keys, values, strict=True):
        unseen = jnp.where(_seen(begin + jnp.arange(v.shape[2]), positions[:, None], window), 0.0, _MASKED)
        if begin:
            sums = jax.lax.cond(last >= begin, _level, lambda sums, *_: sums, sums, wide, k, v, unseen)
        else:
            sums = _level(sums, wide, k, v, unseen)
        begin += v.shape[2]
    _, total, out = sums
    return (out / jnp.maximum(total, 1e-30)[..., None]).reshape(q.shape).astype(q.dtype)


def _level(
    sums: Sums,
    wide: Float[Array, "B K G H"],
    k: Float[Array, "B K H C"],
    v: Float[Array, "B K C H"],
    unseen: Float[Array, "B C"],
) -> Sums:
    best, total, out = sums
    exact = exact_precision(wide.dtype)
    scores = jnp.einsum("bkgh,bkhu->bkgu", wide, k, precision=exact, preferred_element_type=jnp.float32)
    scores = scores * wide.shape[-1] ** -0.5 + unseen[:, None, None]  # -1e30 absorbs the score
    higher = jnp.maximum(best, jnp.max(scores, axis=-1))
    weights, fading = jnp.exp(scores - higher[..., None]), jnp.exp(best - higher)
    gained = jnp.einsum(
        "bkgu,bkuh->bkgh", weights.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32
    )
    return higher, total * fading + jnp.sum(weights, axis=-1), out * fading[..., None] + gained
