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
    """Attention in XLA operations: keys are never repeated per query head; the softmax is in float32.

    Products have their operands as the CPU backend wants them, in the gradient too, which is therefore written out:
    what JAX derives takes twice as long there.
    """
    B, T, N, H = q.shape
    wide = q.reshape(B, T, k.shape[2], -1, H).transpose(0, 2, 3, 1, 4)
    return _attention(wide, k, v, mask).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@jax.custom_vjp
def _attention(
    q: Float[Array, "B K G T H"], k: Float[Array, "B U K H"], v: Float[Array, "B U K H"], mask: Bool[Array, "#B T U"]
) -> Float[Array, "B K G T H"]:
    """softmax(q·kᵀ / √H)·v where `mask` is True; scaled after the product, for bfloat16 would be rounded before."""
    return _forward(q, k, v, mask)[0]


def _forward(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    exact = exact_precision(q.dtype)
    scores = jnp.einsum(
        "bkgth,bkhu->bkgtu", q, k.transpose(0, 2, 3, 1), precision=exact, preferred_element_type=jnp.float32
    )
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
    # Σ weight · its gradient over the keys, which is the output times its own (Dao et al., arXiv 2205.14135).
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
