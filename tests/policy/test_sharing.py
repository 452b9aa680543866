"""Shares of scarce work: by hand; nothing is left over and no sampler takes twice."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxroll.policy.limiter import Rooms, Share


@pytest.mark.parametrize(
    ("share", "members"),
    [
        (Share(8), 8),  # alone
        (Share(8, Rooms(8), 16), 8),  # enough for both
        (Share(8, Rooms(8), 15), 8),
        (Share(8, Rooms(8), 8), 4),
        (Share(8, Rooms(24), 8), 2),
        (Share(1, Rooms(100), 1), 1),
        (Share(4, Rooms(4), 0), 1),  # no work: the window must refuse the caller, not its share
        (Share(4, Rooms(4, 0, 1), 0), 1),
        (Share(4, Rooms(8), 4, held=4), 1),  # it has its part, but the other may have its own reason to take nothing
        (Share(4, Rooms(8, 0, 1), 4, held=4), 0),  # the other fetches weights and will take the rest
        (Share(7, Rooms(8, 0, 1), 4, held=1), 2),  # (4 + 1) · 8 / 16 in all
        (Share(2, Rooms(2, 6, 1), 2, held=6), 1),  # both hold 6 of 8 places: one more for each
        (Share(6, Rooms(2, 6, 1), 3, held=2), 4),  # its load is the lower one
    ],
)
def test_shares_by_hand(share: Share, members: int) -> None:
    assert share.members == members


@pytest.mark.parametrize(
    ("replicate", "available", "awaited", "splits"),
    [
        ("together", 4, True, False),
        ("spread", 100, False, True),
        ("auto", 100, False, False),
        ("auto", 100, True, True),  # the learner waits for this group
        ("auto", 15, False, True),  # a sampler would be idle
    ],
)
def test_when_groups_are_split(replicate: str, available: int, awaited: bool, splits: bool) -> None:
    share = Share(8, Rooms(8), available, replicate)
    assert share.splits(awaited) == splits
    assert share.of_group(8, share.members, awaited, begun=False) == (4 if splits else 8)
    assert not Share(8, Rooms(), available, replicate).splits(awaited), "no other sampler has room"


def test_a_group_kept_together_goes_whole_beyond_the_share_but_what_has_begun_does_not() -> None:
    share = Share(12, Rooms(12), 16, "together")
    assert share.members == 8
    assert share.of_group(5, 3, False, begun=False) == 5
    assert share.of_group(5, 3, False, begun=True) == 3
    assert Share(6, Rooms(6), 8, "together").of_group(5, 1, False, begun=False) == 3, "never beyond its room"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 100))
def test_what_there_is_goes_out_by_room(rooms: list[int], available: int) -> None:
    """Samplers ask one after the other, the rest being the others with room: each gets close to its share."""
    left, taken, whole = available, [], min(available, sum(rooms))
    for place, room in enumerate(rooms):
        share = Share(room, Rooms(sum(rooms[place + 1 :])), left)
        taken.append(min(share.members, left))
        left -= taken[-1]
    assert sum(taken) == whole
    for room, members in zip(rooms, taken, strict=True):
        assert members <= room
        assert abs(members - whole * room / sum(rooms)) < len(rooms)
