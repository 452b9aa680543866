"""The limiter against a brute-force simulation of claims, and its refusals."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxroll.errors import ConfigError
from jaxroll.policy.limiter import AgeLimiter, groups_ahead

ALPHAS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0])


@pytest.mark.parametrize(
    ("alpha", "batch", "redundant", "lag", "window"),
    [
        (0, 4, 0, 0, 4),
        (0, 4, 0, 1, 0),
        (1, 4, 0, 0, 8),
        (1, 4, 0, 1, 4),
        (1, 4, 2, 0, 10),
        (1, 4, 2, 2, 0),  # a token sampled now would be older than 1 when trained
        (0.5, 3, 0, 0, 4),
        (0.5, 3, 0, 1, 1),
        (0.1, 10, 0, 0, 11),
        (0.7, 10, 0, 0, 17),
        (2, 5, 1, -3, 16),  # a sampler ahead of what we know is not behind
    ],
)
def test_window_by_hand(alpha: float, batch: int, redundant: int, lag: int, window: int) -> None:
    limiter = AgeLimiter(alpha, batch, redundant)
    assert limiter.window(lag) == window
    assert [limiter.admits(ahead, 10, 10 - lag) for ahead in range(window + 2)] == [True] * window + [False] * 2


@given(ALPHAS, st.integers(1, 6), st.integers(0, 5), st.data())
def test_what_is_admitted_is_never_too_old_when_claims_follow_the_order(
    alpha: float, batch: int, lag: int, data: st.DataObject
) -> None:
    """Guard (a) makes guard (b) idle: walk the claims that come first and see at which step the group is trained."""
    limiter = AgeLimiter(alpha, batch)
    published = 100
    ahead = data.draw(st.integers(0, limiter.window(0) + 3))
    if limiter.admits(ahead, published, published - lag):
        step, left = published, ahead
        while left >= batch:
            left, step = left - batch, step + 1
        assert step - (published - lag) <= math.ceil(alpha)
        assert not limiter.too_old(published - lag, step)


@given(ALPHAS, st.integers(1, 6))
def test_the_window_is_as_wide_as_the_bound_allows(alpha: float, batch: int) -> None:
    """For whole α the last admitted group is trained at exactly the bound: nothing is given away."""
    limiter = AgeLimiter(alpha, batch)
    assert limiter.window(0) >= batch
    if alpha == int(alpha):
        assert (limiter.window(0) - 1) // batch == alpha


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"alpha": -0.5, "batch_groups": 4}, "schedule.alpha"),
        ({"alpha": math.nan, "batch_groups": 4}, "schedule.alpha"),
        ({"alpha": math.inf, "batch_groups": 4}, "schedule.alpha"),
        ({"alpha": 1, "batch_groups": 0}, "schedule.groups_per_step"),
        ({"alpha": 1, "batch_groups": 4, "redundant_groups": -1}, "schedule.redundant_groups"),
        ({"alpha": 1, "batch_groups": 4, "publish_every": 3}, "schedule.publish_every"),
        ({"alpha": 0.5, "batch_groups": 4, "publish_every": 2}, "schedule.publish_every"),
        ({"alpha": 1, "batch_groups": 4, "publish_every": 0}, "schedule.publish_every"),
        ({"alpha": 1, "batch_groups": 4, "buffer_groups": 7}, "schedule.buffer_groups"),
        ({"alpha": 1, "batch_groups": 4, "redundant_groups": 1, "buffer_groups": 8}, "schedule.buffer_groups"),
    ],
)
def test_settings_that_deadlock_are_refused_by_name(kwargs: dict, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AgeLimiter(**kwargs)
    assert caught.value.key == key


def test_settings_at_the_edge_are_taken() -> None:
    assert AgeLimiter(1, 4, publish_every=2, buffer_groups=8).window(0) == 8


def test_only_lease_order_promises_a_place() -> None:
    assert [groups_ahead("lease_order", place, 5) for place in range(3)] == [0, 1, 2]
    assert [groups_ahead("ready_first", place, 5) for place in range(3)] == [4, 4, 4]
