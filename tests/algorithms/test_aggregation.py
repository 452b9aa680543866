"""Aggregation weights against the definitions, computed sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.algorithms import advantages

LENGTH = 6
LOSSES = st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=6)


def reference(losses: list[list[float]], kind: str) -> float:
    """The mean that the name says, over the sequences that have any trained token."""
    kept = [np.array(sequence) for sequence in losses if sequence]
    if not kept:
        return 0.0
    return {
        "token_mean": lambda: np.concatenate(kept).mean(),
        "seq_mean_token_mean": lambda: np.mean([sequence.mean() for sequence in kept]),
        "seq_mean_token_sum": lambda: np.mean([sequence.sum() for sequence in kept]),
        "constant_length": lambda: np.mean([sequence.sum() for sequence in kept]) / LENGTH,
    }[kind]()


@pytest.mark.parametrize("kind", advantages.KINDS)
@given(losses=LOSSES)
def test_the_weighted_sum_is_the_mean(kind, losses):
    weights = advantages.sequence_weights(np.array([len(sequence) for sequence in losses]), kind, LENGTH)
    got = sum(weight * sum(sequence) for weight, sequence in zip(weights, losses, strict=True))
    np.testing.assert_allclose(got, reference(losses, kind), rtol=1e-4, atol=1e-5)


def test_worked_by_hand():
    counts = np.array([1, 3, 0])
    np.testing.assert_allclose(advantages.sequence_weights(counts, "token_mean"), [0.25, 0.25, 0])
    np.testing.assert_allclose(advantages.sequence_weights(counts, "seq_mean_token_mean"), [0.5, 1 / 6, 0])
    np.testing.assert_allclose(advantages.sequence_weights(counts, "seq_mean_token_sum"), [0.5, 0.5, 0])


def test_nothing_to_train_on_gives_no_weight():
    for kind in advantages.KINDS:
        np.testing.assert_array_equal(advantages.sequence_weights(np.zeros(3, int), kind), np.zeros(3))
        assert advantages.sequence_weights(np.zeros(0, int), kind).shape == (0,)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="token_mean"):
        advantages.sequence_weights(np.ones(1), "mean_of_means")
