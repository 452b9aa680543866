"""The decoder's entry points: pure functions of (spec, flat parameters, arrays), to be jitted by their callers.

B rows, R prompts, S slots, T tokens, K key-value heads, H head dimension, D width, V vocabulary. `layout` (mesh and
rules) is optional: it constrains the shardings of activations, which the compiler otherwise infers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Integer

from jaxroll.kernels import attention as kernels
from jaxroll.kernels import placed
from jaxroll.kernels.attention import SharedRows, blocks, paged, reach, within
from jaxroll.kernels.choice import XLA
from jaxroll.kernels.quantised import Pool, Quantised, as_read
from jaxroll.models import cache as dense
from jaxroll.models import moe
from jaxroll.models.cache import ContiguousCache, KVCache, appended, constrained, extended, filled
from jaxroll.models.families import ModelSpec, Remat
from jaxroll.models.layers import PRODUCT, Block, Decoder, Rotation, rotation, summing
from jaxroll.models.moe import ExpertLoad, Routing
from jaxroll.models.params import block, in_loop, layers_in_loop, module, of_cycles, outside, stacked
from jaxroll.sharding import HOST_MEMORY, Layout

Params = Mapping[str, jax.Array]
Weights = Mapping[str, jax.Array | Quantised]  # the parameters as an engine holds them
_INPUT = "layer_input"  # checkpoint name of the hidden states before a layer
_MOVED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT], offload_src="device", offload_dst=HOST_MEMORY
)
_KEPT = {"layer": None, "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT), "offload": _MOVED}
Layers = tuple[Float[Array, "R T K H"], ...]
Layer = int | Array  # the number of a layer: traced in a loop
Held = TypeVar("Held")  # the caches of an engine
_Both = tuple[KVCache, ContiguousCache]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """The positions of the tokens of R rows: the shard and table of each row's pages, and its first position."""

    shards: Int[Array, " R"]
    tables: Int[Array, "R J"]
    starts: Int[Array, " R"]


def forward(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    layout: Layout | None = None,
    attention: str = XLA,
    rows: SharedRows | None = None,
    prompt_ids: Int[Array, "B T"] | None = None,
    choices: Integer[Array, "B T L k"] | None = None,
) -> Float[Array, "B T D"]:
    """The final hidden states of packed rows: attention is causal and stays within a segment; segment 0 is padding.

    `attention` names the implementation (`kernels.choice`); all except XLA need a layout. With `rows` that share
    prompts it is XLA, and `prompt_ids` holds for each token the segment of the prompt that it continues (0 for none).
    `choices` are experts to use instead of those that the router would choose (`moe.replayed`).
    """
    return forward_with_load(
        spec,
        params,
        tokens,
        positions,
        segment_ids,
        layout=layout,
        attention=attention,
        rows=rows,
        prompt_ids=prompt_ids,
        choices=choices,
    )[0]


def forward_with_load(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    layout: Layout | None = None,
    attention: str = XLA,
    rows: SharedRows | None = None,
    prompt_ids: Int[Array, "B T"] | None = None,
    choices: Integer[Array, "B T L k"] | None = None,
    stacks: Params | None = None,
    sums: Params | None = None,
) -> tuple[Float[Array, "B T D"], ExpertLoad | None]:
    """`forward`, and the load of the experts of every layer (leaves [L, E]; None for a model without experts).

    `stacks` are the parameters of the layers in the loop, to be differentiated by (None: those of `params`, which
    otherwise need not have them). With `sums` (float32, like `stacks`), differentiate by them instead: their cotangents
    are `sums` plus the gradients.
    """
    decoder = outside(spec, params)

    def layer_of(window: int, remat: Remat) -> Callable[[Block, Array, Array | None], tuple[Array, ExpertLoad | None]]:
        if rows is None:
            attend = placed.rows(attention, tokens.shape[1], segment_ids, layout, window)
        else:
            assert prompt_ids is not None, "rows that share prompts need prompt_ids"
            attend = kernels.attention(rows, segment_ids, prompt_ids, positions, window)
        attend = placed.exchanged(attend, layout)
        rotation = _rotation(spec, positions, window)

        def layer(block: Block, x: Array, given: Array | None) -> tuple[Array, ExpertLoad | None]:
            x = checkpoint_name(x, _INPUT)
            choose, loads = moe.largest(spec.experts_per_token) if given is None else moe.replayed(given), []

            def seen(logits: Array, scores: Array) -> Array:
                chosen = choose(logits, scores)
                loads.append(moe.load(logits, chosen, segment_ids > 0))
                return chosen

            x = _pinned(block(x, rotation, attend, Routing(seen, layout)), layout)
            return x, loads[0] if loads else None

        if remat == "none":
            return layer
        # A loop is a barrier that keeps the recomputation apart, so the checkpoint needs none of its own.
        return jax.checkpoint(layer, policy=_KEPT[remat], prevent_cse=not spec.scan)

    windows, loads = sorted(set(spec.each_window)), []
    layer = {window: layer_of(window, spec.remat) for window in windows}
    x = _pinned(decoder.embedded(tokens), layout)
    given = None if choices is None else jnp.moveaxis(choices, 2, 0)  # [L, B, T, k]
    first = 0
    if spec.scan:
        first = layers_in_loop(spec)
        # The loop that sums moves the inputs of cycles itself.
        inner = layer if sums is None else {window: layer_of(window, "layer") for window in windows}
        steps = [inner[window] for window in spec.each_window[: spec.period]]
        stacks = stacked(spec, params, layout) if stacks is None else stacks
        x, load = _scanned(spec, stacks, x, steps, None if given is None else given[:first], sums)
        loads.append(load)
    for number in range(first, spec.layers):
        own = None if given is None else given[number]
        names = in_loop(spec, number)[0].items()
        weights = block(spec, {name: params[full] for name, full in names})
        x, load = layer[spec.each_window[number]](weights, x, own)
        loads.append(jax.tree.map(lambda of_layer: of_layer[None], load))
    total = jax.tree.map(lambda *some: jnp.concatenate(some), *loads) if spec.experts else None
    return decoder.final_norm(x), total


def _scanned(
    spec: ModelSpec,
    params: Params,
    x: Float[Array, "B T D"],
    steps: Sequence[Callable[[Block, Array, Array | None], tuple[Array, ExpertLoad | None]]],
    choices: Integer[Array, "L B T k"] | None,
    sums: Params | None,
) -> tuple[Float[Array, "B T D"], ExpertLoad | None]:
    """The hidden states after as many whole periods of layers as there are, by a loop over periods, and the loads.

    `params` are those of `stacked`; `sums` as in `forward_with_load`.
    """
    period = len(steps)
    cycles = spec.layers // period

    given = None if choices is None else choices.reshape(cycles, period, *choices.shape[1:])

    def cycle(x: Array, of_cycle: tuple[Sequence[Weights], Array | None]) -> tuple[Array, ExpertLoad | None]:
        values, given = of_cycle
        loads = []
        for at, step in enumerate(steps):
            x, load = step(block(spec, values[at]), x, None if given is None else given[at])
            loads.append(load)
        return x, jax.tree.map(lambda *some: jnp.stack(some), *loads) if spec.experts else None

    xs = of_cycles(spec, params), given
    if sums is None:
        x, loads = jax.lax.scan(cycle, x, xs)
    else:
        x, loads = summing(cycle, xs, of_cycles(spec, sums), x, offload=spec.remat == "offload")
    return x, jax.tree.map(lambda leaf: leaf.reshape(cycles * period, *leaf.shape[2:]), loads)


def logits(spec: ModelSpec, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """The logits of the next token for every hidden state, float32."""
    return outside(spec, params).logits(hidden)


def values(spec: ModelSpec, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """A critic's value (of a spec with a value head) for every hidden state, float32."""
    return outside(spec, params).values(hidden)


def prefill(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    *,
    layout: Layout | None = None,
    attention: str = XLA,
) -> tuple[Float[Array, "R V"], Layers, Layers]:
    """The logits after each prompt's last token, and the keys and values of every layer for the cache.

    Prompts start at position 0 and are padded on the right. A row of length 0 is unused. With `spec.kv_dtype`, queries
    see keys and values as they are read from quantized pages.
    """
    return prefill_with_experts(spec, params, tokens, lengths, layout=layout, attention=attention)[:3]


def prefill_with_experts(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    *,
    layout: Layout | None = None,
    attention: str = XLA,
) -> tuple[Float[Array, "R V"], Layers, Layers, Integer[Array, "R T 1 X"] | None]:
    """`prefill`, and the records of the chosen experts (`moe.recorded`; None for a model without experts)."""
    grow = lambda held, _layer, _window, k, v: ((*held[0], k), (*held[1], v))  # noqa: E731
    last, (keys, values), experts = prefill_into(
        spec, params, ((), ()), grow, tokens, lengths, layout=layout, attention=attention
    )
    return last, keys, values, experts


def prefill_into(
    spec: ModelSpec,
    params: Weights,
    held: Any,
    keep: Callable[[Any, Layer, int, Array, Array], Any],
    tokens: Int[Array, "R T"],
    lengths: Int[Array, " R"],
    *,
    layout: Layout | None = None,
    attention: str = XLA,
) -> tuple[Float[Array, "R V"], Any, Integer[Array, "R T 1 X"] | None]:
    """As `prefill_with_experts`, but keys and values go into `held` by `keep(held, layer, window, keys, values)`.

    With layers in a loop, `held` is carried from layer to layer, so its shape may not change.
    """
    T = tokens.shape[1]
    causal = {window: placed.rows(attention, T, None, layout, window) for window in sorted(set(spec.each_window))}

    def attend(held: Any, layer: Layer, window: int, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        seen = (as_read(x, spec.kv_dtype) for x in (k, v))
        return causal[window](q, *seen), keep(held, layer, window, k, v)

    decoder = outer(spec, params)
    x, held, experts = through(
        spec, params, decoder, _pinned(decoder.embedded(tokens), layout), jnp.arange(T)[None], held, attend, layout
    )
    return decoder.logits(decoder.final_norm(_at(x, lengths - 1))), held, experts


def extend(
    spec: ModelSpec,
    params: Weights,
    cache: KVCache,
    tokens: Int[Array, "R T"],
    pages: Pages,
    lengths: Int[Array, " R"],
    *,
    layout: Layout | None = None,
    attention: str = XLA,
) -> tuple[Float[Array, "R V"], KVCache]:
    """The logits after each row's last token, and the cache with the rows' `lengths` tokens from pages.starts on.

    Earlier tokens are read from the row's pages: a long prompt is computed in several such chunks, and a conversation
    continues after its cached tokens. With "splash" layers without a window use that, if one shard has all pages.
    """
    decoder, T, U, windows = outer(spec, params), tokens.shape[1], cache.page_tokens, set(spec.each_window)
    own = {window: cache.tables(window, pages.tables) for window in windows}
    near = {window: within(own[window], pages.starts, window, T, U) for window in windows}
    reached = {window: reach(starts, T, U) for window, (_, starts) in near.items()}
    fused = placed.continued(layout) if attention == "splash" and cache.shards == 1 and not spec.kv_dtype else None

    def attend(held: KVCache, layer: Layer, window: int, q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
        (keys, values, first, count), ring = held.of(layer, window), held.ring_of(window)
        (tables, starts), new = near[window], ((keys, k), (values, v))
        far, at = reached[window], {"shards": pages.shards, "lengths": lengths}
        put = partial(filled, tables=own[window] + first, starts=pages.starts, ring=ring, **at)
        held = held.with_layer(layer, window, *(put(pool, one) for pool, one in new))
        if ring:  # the last of the new tokens overwrite what the first of them see, so these see a copy
            copy = partial(extended, tables=tables + first, starts=starts, **at)
            keys, values = (_one_pool(copy(pool, one)) for pool, one in new)
            return paged(q, keys, values, jnp.arange(tables.size).reshape(tables.shape), starts, far, window), held
        keys, values, *_ = held.of(layer, window)
        if fused and not window:
            return fused(q, k, v, keys, values, tables + first, starts, lengths), held
        if held.shards > 1 and held.joint:  # the pages of other layers are not gathered
            cut = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count, axis=2)
            keys, values, first = jax.tree.map(cut, keys), jax.tree.map(cut, values), 0
        everywhere = tables + first + pages.shards[:, None] * keys.shape[2]
        return paged(q, _one_pool(keys), _one_pool(values), everywhere, starts, far, window), held

    x, positions = _pinned(decoder.embedded(tokens), layout), pages.starts[:, None] + jnp.arange(T)[None]
    x, held, chosen = through(spec, params, decoder, x, positions, cache, attend, layout)
    if held.experts is not None and chosen is not None:
        tables = cache.tables(0, pages.tables)
        held = replace(held, experts=filled(held.experts, chosen, pages.shards, tables, pages.starts, lengths))
    return decoder.logits(decoder.final_norm(_at(x, lengths - 1))), constrained(held, layout)


def decode(
    spec: ModelSpec,
    params: Weights,
    cache: KVCache,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    tables: Int[Array, "S J"],
    *,
    layout: Layout | None = None,
    attention: str = XLA,
) -> tuple[Float[Array, "S V"], KVCache]:
    """The logits after one more token in every slot, and the cache with that token's keys and values.

    `tokens` are at `positions`; a slot attends to its positions up to and including that one. For a position of -1, or
    one beyond the table's pages, nothing is written and the logits are undefined.
    """
    decoder = outer(spec, params)
    split = lambda x: x.reshape(cache.shards, -1, *x.shape[1:])  # noqa: E731  (slots of a shard are adjacent)
    count = blocks(len(tokens) // cache.shards, layout) if attention == XLA else 1
    # Slots of each shard sorted by length: a block reads as many pages as its longest slot has.
    order = jnp.argsort(-split(positions), axis=1) if count > 1 else None
    tokens, positions, tables = (ordered(x, order) for x in (tokens, positions, tables))
    where, U, windows = split(positions), cache.page_tokens, set(spec.each_window)
    own = {window: cache.tables(window, split(tables)) for window in windows}
    near = {window: within(own[window], where, window, 1, U) for window in windows}
    fused = None if attention == XLA else placed.pages(attention, layout)
    # Once for all layers: the maximum over shards is a collective, which XLA repeats for each.
    reached = {window: reach(where if fused else starts, 1, U, count) for window, (_, starts) in near.items()}

    def attend(held: KVCache, layer: Layer, window: int, q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
        # Pools are updated by one token: since the cache is donated, nothing is copied.
        keys, values, first, _ = held.of(layer, window)
        keys, values = (
            jax.vmap(appended)(pool, split(new[:, 0]), own[window] + first, where)
            for pool, new in ((keys, k), (values, v))
        )
        if fused:
            out = fused(split(q), keys, values, own[window] + first, where, reached[window])
        else:
            tables, starts = near[window]
            over_shards = jax.vmap(partial(paged, window=window), in_axes=(0, 0, 0, 0, 0, None))
            out = over_shards(split(q), keys, values, tables + first, starts, reached[window])
        return out.reshape(q.shape), held.with_layer(layer, window, keys, values)

    start = decoder.embedded(tokens[:, None])
    x, held, chosen = through(spec, params, decoder, start, positions[:, None], cache, attend, layout)
    held = replace(held, experts=_with_record(cache.experts, chosen, split, cache.tables(0, split(tables)), where))
    x = ordered(x[:, 0], None if order is None else jnp.argsort(order, axis=1))
    return decoder.logits(decoder.final_norm(x)), constrained(held, layout)


def decode_contiguous(
    spec: ModelSpec,
    params: Weights,
    cache: KVCache,
    side: ContiguousCache,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    tables: Int[Array, "S J"],
    last: Int[Array, ""],
    *,
    layout: Layout | None = None,
) -> tuple[Float[Array, "S V"], KVCache, ContiguousCache]:
    """`decode` that reads the contiguous cache, and writes the token to both caches; no slot is beyond `last`.

    Not for layers in a loop, which would copy the contiguous cache of each layer.
    """
    assert not spec.scan
    decoder = outer(spec, params)
    split = lambda x: x.reshape(cache.shards, -1, *x.shape[1:])  # noqa: E731
    here, where = split(tables), split(positions)

    def attend(held: _Both, layer: Layer, window: int, q: Array, k: Array, v: Array) -> tuple[Array, _Both]:
        assert isinstance(layer, int)
        (pages, side), new = held, (split(k[:, 0]), split(v[:, 0]))
        keys, values, *_ = pages.of(layer, window)
        keys, values = (jax.vmap(appended)(pool, one, here, where) for pool, one in ((keys, new[0]), (values, new[1])))
        side = dense.with_token(side, layer, *new, where)
        out = dense.attend(side, layer, split(q), where, last, window).reshape(q.shape)
        return out, (pages.with_layer(layer, window, keys, values), side)

    x = decoder.embedded(tokens[:, None])
    x, (held, side), chosen = through(spec, params, decoder, x, positions[:, None], (cache, side), attend, layout)
    held = replace(held, experts=_with_record(cache.experts, chosen, split, here, where))
    return decoder.logits(decoder.final_norm(x[:, 0])), constrained(held, layout), side


def _with_record(
    pool: Array | None, chosen: Array | None, split: Callable[[Array], Array], tables: Array, positions: Array
) -> Pool | None:
    """The pool of recorded choices with those of one more token in every slot; None if nothing is recorded."""
    if pool is None or chosen is None:
        return pool
    return jax.vmap(appended)(pool, split(chosen[:, 0]), tables, positions)


def ordered(x: Array, order: Int[Array, "D B"] | None) -> Array:
    """The rows of `x` [D·B, …] with the rows of each shard in `order`; `x` itself if `order` is None."""
    if order is None:
        return x
    return jax.vmap(lambda rows, at: rows[at])(x.reshape(*order.shape, *x.shape[1:]), order).reshape(x.shape)


def _at(x: Float[Array, "R T D"], index: Int[Array, " R"]) -> Float[Array, "R D"]:
    """The hidden state of each row at `index` (at 0 if that is negative)."""
    return jnp.take_along_axis(x, jnp.maximum(index, 0)[:, None, None], axis=1)[:, 0]


def _one_pool(pool: Pool) -> Pool:
    """The pages of all shards as one pool: [K, D·P, U, H]."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]), pool)


def _rotation(spec: ModelSpec, positions: Int[Array, "*rows"], window: int) -> Rotation:
    """The rotation of the layers with this window."""
    if window and spec.local_rope_theta:
        return rotation(positions, spec.head_dim, spec.local_rope_theta)
    return rotation(positions, spec.head_dim, spec.rope_theta, spec.rope_scaling)


def outer(spec: ModelSpec, params: Weights) -> Decoder:
    """The decoder of an engine's program: without its layers if they are in a loop (`params.held`)."""
    return outside(spec, params) if spec.scan else module(spec, params)


def through(
    spec: ModelSpec,
    params: Weights,
    decoder: Decoder,
    x: Array,
    positions: Int[Array, "*rows"],
    held: Held,
    attend: Callable[[Held, Layer, int, Array, Array, Array], tuple[Array, Held]],
    layout: Layout | None,
) -> tuple[Array, Held, Array | None]:
    """The hidden states after all layers, the caches, and the records of the chosen experts (None without experts).

    `attend(held, layer, window, q, k, v)` returns the attention of a layer and the caches with its keys and values.
    With layers in a loop (`spec.scan`), whose parameters are stacked (`params.held`), the layer's number is traced.
    """
    choose = moe.largest(spec.experts_per_token)
    turns = {window: _rotation(spec, positions, window) for window in sorted(set(spec.each_window))}

    def one(weights: Block, number: Layer, window: int, x: Array, held: Held) -> tuple[Array, Held, list[Array]]:
        chosen = []

        def seen(logits: Array, scores: Array) -> Array:
            chosen.append(choose(logits, scores))
            return chosen[-1]

        def own(q: Array, k: Array, v: Array) -> Array:
            nonlocal held
            out, held = attend(held, number, window, q, k, v)
            return out

        return weights(x, turns[window], own, Routing(seen, layout)), held, chosen

    windows, period, layers, first, choices = spec.each_window, spec.period, decoder.layers, 0, []
    if spec.scan:
        first = layers_in_loop(spec)

        def cycle(carry: tuple[Array, Held], of_cycle: tuple[Sequence[Weights], Array]) -> tuple[Any, list[Array]]:
            (x, held), (values, index), found = carry, of_cycle, []
            for at, weights in enumerate(values):
                x, held, chosen = one(block(spec, weights), index * period + at, windows[at], x, held)
                found += chosen
            return (x, held), found

        xs = of_cycles(spec, params), jnp.arange(first // period)
        (x, held), found = jax.lax.scan(cycle, (x, held), xs)
        choices = [of_layer[index] for index in range(first // period) for of_layer in found]
        each = (in_loop(spec, number)[0] for number in range(first, spec.layers))
        layers = [block(spec, {name: params[full] for name, full in names.items()}) for names in each]
    for number, weights in enumerate(layers, first):
        x, held, chosen = one(weights, number, windows[number], x, held)
        choices += chosen
    return x, held, moe.recorded(spec, choices) if choices else None


def _pinned(x: Float[Array, "B T D"], layout: Layout | None) -> Float[Array, "B T D"]:
    """The residual stream between layers, sharded by the layout's rules."""
    if layout is None:
        return x
    divided = layout.sharding(("rows", "stream", "width"), x.shape).spec[1] is not None
    return layout.constrain(x, ("rows", "stream" if divided else "tokens", "width"))
