"""Routing of conversations to samplers: together, spread, or auto."""

from __future__ import annotations

import pytest

from jaxroll.serving import service


def routed(replicate: str, groups: list[int], samplers: int = 2) -> list[str]:
    """The samplers that each group's members went to, one letter a member, when groups come one after the other."""
    conversations = dict.fromkeys("abc"[:samplers], 0)
    found = []
    for members in groups:
        last = ""
        places = []
        for _ in range(members):
            last = service.route(conversations, last, replicate)
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
    assert service.route({"b": 3, "c": 2}, "a", "together") == "c"
