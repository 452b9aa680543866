"""The config rules agree with the store's limiter on α, also for fractional values."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest

from jaxroll.config import Config
from jaxroll.config.rules import check
from jaxroll.errors import ConfigError
from jaxroll.policy.limiter import AgeLimiter, max_age
from jaxroll.store.core.admission import Settings

ALPHAS = ("0", "0.05", "0.1", "0.3", "0.5", "0.7", "1", "1.2", "1.9", "2.3")


def configured(alpha: str, groups: int, buffer: int, publish_every: int = 1) -> Config:
    schedule = replace(
        Config().schedule,
        alpha=float(alpha),
        groups_per_step=groups,
        buffer_groups=buffer,
        publish_every=publish_every,
        in_flight_window="full",
        rolling_updates=0,
    )
    return replace(Config(), schedule=schedule)


def is_refused(config: Config) -> bool:
    try:
        check(config)
    except ConfigError as error:
        assert error.key in ("schedule.buffer_groups", "schedule.publish_every")
        return True
    return False


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_smallest_buffer_is_the_window_in_exact_arithmetic(alpha: str) -> None:
    for groups in (1, 3, 10, 25, 30):
        window = math.floor((Fraction(alpha) + 1) * groups)
        assert not is_refused(configured(alpha, groups, window))
        if window > 1:
            assert is_refused(configured(alpha, groups, window - 1))
        assert Settings.of(configured(alpha, groups, window)).limiter.window(0) == window


@pytest.mark.parametrize(("alpha", "groups", "buffer"), [("1.2", 25, 55), ("0.05", 10, 10)])
def test_buffers_that_the_rules_once_refused(alpha: str, groups: int, buffer: int) -> None:
    assert not is_refused(configured(alpha, groups, buffer))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_rules_and_limiter_refuse_the_same_schedules(alpha: str) -> None:
    for groups, buffer, every in itertools.product((1, 7, 10), (0, 1, 7, 10, 16, 23), (1, 2, 3, 4)):
        try:
            AgeLimiter(float(alpha), groups, 0, every, buffer)
            refused = False
        except ConfigError:
            refused = True
        assert is_refused(configured(alpha, groups, buffer, every)) == refused, (groups, buffer, every)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_greatest_age_is_the_next_whole_number(alpha: str) -> None:
    assert max_age(float(alpha)) == math.ceil(Fraction(alpha))
