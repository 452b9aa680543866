"""Time for records: unix seconds whose differences are durations."""

import time

import pytest

from jaxroll import clock


def test_unix_seconds_are_those_of_the_wall_clock():
    assert abs(clock.unix_s() - time.time()) < 60


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_wall_clock_that_is_set_changes_no_duration(monkeypatch, by_s):
    began_s, wall = clock.unix_s(), time.time
    monkeypatch.setattr(time, "time", lambda: wall() + by_s)
    assert 0 <= clock.unix_s() - began_s < 60
