"""The log-probability of a token against numpy in float64, and its gradient against the textbook's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll import sharding
from jaxroll.algorithms import sampling
from jaxroll.config import MeshConfig


def numpy_logprobs(logits: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    log_z = np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1)) + scaled.max(-1)
    return np.take_along_axis(scaled, tokens[..., None], -1)[..., 0] - log_z


def token_logprobs(logits, tokens, temperature) -> jax.Array:
    return sampling.token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(temperature))


@given(
    seed=st.integers(0, 2**16), temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]), scale=st.sampled_from([1.0, 50.0])
)
def test_equals_numpy(seed, temperature, scale):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.normal(size=(3, 5, 17))).astype(np.float32)
    tokens = rng.integers(0, 17, size=(3, 5)).astype(np.int32)
    expected = numpy_logprobs(logits, tokens, temperature)
    np.testing.assert_allclose(token_logprobs(logits, tokens, temperature), expected, rtol=2e-6, atol=2e-5)


def test_a_temperature_per_row():
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(4, 9)).astype(np.float32), np.arange(4, dtype=np.int32)
    temperature = np.array([0.0, 0.5, 1.0, 3.0], np.float32)
    each = [token_logprobs(logits[i], tokens[i], float(temperature[i])) for i in range(4)]
    np.testing.assert_array_equal(token_logprobs(logits, tokens, temperature), np.stack(each))


def test_bfloat16_logits_are_read_in_float32():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 300)), jnp.bfloat16)
    got = token_logprobs(logits, jnp.array([3, 299]), 1.0)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, numpy_logprobs(np.asarray(logits, np.float32), np.array([3, 299]), 1.0), rtol=1e-6)


def test_tokens_outside_the_support_have_no_mass():
    logits = jnp.array([[0.0, -jnp.inf, 0.0, -jnp.inf]])
    np.testing.assert_allclose(token_logprobs(logits, jnp.array([2]), 0.7), [np.log(0.5)], rtol=1e-6)
    assert token_logprobs(logits, jnp.array([1]), 1.0)[0] == -jnp.inf


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_gradient_is_onehot_minus_softmax_over_temperature(temperature):
    rng = np.random.default_rng(2)
    logits, tokens = rng.normal(size=(6, 11)).astype(np.float32), rng.integers(0, 11, 6).astype(np.int32)
    gradient = jax.grad(lambda x: token_logprobs(x, tokens, temperature).sum())(logits)
    tempered = logits / temperature
    softmax = np.exp(tempered) / np.exp(tempered).sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, (np.eye(11)[tokens] - softmax) / temperature, atol=2e-6)


def test_a_sharded_vocabulary_changes_nothing():
    mesh = sharding.build(MeshConfig(data=2, tensor=4))
    rng = np.random.default_rng(3)
    logits, tokens = rng.normal(size=(4, 32)).astype(np.float32), rng.integers(0, 32, 4).astype(np.int32)
    spread = jax.device_put(logits, jax.NamedSharding(mesh, jax.P("data", "tensor")))
    got = jax.jit(token_logprobs)(spread, tokens, 0.9)
    np.testing.assert_allclose(got, numpy_logprobs(logits, tokens, 0.9), rtol=1e-5, atol=1e-6)


def masked(logits, support):
    """`logits` with -inf outside of the support, in full; rows without ids are kept whole."""
    inside = np.zeros(logits.shape, bool)
    for row, ids in zip(inside, support, strict=True):
        row[ids[ids >= 0] if (ids >= 0).any() else slice(None)] = True
    return jnp.where(inside, logits, -jnp.inf)


def test_a_support_gives_the_values_and_gradients_of_masked_logits():
    chance = np.random.default_rng(4)
    logits = chance.normal(size=(5, 40), scale=4).astype(np.float32)
    support = np.stack([chance.permutation(40)[:7] for _ in range(5)]).astype(np.int32)
    support[0, 1:], support[1, 4:], support[2] = -1, -1, -1
    tokens = jnp.array([support[0, 0], support[1, 2], 11, support[3, 6], support[4, 1]])
    weight, ids, logits = chance.normal(size=5).astype(np.float32), jnp.asarray(support), jnp.asarray(logits)

    def ours(x):
        return sampling.token_logprobs(x, tokens, 0.7, ids) @ weight

    def plain(x):
        return jax.nn.log_softmax(masked(x, support) / 0.7)[np.arange(5), tokens] @ weight

    value, gradient = jax.value_and_grad(ours)(logits)
    want, slope = jax.value_and_grad(plain)(logits)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)
    assert np.isfinite(gradient).all() and sampling.token_logprobs(logits, tokens, 0.7, ids)[0] == 0
    probability = jax.nn.softmax(masked(logits, support) / 0.7)
    entropy = -np.sum(np.where(probability > 0, probability * np.log(np.maximum(probability, 1e-30)), 0), axis=-1)
    np.testing.assert_allclose(sampling.entropies(logits, 0.7, ids), entropy, atol=1e-5)
    whole = sampling.entropies(logits, 0.7, jnp.full((5, 2), -1))
    np.testing.assert_allclose(sampling.entropies(logits, 0.7), whole, atol=1e-6)
