"""The key-value cache of the slots: two arrays, written by prefill's insert and by every decode step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxroll.models.families import ModelSpec
from jaxroll.sharding.rules import Rules, sharding

LOGICAL = ("layers", "slots", "tokens", "kv_heads", "head_dim")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of every slot, in the compute dtype. Never read beyond a slot's position."""

    keys: Float[Array, "L S T K H"]
    values: Float[Array, "L S T K H"]


def abstract(spec: ModelSpec, slots: int, max_tokens: int, mesh: Mesh, rules: Rules) -> KVCache:
    """The cache as ShapeDtypeStructs with shardings: for compiling ahead of time and for sizing."""
    shape = (spec.layers, slots, max_tokens, spec.kv_heads, spec.head_dim)
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(spec.compute_dtype), sharding=sharding(mesh, LOGICAL, rules, shape))
    return KVCache(leaf, leaf)  # pyright: ignore[reportArgumentType]  (abstract leaves stand in for arrays)


def empty(spec: ModelSpec, slots: int, max_tokens: int, mesh: Mesh, rules: Rules) -> KVCache:
    """A cache of zeros, sharded at birth."""
    like = abstract(spec, slots, max_tokens, mesh, rules)
    shards = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), out_shardings=shards)()


def insert(
    cache: KVCache, keys: Float[Array, "L P U K H"], values: Float[Array, "L P U K H"], slots: Int[Array, " P"]
) -> KVCache:
    """The cache with row i of a prefill in slot slots[i], positions 0..U-1; an index of S drops its row.

    U may be smaller than the cache's length: what lies behind is stale, and no decode step looks there.
    """
    prompt_tokens, max_tokens = keys.shape[2], cache.keys.shape[2]
    if prompt_tokens > max_tokens:
        raise ValueError(f"a prefill of {prompt_tokens} tokens does not fit a cache of {max_tokens} tokens a slot")
    write = lambda old, new: old.at[:, slots, :prompt_tokens].set(new.astype(old.dtype), mode="drop")  # noqa: E731
    return KVCache(write(cache.keys, keys), write(cache.values, values))
