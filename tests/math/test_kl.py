"""KL estimators: unbiasedness and gradients checked by enumerating a whole distribution, no sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.errors import ConfigError
from jaxroll.math import kl

P_LOGITS = jnp.array([0.3, -1.2, 0.8, 0.1, -0.4])
Q_LOGITS = jnp.array([-0.5, 0.6, 0.2, 1.0, -1.5])


def logs(logits):
    return jax.nn.log_softmax(logits)


def exact(p_logits, q_logits):
    p, q = logs(p_logits), logs(q_logits)
    return jnp.sum(jnp.exp(p) * (p - q))


def expected_gradient(estimator):
    """E_{x~p} ∇ estimator(log p(x), log q(x)): the gradient a loss would follow, the samples held fixed."""
    held = jnp.exp(logs(P_LOGITS))
    return jax.grad(lambda logits: jnp.sum(held * estimator(logs(logits), logs(Q_LOGITS))))(P_LOGITS)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
def test_expectation_is_the_divergence(estimator):
    mean = jnp.sum(jnp.exp(logs(P_LOGITS)) * estimator(logs(P_LOGITS), logs(Q_LOGITS)))
    np.testing.assert_allclose(mean, exact(P_LOGITS, Q_LOGITS), rtol=1e-5)


def test_only_k2_has_the_right_gradient():
    want = jax.grad(exact)(P_LOGITS, Q_LOGITS)
    np.testing.assert_allclose(expected_gradient(kl.k2), want, atol=1e-6)
    np.testing.assert_allclose(expected_gradient(kl.k1), np.zeros(5), atol=1e-6)
    assert np.abs(expected_gradient(kl.k3) - want).max() > 0.01


def test_k3_is_never_negative_and_zero_on_equal_policies():
    p, q = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
    assert (np.asarray(kl.k3(jnp.array(p), jnp.array(q))) >= 0).all()
    np.testing.assert_array_equal(kl.k3(jnp.array(p), jnp.array(p)), np.zeros(100))


@pytest.mark.parametrize("estimator", ["k1", "k3", "k4"])
def test_a_loss_with_a_wrong_gradient_is_refused(estimator):
    with pytest.raises(ConfigError, match="k2"):
        kl.loss(estimator, jnp.zeros(1), jnp.zeros(1))


def test_off_policy_terms_carry_their_weight_without_a_gradient():
    def total(logp):
        return kl.loss("k2", logp, jnp.zeros(2), jnp.exp(logp)).sum()

    logp = jnp.array([-1.0, -2.0])
    np.testing.assert_allclose(total(logp), np.sum(np.exp([-1, -2]) * np.array([0.5, 2.0])), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(logp), np.exp([-1, -2]) * np.array([-1, -2]), rtol=1e-6)
