"""Slots side by side: laid out from their pages when a request takes them, and decoded to the logits of the pages."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding as layouts
from jaxroll.config import MeshConfig
from jaxroll.models import cache as dense
from jaxroll.models import cache as kv
from jaxroll.models import families, params, transformer
from jaxroll.sharding import Layout

SPEC = families.spec("nano")
SLOTS, PAGE, TABLE = 12, 8, 10  # 80 tokens a slot: two levels


MESHES = {"one device": MeshConfig(), "data=2,tensor=2": MeshConfig(data=2, tensor=2)}


@pytest.fixture(params=MESHES.values(), ids=MESHES)
def layout(request) -> Layout:
    return Layout(layouts.build(request.param), layouts.SAMPLER)


def pools(shards: int, seed: int = 0) -> kv.KVCache:
    rng, own = np.random.default_rng(seed), SLOTS // shards
    shape = (shards, SPEC.kv_heads, own * TABLE, PAGE, SPEC.head_dim)
    made = lambda: tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(SPEC.layers))  # noqa: E731
    return kv.KVCache(made(), made())


def tables(shards: int) -> np.ndarray:
    rng, own = np.random.default_rng(1), SLOTS // shards
    return np.stack([rng.permutation(own * TABLE).reshape(own, TABLE) for _ in range(shards)]).astype(np.int32)


def side(layout: Layout, shards: int) -> dense.ContiguousCache:
    """Everything stale, and full of what must not be seen."""
    like = dense.abstract_contiguous(SPEC, shards, SLOTS, TABLE * PAGE, PAGE, layout.mesh, layout.rules)
    full = lambda leaf: jnp.full(leaf.shape, jnp.nan if leaf.dtype == jnp.float32 else True, leaf.dtype)  # noqa: E731
    return jax.tree.map(lambda leaf: jax.device_put(full(leaf), leaf.sharding), like)


def in_pages(pool: np.ndarray, tables: np.ndarray, shard: int, slot: int, tokens: int) -> np.ndarray:
    """[K, tokens, H]: what the pages of a slot hold, one after the other."""
    pages = pool[shard, :, tables[shard, slot]]  # [J, K, U, H]
    return pages.transpose(1, 0, 2, 3).reshape(SPEC.kv_heads, -1, SPEC.head_dim)[:, :tokens]


def test_stale_slots_are_laid_out_from_their_pages_and_no_others(layout: Layout) -> None:
    shards = layout.mesh.shape["data"]
    cache, table, own = pools(shards), tables(shards), SLOTS // layout.mesh.shape["data"]
    positions = np.random.default_rng(2).integers(0, TABLE * PAGE, (shards, own)).astype(np.int32)
    positions[:, 1] = -1  # idle: left as it is
    laid = jax.jit(dense.refreshed)(side(layout, shards), cache, table, positions)
    assert np.asarray(laid.stale).tolist() == [[slot == 1 for slot in range(own)]] * shards
    for layer in range(SPEC.layers):
        keys = np.concatenate([np.asarray(level) for level in laid.keys[layer]], axis=4).swapaxes(3, 4)
        values = np.concatenate([np.asarray(level) for level in laid.values[layer]], axis=3)
        for shard, slot in np.ndindex(shards, own):
            if slot == 1:
                assert np.isnan(values[shard, slot]).all()
                continue
            known = int(positions[shard, slot])
            for got, pool in ((keys, cache.keys[layer]), (values, cache.values[layer])):
                wanted = in_pages(np.asarray(pool), table, shard, slot, known)
                np.testing.assert_array_equal(got[shard, slot, :, :known], wanted)
                assert not got[shard, slot, :, known:].any()


def test_a_slot_is_laid_out_again_only_when_a_request_takes_it(layout: Layout) -> None:
    shards = layout.mesh.shape["data"]
    own = SLOTS // shards
    table, positions = tables(shards), np.full((shards, own), 20, np.int32)
    refreshed, taken = jax.jit(dense.refreshed), jax.jit(dense.taken)
    first = refreshed(side(layout, shards), pools(shards, 0), table, positions)
    again = refreshed(taken(first, np.array([SLOTS - 1, SLOTS, 2], np.int32)), pools(shards, 9), table, positions)
    changed = (np.asarray(again.values[0][0]) != np.asarray(first.values[0][0])).any(axis=(2, 3, 4)).reshape(-1)
    assert np.flatnonzero(changed).tolist() == [2, SLOTS - 1]
    assert not np.asarray(again.stale).any()


@pytest.mark.parametrize(
    "layout",
    [pytest.param(mesh, id=name, marks=[pytest.mark.soak] * (name == "one device")) for name, mesh in MESHES.items()],
    indirect=True,
)
def test_decoding_gives_the_logits_of_the_loop_over_pages_and_writes_both(layout: Layout) -> None:
    shards = layout.mesh.shape["data"]
    own = SLOTS // shards
    weights = params.init(SPEC, jax.random.key(0), layout.mesh, layout.rules)
    table = tables(shards)
    tokens = np.arange(SLOTS, dtype=np.int32)
    positions = np.array([0, 5, 63, 64, 71, 30, -1, 8, 66, 62, 7, 40], np.int32)
    paged = jax.jit(partial(transformer.decode, SPEC, layout=layout))
    beside = jax.jit(partial(transformer.decode_contiguous, SPEC, layout=layout))
    cache = one = pools(shards)
    laid = jax.jit(dense.refreshed)(side(layout, shards), cache, table, positions.reshape(shards, own))
    flat, running = table.reshape(SLOTS, TABLE), positions >= 0
    for step in range(4):  # across the border between two levels
        where = np.where(running, positions + step, -1).astype(np.int32)
        wanted, one = paged(weights, one, tokens, where, flat)
        got, cache, laid = beside(weights, cache, laid, tokens, where, flat, where.max())
        np.testing.assert_allclose(np.asarray(got)[running], np.asarray(wanted)[running], atol=2e-5)
        tokens = np.argmax(np.asarray(wanted), axis=1).astype(np.int32)
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=2e-5)
