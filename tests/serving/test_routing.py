"""Where a conversation is seated: with its group, where fewest are, or both in turn."""

from __future__ import annotations

import pytest

from jaxroll.serving import client


def dealt(replicate: str, groups: list[int], samplers: int = 2) -> list[str]:
    """The samplers that each group's members went to, one letter a member, when groups come one after the other."""
    seated = dict.fromkeys("abc"[:samplers], 0)
    found = []
    for members in groups:
        last = ""
        places = []
        for _ in range(members):
            last = client.seat(seated, last, replicate)
            seated[last] += 1
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
def test_members_are_seated(replicate: str, groups: list[int], places: list[str]) -> None:
    assert dealt(replicate, groups) == places


def test_whose_sampler_is_gone_goes_where_fewest_are() -> None:
    assert client.seat({"b": 3, "c": 2}, "a", "together") == "c"
