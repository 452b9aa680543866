"""Attention in XLA operations, softmax(q·kᵀ / √H + mask)·v with grouped heads: over rows, over a KV cache; a reference.

The fused kernels (`tpu`, `gpu`) take segment ids instead of a mask; `placed` gives both the same signature.

B rows, T queries, U keys, N query heads, K key-value heads (N = K·G, head n reads key-value head n // G), H head
dimension. The output of a query that sees no key is finite but undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxroll import sharding as layouts
from jaxroll.kernels.quantised import Pool, read
from jaxroll.sharding import Layout

_MASKED = -1e30  # finite, so that a row without keys stays finite in value and gradient


def grouped(
    q: Float[Array, "B T N H"], k: Float[Array, "B U K H"], v: Float[Array, "B U K H"], mask: Bool[Array, "#B T U"]
) -> Float[Array, "B T N H"]:
    """Attention in XLA operations, without repeating keys per query head; the softmax is computed in float32."""
    # The gradient is written out, because the products that JAX derives take twice as long on the CPU backend, which
    # needs a certain order of operands.
    B, T, N, H = q.shape
    wide = q.reshape(B, T, k.shape[2], -1, H).transpose(0, 2, 3, 1, 4)
    return _attention(wide, k, v, mask).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@jax.custom_vjp
def _attention(
    q: Float[Array, "B K G T H"], k: Float[Array, "B U K H"], v: Float[Array, "B U K H"], mask: Bool[Array, "#B T U"]
) -> Float[Array, "B K G T H"]:
    """softmax(q·kᵀ / √H)·v where `mask` is True."""
    return _forward(q, k, v, mask)[0]


def _forward(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    exact = exact_precision(q.dtype)
    scores = jnp.einsum(
        "bkgth,bkhu->bkgtu", q, k.transpose(0, 2, 3, 1), precision=exact, preferred_element_type=jnp.float32
    )
    # Scaled after the product, because scaling a bfloat16 operand would round it.
    scores = jnp.where(mask[:, None, None], scores * q.shape[-1] ** -0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    mean = jnp.einsum("bkgtu,bkuh->bkgth", weights.astype(v.dtype), v.transpose(0, 2, 1, 3), precision=exact)
    return mean, (q, k, v, weights, mean)


def _backward(saved: tuple[Array, ...], d_mean: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, weights, mean = saved
    exact = exact_precision(q.dtype)
    d_weights = jnp.einsum(
        "bkgth,bkhu->bkgtu", d_mean, v.transpose(0, 2, 3, 1), precision=exact, preferred_element_type=jnp.float32
    )
    # Σ over keys of weight · d_weight equals the output times its gradient (Dao et al., arXiv 2205.14135).
    along = jnp.sum(d_mean.astype(jnp.float32) * mean.astype(jnp.float32), axis=-1, keepdims=True)
    d_scores = (weights * (d_weights - along) * q.shape[-1] ** -0.5).astype(q.dtype)
    d_q = jnp.einsum("bkgtu,bkuh->bkgth", d_scores, k.transpose(0, 2, 1, 3), precision=exact)
    d_k = jnp.einsum("bkgtu,bkgth->bkuh", d_scores, q, precision=exact)
    d_v = jnp.einsum("bkgtu,bkgth->bkuh", weights.astype(v.dtype), d_mean, precision=exact)
    return d_q, d_k.transpose(0, 2, 1, 3), d_v.transpose(0, 2, 1, 3), None


_attention.defvjp(_forward, _backward)


def reference(
    q: Float[Array, "B T N H"], k: Float[Array, "B U K H"], v: Float[Array, "B U K H"], mask: Bool[Array, "#B T U"]
) -> Float[Array, "B T N H"]:
    """Attention one row, query and head at a time, in float32; slow but easy to verify."""
    B, T, N, H = q.shape
    group = N // k.shape[2]
    mask = jnp.broadcast_to(mask, (B, T, k.shape[1]))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    exact = jax.lax.Precision.HIGHEST

    def one(b: int, t: int, n: int) -> Array:
        scores = jnp.dot(k[b, :, n // group], q[b, t, n], precision=exact) / jnp.sqrt(H)
        weights = jax.nn.softmax(jnp.where(mask[b, t], scores, _MASKED))
        return jnp.dot(weights, v[b, :, n // group], precision=exact)

    return jnp.stack([jnp.stack([jnp.stack([one(b, t, n) for n in range(N)]) for t in range(T)]) for b in range(B)])


def visible(tokens: int, segments: Int[Array, "B T"] | None = None, window: int = 0) -> Bool[Array, "#B T T"]:
    """True where query t sees key u: u ≤ t and, with `segments`, both in the same segment, which is not padding (0).

    With a `window` above 0, a query sees that many keys, its own included: u > t - window.
    """
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    if 0 < window < tokens:
        causal &= ~jnp.tril(causal, -window)
    if segments is None:
        return causal[None]
    same = segments[:, :, None] == segments[:, None, :]
    return same & (segments > 0)[:, None, :] & causal[None]


def lengthened(x: Shaped[Array, "B T *rest"], multiple: int) -> Shaped[Array, "B T1 *rest"]:
    """`x` padded with zeros after its tokens, to a multiple of `multiple`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), *((0, 0),) * (x.ndim - 2)))


def exact_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """The matmul precision that is exact for `dtype`; by default TPU and GPU multiply float32 with fewer bits."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


# --- rows whose prompts are computed once for all their answers
#
# A row has P tokens of prompts and A stretches of S tokens of answers, T = P + A·S. A prompt token sees the prompt up
# to itself; an answer token sees the whole prompt that its answer continues, and the answer up to itself. The results
# equal those with a copy of the prompt before every answer, with fewer tokens (Liu et al., "Prefix Grouper", arXiv
# 2506.05433, for one prompt per row; here a row holds several). B rows, N query heads, K key-value heads, H head
# dimension.


@dataclass(frozen=True)
class SharedRows:
    """The layout of a row: `prompt_tokens` tokens for prompts, then `stretches` of `tokens` tokens each for answers."""

    prompt_tokens: int
    stretches: int
    tokens: int

    @property
    def row_tokens(self) -> int:
        """T."""
        return self.prompt_tokens + self.stretches * self.tokens


def attention(
    rows: SharedRows,
    segments: Int[Array, "B T"],
    prompts: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    window: int = 0,
) -> Callable[[Array, Array, Array], Array]:
    """Attention as a function of q [B, T, N, H], k and v [B, T, K, H]; the masks are built once for all layers.

    `segments` numbers prompts and answers (0 is padding); `prompts` holds at an answer's tokens the number of the
    prompt that it continues, or 0 if the answer contains its whole prompt. An answer's `positions` continue those of
    its prompt; with a `window` above 0, a query sees only keys less than `window` positions before it.
    """
    P, A, S = rows.prompt_tokens, rows.stretches, rows.tokens
    of_prompts = visible(P, segments[:, :P], window)
    own = _stretches(segments[:, P:], A)
    continued = _stretches(prompts[:, P:], A)
    before = jnp.repeat(segments[:, :P], A, axis=0)
    theirs = (continued[:, :, None] == before[:, None, :]) & (before > 0)[:, None, :]
    if window > 0:
        ahead = _stretches(positions[:, P:], A)[:, :, None] - jnp.repeat(positions[:, :P], A, axis=0)[:, None, :]
        theirs &= ahead < window
    of_answers = jnp.concatenate([theirs, visible(S, own, window)], axis=2)  # [B·A, S, P + S]

    def attend(
        q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
    ) -> Float[Array, "B T N H"]:
        seen = [jnp.concatenate([jnp.repeat(x[:, :P], A, axis=0), _stretches(x[:, P:], A)], axis=1) for x in (k, v)]
        prompts = grouped(q[:, :P], k[:, :P], v[:, :P], of_prompts)
        answers = grouped(_stretches(q[:, P:], A), seen[0], seen[1], of_answers)
        return jnp.concatenate([prompts, answers.reshape(len(q), A * S, *q.shape[2:])], axis=1)

    return attend


def _stretches(x: Array, count: int) -> Array:
    """`x`, [B, A·S, …], as [B·A, S, …]."""
    return x.reshape(x.shape[0] * count, x.shape[1] // count, *x.shape[2:])


# --- Attention over a KV cache: paged (a loop over pages), and contiguous (levels of increasing length)
#
# B rows of T consecutive queries each, N query heads, K key-value heads, H head dimension; a pool of P pages of U
# tokens; a row's table lists its J pages in order. Query t of row b is at position starts[b] + t and sees the keys at
# positions 0 … starts[b] + t of the row's pages; with a `window` above 0, only the last `window` of them. The output of
# a row that sees no key is finite but undefined.

_CHUNK_TOKENS = 32  # small pages are read several at a time, because every iteration of the loop has a fixed cost
_CPU_ROWS = 4


def paged(
    q: Float[Array, "B T N H"],
    keys: Pool,
    values: Pool,
    tables: Int[Array, "B J"],
    starts: Int[Array, " B"],
    reach: Int[Array, " blocks"],
    window: int = 0,
) -> Float[Array, "B T N H"]:
    """softmax(q·kᵀ / √H)·v, page by page with a running maximum and sum (Milakov & Gimelshein, arXiv 1805.02867).

    `keys` and `values` are [K, P, U, H]; quantized ones are read in the dtype of q.

    The rows form equal, consecutive blocks; of block i only the first reach[i] pages are read (see `reach`). All blocks
    use the same operations, and a page beyond the end of a row or before its window adds exact zeros. So a row's result
    does not depend, to the bit, on the lengths of other rows, its slot or its pages.
    """
    B, T, N, H = q.shape
    K, U = keys.shape[0], keys.shape[2]
    rows, pages = -(-B // len(reach)), _pages_at_once(U)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages)))
    # A bfloat16 query would be rounded once more, so its scores are scaled after the product; this takes longer.
    scaled = q * jnp.asarray(H**-0.5, q.dtype) if q.dtype == jnp.float32 else q
    wide, scale = scaled.reshape(B, T, K, N // K, H).transpose(2, 0, 3, 1, 4), 1.0 if scaled is not q else H**-0.5

    def block(i: Int[Array, ""], out: Float[Array, "K B G T H"]) -> Float[Array, "K B G T H"]:
        at = jnp.minimum(i * rows, B - rows)  # the last block may overlap the previous one and compute rows twice
        here = lambda x, axis=0: jax.lax.dynamic_slice_in_dim(x, at, rows, axis)  # noqa: E731
        mean = _block(here(wide, 1), keys, values, here(tables), here(starts), -(-reach[i] // pages), window, scale)
        return jax.lax.dynamic_update_slice_in_dim(out, mean, at, axis=1)

    nothing = jnp.zeros(wide.shape, jnp.float32)
    out = block(jnp.int32(0), nothing) if len(reach) == 1 else jax.lax.fori_loop(0, len(reach), block, nothing)
    return out.transpose(1, 3, 0, 2, 4).reshape(B, T, N, H).astype(q.dtype)


def _block(
    wide: Float[Array, "K R G T H"],
    keys: Pool,
    values: Pool,
    tables: Int[Array, "R J"],
    starts: Int[Array, " R"],
    chunks: Int[Array, ""],
    window: int,
    scale: float,
) -> Float[Array, "K R G T H"]:
    """The rows of one block over their first `chunks` chunks of pages, in float32."""
    K, R, G, T, H = wide.shape
    pages, exact = _pages_at_once(keys.shape[2]), exact_precision(wide.dtype)
    C = pages * keys.shape[2]
    queries = wide.reshape(K, R, G * T, H)
    positions = jnp.broadcast_to((starts[:, None] + jnp.arange(T)[None])[:, None], (R, G, T)).reshape(R, G * T)

    def chunk(j: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, out = carry
        here = jax.lax.dynamic_slice_in_dim(tables, j * pages, pages, axis=1)
        k, v = (read(pool, lambda x: x[:, here], wide.dtype).reshape(K, R, C, H) for pool in (keys, values))
        # Keys are the left operand: as the right one, the CPU backend would first transpose every page.
        scores = jnp.einsum("kbuh,kbqh->kbqu", k, queries, precision=exact, preferred_element_type=jnp.float32)
        offsets = jnp.arange(C)[None, None]  # made here, because an operand of the loop would not be fused
        # At the first key inside the window, the sums over keys before it are multiplied by an exact zero.
        scores = jnp.where(_seen(j * C + offsets, positions[..., None], window), scores * scale, _MASKED)
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


def _seen(keys: Int[Array, "#*B C"], queries: Int[Array, "*B 1"], window: int) -> Bool[Array, "*B C"]:
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
    last = jnp.max(_members(starts, blocks), axis=(0, -1))
    return (last + queries - 1) // page_tokens + 1


def window_pages(window: int, queries: int, page_tokens: int) -> int:
    """The largest number of pages that `queries` consecutive queries see within a `window` above 0."""
    return (window + queries - 3) // page_tokens + 2


def within(
    tables: Int[Array, "*shards B J"], starts: Int[Array, "*shards B"], window: int, queries: int, page_tokens: int
) -> tuple[Int[Array, "*shards B j"], Int[Array, "*shards B"]]:
    """The pages that each row's queries see within `window`, and the position of the first query counted from there.

    Without a window, or with one as long as the table, both are as given. A row at -1 stays there.
    """
    count = window_pages(window, queries, page_tokens) if window else tables.shape[-1]
    if count >= tables.shape[-1]:
        return tables, starts
    first = jnp.maximum(starts - window + 1, 0) // page_tokens
    seen = jnp.minimum(first[..., None] + jnp.arange(count).reshape((1,) * first.ndim + (-1,)), tables.shape[-1] - 1)
    return jnp.take_along_axis(tables, seen, axis=-1), starts - first * page_tokens


def _members(values: Int[Array, "*shards B"], blocks: int) -> Int[Array, "D blocks rows"]:
    """The values of the rows of each block."""
    count = values.shape[-1]
    rows = -(-count // blocks)
    begins = np.minimum(np.arange(blocks) * rows, count - rows)
    return jnp.asarray(values)[..., begins[:, None] + np.arange(rows)].reshape(-1, blocks, rows)


def _pages_at_once(page_tokens: int) -> int:
    return max(1, _CHUNK_TOKENS // page_tokens)


# --- contiguous KV cache: attention of one more token, or of several
#
# B rows of T consecutive queries each, N query heads, K key-value heads (N = K·G), H head dimension; level l holds C_l
# tokens of every row, the first level those from position 0 on. Query t of a row at position p sees the positions
# 0 … p + t. The output of a row at -1 is finite but undefined.

_LEVEL_TOKENS = 64
_LEAST_TOKENS = 32  # on the CPU, products with fewer columns take longer than with this many
_MOST_LEVELS = 8

# Running maximum, sum, output; the T queries of the G heads are one axis, Q = G·T.
Sums = tuple[Float[Array, "B K Q"], Float[Array, "B K Q"], Float[Array, "B K Q H"]]


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
    q: Float[Array, "B T N H"],
    keys: Sequence[Float[Array, "B K H _"]],
    values: Sequence[Float[Array, "B K _ H"]],
    positions: Int[Array, " B"],
    last: Int[Array, ""],
    window: int = 0,
) -> Float[Array, "B T N H"]:
    """softmax(q·kᵀ / √H)·v, one level at a time with a running maximum and sum; levels beyond `last` are skipped.

    A level beyond the end of a row adds exact zeros, so a row's result does not depend, to the bit, on the lengths of
    other rows or on its slot. The tokens are the last axis of keys, which is the layout of the CPU's products.
    """
    B, T, N, H = q.shape
    K = keys[0].shape[1]
    G = N // K
    wide = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    at = positions[:, None] + jnp.arange(T)[None]
    if T > 1:  # one query has the same position in all heads
        at = jnp.broadcast_to(at[:, None], (B, G, T)).reshape(B, G * T)
    each = wide.shape[:-1]
    sums: Sums = jnp.full(each, _MASKED, jnp.float32), jnp.zeros(each, jnp.float32), jnp.zeros(wide.shape, jnp.float32)
    begin = 0
    for k, v in zip(keys, values, strict=True):
        unseen = jnp.where(_seen((begin + jnp.arange(v.shape[2]))[None, None], at[..., None], window), 0.0, _MASKED)
        if begin:
            sums = jax.lax.cond(last >= begin, _level, lambda sums, *_: sums, sums, wide, k, v, unseen)
        else:
            sums = _level(sums, wide, k, v, unseen)
        begin += v.shape[2]
    _, total, out = sums
    mean = (out / jnp.maximum(total, 1e-30)[..., None]).reshape(B, K, G, T, H)
    return mean.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def _level(
    sums: Sums,
    wide: Float[Array, "B K Q H"],
    k: Float[Array, "B K H C"],
    v: Float[Array, "B K C H"],
    unseen: Float[Array, "*at C"],
) -> Sums:
    best, total, out = sums
    exact = exact_precision(wide.dtype)
    scores = jnp.einsum("bkgh,bkhu->bkgu", wide, k, precision=exact, preferred_element_type=jnp.float32)
    scores = scores * wide.shape[-1] ** -0.5 + unseen[:, None]  # -1e30 absorbs the score
    higher = jnp.maximum(best, jnp.max(scores, axis=-1))
    weights, fading = jnp.exp(scores - higher[..., None]), jnp.exp(best - higher)
    gained = jnp.einsum(
        "bkgu,bkuh->bkgh", weights.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32
    )
    return higher, total * fading + jnp.sum(weights, axis=-1), out * fading[..., None] + gained
