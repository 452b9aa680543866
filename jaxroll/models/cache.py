"""The key-value cache: pages of tokens in a pool, and tables that say which pages are whose.

S slots stand in D shards, S/D in each, as the rules spread slots over the mesh; a shard has P pages of U tokens of its
own, so that no decode step reads another device's pages. A page number counts inside its shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxroll.models.families import ModelSpec
from jaxroll.sharding.rules import Layout, Rules, sharding

LOGICAL = ("slots", "kv_heads", None, "tokens", "head_dim")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of each layer, in the compute dtype."""

    keys: tuple[Float[Array, "D K P U H"], ...]
    values: tuple[Float[Array, "D K P U H"], ...]

    @property
    def shards(self) -> int:
        """D."""
        return self.keys[0].shape[0]

    @property
    def pages(self) -> int:
        """P, the pages of one shard."""
        return self.keys[0].shape[2]

    @property
    def page_tokens(self) -> int:
        """U."""
        return self.keys[0].shape[3]


def shards_of(slots: int, mesh: Mesh, rules: Rules) -> int:
    """D: over how many groups of devices the rules spread `slots`; 1 where they do not divide evenly."""
    spread = sharding(mesh, ("slots",), rules, (slots,))
    return slots // spread.shard_shape((slots,))[0]


def abstract(spec: ModelSpec, shards: int, pages: int, page_tokens: int, mesh: Mesh, rules: Rules) -> KVCache:
    """The cache as ShapeDtypeStructs with shardings: for compiling ahead of time and for sizing."""
    shape = (shards, spec.kv_heads, pages, page_tokens, spec.head_dim)
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(spec.compute_dtype), sharding=sharding(mesh, LOGICAL, rules, shape))
    leaves = (leaf,) * spec.layers
    return KVCache(leaves, leaves)  # pyright: ignore[reportArgumentType]  (abstract leaves stand in for arrays)


def empty(spec: ModelSpec, shards: int, pages: int, page_tokens: int, mesh: Mesh, rules: Rules) -> KVCache:
    """A cache of zeros, sharded at birth."""
    like = abstract(spec, shards, pages, page_tokens, mesh, rules)
    lie = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), out_shardings=lie)()


def appended(
    pool: Float[Array, "K P U H"], new: Float[Array, "B K H"], tables: Int[Array, "B J"], positions: Int[Array, " B"]
) -> Float[Array, "K P U H"]:
    """One shard's pool with one token per row at its position; a position outside the table is not written."""
    (K, P, U), J = pool.shape[:3], tables.shape[1]
    place = jnp.clip(positions // U, 0, J - 1)
    page = jnp.take_along_axis(tables, place[:, None], axis=1)[:, 0]
    page = jnp.where((positions >= 0) & (positions < J * U), page, P)
    # Heads by their numbers: all of them at once a TPU writes in another layout, and copies the pool there and back.
    return pool.at[jnp.arange(K)[:, None], page, positions % U].set(new.swapaxes(0, 1), mode="drop")


def filled(
    pool: Float[Array, "D K P U H"],
    new: Float[Array, "R T K H"],
    shards: Int[Array, " R"],
    tables: Int[Array, "R J"],
    starts: Int[Array, " R"],
    lengths: Int[Array, " R"],
) -> Float[Array, "D K P U H"]:
    """The pool with `lengths[r]` tokens of row r at positions starts[r], starts[r] + 1, …; the rest is not written."""
    (K, P, U), J, T = pool.shape[1:4], tables.shape[1], new.shape[1]
    positions = starts[:, None] + jnp.arange(T)
    place = jnp.minimum(positions // U, J - 1)
    written = (jnp.arange(T) < lengths[:, None]) & (positions < J * U)
    page = jnp.where(written, jnp.take_along_axis(tables, place, axis=1), P)
    heads, tokens = jnp.arange(K)[:, None], lambda x: x[:, None]  # [R, 1, T]: each head by its number, see `appended`
    at = shards[:, None, None], heads, tokens(page), tokens(positions % U)
    return pool.at[at].set(new.swapaxes(1, 2).astype(pool.dtype), mode="drop")


def begun(
    pool: Float[Array, "D K P U H"],
    new: Float[Array, "R T K H"],
    shards: Int[Array, " R"],
    tables: Int[Array, "R J"],
    lengths: Int[Array, " R"],
) -> Float[Array, "D K P U H"]:
    """`filled` from position 0 on, in whole pages: what stands behind a row's tokens in its last one means nothing."""
    (K, P, U), (R, T) = pool.shape[1:4], new.shape[:2]
    pages = -(-T // U)
    new = jnp.pad(new.astype(pool.dtype), ((0, 0), (0, pages * U - T), (0, 0), (0, 0)))
    new = new.reshape(R, pages, U, K, -1).transpose(0, 3, 1, 2, 4)
    page = jnp.where(jnp.arange(pages) * U < lengths[:, None], tables[:, :pages], P)
    return pool.at[shards[:, None, None], jnp.arange(K)[:, None], page[:, None]].set(new, mode="drop")


def copied(
    pool: Float[Array, "D K P U H"], shards: Int[Array, " R"], sources: Int[Array, " R"], targets: Int[Array, " R"]
) -> Float[Array, "D K P U H"]:
    """The pool with page sources[r] copied to targets[r] within its shard; a target of P copies nothing."""
    return pool.at[shards, :, targets].set(pool[shards, :, jnp.minimum(sources, pool.shape[2] - 1)], mode="drop")


def constrained(cache: KVCache, layout: Layout | None) -> KVCache:
    """`cache` with its layout pinned inside a jitted program."""
    if layout is None:
        return cache
    return jax.tree.map(lambda leaf: layout.constrain(leaf, LOGICAL), cache)
