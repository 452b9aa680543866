"""The cost of a member in the store's core hardly grows with the number of samplers: by function calls, not by time."""

from __future__ import annotations

from benchmarks.store import scale


def test_a_member_costs_the_core_as_many_calls_with_many_samplers_as_with_few() -> None:
    few, many = (scale.World(samplers, scale.SLOTS, samplers // 2, 3) for samplers in (10, 200))
    calls = [scale.counted(one)["calls"] for one in (few, many)]
    assert 0 < calls[1] < scale.AIM * calls[0]
    assert scale.measured(few)["requests"] > 2, "a lease and a put"
