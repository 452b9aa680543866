"""Schedules at their corners, and the first AdamW update worked by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.config import LearnerConfig
from jaxroll.learner import state


def test_warm_up_reaches_the_peak_and_stays():
    schedule = state.learning_rate(1.0, 4, 0)
    np.testing.assert_allclose([schedule(i) for i in range(6)], [0.25, 0.5, 0.75, 1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_first_step_counts(warmup):
    np.testing.assert_allclose([state.learning_rate(2.0, warmup, 0)(i) for i in range(3)], [2, 2, 2])


def test_cosine_ends_at_a_tenth():
    schedule = state.learning_rate(1.0, 2, 10)
    np.testing.assert_allclose([schedule(i) for i in (0, 1, 6, 11, 50)], [0.5, 1.0, 0.55, 0.1, 0.1], rtol=1e-6)


def test_the_first_update_worked_by_hand():
    """Clipped gradient (0.6, 0.8) of norm 1; Adam's first update is the gradient's sign; only the matrix decays."""
    config = LearnerConfig(learning_rate=0.1, warmup_steps=1, weight_decay=0.5, max_grad_norm=1.0)
    params = {"matrix": jnp.full((1, 1), 2.0), "scale": jnp.full((1,), 2.0)}
    transform = state.build(config).transform
    updates, _ = transform.update(
        {"matrix": jnp.full((1, 1), 3.0), "scale": jnp.full((1,), 4.0)}, transform.init(params), params
    )
    np.testing.assert_allclose(updates["matrix"], [[-0.1 * (1 + 0.5 * 2.0)]], rtol=1e-5)
    np.testing.assert_allclose(updates["scale"], [-0.1], rtol=1e-5)
