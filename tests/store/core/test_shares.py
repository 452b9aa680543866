"""Several samplers at one store: scarce work is split by free room, groups together or spread by the policy."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxroll.errors import NoCredit
from jaxroll.records import Version, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import by_holder
from tests.harness.store.machine import V0, Machine

V1 = Version(0, 1)


def hungry(m: Machine, version: Version, **rooms: int) -> None:
    """Let the store refuse these samplers because there is no work."""
    for name, room in rooms.items():
        with pytest.raises(NoCredit, match="window"):
            m.lease(room, version, name=name)


def second_step(replicate: str, batch: int = 2, size: int = 4, **rooms: int) -> Machine:
    """A synchronous run whose samplers were all idle while the learner trained its first step."""
    m = Machine(alpha=0.0, batch=batch, size=size, replicate=replicate)
    m.start()
    m.fill(batch * size)
    m.claim(0)
    hungry(m, V0, **rooms)
    m.publish(V1)
    return m


def by_group(keys: list) -> dict[int, int]:
    return dict(Counter(group for group, _, _ in keys))


def test_one_sampler_that_could_take_everything_leaves_the_others_their_part() -> None:
    m = second_step("together", A=100, B=100)
    assert by_group(m.lease(100, V1, name="A")) == {2: 4}
    assert by_group(m.lease(100, V1, name="B")) == {3: 4}


def test_alone_it_takes_everything() -> None:
    m = second_step("together", A=100)
    assert by_group(m.lease(100, V1, name="A")) == {2: 4, 3: 4}


def test_spread_deals_every_group_over_those_with_room() -> None:
    m = second_step("spread", A=12, B=6, C=6)
    assert by_group(m.lease(12, V1, name="A")) == {2: 2, 3: 2}
    assert by_group(m.lease(6, V1, name="B")) == {2: 1, 3: 1}
    assert by_group(m.lease(6, V1, name="C")) == {2: 1, 3: 1}


def test_spread_gives_every_member_to_a_sampler() -> None:
    """A sampler with room left after its share takes the members for which the others had no room."""
    m = second_step("spread", A=8, B=2)
    assert by_group(m.lease(8, V1, name="A")) == {2: 4, 3: 3}
    assert by_group(m.lease(2, V1, name="B")) == {3: 1}
    with pytest.raises(NoCredit, match="window"):
        m.lease(1, V1, name="B")


def test_auto_keeps_groups_whole_while_there_is_work_for_all() -> None:
    m = second_step("auto", batch=4, A=8, B=8)
    assert by_group(m.lease(8, V1, name="A")) == {4: 4, 5: 4}
    assert by_group(m.lease(8, V1, name="B")) == {6: 4, 7: 4}


def test_auto_spreads_when_somebody_would_be_idle() -> None:
    m = second_step("auto", batch=1, A=8, B=8)
    assert by_group(m.lease(8, V1, name="A")) == {1: 2}
    assert by_group(m.lease(8, V1, name="B")) == {1: 2}


def test_auto_spreads_what_the_learner_waits_for() -> None:
    m = second_step("auto", batch=4, A=8, B=8)
    m.train(0)
    with pytest.raises(Exception, match="not leased yet"):
        m.claim(1)
    assert by_group(m.lease(8, V1, name="A")) == {4: 2, 5: 2, 6: 2, 7: 2}
    assert by_group(m.lease(8, V1, name="B")) == {4: 2, 5: 2, 6: 2, 7: 2}


def test_who_had_room_long_ago_is_not_waited_for() -> None:
    m = second_step("spread", A=8, B=8)
    m.now += 11.0
    assert by_group(m.lease(8, V1, name="A")) == {2: 4, 3: 4}


def test_samplers_that_fetch_the_new_weights_for_long_keep_their_part() -> None:
    m = second_step("spread", A=8, B=8, C=8)
    m.now += 11.0
    for name in ("B", "C"):
        with pytest.raises(NoCredit, match="weights"):
            m.lease(8, V0, name=name)
    assert by_group(m.lease(8, V1, name="A")) == {2: 2, 3: 1}
    assert by_group(m.lease(8, V1, name="B")) == {2: 1, 3: 2}
    assert by_group(m.lease(8, V1, name="C")) == {2: 1, 3: 1}


def test_a_sampler_that_asks_again_leaves_the_rest_to_those_that_fetch_the_weights() -> None:
    m = second_step("spread", A=8, B=8)
    first = m.lease(8, V1, name="A")
    assert by_group(first) == {2: 2, 3: 2}
    with pytest.raises(NoCredit, match="left to samplers that fetch"):
        m.lease(4, V1, name="A")
    m.put(first[0], V1)
    assert len(m.lease(5, V1, name="A")) == 1, "it holds three of the eight that there are, and B none"
    m.now += 11.0
    assert by_group(m.lease(4, V1, name="A")) == {2: 1, 3: 2}, "B has not asked for long"


def test_a_sampler_with_the_new_weights_that_may_take_nothing_holds_nobody_up() -> None:
    """B has failed the only member that is left, and asks at the newest version."""
    m = second_step("spread", A=8, B=8)
    shares = {name: m.lease(8, V1, name=name) for name in ("A", "B")}
    for key in shares["B"][1:]:
        m.put(key, V1)
    m.fail(shares["B"][0], "DATA")
    m.now += 1.0
    with pytest.raises(NoCredit, match="window"):
        m.lease(8, V1, name="B")
    assert len(m.lease(4, V1, name="A")) == 1


def test_a_sampler_that_fetches_weights_without_end_has_no_part() -> None:
    m = second_step("spread", A=8, B=8)
    m.now += 61.0
    with pytest.raises(NoCredit, match="weights"):
        m.lease(8, V0, name="B")
    assert by_group(m.lease(8, V1, name="A")) == {2: 4, 3: 4}


def test_a_slow_sampler_does_not_wait_for_one_that_fetches_weights() -> None:
    m = second_step("spread", A=8, B=8)
    m.now += 11.0
    m.state.step_s, m.state.member_s["A"] = 1.0, 50.0
    with pytest.raises(NoCredit, match="weights"):
        m.lease(8, V0, name="B")
    assert by_group(m.lease(8, V1, name="A")) == {2: 2, 3: 2}


def test_who_was_given_work_has_no_claim_to_more() -> None:
    m = second_step("together", batch=4, A=8, B=8, C=8)
    assert by_group(m.lease(8, V1, name="B")) == {4: 4, 5: 4}, "a third of sixteen, in whole groups"
    assert by_group(m.lease(8, V1, name="A")) == {6: 4}, "half of the rest: only C is still without"
    assert by_group(m.lease(8, V1, name="C")) == {7: 4}


def test_a_slow_sampler_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    m = second_step("together", A=100, B=100)
    m.state.step_s, m.state.member_s["B"] = 1.0, 50.0
    assert by_group(m.lease(100, V1, name="A")) == {2: 4, 3: 4}


@pytest.mark.parametrize(("tokens", "part"), [(50, {4: 2, 5: 2}), (5, {4: 4, 5: 4})], ids=["long", "slow"])
def test_a_sampler_that_ended_the_longest_members_last_has_its_part(tokens: int, part: dict[int, int]) -> None:
    """B needs 3.5 s a member and the learner 2 s a step: for a member of the mean length B needs less if it is long."""
    m = second_step("spread", A=8, B=8)
    shares = {name: m.lease(8, V1, name=name) for name in ("A", "B")}
    for name, seconds, count in (("A", 1.5, 10), ("B", 2.0, tokens)):
        m.now += seconds
        for group, member, attempt in shares[name]:
            m.ask(ev.PutMember(group, member, attempt, "d", 100, (VersionRun(V1, count),)))
    m.claim(1)
    m.state.step_s = 2.0
    hungry(m, V1, B=8, A=8)
    m.publish(Version(0, 2))
    assert by_group(m.lease(8, Version(0, 2), name="A")) == part


def test_samplers_that_are_equally_quick_share_the_work_though_one_is_within_the_limit() -> None:
    """A step takes the learner 2 s, and members about as long: three of A took a little less, those of B and C more."""
    m = second_step("spread", batch=6, A=8, B=8, C=8)
    shares = {name: m.lease(8, V1, name=name) for name in ("A", "B", "C")}
    for name, seconds in (("A", 1.9), ("B", 0.2), ("C", 0.2)):
        m.now += seconds
        for group, member, attempt in shares[name]:
            m.ask(ev.PutMember(group, member, attempt, "d", 100, (VersionRun(V1, 10),)))
    m.claim(1)
    m.state.step_s = 2.0
    hungry(m, V1, A=8, B=8, C=8)
    m.publish(Version(0, 2))
    given = [sum(by_group(m.lease(8, Version(0, 2), name=name)).values()) for name in ("A", "B", "C")]
    assert given == [8, 8, 8]


def test_slow_samplers_share_what_no_quicker_one_has_room_for() -> None:
    m = second_step("together", A=100, B=100)
    m.state.step_s, m.state.member_s["A"], m.state.member_s["B"] = 1.0, 50.0, 60.0
    assert by_group(m.lease(100, V1, name="A")) == {2: 4}
    assert by_group(m.lease(100, V1, name="B")) == {3: 4}


def test_a_slow_sampler_without_work_is_tried_again_after_some_claims() -> None:
    m = Machine(alpha=0.0, batch=1, size=1, steps=100)
    m.start()
    m.put(m.lease(1, V0, name="B")[0], V0)
    m.state.step_s, m.state.member_s["A"] = 1.0, 1.15
    for step in range(40):
        m.claim(step)
        hungry(m, Version(0, step), B=8)
        m.publish(Version(0, step + 1))
        try:
            m.lease(1, Version(0, step + 1), name="A")
        except NoCredit as refusal:
            assert "slow: A" in str(refusal)
        else:
            break
        m.put(m.lease(1, Version(0, step + 1), name="B")[0], Version(0, step + 1))
    assert 20 <= step < 30, f"{step} claims until it gets work again"


def test_redundant_members_are_dealt_out_too() -> None:
    m = Machine(alpha=0.0, batch=1, size=3, redundant_members=1, replicate="spread")
    m.start()
    m.fill(3)
    m.claim(0)
    hungry(m, V0, A=8, B=8)
    m.publish(V1)
    assert by_group(m.lease(8, V1, name="A")) == {1: 2}
    assert by_group(m.lease(8, V1, name="B")) == {1: 2}


def test_a_sampler_leaves_work_for_a_quarter_of_the_time_of_its_members_only() -> None:
    m = second_step("spread", A=8, B=8)
    m.state.member_s["A"] = 2.0
    first = m.lease(8, V1, name="A")
    m.now += 0.4
    with pytest.raises(NoCredit, match="left to samplers that fetch"):
        m.lease(4, V1, name="A")
    m.now += 0.2
    assert len(first) == 4
    assert [len(m.lease(4, V1, name="A")) for _ in range(4)] == [1, 1, 1, 1]


def test_a_sampler_that_ends_its_trajectories_before_it_fetches_weights_is_not_waited_for() -> None:
    m = Machine(alpha=1.0, batch=2, size=4, replicate="spread", one_version=True)
    m.start()
    m.fill(8)
    assert by_group(m.lease(8, V0, name="B")) == {2: 4, 3: 4}
    m.train(0)
    with pytest.raises(NoCredit, match="1 behind"):
        m.lease(8, V0, name="B")
    for key in m.lease(8, Version(0, 1), name="A"):
        m.put(key, Version(0, 1))
    m.now += 1.0
    with pytest.raises(NoCredit, match="1 behind"):
        m.lease(8, V0, name="B")
    assert (
        m.state.behind.keys() == {"B"} and not by_holder(m.core.settings, m.state).rooms_of_others("A", m.now).fetching
    )


def test_a_sampler_that_has_missed_two_versions_is_not_waited_for() -> None:
    m = second_step("spread", A=8, B=8)
    m.now += 11.0
    for key in m.lease(8, V1, name="A"):
        m.put(key, V1)
    m.claim(1)
    hungry(m, V1, A=8)
    with pytest.raises(NoCredit, match="1 behind"):
        m.lease(8, V0, name="B")
    m.publish(Version(0, 2))
    with pytest.raises(NoCredit, match="2 behind"):
        m.lease(8, V0, name="B")
    first = m.lease(8, Version(0, 2), name="A")
    assert len(first) == 4 and len(m.lease(4, Version(0, 2), name="A")) == 1


def test_a_sampler_whose_last_members_end_while_it_fetches_is_waited_for() -> None:
    m = Machine(alpha=1.0, batch=2, size=4, replicate="spread")
    m.start()
    m.fill(8)
    kept = m.lease(8, V0, name="B")
    m.train(0)
    with pytest.raises(NoCredit, match="1 behind"):
        m.lease(8, V0, name="B")
    assert not m.state.by_holder.fetching()
    for key in kept:
        m.put(key)
    first = m.lease(8, V1, name="A")
    assert len(first) == 4 and m.state.by_holder.fetching()
    with pytest.raises(NoCredit, match="left to samplers that fetch"):
        m.lease(4, V1, name="A")
