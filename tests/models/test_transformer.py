"""The decoder against a slow numpy one in Hugging Face's layout, and its entry points against one another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.models import cache, families, params, transformer

ONE = sharding.build(MeshConfig())
NANO = families.spec("nano")
VARIANTS = {
    "tied": NANO,
    "untied": dataclasses.replace(NANO, tied_embeddings=False),
    "no_qk_norm": dataclasses.replace(NANO, qk_norm=False),
    "one_kv_head": dataclasses.replace(NANO, kv_heads=1, layers=1),
    "theta_1e6": dataclasses.replace(NANO, rope_theta=1e6, norm_eps=1e-2, remat="layer"),
}


@functools.cache
def initialised(spec: families.ModelSpec) -> params.Params:
    """Parameters whose norms are no longer ones, so that a forgotten scale shows."""
    values = params.init(spec, jax.random.key(0), ONE, sharding.LEARNER)
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32) if name.endswith("norm") else leaf
        for name, leaf in values.items()
    }


# --- an independent decoder: one sequence, float64, torch's names and [out, in] weights, loops over heads


def numpy_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return scale * (x / np.sqrt((x**2).mean(-1, keepdims=True) + eps))


def numpy_rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Complex rotation of the pairs (i, i + H/2), rather than the half-swap that the model writes."""
    half = len(x) // 2
    angles = position / theta ** (2 * np.arange(half) / len(x))
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def numpy_attention(spec, weights: dict, prefix: str, x: np.ndarray) -> np.ndarray:
    H, T = spec.head_dim, len(x)
    q, k, v = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    out = np.zeros((T, spec.heads * H))
    for head in range(spec.heads):
        kv_head = head // (spec.heads // spec.kv_heads)
        queries, keys = q[:, head * H : (head + 1) * H], k[:, kv_head * H : (kv_head + 1) * H]
        if spec.qk_norm:
            queries = numpy_norm(queries, weights[f"{prefix}.q_norm.weight"], spec.norm_eps)
            keys = numpy_norm(keys, weights[f"{prefix}.k_norm.weight"], spec.norm_eps)
        queries = np.stack([numpy_rotated(row, t, spec.rope_theta) for t, row in enumerate(queries)])
        keys = np.stack([numpy_rotated(row, t, spec.rope_theta) for t, row in enumerate(keys)])
        for t in range(T):
            scores = keys[: t + 1] @ queries[t] / np.sqrt(H)
            shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            out[t, head * H : (head + 1) * H] = shares @ v[: t + 1, kv_head * H : (kv_head + 1) * H]
    return out @ weights[f"{prefix}.o_proj.weight"].T


def numpy_logits(spec, weights: dict, tokens: np.ndarray) -> np.ndarray:
    """float64 [T, V] of one sequence that starts at position 0."""
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(spec.layers):
        layer = f"model.layers.{index}"
        normed = numpy_norm(x, weights[f"{layer}.input_layernorm.weight"], spec.norm_eps)
        x = x + numpy_attention(spec, weights, f"{layer}.self_attn", normed)
        normed = numpy_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], spec.norm_eps)
        gate = normed @ weights[f"{layer}.mlp.gate_proj.weight"].T
        up = normed @ weights[f"{layer}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    x = numpy_norm(x, weights["model.norm.weight"], spec.norm_eps)
    head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
    return x @ weights[head].T


# --- the entry points, jitted


@functools.partial(jax.jit, static_argnums=0)
def forward_logits(spec, values, tokens, positions, segments):
    return transformer.logits(spec, values, transformer.forward(spec, values, tokens, positions, segments))


prefill = jax.jit(transformer.prefill, static_argnums=0)
extend = jax.jit(transformer.extend, static_argnums=0)
decode = jax.jit(transformer.decode, static_argnums=0)


def random_tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, size=(rows, length)).astype(np.int32)


def whole_rows(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tokens, np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape), np.ones_like(tokens)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_numpy_decoder(variant):
    spec = VARIANTS[variant]
    tokens = random_tokens(2, 11)
    got = forward_logits(spec, initialised(spec), *whole_rows(tokens))
    weights = params.exported(spec, initialised(spec))
    for row in range(2):
        np.testing.assert_allclose(got[row], numpy_logits(spec, weights, tokens[row]), atol=2e-5)


def scattered_tables(slots: int, pages: int) -> np.ndarray:
    """Tables with random pages; page 0 belongs to no row."""
    return np.random.default_rng(5).permutation(np.arange(1, slots * pages + 1)).reshape(slots, pages).astype(np.int32)


@pytest.mark.parametrize("variant", ["tied", pytest.param("one_kv_head", marks=pytest.mark.soak)])
def test_chunks_of_a_prompt_equal_forward(variant):
    """Three prompts in chunks of 4, 5 and the rest, each beginning wherever the one before ended within a page."""
    spec, values = VARIANTS[variant], initialised(VARIANTS[variant])
    tokens, ends = random_tokens(3, 16), np.array([16, 11, 14], np.int32)
    expected = forward_logits(spec, values, *whole_rows(tokens))
    held, tables, zeros = (
        cache.empty(spec, 1, 20, 3, ONE, sharding.SAMPLER),
        scattered_tables(3, 6),
        np.zeros(3, np.int32),
    )
    for start, width in ((0, 4), (4, 5), (9, 7)):
        starts = np.full(3, start, np.int32)
        lengths = np.minimum(ends - start, width)
        logits, held = extend(
            spec, values, held, tokens[:, start : start + width], transformer.Pages(zeros, tables, starts), lengths
        )
        np.testing.assert_allclose(logits, expected[np.arange(3), start + lengths - 1], atol=1e-4)


@pytest.mark.parametrize("variant", ["tied", pytest.param("one_kv_head", marks=pytest.mark.soak)])
def test_prefill_then_decode_equals_forward(variant):
    spec, values = VARIANTS[variant], initialised(VARIANTS[variant])
    tokens, lengths, length = random_tokens(4, 14), jnp.array([5, 1, 8, 3], jnp.int32), 14
    expected = forward_logits(spec, values, *whole_rows(tokens))
    padded = np.where(np.arange(8)[None] < lengths[:, None], tokens[:, :8], 63)
    logits, keys, values_ = prefill(spec, values, padded, lengths)
    np.testing.assert_allclose(logits, expected[np.arange(4), lengths - 1], atol=1e-4)
    slots, tables = np.array([2, 5, 0, 3], np.int32), scattered_tables(6, 3)
    zeros = jnp.zeros(4, jnp.int32)
    held = cache.empty(spec, 1, 20, 5, ONE, sharding.SAMPLER)
    fill = lambda pools, new: tuple(  # noqa: E731
        cache.filled(pool, one, zeros, jnp.asarray(tables[slots]), zeros, lengths)
        for pool, one in zip(pools, new, strict=True)
    )
    held = cache.KVCache(fill(held.keys, keys), fill(held.values, values_))
    for step in range(length - int(lengths.max())):
        positions = np.full(6, -1, np.int32)
        positions[slots] = lengths + step
        fed = np.zeros(6, np.int32)
        fed[slots] = tokens[np.arange(4), lengths + step]
        logits, held = decode(spec, values, held, fed, positions, tables)
        np.testing.assert_allclose(logits[slots], expected[np.arange(4), lengths + step], atol=1e-4)


def test_gradients_equal_finite_differences_of_the_numpy_decoder():
    """Along a random direction in each parameter: (L(w + εd) − L(w − εd)) / 2ε in float64 against ⟨∇L, d⟩."""
    spec, tokens = VARIANTS["untied"], random_tokens(1, 7)
    values = {name: np.asarray(leaf) for name, leaf in initialised(spec).items()}
    weigh = np.random.default_rng(1).normal(size=(7, 64)).astype(np.float32)
    gradients = jax.jit(jax.grad(lambda w: jnp.sum(weigh * forward_logits(spec, w, *whole_rows(tokens))[0])))(values)
    rng, step = np.random.default_rng(2), 1e-4

    def loss(moved: dict) -> float:
        return float(np.sum(weigh * numpy_logits(spec, params.exported(spec, moved), tokens[0])))

    for name, leaf in values.items():
        direction = rng.normal(size=leaf.shape)
        ahead, behind = (loss({**values, name: leaf.astype(np.float64) + s * direction}) for s in (step, -step))
        along = float(np.sum(np.asarray(gradients[name], np.float64) * direction))
        scale = float(np.linalg.norm(gradients[name])) * np.sqrt(leaf.size)
        np.testing.assert_allclose((ahead - behind) / (2 * step), along, atol=1e-4 * scale, err_msg=name)


def test_packed_segments_do_not_see_one_another():
    values = initialised(NANO)
    first, second, third = (random_tokens(1, n, seed)[0] for n, seed in ((5, 1), (7, 2), (3, 3)))
    row = np.concatenate([first, second, third, np.full(3, 9)])[None].astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (5, 7, 3, 3)])[None].astype(np.int32)
    segments = np.repeat([1, 2, 3, 0], [5, 7, 3, 3])[None].astype(np.int32)
    packed = forward_logits(NANO, values, row, positions, segments)[0]
    weights = params.exported(NANO, values)
    for part, start in ((first, 0), (second, 5), (third, 12)):
        np.testing.assert_allclose(packed[start : start + len(part)], numpy_logits(NANO, weights, part), atol=2e-5)
    assert np.isfinite(packed).all()
    other = np.where(segments == 2, row, (row + 17) % 64)
    again = forward_logits(NANO, values, other, positions, segments)[0]
    np.testing.assert_array_equal(again[5:12], packed[5:12])


def test_padding_gives_no_gradient_to_anything():
    values = initialised(NANO)
    tokens, positions, segments = (jnp.asarray(x) for x in whole_rows(random_tokens(1, 8)))
    segments = segments.at[:, 5:].set(0)

    @jax.jit
    @jax.grad
    def gradients(values, tokens):
        hidden = transformer.forward(NANO, values, tokens, positions, segments)
        return jnp.sum(hidden * (segments > 0)[..., None])

    gradient = gradients(values, tokens)
    changed = gradients(values, jnp.where(segments > 0, tokens, (tokens + 1) % 64))
    assert all(np.isfinite(leaf).all() for leaf in gradient.values())
    for name in gradient:
        np.testing.assert_array_equal(gradient[name], changed[name])


def random_cache(pages: int, page_tokens: int, seed: int) -> cache.KVCache:
    rng, shape = np.random.default_rng(seed), (1, NANO.kv_heads, pages, page_tokens, NANO.head_dim)
    pools = lambda: tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(NANO.layers))  # noqa: E731
    return cache.KVCache(pools(), pools())


def test_a_slots_result_is_bitwise_independent_of_its_slot_pages_and_neighbours():
    values, held = initialised(NANO), random_cache(64, 4, 4)
    S, rng = 16, np.random.default_rng(4)
    tables = rng.permutation(64)[: S * 3].reshape(S, 3).astype(np.int32)
    tokens, positions = random_tokens(1, S)[0], rng.integers(0, 12, S).astype(np.int32)
    here, _ = decode(NANO, values, held, tokens, positions, tables)
    order, places = rng.permutation(S), rng.permutation(64)
    moved = jax.tree.map(lambda pool: pool[:, :, np.argsort(places)], held)
    there, _ = decode(NANO, values, moved, tokens[order], positions[order], places[tables][order].astype(np.int32))
    np.testing.assert_array_equal(np.asarray(here)[order], there)
    short = np.where(positions < 4, positions, -1).astype(np.int32)
    alone, _ = decode(NANO, values, held, tokens, short, tables)
    assert (positions < 4).any() and (positions >= 8).any()
    np.testing.assert_array_equal(np.asarray(here)[positions < 4], np.asarray(alone)[positions < 4])


def test_decode_looks_at_nothing_beyond_its_position_and_writes_only_there():
    values, held = initialised(NANO), random_cache(4, 4, 1)
    tables, positions = np.array([[2, 0], [3, 1], [1, 3]], np.int32), np.array([3, 8, -1], np.int32)
    tokens = np.array([5, 6, 7], np.int32)  # 8 is beyond the table, -1 marks an empty slot
    logits, after = decode(NANO, values, held, tokens, positions, tables)
    stale = jax.tree.map(lambda pool: pool.at[:, :, [0, 1, 3]].set(50.0), held)
    again, _ = decode(NANO, values, stale, tokens, positions, tables)
    np.testing.assert_array_equal(logits[0], again[0])
    for before, pool in zip(held.keys, after.keys, strict=True):
        changed = np.asarray(pool != before).any(axis=(0, 1, 4))  # [page, token]
        assert np.argwhere(changed).tolist() == [[2, 3]]


def test_bfloat16_computes_in_bfloat16_and_scores_in_float32():
    spec = dataclasses.replace(NANO, compute_dtype="bfloat16")
    values, tokens = initialised(NANO), random_tokens(2, 9)
    hidden = jax.jit(transformer.forward, static_argnums=0)(spec, values, *whole_rows(tokens))
    logits = forward_logits(spec, values, *whole_rows(tokens))
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    exact = forward_logits(NANO, values, *whole_rows(tokens))
    assert 0 < np.abs(logits - exact).max() < 0.1
    _, keys, _ = prefill(spec, values, tokens, np.array([9, 4], np.int32))
    assert keys[0].dtype == cache.empty(spec, 1, 2, 9, ONE, sharding.SAMPLER).keys[0].dtype == jnp.bfloat16
