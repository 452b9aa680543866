"""Attention as XLA computes it, softmax(q·kᵀ / √H + mask)·v with grouped key-value heads, and a slow reference.

The fused kernels (`tpu`, `gpu`) take segment ids where these take a mask; `placed` brings both under one signature.

B rows, T queries, U keys, N query heads, K key-value heads (N = K·G, head n reads key-value head n // G), H head
dimension. A query that may see no key at all gets a finite, meaningless output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

_MASKED = -1e30  # finite, so that a row without keys stays finite in value and gradient


def grouped(
    q: Float[Array, "B T N H"], k: Float[Array, "B U K H"], v: Float[Array, "B U K H"], mask: Bool[Array, "#B T U"]
) -> Float[Array, "B T N H"]:
    """Attention in XLA operations: keys are never repeated per query head; the softmax is in float32."""
    B, T, N, H = q.shape
    K = k.shape[2]
    precision = exact_precision(q.dtype)
    grouped_q = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bukh->bkgtu", grouped_q, k, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * H**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgtu,bukh->btkgh", weights, v, precision=precision).reshape(B, T, N, H)


def reference(
    q: Float[Array, "B T N H"], k: Float[Array, "B U K H"], v: Float[Array, "B U K H"], mask: Bool[Array, "#B T U"]
) -> Float[Array, "B T N H"]:
    """Attention one row, query and head at a time, in float32: slow, and meant to be read."""
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


def visible(tokens: int, segments: Int[Array, "B T"] | None = None) -> Bool[Array, "#B T T"]:
    """True where query t may see key u: u ≤ t and, where segments are given, of the same one and not padding (0)."""
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    if segments is None:
        return causal[None]
    same = segments[:, :, None] == segments[:, None, :]
    return same & (segments > 0)[:, None, :] & causal


def lengthened(x: Shaped[Array, "B T *rest"], multiple: int) -> Shaped[Array, "B T1 *rest"]:
    """`x` with zeros behind its tokens, up to a multiple of `multiple`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), *((0, 0),) * (x.ndim - 2)))


def exact_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """The matmul precision that keeps a dtype's promise: TPU and GPU else multiply float32 in fewer bits."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
