"""On data×fsdp×tensor = 2×2×2 the loss, its gradients and a decode step are those of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding as layouts
from jaxroll.algorithms.sampling import token_logprobs
from jaxroll.config import MeshConfig
from jaxroll.models import cache, families, params, transformer
from jaxroll.sharding import Layout

ONE, CUBE = MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)
ROWS, TOKENS = 8, 24


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, size=(ROWS, TOKENS)).astype(np.int32)
    segments = np.tile(np.repeat([1, 2, 0], [10, 11, 3]).astype(np.int32), (ROWS, 1))
    positions = np.tile(np.concatenate([np.arange(10), np.arange(11), np.arange(3)]).astype(np.int32), (ROWS, 1))
    return tokens, positions, segments


def loss_and_gradients(spec, mesh_config: MeshConfig, pinned: str):
    mesh = layouts.build(mesh_config)
    layout = Layout(mesh, layouts.LEARNER) if pinned == "pinned" else None
    placed = jax.NamedSharding(mesh, layouts.batch_spec(layouts.LEARNER))
    weights = params.shardings(spec, mesh, layouts.LEARNER)

    def loss(values, tokens, positions, segments):
        hidden = transformer.forward(spec, values, tokens, positions, segments, layout=layout)
        logprobs = token_logprobs(transformer.logits(spec, values, hidden[:, :-1]), tokens[:, 1:], 1.0)
        trained = (segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])
        return -jnp.sum(logprobs * trained) / jnp.sum(trained)

    step = jax.jit(
        jax.value_and_grad(loss), in_shardings=(weights, placed, placed, placed), out_shardings=(None, weights)
    )
    return step(params.init(spec, jax.random.key(0), mesh, layouts.LEARNER), *batch())


@functools.cache
def alone():
    return loss_and_gradients(families.spec("nano"), ONE, "propagated")


@pytest.mark.parametrize(("pinned", "remat"), [("propagated", "none"), ("pinned", "layer")])
def test_loss_and_gradients_equal_one_device(pinned, remat):
    spec = dataclasses.replace(families.spec("nano"), remat=remat)
    expected_loss, expected = alone()
    loss, gradients = loss_and_gradients(spec, CUBE, pinned)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name in expected:
        np.testing.assert_allclose(gradients[name], expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("config", [CUBE, pytest.param(MeshConfig(tensor=8), marks=pytest.mark.soak)])
def test_a_decode_step_equals_one_device(config):
    """tensor=8 divides neither the heads nor the key-value heads: they stay whole, and the answer stays right."""
    spec = families.spec("nano")
    rng = np.random.default_rng(1)
    some = lambda *shape, below=64: jnp.asarray(rng.integers(0, below, shape), jnp.int32)  # noqa: E731
    tokens, positions, prompts = some(8), some(8, below=12), some(4, 6)
    lengths, slots, starts = jnp.full(4, 6, jnp.int32), jnp.arange(4, dtype=jnp.int32) * 2, jnp.zeros(4, jnp.int32)

    def run(mesh_config: MeshConfig):
        mesh = layouts.build(mesh_config)
        layout = Layout(mesh, layouts.SAMPLER)
        values = params.init(spec, jax.random.key(0), mesh, layouts.SAMPLER)
        shards = cache.shards_of(8, mesh, layouts.SAMPLER)
        tables = jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % (16 // shards)  # two pages of six tokens a slot
        held = cache.empty(spec, shards, 16 // shards, 6, mesh, layouts.SAMPLER)

        @jax.jit
        def steps(values, held):
            _, keys, held_values = transformer.prefill(spec, values, prompts, lengths, layout=layout)
            fill = lambda pools, new: tuple(  # noqa: E731
                cache.filled(pool, one, slots * shards // 8, tables[slots], starts, lengths)
                for pool, one in zip(pools, new, strict=True)
            )
            filled = cache.KVCache(fill(held.keys, keys), fill(held.values, held_values))
            return transformer.decode(spec, values, filled, tokens, positions, tables, layout=layout)

        return steps(values, held)

    (alone, alone_cache), (spread, spread_cache) = run(ONE), run(config)
    np.testing.assert_allclose(spread, alone, atol=1e-5)
    in_a_row = lambda pool: np.asarray(pool).swapaxes(1, 2).reshape(16, *pool.shape[1:2], *pool.shape[3:])  # noqa: E731
    for spread_keys, alone_keys in zip(spread_cache.keys, alone_cache.keys, strict=True):
        np.testing.assert_allclose(in_a_row(spread_keys), in_a_row(alone_keys), atol=1e-5)
