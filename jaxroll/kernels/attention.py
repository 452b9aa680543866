"""Attention in XLA operations, softmax(q·kᵀ / √H + mask)·v with grouped key-value heads, and a slow reference.

The fused kernels (`tpu`, `gpu`) take segment ids instead of a mask; `placed` gives both the same signature.

B rows, T queries, U keys, N query heads, K key-value heads (N = K·G, head n reads key-value head n // G), H head
dimension. The output of a query that sees no key is finite but undefined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

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
    return same & (segments > 0)[:, None, :] & causal


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
