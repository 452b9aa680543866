"""KL estimators: unbiasedness and gradients checked by enumerating a whole distribution, no sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.algorithms import losses
from jaxroll.errors import ConfigError

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


@pytest.mark.parametrize("estimator", [losses.k1, losses.k3])
def test_expectation_is_the_divergence(estimator):
    mean = jnp.sum(jnp.exp(logs(P_LOGITS)) * estimator(logs(P_LOGITS), logs(Q_LOGITS)))
    np.testing.assert_allclose(mean, exact(P_LOGITS, Q_LOGITS), rtol=1e-5)


def test_as_losses_k2_has_the_gradient_of_the_divergence_and_k3_that_of_the_other_one():
    want = jax.grad(exact)(P_LOGITS, Q_LOGITS)
    np.testing.assert_allclose(expected_gradient(losses.k2), want, atol=1e-6)
    np.testing.assert_allclose(expected_gradient(losses.k1), np.zeros(5), atol=1e-6)
    other = jax.grad(lambda logits: exact(Q_LOGITS, logits))(P_LOGITS)
    np.testing.assert_allclose(expected_gradient(losses.k3), other, atol=1e-6)
    assert np.abs(other - want).max() > 0.01


def test_k3_is_never_negative_and_zero_on_equal_policies():
    p, q = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
    assert (np.asarray(losses.k3(jnp.array(p), jnp.array(q))) >= 0).all()
    np.testing.assert_array_equal(losses.k3(jnp.array(p), jnp.array(p)), np.zeros(100))


@pytest.mark.parametrize(("estimator", "other_way_round"), [("k2", False), ("k3", True)])
def test_a_loss_has_its_gradient_for_any_behaviour_policy(estimator, other_way_round):
    """Drawn by another policy and weighted by p over it; against the gradient of the divergence by numpy."""
    p, q = (np.asarray(logs(x), np.float64) for x in (P_LOGITS, Q_LOGITS))
    drawn_by = logs(jnp.array([0.9, 0.1, -0.7, -0.2, 0.4]))

    def total(logits):
        logp = logs(logits)
        return jnp.sum(jnp.exp(drawn_by) * losses.loss(estimator, logp, logs(Q_LOGITS), jnp.exp(logp - drawn_by)))

    from_ref = np.exp(p) - np.exp(q)  # ∇KL(q‖p) through softmax
    from_policy = np.exp(p) * (p - q - np.sum(np.exp(p) * (p - q)))  # ∇KL(p‖q)
    np.testing.assert_allclose(jax.grad(total)(P_LOGITS), from_ref if other_way_round else from_policy, atol=1e-6)


@pytest.mark.parametrize(("estimator", "held"), [("k1", True), ("k2", False), ("k3", False)])
def test_as_a_reward_k1_alone_has_the_gradient(estimator, held):
    """E_p[k · ∇log p], enumerated: the gradient that REINFORCE gives for a reward; only k1 gives that of the KL."""
    p, q = (np.asarray(logs(x), np.float64) for x in (P_LOGITS, Q_LOGITS))
    charged = np.asarray(getattr(losses, estimator)(logs(P_LOGITS), logs(Q_LOGITS)), np.float64)
    found = np.exp(p) * (charged - np.sum(np.exp(p) * charged))  # through softmax
    want = np.asarray(jax.grad(exact)(P_LOGITS, Q_LOGITS))
    assert (np.abs(found - want).max() < 1e-6) == held
    assert held or np.abs(found - want).max() > 0.01
    assert np.exp(p) @ (p - q) > 0


@pytest.mark.parametrize("estimator", ["k1", "k4"])
def test_a_loss_with_a_wrong_gradient_is_refused(estimator):
    with pytest.raises(ConfigError, match="k2"):
        losses.loss(estimator, jnp.zeros(1), jnp.zeros(1))


def test_off_policy_terms_carry_their_weight_without_a_gradient():
    def total(logp):
        return losses.loss("k2", logp, jnp.zeros(2), jnp.exp(logp)).sum()

    logp = jnp.array([-1.0, -2.0])
    np.testing.assert_allclose(total(logp), np.sum(np.exp([-1, -2]) * np.array([0.5, 2.0])), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(logp), np.exp([-1, -2]) * np.array([-1, -2]), rtol=1e-6)
