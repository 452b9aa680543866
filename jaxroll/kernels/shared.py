"""Attention in rows whose prompts are computed once for all their answers.

A row is P tokens of prompts and A stretches of S tokens of answers, T = P + A·S. A prompt sees itself; an answer sees
its own tokens up to each, and all of the prompt that it continues: the same numbers as with a prompt before every
answer, for fewer tokens (Liu et al., "Prefix Grouper", arXiv 2506.05433, for one prompt a row; here a row holds several
of each). B rows, N query heads, K key-value heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxroll.kernels.attention import grouped, visible


@dataclass(frozen=True)
class SharedRows:
    """How a row is divided: its first `prompt_tokens` hold prompts, then come `stretches` of `tokens` each."""

    prompt_tokens: int
    stretches: int
    tokens: int

    @property
    def row_tokens(self) -> int:
        """T."""
        return self.prompt_tokens + self.stretches * self.tokens


def attention(
    rows: SharedRows, segments: Int[Array, "B T"], prompts: Int[Array, "B T"]
) -> Callable[[Array, Array, Array], Array]:
    """A function of q [B, T, N, H], k and v [B, T, K, H]; the masks are built here, once for all layers.

    `segments` number prompts and answers (0 is padding); `prompts` has at an answer's tokens the number of the prompt
    that it continues, 0 where it brings its own.
    """
    P, A, S = rows.prompt_tokens, rows.stretches, rows.tokens
    of_prompts = visible(P, segments[:, :P])
    own = _stretches(segments[:, P:], A)
    continued = _stretches(prompts[:, P:], A)
    before = jnp.repeat(segments[:, :P], A, axis=0)
    theirs = (continued[:, :, None] == before[:, None, :]) & (before > 0)[:, None, :]
    of_answers = jnp.concatenate([theirs, visible(S, own)], axis=2)  # [B·A, S, P + S]

    def attend(
        q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
    ) -> Float[Array, "B T N H"]:
        seen = [jnp.concatenate([jnp.repeat(x[:, :P], A, axis=0), _stretches(x[:, P:], A)], axis=1) for x in (k, v)]
        prompts = grouped(q[:, :P], k[:, :P], v[:, :P], of_prompts)
        answers = grouped(_stretches(q[:, P:], A), seen[0], seen[1], of_answers)
        return jnp.concatenate([prompts, answers.reshape(len(q), A * S, *q.shape[2:])], axis=1)

    return attend


def _stretches(x: Array, count: int) -> Array:
    """[B·A, S, …] of [B, A·S, …]."""
    return x.reshape(x.shape[0] * count, x.shape[1] // count, *x.shape[2:])
