"""Routing of conversations to samplers: together, spread, or auto; pools by tag; the shortest queue."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxroll.errors import ConfigError
from jaxroll.policy.routing import Pools, SamplerLoad, may_help, route, serves


def routed(replicate: str, groups: list[int], samplers: int = 2) -> list[str]:
    """The samplers that each group's members went to, one letter a member, when groups come one after the other."""
    conversations = dict.fromkeys("abc"[:samplers], 0)
    found = []
    for members in groups:
        last = ""
        places = []
        for _ in range(members):
            last = route({name: SamplerLoad(count) for name, count in conversations.items()}, last, replicate)
            conversations[last] += 1
            places.append(last)
        found.append("".join(places))
    return found


@pytest.mark.parametrize(
    ("replicate", "groups", "places"),
    [
        ("together", [4, 4, 2, 1], ["aaaa", "bbbb", "aa", "b"]),
        ("spread", [4, 3], ["abab", "aba"]),
        ("auto", [4, 2], ["abbb", "aa"]),  # the idle one is not left idle; then groups stay together
    ],
)
def test_members_are_routed_by_the_policy(replicate: str, groups: list[int], places: list[str]) -> None:
    assert routed(replicate, groups) == places


def test_after_its_sampler_is_gone_a_group_goes_to_the_least_busy_one() -> None:
    assert route({"b": SamplerLoad(3), "c": SamplerLoad(2)}, "a", "together") == "c"


@pytest.mark.parametrize(
    ("own", "other", "placement", "found"),
    [
        (SamplerLoad(4, 4, "x"), SamplerLoad(3, 4, "y"), "together", "b"),
        (SamplerLoad(5, 4, "x"), SamplerLoad(4, 4, "y"), "together", "a"),  # a queue here or there
        (SamplerLoad(1, 1, "x"), SamplerLoad(2, 4, "x"), "spread", "b"),  # more conversations, and no queue
    ],
)
def test_a_full_sampler_gets_a_conversation_only_if_all_are_full(
    own: SamplerLoad, other: SamplerLoad, placement: str, found: str
) -> None:
    assert route({"a": own, "b": other}, "", placement, "x") == found


loads = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(SamplerLoad, st.integers(0, 5), st.integers(1, 4), st.sampled_from(["", "x", "y"])),
    min_size=1,
)


@given(
    loads, st.sampled_from("abcdefg"), st.sampled_from(["together", "spread", "auto"]), st.sampled_from(["", "x", "y"])
)
def test_a_conversation_leaves_its_pool_only_where_all_of_it_is_full(
    samplers: dict[str, SamplerLoad], last: str, placement: str, work: str
) -> None:
    found = route(samplers, last, placement, work)
    own = [load for load in samplers.values() if serves(load.pool, work)]
    if not serves(samplers[found].pool, work):
        assert all(load.is_full for load in own), "elsewhere though its pool has room"
        assert not samplers[found].is_full or not own, "elsewhere into a queue though it could queue in its pool"
    if any(not load.is_full for load in own):
        assert serves(samplers[found].pool, work)
    if placement == "spread" and samplers[found].is_full:
        assert all(load.is_full for load in samplers.values()), "a queue though another sampler has none"
    if (
        last in samplers
        and placement == "together"
        and serves(samplers[last].pool, work)
        and not samplers[last].is_full
    ):
        assert found == last, "the prompt is computed twice"


@given(st.sampled_from(["", "x", "y"]), st.sets(st.sampled_from(["", "x", "y"])))
def test_help_is_for_work_that_no_sampler_with_room_serves(work: str, with_room: set[str]) -> None:
    assert may_help(work, with_room) == (
        not with_room or ("" not in with_room and work != "" and work not in with_room)
    )


def test_samplers_are_in_the_same_pools_for_any_order_of_the_config() -> None:
    one, other = {"a": {"samplers": 1, "tags": ["x"]}}, {"b": {"samplers": 2, "tags": ["y"]}}
    assert Pools.of({**other, **one}, ["x", "y"], 3) == Pools.of({**one, **other}, ["x", "y"], 3)


def test_pools_by_hand() -> None:
    given = {"fast": {"samplers": 1, "tags": ["chat"]}, "wide": {"samplers": 2, "tags": ["code", "agent"]}}
    pools = Pools.of(given, ["agent", "code", "chat", "o"], 4)
    assert pools.of_source == ("wide", "wide", "fast", "") and pools.of_work(9) == ""
    assert [pools.of_role(f"sampler-{i}") for i in range(4)] == ["fast", "wide", "wide", ""]
    assert pools.of_role("actor-0") == pools.of_role("evaluator") == ""
    assert not Pools() and Pools().of_work(0) == "" and Pools.of({}, ["a"], 1) == Pools()


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"a b": {"samplers": 1, "tags": ["x"]}}, "placement.pools.a b", "not a name"),
        ({"a": ["x"]}, "placement.pools.a", "not a pool"),
        ({"a": {"samplers": 1}}, "placement.pools.a", "not a pool"),
        ({"a": {"samplers": True, "tags": ["x"]}}, "placement.pools.a.samplers", "not a number"),
        ({"a": {"samplers": -1, "tags": ["x"]}}, "placement.pools.a.samplers", "not a number"),
        ({"a": {"samplers": 1, "tags": []}}, "placement.pools.a.tags", "serves tags"),
        ({"a": {"samplers": 1, "tags": "x"}}, "placement.pools.a.tags", "serves tags"),
        ({"a": {"samplers": 1, "tags": ["z"]}}, "placement.pools.a.tags", "no source"),
        ({"a": {"samplers": 0, "tags": ["x"]}, "b": {"samplers": 0, "tags": ["x"]}}, "placement.pools.b.tags", "once"),
        ({"a": {"samplers": 3, "tags": ["x"]}}, "placement.pools", "sampler.count"),
    ],
)
def test_malformed_pools_are_refused(given: dict, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Pools.of(given, ["x", "y"], 2)
    assert refused.value.key == key and words in str(refused.value)
