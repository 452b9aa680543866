"""Attention of one more token over keys and values that are laid out side by side, in levels.

B rows of one query each, N query heads, K key-value heads (N = K·G), H head dimension; level l holds C_l tokens of
every row, the first level those from position 0 on. A row at position p sees the positions 0 … p. A row at -1 sees
nothing and gets a finite, meaningless output.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxroll.kernels.attention import exact_precision

_MASKED = -1e30  # finite: a row that sees nothing stays finite
_LEVEL_TOKENS = 64
_LEAST_TOKENS = 32  # the CPU's products of fewer columns take longer than those of so many
_MOST_LEVELS = 8

Sums = tuple[Float[Array, "B K G"], Float[Array, "B K G"], Float[Array, "B K G H"]]  # running maximum, sum, output


def levels(tokens: int, page_tokens: int) -> tuple[int, ...]:
    """C_l, multiples of `page_tokens` that hold `tokens` together, as many as pay; a short end goes with the last."""
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
) -> Float[Array, "B 1 N H"]:
    """softmax(q·kᵀ / √H)·v, a level at a time with a running maximum and sum; those beyond `last` are left out.

    To a row that ends earlier a further level adds exact zeros, so its result depends, to the bit, neither on how long
    the others are nor on where it stands. Keys lie with their tokens last, as the CPU's products want them.
    """
    B, _, N, H = q.shape
    K = keys[0].shape[1]
    wide = q.reshape(B, K, N // K, H)
    each = wide.shape[:-1]
    sums: Sums = jnp.full(each, _MASKED, jnp.float32), jnp.zeros(each, jnp.float32), jnp.zeros(wide.shape, jnp.float32)
    begin = 0
    for k, v in zip(keys, values, strict=True):
        unseen = jnp.where(begin + jnp.arange(v.shape[2]) <= positions[:, None], 0.0, _MASKED)
        if begin:
            sums = jax.lax.cond(last >= begin, _level, lambda sums, *_: sums, sums, wide, k, v, unseen)
        else:
            sums = _level(sums, wide, k, v, unseen)
        begin += v.shape[2]
    _, total, out = sums
    return (out / jnp.maximum(total, 1e-30)[..., None]).reshape(q.shape).astype(q.dtype)


def _level(
    sums: Sums, wide: Float[Array, "B K G H"], k: Float[Array, "B K H C"], v: Float[Array, "B K C H"],
    unseen: Float[Array, "B C"],
) -> Sums:  # fmt: skip
    best, total, out = sums
    exact = exact_precision(wide.dtype)
    scores = jnp.einsum("bkgh,bkhu->bkgu", wide, k, precision=exact, preferred_element_type=jnp.float32)
    scores = scores * wide.shape[-1] ** -0.5 + unseen[:, None, None]  # so far down that nothing of a score is left
    higher = jnp.maximum(best, jnp.max(scores, axis=-1))
    weights, fading = jnp.exp(scores - higher[..., None]), jnp.exp(best - higher)
    gained = jnp.einsum(
        "bkgu,bkuh->bkgh", weights.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32
    )
    return higher, total * fading + jnp.sum(weights, axis=-1), out * fading[..., None] + gained
