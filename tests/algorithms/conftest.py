"""Shapes must match in these tests: an operand of lower rank raises an error."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_rank_promotion():
    import jax

    with jax.numpy_rank_promotion("raise"):
        yield
