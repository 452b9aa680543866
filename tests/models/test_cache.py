"""The cache: where insert writes, what it drops, where it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.models import cache, families
from jaxroll.sharding import meshes, rules

NANO = families.spec("nano")
MESH = meshes.build(MeshConfig(data=2, fsdp=1, tensor=2))


def rows(count: int, tokens: int, seed: int) -> jax.Array:
    shape = (NANO.layers, count, tokens, NANO.kv_heads, NANO.head_dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_rows_go_to_their_slots_and_the_index_past_the_end_drops_them():
    before = cache.KVCache(rows(5, 9, 0), rows(5, 9, 1))
    keys, values = rows(4, 6, 2), rows(4, 6, 3)
    after = jax.jit(cache.insert)(before, keys, values, jnp.array([3, 5, 0, 5]))
    for old, new, written in ((before.keys, after.keys, keys), (before.values, after.values, values)):
        expected = np.asarray(old).copy()
        expected[:, 3, :6], expected[:, 0, :6] = written[:, 0], written[:, 2]
        np.testing.assert_array_equal(new, expected)


def test_a_prefill_longer_than_the_cache_is_refused():
    with pytest.raises(ValueError, match="10 tokens does not fit a cache of 9 tokens"):
        cache.insert(cache.KVCache(rows(5, 9, 0), rows(5, 9, 1)), rows(1, 10, 2), rows(1, 10, 3), jnp.array([0]))


def test_an_empty_cache_is_split_over_slots_and_heads():
    held = cache.empty(NANO, 8, 16, MESH, rules.SAMPLER)
    assert held.keys.shape == held.values.shape == (2, 8, 16, 2, 8)
    assert held.keys.addressable_shards[0].data.shape == (2, 4, 16, 1, 8)
    assert not held.keys.any()
    assert cache.abstract(NANO, 8, 16, MESH, rules.SAMPLER).keys.sharding == held.keys.sharding


def test_slots_that_the_mesh_does_not_divide_stay_whole():
    assert cache.empty(NANO, 5, 4, MESH, rules.SAMPLER).keys.addressable_shards[0].data.shape == (2, 5, 4, 1, 8)
