"""Attention over a paged cache: one signature, a slow reference, and a loop over pages that reads what is there.

B rows of T consecutive queries each, N query heads, K key-value heads, H head dimension; a pool of P pages of U tokens;
a row's table names its J pages in order. Query t of row b stands at position starts[b] + t and sees the keys at
positions 0 … starts[b] + t of its own pages. A row that sees no key at all gets a finite, meaningless output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxroll.kernels.attention import exact_precision, grouped

_MASKED = -1e30  # finite: a row that sees nothing stays finite


def paged(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "B J"],
    starts: Int[Array, " B"],
    reach: Int[Array, ""],
) -> Float[Array, "B T N H"]:
    """softmax(q·kᵀ / √H)·v, page by page with a running maximum and sum (Milakov & Gimelshein, arXiv 1805.02867).

    Only the first `reach` pages of every table are read: see `reach`. To a row that ended earlier a further page adds
    exact zeros, so a row's result does not depend, to the bit, on how long the others are or where its pages lie.
    """
    B, T, N, H = q.shape
    K, U = keys.shape[0], keys.shape[2]
    exact = exact_precision(q.dtype)
    wide = (q.reshape(B, T, K, N // K, H) * jnp.asarray(H**-0.5, q.dtype)).transpose(2, 0, 3, 1, 4)
    positions = starts[:, None] + jnp.arange(T)

    def page(j: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, out = carry
        here = jax.lax.dynamic_index_in_dim(tables, j, axis=1, keepdims=False)
        k, v = keys[:, here], values[:, here]
        scores = jnp.einsum("kbgth,kbuh->kbgtu", wide, k, precision=exact, preferred_element_type=jnp.float32)
        seen = (j * U + jnp.arange(U)) <= positions[..., None]
        scores = jnp.where(seen[:, None], scores, _MASKED)
        higher = jnp.maximum(best, jnp.max(scores, axis=-1))
        weights = jnp.where(seen[:, None], jnp.exp(scores - higher[..., None]), 0.0)
        fading = jnp.exp(best - higher)
        gained = jnp.einsum(
            "kbgtu,kbuh->kbgth", weights.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32
        )
        return higher, total * fading + jnp.sum(weights, axis=-1), out * fading[..., None] + gained

    rows = (K, B, N // K, T)
    nothing = jnp.full(rows, _MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, H), jnp.float32)
    _, total, out = jax.lax.fori_loop(0, reach, page, nothing)
    mean = out / jnp.maximum(total, 1e-30)[..., None]
    return mean.transpose(1, 3, 0, 2, 4).reshape(B, T, N, H).astype(q.dtype)


def reach(starts: Int[Array, " *rows"], queries: int, page_tokens: int) -> Int[Array, ""]:
    """How many pages the longest row needs."""
    return (jnp.max(starts) + queries - 1) // page_tokens + 1


def reference(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "K P U H"],
    values: Float[Array, "K P U H"],
    tables: Int[Array, "B J"],
    starts: Int[Array, " B"],
) -> Float[Array, "B T N H"]:
    """The same by gathering every row's pages into one array: reads the maximum, and is easy to read."""
    B, J = tables.shape
    K, _, U, H = keys.shape
    gather = lambda pool: pool[:, tables].reshape(K, B, J * U, H).transpose(1, 2, 0, 3)  # noqa: E731
    positions = starts[:, None] + jnp.arange(q.shape[1])
    return grouped(q, gather(keys), gather(values), jnp.arange(J * U) <= positions[..., None])
