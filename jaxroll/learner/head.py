"""What the model's last layer says about every token, a part of each row at a time.

R rows, T tokens of a row, D width, V vocabulary. Logits of all tokens, [R, T, V], would be the largest array of a step
by far (2.5 GB for 4,096 tokens of Qwen3); they exist only for as many tokens of each row as `part_tokens` allows,
forwards and, made again, backwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxroll.kernels.attention import lengthened
from jaxroll.math import logprob
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.sharding.rules import Layout


class TokenTerms(NamedTuple):
    """What one forward pass says about every token, float32 [R, T]."""

    logprob: Float[Array, "R T"]
    entropy: Float[Array, "R T"]
    logits_variance: Float[Array, "R T"]


def token_terms(
    spec: ModelSpec,
    layout: Layout,
    temperature: float,
    params: transformer.Params,
    hidden: Float[Array, "R T D"],
    tokens: Int[Array, "R T"],
    logits_mb: float,
) -> TokenTerms:
    """The terms of every token of packed rows, each from the hidden state before it; the first of a row means nothing.

    At most `logits_mb` MiB of float32 logits exist on a device at a time.
    """
    R, T = tokens.shape
    part = part_tokens(spec, layout, (R, T), logits_mb)

    @jax.checkpoint
    def terms(params: transformer.Params, before: Array, tokens: Array) -> TokenTerms:
        logits = transformer.logits(spec, params, before)
        constant = jax.lax.stop_gradient(logits)
        log_all = jax.nn.log_softmax(logprob.tempered(constant, temperature))
        entropy = -jnp.sum(jnp.exp(log_all) * log_all, axis=-1)
        return TokenTerms(logprob.token_logprobs(logits, tokens, temperature), entropy, constant.var(axis=-1))

    before = jnp.roll(hidden, 1, axis=1)
    if part == T:
        return terms(params, before, tokens)
    before, tokens = lengthened(before, part), lengthened(tokens, part)
    cut = lambda x: x.reshape(R, -1, part, *x.shape[2:]).swapaxes(0, 1)  # noqa: E731
    _, parts = jax.lax.scan(lambda _, x: (None, terms(params, *x)), None, (cut(before), cut(tokens)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(R, -1)[:, :T], parts)


def part_tokens(spec: ModelSpec, layout: Layout, shape: tuple[int, int], logits_mb: float) -> int:
    """Tokens of a row whose logits exist at once: T, or half of it (of an odd number the larger), and so on, until a
    device holds `logits_mb`, or one token of each row is left.
    """
    rows, tokens = shape
    local = layout.sharding(("rows", "tokens", "vocab"), (rows, 1, spec.vocab_size)).shard_shape
    a_token = 4 * math.prod(local((rows, 1, spec.vocab_size)))
    part = tokens
    while part > 1 and part * a_token > logits_mb * 2**20:
        part = -(-part // 2)
    return part
