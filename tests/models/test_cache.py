"""The cache: where tokens are written, what is dropped, where pages lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.models import cache, families

NANO = families.spec("nano")
MESH = sharding.build(MeshConfig(data=2, fsdp=1, tensor=2))
D, K, P, U, H = 2, 2, 5, 3, 4


def pool(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(D, K, P, U, H)), jnp.float32)


def test_rows_go_to_the_pages_of_their_tables_and_nowhere_else():
    before, new = pool(0), jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, K, H)), jnp.float32)
    shards, tables = np.array([1, 0, 1]), np.array([[4, 2], [0, 3], [1, 1]])
    starts, lengths = np.array([1, 0, 0]), np.array([4, 3, 0])  # the last row is a dummy
    after = jax.jit(cache.filled)(before, new, shards, tables, starts, lengths)
    expected = np.asarray(before).copy()
    for row in range(3):
        for t in range(lengths[row]):
            page, offset = divmod(starts[row] + t, U)
            expected[shards[row], :, tables[row, page], offset] = new[row, t]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("tokens", [1, 3, 4, 6])
def test_fresh_prompts_go_to_their_pages_and_nothing_to_others(tokens):
    before, new = pool(0), jnp.asarray(np.random.default_rng(1).normal(size=(3, tokens, K, H)), jnp.float32)
    shards, tables = np.array([1, 0, 1]), np.array([[4, 2], [0, 3], [1, 1]])
    lengths = np.array([tokens, max(1, tokens - 2), 0])  # the last row is a dummy
    after = np.asarray(jax.jit(cache.begun)(before, new, shards, tables, lengths))
    untouched = np.ones((D, P), bool)
    for row in range(3):
        for t in range(lengths[row]):
            page, offset = divmod(t, U)
            np.testing.assert_array_equal(after[shards[row], :, tables[row, page], offset], new[row, t])
            untouched[shards[row], tables[row, page]] = False
    assert np.isfinite(after).all()
    for shard, page in np.argwhere(untouched):
        np.testing.assert_array_equal(after[shard, :, page], before[shard, :, page])


def test_a_token_is_appended_at_its_position_and_outside_the_table_dropped():
    before, new = pool(2)[0], jnp.asarray(np.random.default_rng(3).normal(size=(4, K, H)), jnp.float32)
    tables, positions = np.array([[4, 2], [0, 3], [1, 1], [1, 1]]), np.array([2, 4, 6, -1])
    after = jax.jit(cache.appended)(before, new, tables, positions)
    expected = np.asarray(before).copy()
    expected[:, 4, 2], expected[:, 3, 1] = new[0], new[1]
    np.testing.assert_array_equal(after, expected)


def test_pages_are_copied_within_their_shard_and_the_page_past_the_end_is_not_written():
    before = pool(4)
    after = jax.jit(cache.copied)(before, np.array([1, 0, 1]), np.array([0, 2, 1]), np.array([3, P, 4]))
    expected = np.asarray(before).copy()
    expected[1, :, 3], expected[1, :, 4] = before[1, :, 0], before[1, :, 1]
    np.testing.assert_array_equal(after, expected)


def test_an_empty_cache_is_split_over_shards_of_slots_and_heads():
    held = cache.empty(NANO, 2, 8, 16, MESH, sharding.SAMPLER)
    assert len(held.keys) == len(held.values) == NANO.layers
    assert held.keys[0].shape == (2, 2, 8, 16, 8) and (held.shards, held.page_tokens) == (2, 16)
    assert held.keys[0].addressable_shards[0].data.shape == (1, 1, 8, 16, 8)
    assert not held.keys[0].any()
    assert cache.abstract(NANO, 2, 8, 16, MESH, sharding.SAMPLER).keys[0].sharding == held.keys[0].sharding


def test_slots_that_the_mesh_does_not_divide_are_one_shard():
    assert [cache.shards_of(slots, MESH, sharding.SAMPLER) for slots in (8, 5)] == [2, 1]
    assert cache.empty(NANO, 1, 5, 4, MESH, sharding.SAMPLER).keys[0].addressable_shards[0].data.shape == (
        1,
        1,
        5,
        4,
        8,
    )
