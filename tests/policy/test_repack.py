"""Plans that empty draining samplers: properties, a comparison with all plans, and the moves under way."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxroll.policy.routing import MOVE_S, Draining, Repacker, Room, repack

SLOTS, TOKENS = 16, 400
ROOM = Room(SLOTS, TOKENS)
LOADS = st.builds(
    Draining,
    version=st.integers(0, 1),
    members=st.integers(0, SLOTS + 4),
    tokens=st.integers(0, TOKENS + 100),
    pool=st.sampled_from(["", "", "a"]),
    leaves=st.sampled_from([False, False, True]),
)
SAMPLERS = st.dictionaries(st.sampled_from([f"sampler-{n}" for n in range(10)]), LOADS)
COMING = st.dictionaries(st.sampled_from([f"sampler-{n}" for n in range(10)]), st.lists(LOADS, min_size=1, max_size=2))


@settings(max_examples=200, deadline=None)
@given(SAMPLERS, COMING)
def test_a_plan_keeps_room_versions_and_pools_and_makes_no_chains(
    samplers: dict[str, Draining], coming: dict[str, list[Draining]]
) -> None:
    moves = repack(samplers, ROOM, coming)
    assert not moves.keys() & (set(moves.values()) | coming.keys()), "a sampler gives and receives"
    for source, to in moves.items():
        one, other = samplers[source], samplers[to]
        assert (one.version, one.pool) == (other.version, other.pool)
        assert one.members and other.members, "an empty sampler takes part"
        assert not other.leaves, "a sampler that leaves receives members"
    for to in set(moves.values()):
        loads = [samplers[to], *coming.get(to, ()), *(samplers[source] for source, at in moves.items() if at == to)]
        assert sum(one.members for one in loads) <= SLOTS and sum(one.tokens for one in loads) <= TOKENS


def most_emptied(members: list[int]) -> int:
    """The most samplers that any plan of whole loads empties."""
    best = 0
    for to in itertools.product(range(len(members)), repeat=len(members)):
        stays = [index == at for index, at in enumerate(to)]
        if all(stays[at] for at in to):
            loads = [sum(n for n, at in zip(members, to, strict=True) if at == index) for index in range(len(members))]
            if all(load <= SLOTS for load in loads):
                best = max(best, stays.count(False))
    return best


def test_a_plan_empties_nearly_as_many_samplers_as_any() -> None:
    """Best fit is no search: in 1,500 other draws it emptied one less in 8 of them, and never two less."""
    chance, missed = random.Random(1), 0
    for _ in range(150):
        members = [min(SLOTS, 1 + int(chance.lognormvariate(1.3, 0.8))) for _ in range(chance.randint(2, 5))]
        found = repack({str(index): Draining(0, count) for index, count in enumerate(members)}, ROOM)
        missing = most_emptied(members) - len(found)
        assert 0 <= missing <= 1, (members, found)
        missed += missing
    assert missed <= 7


def test_full_and_balanced_samplers_stay_as_they_are() -> None:
    for members in (SLOTS // 2 + 1, SLOTS, SLOTS + 5):
        assert repack({name: Draining(0, members) for name in "abcd"}, ROOM) == {}


def moved(repacker: Repacker, now_s: float = 0.0) -> None:
    """Members of a on their way to b."""
    assert not repacker.report("a", Draining(0, 3), now_s)
    assert repacker.report("b", Draining(0, 5), now_s)
    assert (repacker.order("a"), repacker.order("a"), repacker.order("b")) == ("b", "", "")
    assert not repacker.coming("b")
    repacker.given("a", 3)
    assert repacker.coming("b") and not repacker.coming("b")


def test_a_sampler_that_received_members_is_full_and_stays_until_it_reports_them() -> None:
    repacker = Repacker(ROOM)
    moved(repacker)
    assert not repacker.report("c", Draining(0, 9), 1.0), "5 + 3 + 9 members are more than 16"
    assert repacker.report("d", Draining(0, 6), 1.0), "9 + 6 fit; b, which is smaller, receives and stays"
    assert (repacker.order("d"), repacker.order("b")) == ("c", "")
    repacker.given("d", 6)
    assert repacker.coming("c")
    assert not repacker.report("b", Draining(0, 8), 2.0)
    assert repacker.report("e", Draining(0, 8), 3.0), "b has reported what it received"
    assert {name: to for name in "bce" if (to := repacker.order(name))} == {"b": "e"}


def test_a_move_that_does_not_happen_ends_and_samplers_with_new_weights_take_no_part() -> None:
    repacker = Repacker(ROOM)
    repacker.report("a", Draining(0, 3), 0.0)
    assert repacker.report("b", Draining(0, 5), 0.0) and repacker.order("a") == "b"
    assert repacker.report("a", Draining(0, 2), 1.0), "it is back, and its load goes again"
    repacker.forget("b")
    assert not repacker.report("a", Draining(0, 2), 1.0 + 2 * MOVE_S)
    repacker.report("b", Draining(1, 5), 2.0 + 2 * MOVE_S)
    assert repacker.order("a") == repacker.order("b") == ""


def test_a_sampler_that_reports_no_more_takes_no_part() -> None:
    repacker = Repacker(ROOM)
    repacker.report("a", Draining(0, 3), 0.0, again_s=5.0)
    assert not repacker.report("b", Draining(0, 5), 5.1 + MOVE_S)
    assert repacker.report("c", Draining(0, 5), 5.2 + MOVE_S) and repacker.order("b") == "c"
