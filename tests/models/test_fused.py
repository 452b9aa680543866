"""The decoder with attention by fused kernels, interpreted on the CPU, against the decoder with the XLA forms."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.kernels import placed
from jaxroll.models import cache, families, params, transformer
from jaxroll.sharding import Layout

SPEC = dataclasses.replace(families.spec("nano"), layers=1)
LAYOUT = Layout(sharding.build(MeshConfig(data=2, tensor=2)), sharding.SAMPLER)
S, P, U, J = 6, 12, 8, 3  # slots, pages of a shard, tokens of a page, pages of a table


@pytest.fixture(scope="module")
def values() -> params.Params:
    rng, lie = np.random.default_rng(3), params.shardings(SPEC, LAYOUT.mesh, sharding.SAMPLER)
    made = {name: 0.2 * rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in params.abstract(SPEC).items()}
    return jax.device_put(made, lie)


def test_packed_rows(values: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed, "_row_kernel", lambda name: partial(placed.splash, interpret=True))
    rng = np.random.default_rng(0)
    segments = np.array([np.repeat([1, 2, 0], [60, 50, 20]), np.repeat([3, 4, 5], [10, 60, 60])], np.int32)
    tokens = rng.integers(0, SPEC.vocab_size, segments.shape).astype(np.int32)
    positions = np.stack([np.arange(130)] * 2).astype(np.int32)
    hidden = {
        name: jax.jit(partial(transformer.forward, SPEC, layout=LAYOUT, attention=name))(
            values, tokens, positions, segments
        )
        for name in ("splash", "xla")
    }
    told = segments > 0
    np.testing.assert_allclose(np.asarray(hidden["splash"])[told], np.asarray(hidden["xla"])[told], atol=2e-5)


def test_a_decode_step_over_the_cache(values: params.Params) -> None:
    """Slots of both shards, some idle; the cache is written alike to the bit, before the kernel reads it."""
    rng = np.random.default_rng(1)
    like = cache.abstract(SPEC, 2, P, U, LAYOUT.mesh, sharding.SAMPLER)
    held = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding), like
    )
    tables = np.stack([rng.permutation(P)[:9].reshape(3, J) for _ in range(2)]).reshape(S, J).astype(np.int32)
    tokens = rng.integers(0, SPEC.vocab_size, S).astype(np.int32)
    positions = np.array([5, -1, 23, 0, 8, -1], np.int32)

    def step(name: str) -> tuple[jax.Array, cache.KVCache]:
        decode = partial(transformer.decode, SPEC, layout=LAYOUT, attention=name)
        return jax.jit(decode)(values, held, tokens, positions, tables)

    with pltpu.force_tpu_interpret_mode():
        fused, written = step("pallas")
    plain, expected = step("xla")
    runs = positions >= 0
    np.testing.assert_allclose(np.asarray(fused)[runs], np.asarray(plain)[runs], atol=0.02)  # bfloat16 in the kernel
    jax.tree.map(np.testing.assert_array_equal, written, expected)


def test_prompts(values: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed, "_row_kernel", lambda name: partial(placed.splash, interpret=True))
    rng = np.random.default_rng(2)
    prompts, lengths = rng.integers(0, SPEC.vocab_size, (2, 20)).astype(np.int32), np.array([20, 7], np.int32)
    got, expected = (
        jax.jit(partial(transformer.prefill, SPEC, layout=LAYOUT, attention=name))(values, prompts, lengths)
        for name in ("splash", "xla")
    )
    np.testing.assert_allclose(got[0], expected[0], atol=2e-5)


def test_more_tokens_of_a_prompt(values: params.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind pages of one shard, with heads on two devices; the cache is written alike to the bit."""
    monkeypatch.setattr(placed, "splash_behind", partial(placed.splash_behind, interpret=True))
    layout, rng = Layout(sharding.build(MeshConfig(tensor=2)), sharding.SAMPLER), np.random.default_rng(4)
    own = jax.device_put(values, params.shardings(SPEC, layout.mesh, sharding.SAMPLER))
    like = cache.abstract(SPEC, 1, P, U, layout.mesh, sharding.SAMPLER)
    held = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding), like
    )
    tables = rng.permutation(P)[: 2 * J].reshape(2, J).astype(np.int32)
    tokens, lengths = rng.integers(0, SPEC.vocab_size, (2, 10)).astype(np.int32), np.array([10, 4], np.int32)
    pages = transformer.Pages(np.zeros(2, np.int32), tables, np.array([13, 8], np.int32))

    def extended(name: str) -> tuple[jax.Array, cache.KVCache]:
        extend = partial(transformer.extend, SPEC, layout=layout, attention=name)
        return jax.jit(extend)(own, held, tokens, pages, lengths)

    (fused, written), (plain, expected) = extended("splash"), extended("xla")
    np.testing.assert_allclose(fused, plain, atol=2e-5)
    jax.tree.map(np.testing.assert_array_equal, written, expected)
    assert "pallas" in str(
        jax.make_jaxpr(partial(transformer.extend, SPEC, layout=layout, attention="splash"))(
            own, held, tokens, pages, lengths
        )
    ) and "pallas" not in str(
        jax.make_jaxpr(partial(transformer.extend, SPEC, layout=layout, attention="xla"))(
            own, held, tokens, pages, lengths
        )
    )
