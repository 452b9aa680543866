"""The projection with its own backward pass against JAX's differentiation of an einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxroll.models import layers


@pytest.mark.parametrize(
    ("equation", "x_shape", "kernel_shape", "inputs"),
    [
        ("btd,df->btf", (2, 5, 8), (8, 6), 1),
        ("btd,dnh->btnh", (2, 5, 8), (8, 4, 2), 1),
        ("btnh,nhd->btd", (2, 5, 4, 2), (4, 2, 8), 2),
        ("d,df->f", (8,), (8, 6), 1),
    ],
)
def test_a_projection_and_its_gradients_equal_einsum(equation, x_shape, kernel_shape, inputs):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (x_shape, kernel_shape))

    def loss(product):
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(product(*args))), argnums=(0, 1))(x, kernel)

    value, gradients = loss(lambda x, kernel: layers.project(x, nnx.Param(kernel), inputs))
    expected, expected_gradients = loss(lambda x, kernel: jnp.einsum(equation, x, kernel))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_float32_parameter_gets_a_float32_gradient_from_bfloat16_activations():
    x, kernel = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 2), jnp.float32)
    value, gradient = jax.value_and_grad(
        lambda kernel: jnp.sum(layers.project(x, nnx.Param(kernel)).astype(jnp.float32))
    )(kernel)
    assert (value, gradient.dtype) == (24.0, jnp.float32)
    np.testing.assert_array_equal(gradient, jnp.full((4, 2), 3.0))
