"""The decoder's entry points: pure functions of (spec, flat parameters, arrays), to be jitted by their callers.

B rows, R prompts, S slots, T tokens, K key-value heads, H head dimension, D width, V vocabulary. `layout` (mesh and
rules) is optional: it constrains the shardings of activations, which the compiler otherwise infers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxroll.kernels import attention as kernels
from jaxroll.kernels import placed
from jaxroll.kernels.attention import SharedRows, blocks, paged, reach
from jaxroll.kernels.choice import XLA
from jaxroll.models import cache as dense
from jaxroll.models import moe
from jaxroll.models.cache import ContiguousCache, KVCache, appended, constrained, filled
from jaxroll.models.families import ModelSpec
from jaxroll.models.layers import PRODUCT, Block, Decoder, Rotation, rotation
from jaxroll.models.moe import Load, Routing
from jaxroll.models.params import block, block_axes, module
from jaxroll.sharding import Layout

Params = Mapping[str, jax.Array]
_KEPT = {"layer": None, "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT)}
Layers = tuple[Float[Array, "R T K H"], ...]


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
    choices: Int[Array, "B T L k"] | None = None,
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
    choices: Int[Array, "B T L k"] | None = None,
    stacks: Params | None = None,
    sums: Params | None = None,
) -> tuple[Float[Array, "B T D"], Load | None]:
    """`forward`, and the load of the experts of every layer (leaves [L, E]; None for a model without experts).

    `stacks` are the parameters of the layers in the loop, to be differentiated by (None: those of `params`). With
    `sums` (float32, like `stacks`), differentiate by them instead: their cotangents are `sums` plus the gradients.
    """
    decoder = module(spec, params)

    def layer_of(window: int) -> Callable[[Block, Array, Array | None], tuple[Array, Load | None]]:
        if rows is None:
            attend = placed.rows(attention, tokens.shape[1], segment_ids, layout, window)
        else:
            assert prompt_ids is not None, "rows that share prompts need prompt_ids"
            attend = kernels.attention(rows, segment_ids, prompt_ids, positions, window)
        attend = placed.exchanged(attend, layout)
        turn = _rotation(spec, positions, window)

        def layer(block: Block, x: Array, given: Array | None) -> tuple[Array, Load | None]:
            choose, loads = moe.largest(spec.experts_per_token) if given is None else moe.replayed(given), []

            def seen(logits: Array, scores: Array) -> Array:
                chosen = choose(logits, scores)
                loads.append(moe.load(logits, chosen, segment_ids > 0))
                return chosen

            x = _pinned(block(x, turn, attend, Routing(seen, layout)), layout)
            return x, loads[0] if loads else None

        if spec.remat == "none":
            return layer
        # A loop is a barrier that keeps the recomputation apart, so the checkpoint needs none of its own.
        return jax.checkpoint(layer, policy=_KEPT[spec.remat], prevent_cse=not spec.scan)

    layer = {window: layer_of(window) for window in sorted(set(spec.each_window))}
    x, loads = _pinned(decoder.embedded(tokens), layout), []
    given = None if choices is None else jnp.moveaxis(choices, 2, 0)  # [L, B, T, k]
    first = 0
    if spec.scan:
        first = layers_in_loop(spec)
        steps = [layer[window] for window in spec.each_window[: spec.period]]
        stacks = stacked(spec, params, layout) if stacks is None else stacks
        x, load = _scanned(spec, stacks, x, steps, None if given is None else given[:first], sums)
        loads.append(load)
    for number in range(first, spec.layers):
        own = None if given is None else given[number]
        x, load = layer[spec.each_window[number]](decoder.layers[number], x, own)
        loads.append(jax.tree.map(lambda of_layer: of_layer[None], load))
    total = jax.tree.map(lambda *some: jnp.concatenate(some), *loads) if spec.experts else None
    return decoder.final_norm(x), total


def _scanned(
    spec: ModelSpec,
    params: Params,
    x: Float[Array, "B T D"],
    steps: Sequence[Callable[[Block, Array, Array | None], tuple[Array, Load | None]]],
    choices: Int[Array, "L B T k"] | None,
    sums: Params | None,
) -> tuple[Float[Array, "B T D"], Load | None]:
    """The hidden states after as many whole periods of layers as there are, by a loop over periods, and the loads.

    `params` are those of `stacked`; `sums` as in `forward_with_load`.
    """
    period = len(steps)
    cycles = spec.layers // period

    def each(params: Params) -> list[Params]:
        return [{name: params[f"{_LOOP}.{at:02d}.{name}"] for name in block_axes(spec)} for at in range(period)]

    given = None if choices is None else choices.reshape(cycles, period, *choices.shape[1:])

    def cycle(x: Array, of_cycle: tuple[Sequence[Params], Array | None]) -> tuple[Array, Load | None]:
        values, given = of_cycle
        loads = []
        for at, step in enumerate(steps):
            x, load = step(block(spec, values[at]), x, None if given is None else given[at])
            loads.append(load)
        return x, jax.tree.map(lambda *some: jnp.stack(some), *loads) if spec.experts else None

    xs = each(params), given
    x, loads = jax.lax.scan(cycle, x, xs) if sums is None else _summing(cycle, xs, each(sums), x)
    return x, jax.tree.map(lambda leaf: leaf.reshape(cycles * period, *leaf.shape[2:]), loads)


def _summing(cycle: Callable[[Array, Any], tuple[Array, Any]], xs: Any, sums: Any, x: Array) -> tuple[Array, Any]:
    """`lax.scan(cycle, x, xs)`; the cotangent of `sums` is `sums` plus the gradients by `xs[0]`.

    The backward loop recomputes each cycle from its input and adds its gradients to the running sums, so that only the
    gradients of one cycle exist at a time. That of `lax.scan` returns those of all cycles: a copy of the parameters.
    """

    @jax.custom_vjp
    def run(xs: Any, sums: Any, x: Array) -> tuple[Array, Any]:
        return jax.lax.scan(cycle, x, xs)

    def forwards(xs: Any, sums: Any, x: Array) -> tuple[tuple[Array, Any], Any]:
        def step(x: Array, of_cycle: Any) -> tuple[Array, Any]:
            after, loads = cycle(x, of_cycle)
            return after, (loads, x)

        after, (loads, before) = jax.lax.scan(step, x, xs)
        return (after, loads), (xs, sums, before)

    def backwards(kept: Any, cotangents: tuple[Array, Any]) -> tuple[None, Any, Array]:
        (xs, sums, before), (after, loads) = kept, cotangents
        loads = [leaf for leaf in jax.tree.leaves(loads) if leaf.dtype != jax.dtypes.float0]

        def step(carry: Any, of_cycle: Any) -> tuple[Any, None]:
            (after, sums, at), ((values, given), x, loads) = carry, of_cycle

            def floats(values: Any, x: Array) -> tuple[Array, list[Array]]:
                after, loads = cycle(x, (values, given))
                return after, [leaf for leaf in jax.tree.leaves(loads) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

            grads, before = jax.vjp(floats, values, x)[1]((after, loads))
            sums = jax.tree.map(lambda total, grad: total.at[at].add(grad.astype(total.dtype)), sums, grads)
            return (before, sums, at - 1), None

        last = jnp.asarray(len(before) - 1)
        (x, sums, _), _ = jax.lax.scan(step, (after, sums, last), (xs, before, loads), reverse=True)
        return None, sums, x

    run.defvjp(forwards, backwards)
    return run(xs, sums, x)


_LOOP = "loop"


def stacked(spec: ModelSpec, params: Params, layout: Layout | None) -> dict[str, jax.Array]:
    """The parameters of the layers in the loop: "loop.00.attn.q" has those of the first layer of every period.

    Matrices are cast to the compute dtype before, as at their use; routers compute in float32.
    """
    dtype, period = jnp.dtype(spec.compute_dtype), spec.period

    def one(at: int, name: str, axes: tuple[str, ...]) -> Array:
        layers = range(at, layers_in_loop(spec), period)
        leaves = [params[f"layers.{number:02d}.{name}"] for number in layers]
        if leaves[0].ndim > 1 and not moe.is_router(name):
            leaves = [leaf.astype(dtype) for leaf in leaves]
        found = jnp.stack(leaves)
        return found if layout is None else layout.constrain(found, ("layers", *axes))

    names = block_axes(spec).items()
    return {f"{_LOOP}.{at:02d}.{name}": one(at, name, axes) for at in range(period) for name, axes in names}


def unstacked(spec: ModelSpec, values: Params) -> dict[str, jax.Array]:
    """`values` with the arrays of `stacked` divided, by the names of parameters."""
    found = {}
    for name, value in values.items():
        start, _, rest = name.partition(".")
        at, _, of_layer = rest.partition(".")
        if start != _LOOP:
            found[name] = value
            continue
        found |= {f"layers.{n * spec.period + int(at):02d}.{of_layer}": value[n] for n in range(value.shape[0])}
    return dict(sorted(found.items()))


def layers_in_loop(spec: ModelSpec) -> int:
    """The number of layers in the loop: those of whole periods."""
    return spec.layers // spec.period * spec.period


def in_loop(spec: ModelSpec, number: int) -> tuple[dict[str, str], dict[str, str]]:
    """By name in a layer ("attn.q"): the names of the parameters of layer `number`, and of the stacks they are in."""
    names = block_axes(spec)
    return (
        {name: f"layers.{number:02d}.{name}" for name in names},
        {name: f"{_LOOP}.{number % spec.period:02d}.{name}" for name in names},
    )


def logits(spec: ModelSpec, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """The logits of the next token for every hidden state, float32."""
    return module(spec, params).logits(hidden)


def values(spec: ModelSpec, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """A critic's value (of a spec with a value head) for every hidden state, float32."""
    return module(spec, params).values(hidden)


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

    Prompts start at position 0 and are padded on the right. A row of length 0 is unused.
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
) -> tuple[Float[Array, "R V"], Layers, Layers, Int[Array, "R T 1 X"] | None]:
    """`prefill`, and the records of the chosen experts (`moe.recorded`; None for a model without experts)."""
    decoder = module(spec, params)
    T = tokens.shape[1]
    turns = rotations(spec, jnp.arange(T)[None])
    causal = {window: placed.rows(attention, T, None, layout, window) for window in sorted(set(spec.each_window))}
    keys, values = [], []

    def attend(q: Array, k: Array, v: Array) -> Array:
        keys.append(k)
        values.append(v)
        return causal[spec.each_window[len(keys) - 1]](q, k, v)

    x, experts = through(spec, decoder, _pinned(decoder.embedded(tokens), layout), turns, attend, layout)
    return decoder.logits(decoder.final_norm(_at(x, lengths - 1))), tuple(keys), tuple(values), experts


def extend(
    spec: ModelSpec,
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "R T"],
    pages: Pages,
    lengths: Int[Array, " R"],
    *,
    layout: Layout | None = None,
) -> tuple[Float[Array, "R V"], KVCache]:
    """The logits after each row's last token, and the cache with the rows' `lengths` tokens from pages.starts on.

    Earlier tokens are read from the row's pages: a long prompt is computed in several such chunks, and a conversation
    continues after its cached tokens.
    """
    decoder = module(spec, params)
    T = tokens.shape[1]
    turns = rotations(spec, pages.starts[:, None] + jnp.arange(T))
    keys, values = list(cache.keys), list(cache.values)
    layer, far = iter(range(spec.layers)), reach(pages.starts, T, cache.page_tokens)

    def attend(q: Array, k: Array, v: Array) -> Array:
        at = next(layer)
        keys[at] = filled(keys[at], k, pages.shards, pages.tables, pages.starts, lengths)
        values[at] = filled(values[at], v, pages.shards, pages.tables, pages.starts, lengths)
        everywhere = pages.tables + pages.shards[:, None] * cache.pages
        one = _one_pool(keys[at]), _one_pool(values[at])
        return paged(q, *one, everywhere, pages.starts, far, spec.each_window[at])

    x, chosen = through(spec, decoder, _pinned(decoder.embedded(tokens), layout), turns, attend, layout)
    experts = cache.experts
    if experts is not None and chosen is not None:
        experts = filled(experts, chosen, pages.shards, pages.tables, pages.starts, lengths)
    held = constrained(KVCache(tuple(keys), tuple(values), experts), layout)
    return decoder.logits(decoder.final_norm(_at(x, lengths - 1))), held


def decode(
    spec: ModelSpec,
    params: Params,
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
    decoder = module(spec, params)
    keys, values = list(cache.keys), list(cache.values)
    split = lambda x: x.reshape(cache.shards, -1, *x.shape[1:])  # noqa: E731  (slots of a shard are adjacent)
    count = blocks(len(tokens) // cache.shards, layout) if attention == XLA else 1
    # Slots of each shard sorted by length: a block reads as many pages as its longest slot has.
    order = jnp.argsort(-split(positions), axis=1) if count > 1 else None
    tokens, positions, tables = (ordered(x, order) for x in (tokens, positions, tables))
    turns = rotations(spec, positions[:, None])
    here, where = split(tables), split(positions)
    layer, far = iter(range(spec.layers)), reach(where, 1, cache.page_tokens, count)
    fused = None if attention == XLA else placed.pages(attention, layout)

    def attend(q: Array, k: Array, v: Array) -> Array:
        # One array per layer, updated by one token: since the cache is donated, nothing is copied.
        at = next(layer)
        keys[at] = jax.vmap(appended)(keys[at], split(k[:, 0]), here, where)
        values[at] = jax.vmap(appended)(values[at], split(v[:, 0]), here, where)
        window = spec.each_window[at]
        over_shards = fused or jax.vmap(partial(paged, window=window), in_axes=(0, 0, 0, 0, 0, None))
        return over_shards(split(q), keys[at], values[at], here, where, far).reshape(q.shape)

    x, chosen = through(spec, decoder, decoder.embedded(tokens[:, None]), turns, attend, layout)
    held = KVCache(tuple(keys), tuple(values), _with_record(cache.experts, chosen, split, here, where))
    x = ordered(x[:, 0], None if order is None else jnp.argsort(order, axis=1))
    return decoder.logits(decoder.final_norm(x)), constrained(held, layout)


def decode_contiguous(
    spec: ModelSpec,
    params: Params,
    cache: KVCache,
    side: ContiguousCache,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    tables: Int[Array, "S J"],
    last: Int[Array, ""],
    *,
    layout: Layout | None = None,
) -> tuple[Float[Array, "S V"], KVCache, ContiguousCache]:
    """`decode` that reads the contiguous cache, and writes the token to both caches; no slot is beyond `last`."""
    decoder = module(spec, params)
    keys, values = list(cache.keys), list(cache.values)
    split = lambda x: x.reshape(cache.shards, -1, *x.shape[1:])  # noqa: E731
    turns = rotations(spec, positions[:, None])
    here, where = split(tables), split(positions)
    layer = iter(range(spec.layers))

    def attend(q: Array, k: Array, v: Array) -> Array:
        nonlocal side
        at, new_keys, new_values = next(layer), split(k[:, 0]), split(v[:, 0])
        keys[at] = jax.vmap(appended)(keys[at], new_keys, here, where)
        values[at] = jax.vmap(appended)(values[at], new_values, here, where)
        side = dense.with_token(side, at, new_keys, new_values, where)
        return dense.attend(side, at, split(q), where, last, spec.each_window[at]).reshape(q.shape)

    x, chosen = through(spec, decoder, decoder.embedded(tokens[:, None]), turns, attend, layout)
    held = KVCache(tuple(keys), tuple(values), _with_record(cache.experts, chosen, split, here, where))
    return decoder.logits(decoder.final_norm(x[:, 0])), constrained(held, layout), side


def _with_record(
    pool: Array | None, chosen: Array | None, split: Callable[[Array], Array], tables: Array, positions: Array
) -> Array | None:
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


def _one_pool(pool: Float[Array, "D K P U H"]) -> Float[Array, "K DP U H"]:
    """The pages of all shards as one pool."""
    D, K, P, U, H = pool.shape
    return pool.swapaxes(0, 1).reshape(K, D * P, U, H)


def _rotation(spec: ModelSpec, positions: Int[Array, "*rows"], window: int) -> Rotation:
    """The rotation of the layers with this window."""
    if window and spec.local_rope_theta:
        return rotation(positions, spec.head_dim, spec.local_rope_theta)
    return rotation(positions, spec.head_dim, spec.rope_theta, spec.rope_scaling)


def rotations(spec: ModelSpec, positions: Int[Array, "*rows"]) -> list[Rotation]:
    """The rotation of every layer."""
    found = {window: _rotation(spec, positions, window) for window in sorted(set(spec.each_window))}
    return [found[window] for window in spec.each_window]


def through(
    spec: ModelSpec,
    decoder: Decoder,
    x: Array,
    turns: Sequence[Rotation],
    attend: Callable[..., Array],
    layout: Layout | None,
) -> tuple[Array, Array | None]:
    """The hidden states after all layers, and the records of the chosen experts (None for a model without experts)."""
    choose, chosen = moe.largest(spec.experts_per_token), []

    def seen(logits: Array, scores: Array) -> Array:
        chosen.append(choose(logits, scores))
        return chosen[-1]

    for layer, turn in zip(decoder.layers, turns, strict=True):
        x = layer(x, turn, attend, Routing(seen, layout))
    return x, moe.recorded(spec, chosen) if chosen else None


def _pinned(x: Float[Array, "B T D"], layout: Layout | None) -> Float[Array, "B T D"]:
    """The residual stream between layers, sharded by the layout's rules."""
    if layout is None:
        return x
    divided = layout.sharding(("rows", "stream", "width"), x.shape).spec[1] is not None
    return layout.constrain(x, ("rows", "stream" if divided else "tokens", "width"))
