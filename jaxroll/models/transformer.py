"""The decoder's entry points: pure functions of (spec, flat parameters, arrays), to be jitted by their callers.

B rows, P prompts, S slots, T tokens, L layers, K key-value heads, H head dimension, D width, V vocabulary. `layout`
(mesh and rules) is optional everywhere: with it the activations are pinned, without it the compiler propagates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxroll.kernels.attention import attention
from jaxroll.models.cache import KVCache
from jaxroll.models.families import ModelSpec
from jaxroll.models.layers import Block, Decoder, rotation
from jaxroll.models.params import module
from jaxroll.sharding.rules import Layout

Params = Mapping[str, jax.Array]


def forward(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    layout: Layout | None = None,
) -> Float[Array, "B T D"]:
    """The final hidden states of packed rows: attention is causal and stays within a segment; segment 0 is padding."""
    decoder = module(spec, params)
    mask = _packed_mask(segment_ids)
    turn = rotation(positions, spec.head_dim, spec.rope_theta)

    def layer(block: Block, x: Array) -> Array:
        return _pinned(block(x, turn, lambda q, k, v: attention(q, k, v, mask)), layout, "rows")

    if spec.remat:
        layer = jax.checkpoint(layer)
    x = _pinned(decoder.embedded(tokens), layout, "rows")
    for block in decoder.layers:
        x = layer(block, x)
    return decoder.final_norm(x)


def logits(spec: ModelSpec, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Scores of the next token after every hidden state, float32."""
    return module(spec, params).logits(hidden)


def prefill(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "P T"],
    lengths: Int[Array, " P"],
    *,
    layout: Layout | None = None,
) -> tuple[Float[Array, "P V"], Float[Array, "L P T K H"], Float[Array, "L P T K H"]]:
    """The logits after each prompt's last token, and the keys and values to insert into the cache.

    Prompts start at position 0 and are padded on the right; what the padding leaves behind in keys and values is
    overwritten by decode before it is ever attended to. A row of length 0 is a dummy.
    """
    decoder = module(spec, params)
    T = tokens.shape[1]
    turn = rotation(jnp.arange(T)[None], spec.head_dim, spec.rope_theta)
    causal = jnp.tril(jnp.ones((1, T, T), bool))
    keys, values = [], []

    def attend(q: Array, k: Array, v: Array) -> Array:
        keys.append(k)
        values.append(v)
        return attention(q, k, v, causal)

    x = _through(decoder, _pinned(decoder.embedded(tokens), layout, "rows"), turn, attend)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(x, last, axis=1)[:, 0]
    return decoder.logits(decoder.final_norm(hidden)), jnp.stack(keys), jnp.stack(values)


def decode(
    spec: ModelSpec,
    params: Params,
    cache: KVCache,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    *,
    layout: Layout | None = None,
) -> tuple[Float[Array, "S V"], KVCache]:
    """The logits after one more token in every slot, and the cache with that token's keys and values written.

    `tokens` stand at `positions`; a slot attends to its positions up to and including that one. A position at or
    beyond the cache's length is not written, and its logits mean nothing.
    """
    decoder = module(spec, params)
    S, T = cache.keys.shape[1:3]
    turn = rotation(positions[:, None], spec.head_dim, spec.rope_theta)
    visible = (jnp.arange(T) <= positions[:, None])[:, None]
    here, layer = jnp.arange(S), iter(range(spec.layers))

    def attend(q: Array, k: Array, v: Array) -> Array:
        # One array for all layers, written a token at a time: with the cache donated nothing of it is copied.
        nonlocal cache
        at = (next(layer), here, positions)
        cache = KVCache(
            cache.keys.at[at].set(k[:, 0], mode="drop"),
            cache.values.at[at].set(v[:, 0], mode="drop"),
        )
        return attention(q, cache.keys[at[0]], cache.values[at[0]], visible)

    x = _through(decoder, decoder.embedded(tokens[:, None]), turn, attend)
    return decoder.logits(decoder.final_norm(x[:, 0])), cache


def _through(decoder: Decoder, x: Array, turn: tuple[Array, Array], attend: Callable[..., Array]) -> Array:
    for block in decoder.layers:
        x = block(x, turn, attend)
    return x


def _packed_mask(segment_ids: Int[Array, "B T"]) -> Array:
    """True where query t may see key u: the same segment, not padding, and u ≤ t."""
    T = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same & (segment_ids > 0)[:, None, :] & jnp.tril(jnp.ones((T, T), bool))


def _pinned(x: Float[Array, "B T D"], layout: Layout | None, rows: str) -> Float[Array, "B T D"]:
    return x if layout is None else layout.constrain(x, (rows, "tokens", "width"))
