"""The XLA form of attention against the one that loops, in value and gradient."""

import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.kernels import attention, placed


def problem(dtype=jnp.float32, *, rows=2, queries=5, keys=7, heads=4, kv_heads=2, head_dim=8):
    rng = np.random.default_rng(0)
    shapes = [(rows, queries, heads, head_dim), (rows, keys, kv_heads, head_dim), (rows, keys, kv_heads, head_dim)]
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    mask = jnp.asarray(rng.random((rows, queries, keys)) < 0.6).at[:, :, 0].set(True)
    return q, k, v, mask


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_the_reference(kv_heads):
    q, k, v, mask = problem(kv_heads=kv_heads)
    np.testing.assert_allclose(attention.grouped(q, k, v, mask), attention.reference(q, k, v, mask), atol=2e-6)


@pytest.mark.parametrize("argument", range(4))
def test_an_array_of_another_shape_or_type_than_its_annotation_is_refused(argument):
    """The tests check the annotations of every function with arrays, at every call (tests/harness/shapes.py)."""
    pytest.importorskip("beartype", reason="without it nothing is checked")
    given = list(problem())
    given[argument] = given[argument][..., None]
    with pytest.raises(jaxtyping.TypeCheckError, match="grouped"):
        attention.grouped(*given)
    given = list(problem())
    given[argument] = np.asarray(given[argument])
    with pytest.raises(jaxtyping.TypeCheckError, match="grouped"):
        attention.grouped(*given)


def test_one_mask_may_serve_all_rows():
    q, k, v, mask = problem()
    once = attention.grouped(q, k, v, mask[:1])
    np.testing.assert_allclose(once, attention.reference(q, k, v, jnp.repeat(mask[:1], 2, axis=0)), atol=2e-6)


def test_gradients_equal_the_reference():
    q, k, v, mask = problem(rows=1, queries=3, keys=3)

    def loss(attend):
        return jax.grad(lambda *x: jnp.sum(attend(*x, mask) ** 2), argnums=(0, 1, 2))(q, k, v)

    for got, expected in zip(loss(attention.grouped), loss(attention.reference), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("implementation", [attention.grouped, attention.reference])
def test_a_query_without_keys_stays_finite(implementation):
    q, k, v, mask = problem()
    mask = mask.at[:, 1].set(False)
    gradient = jax.grad(lambda q: jnp.sum(implementation(q, k, v, mask)))(q)
    assert np.isfinite(implementation(q, k, v, mask)).all()
    assert np.isfinite(gradient).all()


def test_bfloat16_stays_bfloat16_and_near():
    q, k, v, mask = problem(jnp.bfloat16)
    got = attention.grouped(q, k, v, mask)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), attention.reference(q, k, v, mask), atol=0.05)


def test_masked_keys_have_no_influence():
    q, k, v, mask = problem()
    mask = mask.at[:, :, 3].set(False)
    poisoned = attention.grouped(q, k.at[:, 3].set(9.0), v.at[:, 3].set(5.0), mask)
    np.testing.assert_array_equal(poisoned, attention.grouped(q, k, v, mask))


def test_a_token_sees_its_own_segment_up_to_itself():
    seen = attention.visible(5, jnp.array([[1, 1, 2, 2, 0]]))
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(seen[0], np.array(expected, bool))
    np.testing.assert_array_equal(attention.visible(5), np.tril(np.ones((1, 5, 5), bool)))


@pytest.mark.parametrize(("kv_heads", "window"), [(1, 0), (2, 7)])
def test_tokens_of_queries_are_divided_where_heads_cannot_be(kv_heads: int, window: int) -> None:
    """Four heads on a mesh of 2 × 4: keys are gathered, values and gradients are those of one device."""
    layout = sharding.Layout(sharding.build(MeshConfig(tensor=2, sequence=4)), sharding.LEARNER)
    q, k, v, _ = problem(queries=32, keys=32, kv_heads=kv_heads)
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0], [1, 2, 2, 2]], 8, axis=1))  # across the parts of a row, and padding

    def gradients(layout: sharding.Layout | None):
        attend = placed.exchanged(placed.rows("xla", 32, segments, layout, window), layout)
        weigh = (segments > 0)[..., None, None]
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(weigh * attend(*x) ** 2), argnums=(0, 1, 2)))

    found, expected = (jax.tree.leaves(gradients(where)(q, k, v)) for where in (layout, None))
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    part = layout.sharding(("rows", "tokens", "heads", "head_dim"), q.shape)
    of_keys = layout.sharding(("rows", "tokens", "kv_heads", "head_dim"), k.shape)
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x, at in ((q, part), (k, of_keys), (v, of_keys))]
    text = gradients(layout).lower(*given).compile().as_text()
    assert "all-gather" in text and "all-to-all" not in text
    scores = set(re.findall(r"f32\[2,\d,\d,(\d+),32\]", text))
    assert scores == {"8"}, "the queries of one device"
