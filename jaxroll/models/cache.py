"""The paged KV cache: pages of tokens in a pool, with a table of pages for each slot.

S slots are in D shards of S/D slots, as the rules shard slots over the mesh. A shard has its own P pages of U tokens,
so that no decode step reads another device's pages. Page numbers are relative to the shard.

Layers with a sliding window may have *rings* instead: R consecutive pages, of which page j % R holds the tokens of page
j of the sequence. A token overwrites one that is R·U positions before it, which no later query sees. So these layers
need memory for the window and not for the whole sequence. The last column of a table is then the number of the ring.

With `ModelSpec.kv_dtype`, keys and values are quantized where they are written, with a scale per token and head
(`kernels.quantised`). A pool is then of values [D, K, P, U, H] and scales [D, K, P, U], and all moves treat both alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from jaxroll.kernels.attention import dense, levels
from jaxroll.kernels.quantised import DTYPES, Pool, Quantised, as_in
from jaxroll.models import moe
from jaxroll.models.families import ModelSpec
from jaxroll.sharding import Layout, Rules, sharding

LOGICAL = ("slots", "kv_heads", None, "tokens", "head_dim")


class LayerPools(NamedTuple):
    """The pools of a layer, in which its pages have the numbers from `first` to `first` + `pages` - 1."""

    keys: Pool  # [D, K, P, U, H]
    values: Pool
    first: int | Int[Array, ""]
    pages: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values in the compute dtype or quantized: a pool [D, K, P, U, H] for each layer.

    `experts`, if recorded, are the choices of all layers in the same pages: X numbers per token (`moe.recorded`). With
    layers in a loop, `joint` has the layers of each pool, which has the pages of all of them: page p of its n-th layer
    is p + n·P. With a `ring` (R) above 0, the layers with a window have rings; they have the last of joint pools.

    `draft` has the keys and values of `ModelSpec.draft`, which has no rings, in pages with the same numbers.
    """

    keys: tuple[Pool, ...]
    values: tuple[Pool, ...]
    experts: Integer[Array, "D 1 P U X"] | None = None
    joint: tuple[tuple[int, ...], ...] = field(default=(), metadata={"static": True})
    ring: int = field(default=0, metadata={"static": True})
    in_rings: tuple[bool, ...] = field(default=(), metadata={"static": True})  # of each pool; empty without rings
    draft: KVCache | None = None

    @property
    def shards(self) -> int:
        """D, the number of shards."""
        return self.keys[0].shape[0]

    @property
    def page_tokens(self) -> int:
        """U, the number of tokens of a page."""
        return self.keys[0].shape[3]

    def pools_of_rings(self) -> list[Pool]:
        """The pools of keys and values that have rings."""
        both = zip(self.keys + self.values, 2 * self.in_rings, strict=True) if self.ring else ()
        return [pool for pool, ringed in both if ringed]

    def ring_of(self, window: int) -> int:
        """R for a layer with this window; 0 for one without a ring."""
        return self.ring if window else 0

    def tables(self, window: int, tables: Int[Array, "*rows J1"]) -> Int[Array, "*rows J"]:
        """The pages of the layers with this window, relative to the first page of a layer."""
        if not self.ring:
            return tables
        ring, full = tables[..., -1:], tables[..., :-1]
        pages = jnp.broadcast_to(jnp.arange(full.shape[-1]) % self.ring, full.shape)
        return ring * self.ring + pages if window else full

    def of(self, layer: int | Array, window: int) -> LayerPools:
        """The pools of a layer, which has this window."""
        at = self._pool(layer, window)
        keys, values = self.keys[at], self.values[at]
        if not self.joint:
            return LayerPools(keys, values, 0, keys.shape[2])
        layers = self.joint[at]
        ranks = [layers.index(one) if one in layers else 0 for one in range(max(layers) + 1)]
        rank = layer if len(self.joint) == 1 else jnp.array(ranks)[layer]
        pages = keys.shape[2] // len(layers)
        return LayerPools(keys, values, rank * pages, pages)

    def with_layer(self, layer: int | Array, window: int, keys: Pool, values: Pool) -> KVCache:
        """The cache with other pools of a layer."""
        at = self._pool(layer, window)
        put = lambda pools, new: (*pools[:at], new, *pools[at + 1 :])  # noqa: E731
        return replace(self, keys=put(self.keys, keys), values=put(self.values, values))

    def _pool(self, layer: int | Array, window: int) -> int:
        if self.joint:
            return len(self.joint) - 1 if self.ring_of(window) else 0
        assert isinstance(layer, int)
        return layer

    def map(self, change: Callable[..., Array], *others: KVCache) -> KVCache:
        """The cache with `change(array, layers, ring, *arrays of others)` for each array of each pool.

        A pool has the pages of so many layers, in rings of `ring` pages (0: no rings).
        """
        counts = [len(layers) for layers in self.joint] or [1] * len(self.keys)
        rings = [self.ring * one for one in self.in_rings] or [0] * len(self.keys)

        def each(pools: tuple[Pool, ...], *of: tuple[Pool, ...]) -> tuple[Pool, ...]:
            rows = zip(pools, counts, rings, *of, strict=True)
            return tuple(one(*row) for row in rows)

        def one(pool: Pool, count: int, ring: int, *of: Pool) -> Pool:
            return jax.tree.map(lambda array, *others: change(array, count, ring, *others), pool, *of)

        experts = None
        if self.experts is not None:
            experts = change(self.experts, 1, 0, *(other.experts for other in others))
        draft = self.draft and self.draft.map(change, *(other.draft for other in others if other.draft))
        return replace(
            self,
            keys=each(self.keys, *(other.keys for other in others)),
            values=each(self.values, *(other.values for other in others)),
            experts=experts,
            draft=draft,
        )


def shards_of(slots: int, mesh: Mesh, rules: Rules) -> int:
    """D: the number of groups of devices over which the rules shard `slots`; 1 if these do not divide evenly."""
    spread = sharding(mesh, ("slots",), rules, (slots,))
    return slots // spread.shard_shape((slots,))[0]


def abstract(
    spec: ModelSpec,
    shards: int,
    pages: int,
    page_tokens: int,
    mesh: Mesh,
    rules: Rules,
    *,
    experts: bool = False,
    ring: int = 0,
    rings: int = 0,
) -> KVCache:
    """The cache as ShapeDtypeStructs with shardings, for ahead-of-time compilation and memory estimates.

    With `experts`, it has room for recorded choices. With a `ring` above 0, layers with a window have `rings` rings of
    that many pages in each shard.
    """

    def array(shape: tuple[int, ...], dtype: np.dtype) -> Any:  # abstract leaves replace arrays
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, LOGICAL[: len(shape)], rules, shape))

    def pool(heads: int, width: int, dtype: np.dtype, pages: int) -> Any:
        return array((shards, heads, pages, page_tokens, width), dtype)

    def of_layers(pages: int) -> Any:
        values = pool(spec.kv_heads, spec.head_dim, DTYPES.get(spec.kv_dtype, jnp.dtype(spec.compute_dtype)), pages)
        return Quantised(values, array(values.shape[:4], jnp.dtype("float32"))) if spec.kv_dtype else values

    windowed = [bool(ring and window) for window in spec.each_window]
    every = [(layer,) for layer in range(spec.layers)]
    if spec.scan:
        kinds = (tuple(layer for layer in range(spec.layers) if windowed[layer] == kind) for kind in (False, True))
        every = [layers for layers in kinds if layers]
    in_rings = [windowed[layers[0]] for layers in every]
    of_layer = {False: pages, True: rings * ring}
    leaves = tuple(of_layers(len(layers) * of_layer[one]) for layers, one in zip(every, in_rings, strict=True))
    recorded = pool(1, moe.recorded_width(spec), moe.recorded_dtype(spec), pages) if experts else None
    draft = spec.draft and abstract(spec.draft, shards, pages, page_tokens, mesh, rules)
    joint, rings_of = tuple(every) if spec.scan else (), tuple(in_rings) if ring else ()
    return KVCache(leaves, leaves, recorded, joint, ring, rings_of, draft)


def empty(
    spec: ModelSpec, shards: int, pages: int, page_tokens: int, mesh: Mesh, rules: Rules, **options: Any
) -> KVCache:
    """A cache of zeros, created sharded; `options` are those of `abstract`."""
    like = abstract(spec, shards, pages, page_tokens, mesh, rules, **options)
    lie = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), out_shardings=lie)()


def appended(pool: Pool, new: Shaped[Array, "B K H"], tables: Int[Array, "B J"], positions: Int[Array, " B"]) -> Pool:
    """One shard's pool with one token per row at its position; a position outside the table is not written."""
    (K, P, U), J = pool.shape[:3], tables.shape[1]
    place = jnp.clip(positions // U, 0, J - 1)
    page = jnp.take_along_axis(tables, place[:, None], axis=1)[:, 0]
    page = jnp.where((positions >= 0) & (positions < J * U), page, P)

    def put(pool: Array, new: Array) -> Array:
        # Heads are indexed explicitly: for a slice of all heads, a TPU would copy the pool to another layout and back.
        return pool.at[jnp.arange(K)[:, None], page, positions % U].set(new.swapaxes(0, 1), mode="drop")

    return jax.tree.map(put, pool, as_in(pool, new))


def filled(
    pool: Pool,
    new: Shaped[Array, "R T K H"],
    shards: Int[Array, " R"],
    tables: Int[Array, "R J"],
    starts: Int[Array, " R"],
    lengths: Int[Array, " R"],
    ring: int = 0,
) -> Pool:
    """The pool with `lengths[r]` tokens of row r at positions starts[r], starts[r] + 1, …; other tokens are dropped.

    With a `ring`, tokens that later ones would overwrite are dropped, too.
    """
    (K, P, U), J, T = pool.shape[1:4], tables.shape[1], new.shape[1]
    positions = starts[:, None] + jnp.arange(T)[None]
    place = jnp.minimum(positions // U, J - 1)
    written = lasting(T, lengths, ring * U) & (positions < J * U)
    page = jnp.where(written, jnp.take_along_axis(tables, place, axis=1), P)
    heads, tokens = jnp.arange(K)[:, None], lambda x: x[:, None]  # [R, 1, T]: explicit heads, see `appended`
    at = shards[:, None, None], heads, tokens(page), tokens(positions % U)

    def put(pool: Array, new: Array) -> Array:
        return pool.at[at].set(new.swapaxes(1, 2).astype(pool.dtype), mode="drop")

    return jax.tree.map(put, pool, as_in(pool, new))


def begun(
    pool: Pool,
    new: Shaped[Array, "R T K H"],
    shards: Int[Array, " R"],
    tables: Int[Array, "R J"],
    lengths: Int[Array, " R"],
    ring: int = 0,
) -> Pool:
    """`filled` from position 0 on, by whole pages; the rest of the last page is undefined."""
    (K, P, U), (R, T) = pool.shape[1:4], new.shape[:2]
    pages = -(-T // U)

    def put(pool: Array, new: Array) -> Array:
        new = jnp.pad(new.astype(pool.dtype), ((0, 0), (0, pages * U - T)) + ((0, 0),) * (new.ndim - 2))
        new = jnp.moveaxis(new.reshape(R, pages, U, *new.shape[2:]), 3, 1)
        page = jnp.where(lasting(pages, -(-lengths // U), ring), tables[:, :pages], P)
        return pool.at[shards[:, None, None], jnp.arange(K)[:, None], page[:, None]].set(new, mode="drop")

    return jax.tree.map(put, pool, as_in(pool, new))


def lasting(count: int, used: Int[Array, " R"], places: int) -> Bool[Array, "R count"]:
    """True for the first used[r] of `count` items of row r; with `places` above 0 only for the last ones that have one.

    The others may not be written: which of two writes to one place remains is undefined.
    """
    each, used = jnp.arange(count)[None], used[:, None]
    return (each < used) & (each >= used - places) if places else each < used


def extended(
    pool: Pool,
    new: Shaped[Array, "R T K H"],
    shards: Int[Array, " R"],
    tables: Int[Array, "R J"],
    starts: Int[Array, " R"],
    lengths: Int[Array, " R"],
) -> Pool:
    """A copy of each row's pages of `tables`, with its new tokens at positions starts[r], starts[r] + 1, …

    A pool of R shards: [R, K, J, U, H].
    """
    rows = jnp.arange(len(tables))
    pages = jax.tree.map(lambda array: array[shards[:, None], :, tables].swapaxes(1, 2), pool)
    return filled(pages, new, rows, jnp.broadcast_to(jnp.arange(tables.shape[1]), tables.shape), starts, lengths)


def copied(
    pool: Shaped[Array, "D K P U *H"],
    shards: Int[Array, " R"],
    sources: Int[Array, " R"],
    targets: Int[Array, " R"],
    layers: int = 1,
) -> Shaped[Array, "D K P U *H"]:
    """The pool with page sources[r] copied to page targets[r] of shard shards[r]; a target of P copies nothing.

    In a pool of several layers, those of every layer are copied.
    """
    shards, targets = jnp.tile(shards, layers), of_every_layer(pool, layers, targets)
    sources = of_every_layer(pool, layers, jnp.minimum(sources, pool.shape[2] // layers - 1))
    return pool.at[shards, :, targets].set(pool[shards, :, sources], mode="drop")


def ring_copied(cache: KVCache, shard: Int[Array, ""], source: Int[Array, ""], target: Int[Array, ""]) -> KVCache:
    """The cache with the tokens of ring `source` in ring `target` of the shard."""

    def change(pool: Array, layers: int, ring: int) -> Array:
        if not ring:
            return pool
        each = jnp.arange(ring)
        return copied(pool, jnp.broadcast_to(shard, (ring,)), source * ring + each, target * ring + each, layers)

    return cache.map(change)


def of_every_layer(pool: Shaped[Array, "D K P U *H"], layers: int, pages: Int[Array, " R"]) -> Int[Array, " LR"]:
    """The numbers of `pages` in a pool of several layers; those out of range stay so."""
    count = pool.shape[2] // layers
    every = pages[None] + count * jnp.arange(layers)[:, None]
    return jnp.where((pages < count)[None], every, pool.shape[2]).reshape(-1)


def constrained(cache: KVCache, layout: Layout | None) -> KVCache:
    """`cache`, with its sharding inside a jitted program constrained to the layout."""
    if layout is None:
        return cache
    return jax.tree.map(lambda leaf: layout.constrain(leaf, LOGICAL[: leaf.ndim]), cache)


# --- Contiguous KV cache: a copy of every slot's keys and values, which decode steps read if it is worth its memory
#
# The pages stay authoritative. When a request takes a slot, its keys and values are copied from the pages; from then on
# each new token is written to both, so that no decode step has to gather pages.

Levels = tuple[Array, ...]
_AT_ONCE = 8  # slots that are copied together

KEYS = ("slots", None, "kv_heads", "head_dim", "tokens")
VALUES = ("slots", None, "kv_heads", "tokens", "head_dim")
STALE = ("slots", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContiguousCache:
    """Keys (already rotated) and values of each layer by level (`kernels.dense`), B slots in each of D shards.

    A `stale` slot holds the values of an earlier request.
    """

    keys: tuple[Levels, ...]  # of Float[Array, "D B K H C"]
    values: tuple[Levels, ...]  # of Float[Array, "D B K C H"]
    stale: Bool[Array, "D B"]


def abstract_contiguous(
    spec: ModelSpec, shards: int, slots: int, tokens: int, page_tokens: int, mesh: Mesh, rules: Rules
) -> ContiguousCache:
    """A cache for `tokens` tokens of each of `slots` slots, as ShapeDtypeStructs with shardings."""

    def leaf(shape: tuple[int, ...], logical: tuple[str | None, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding(mesh, logical, rules, shape))

    own, K, H, dtype = slots // shards, spec.kv_heads, spec.head_dim, spec.compute_dtype
    lengths = levels(tokens, page_tokens)
    keys = tuple(leaf((shards, own, K, H, C), KEYS, dtype) for C in lengths)
    values = tuple(leaf((shards, own, K, C, H), VALUES, dtype) for C in lengths)
    stale = leaf((shards, own), STALE, "bool")
    return ContiguousCache((keys,) * spec.layers, (values,) * spec.layers, stale)  # pyright: ignore[reportArgumentType]


def taken(side: ContiguousCache, slots: Int[Array, " N"]) -> ContiguousCache:
    """`side` with `slots` (numbered over all shards) marked as stale; numbers out of range are dropped."""
    stale = side.stale.reshape(-1).at[slots].set(True, mode="drop")
    return replace(side, stale=stale.reshape(side.stale.shape))


def refreshed(
    side: ContiguousCache, cache: KVCache, tables: Int[Array, "D B J"], positions: Int[Array, "D B"]
) -> ContiguousCache:
    """`side` with stale slots copied from their pages: positions 0 … positions - 1, and zeros behind them.

    A slot with a negative position is not copied and stays stale.
    """
    B = positions.shape[1]
    wanted, rows = side.stale & (positions >= 0), min(_AT_ONCE, B)
    order = jnp.argsort(~wanted, axis=1)  # stale slots first
    count = jnp.max(jnp.sum(wanted, axis=1))

    def some(i: Int[Array, ""], side: ContiguousCache) -> ContiguousCache:
        at = jax.lax.dynamic_slice_in_dim(order, i * rows, rows, axis=1)
        mine = jnp.take_along_axis(wanted, at, axis=1)
        known = jnp.where(mine, jnp.take_along_axis(positions, at, axis=1), 0)
        pages, to = jnp.take_along_axis(tables, at[..., None], axis=1), jnp.where(mine, at, B)
        far = jnp.max(known)

        def laid(pool: Pool, old: Levels, axis: int) -> Levels:
            assert not isinstance(pool, Quantised), "`kernels.choice` allows no contiguous copy of quantized pages"
            found, begin = [], 0
            for level in old:
                C = level.shape[axis]
                new = _gathered(pool, pages, known, far, begin, C)
                new = new if axis == -2 else new.swapaxes(-1, -2)
                found.append(jax.vmap(lambda level, to, new: level.at[to].set(new, mode="drop"))(level, to, new))
                begin += C
            return tuple(found)

        keys = tuple(laid(pool, old, -1) for pool, old in zip(cache.keys, side.keys, strict=True))
        values = tuple(laid(pool, old, -2) for pool, old in zip(cache.values, side.values, strict=True))
        return replace(side, keys=keys, values=values)

    side = jax.lax.fori_loop(0, -(-count // rows), some, side)
    return replace(side, stale=side.stale & ~wanted)


def _gathered(
    pool: Float[Array, "D K P U H"],
    tables: Int[Array, "D R J"],
    known: Int[Array, "D R"],
    far: Int[Array, ""],
    begin: int,
    tokens: int,
) -> Float[Array, "D R K C H"]:
    """The `known` values of R rows from position `begin` on; zeros, without reading pages, beyond `far`."""
    D, K, _, U, H = pool.shape
    shape = (D, tables.shape[1], K, tokens, H)

    def found() -> Array:
        pages = tables[:, :, begin // U : (begin + tokens) // U]
        held = jax.vmap(lambda pool, pages: pool[:, pages].swapaxes(0, 1))(pool, pages).reshape(shape)
        there = (begin + jnp.arange(tokens))[None, None] < known[:, :, None]
        return jnp.where(there[:, :, None, :, None], held, jnp.zeros((), pool.dtype))

    return jax.lax.cond(far > begin, found, lambda: jnp.zeros(shape, pool.dtype))


def with_token(
    side: ContiguousCache,
    layer: int,
    keys: Float[Array, "*at K H"],
    values: Float[Array, "*at K H"],
    positions: Int[Array, "*at"],
) -> ContiguousCache:
    """`side` with one or T more keys and values of `layer` in each slot; those at negative positions are dropped."""
    put = lambda old, new: (*old[:layer], new, *old[layer + 1 :])  # noqa: E731
    return replace(
        side,
        keys=put(side.keys, _with_one(side.keys[layer], keys, positions, -1, _with_key)),
        values=put(side.values, _with_one(side.values[layer], values, positions, -2, _with_value)),
    )


def attend(
    side: ContiguousCache,
    layer: int,
    q: Float[Array, "D B T N H"],
    positions: Int[Array, "D B"],
    last: Int[Array, ""],
    window: int = 0,
) -> Float[Array, "D B T N H"]:
    """Attention of T more tokens in every slot, over the last `window` if above 0; no token is beyond `last`."""
    over_shards = jax.vmap(partial(dense, window=window), in_axes=(0, 0, 0, 0, None))
    return over_shards(q, side.keys[layer], side.values[layer], positions, last)


def _with_one(
    old: Levels, new: Float[Array, "*at K H"], positions: Int[Array, "*at"], axis: int, put: Callable[..., Array]
) -> Levels:
    """The levels with `new` written by `put` into the level of each position; tokens are along `axis`."""
    written, begin = [], 0
    for level in old:
        tokens = level.shape[axis]
        index = jnp.where(positions < begin, tokens, positions - begin)  # a negative index would count from the end
        written.append(jax.vmap(put)(level, new, index))
        begin += tokens
    return tuple(written)


def _with_key(
    level: Float[Array, "B K H C"], new: Float[Array, "*at K H"], index: Int[Array, "*at"]
) -> Float[Array, "B K H C"]:
    return level.at[_rows_of(index), :, :, index].set(new, mode="drop")


def _with_value(
    level: Float[Array, "B K C H"], new: Float[Array, "*at K H"], index: Int[Array, "*at"]
) -> Float[Array, "B K C H"]:
    return level.at[_rows_of(index), :, index].set(new, mode="drop")


def _rows_of(index: Int[Array, "*at"]) -> Int[Array, "*at1"]:
    """The row of each index, to be broadcast."""
    return jnp.arange(len(index)).reshape(-1, *(1,) * (index.ndim - 1))
