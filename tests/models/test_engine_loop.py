"""The programs of an engine with layers in a loop: those of single layers in every family, and of constant size."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.models import cache, families, params, transformer
from jaxroll.models.families import ModelSpec
from tests.golden.write_families import VARIANTS
from tests.models.test_family_goldens import continued, golden

ONE = sharding.build(MeshConfig())
STEPS = 5
QUICK = ("llama",)  # gemma3_text has windows in a pattern with a rest


@functools.partial(jax.jit, static_argnums=0)
def generated(spec: ModelSpec, values: params.Params, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Greedy tokens after two prompts, which are computed in two parts, and all log-probs on the way.

    The second prompt is shorter, and the pages of both are in disorder.
    """
    values = params.held(spec, values, None)
    tables = jnp.array([[3, 0, 5, 8, 2, 9, 7, 1], [4, 6, 10, 12, 15, 14, 13, 11]])
    zeros, lengths = jnp.zeros(2, jnp.int32), jnp.array([11, 8])
    fill = functools.partial(cache.begun, shards=zeros, lengths=lengths)
    like = cache.abstract(spec, 1, 16, 4, ONE, sharding.SAMPLER, experts=spec.experts > 0)
    held = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    def keep(held: cache.KVCache, layer, window, k, v) -> cache.KVCache:
        keys, new, first, _ = held.of(layer, window)
        put = functools.partial(fill, tables=held.tables(window, tables) + first, ring=held.ring_of(window))
        return held.with_layer(layer, window, put(keys, k), put(new, v))

    first, held, _ = transformer.prefill_into(spec, values, held, keep, tokens[:, :11], lengths)
    chunk = jnp.stack([tokens[0, 11:18], tokens[1, 8:15]])
    after, held = transformer.extend(spec, values, held, chunk, transformer.Pages(zeros, tables, lengths), zeros + 7)

    def step(carry, number):
        held, logits = carry
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        logits, held = transformer.decode(spec, values, held, token, lengths + 7 + number, tables)
        return (held, logits), (token, logits)

    (held, _), (drawn, logits) = jax.lax.scan(step, (held, after), jnp.arange(STEPS))
    seen = jax.nn.log_softmax(jnp.stack([first, after, *logits]))
    return drawn, seen if held.experts is None else (seen, held.experts)


@pytest.mark.parametrize(
    "variant", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in VARIANTS]
)
def test_tokens_and_log_probs_are_those_of_single_layers(variant: str) -> None:
    spec, values, expected = golden(variant)
    tokens = jnp.asarray(continued(expected)[:, :18])
    (wanted, seen), (drawn, found) = (
        generated(dataclasses.replace(spec, scan=scan), values, tokens) for scan in (False, True)
    )
    np.testing.assert_array_equal(drawn, wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(seen), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def decode_step(layers: int, *, scan: bool, pages: int = 32) -> jax.stages.Lowered:
    """A decode step of eight slots, whose cache is donated."""
    spec = dataclasses.replace(families.spec("nano", vocab_size=24), layers=layers, scan=scan)
    held = cache.abstract(spec, 1, pages, 4, ONE, sharding.SAMPLER)
    values = jax.eval_shape(functools.partial(params.held, spec, layout=None), params.served(spec))
    slots = jax.ShapeDtypeStruct((8,), np.int32)
    step = jax.jit(functools.partial(transformer.decode, spec), donate_argnums=1)
    return step.lower(values, held, slots, slots, jax.ShapeDtypeStruct((8, 4), np.int32))


@pytest.mark.soak
def test_a_decode_step_does_not_grow_with_the_number_of_layers() -> None:
    few, many = (decode_step(layers, scan=True).as_text().count("stablehlo.") for layers in (2, 6))
    assert few == many < decode_step(6, scan=False).as_text().count("stablehlo.")


def test_a_loop_updates_the_pool_in_place() -> None:
    """The pool is the donated one, and temporary memory does not grow with it."""

    def sizes(pages: int) -> tuple[int, int, int]:
        found = decode_step(3, scan=True, pages=pages).compile().memory_analysis()
        assert found is not None
        pool = 2 * 3 * pages * 4 * 2 * 8 * 4  # keys and values, layers, pages, tokens, heads, numbers, bytes
        return found.temp_size_in_bytes, found.alias_size_in_bytes, pool

    (small, _, few), (large, alias, pool) = sizes(32), sizes(4096)
    assert alias >= pool > 100 * few and large - small < 0.01 * pool
