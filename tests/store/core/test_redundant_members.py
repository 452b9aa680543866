"""Redundant members: the first to finish make the group; the others are aborted and their holders notified."""

from __future__ import annotations

import msgspec
import pytest

from jaxroll import wire
from jaxroll.errors import NoCredit
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.invariants import Known, impossible
from jaxroll.store.core.state import State
from jaxroll.store.log.replay import broken_by
from tests.harness.store.machine import V0, Machine


def started(spare: int = 1, **rules) -> Machine:
    m = Machine(**({"alpha": 0.0, "batch": 1, "redundant_members": spare} | rules))
    m.start()
    return m


def cancelled(m: Machine, request: ev.Request) -> list:
    return m.core.handle(request, m.now).ended


def done(m: Machine, group: int) -> list[int]:
    found = m.state.find(group)
    assert found is not None
    return [number for number, _ in found.done()]


def test_the_first_to_finish_make_the_group() -> None:
    m = started(spare=2)
    keys = m.lease(9)
    assert keys == [(0, member, 1) for member in range(4)], "one group within the window, two and two members"
    m.put(keys[3])
    assert m.states() == {"LEASED": 1}
    m.put(keys[1])
    assert (m.states(), done(m, 0)) == ({"READY": 1}, [1, 3])
    assert [(e.members, e.reason) for e in m.log if isinstance(e, ev.Aborted)] == [((0, 2), "enough")]
    assert m.put(keys[0]) == "SURPLUS", "it came too late"
    assert m.claim(0).groups == (0,)
    assert m.state.aborted_members == 2


def test_only_holders_of_members_that_are_given_up_learn_of_it() -> None:
    m = started()
    m.lease(2, name="A")
    m.lease(2, name="B")
    m.put((0, 0, 1))
    ended = cancelled(m, ev.PutMember(0, 1, 1, "d", 100, m.state.open[0].slots[0].runs))
    assert ended == [("B-1", (0, 2, 1))]
    assert m.ask(ev.Renew("B-1", ((0, 2, 1),))) == ((0, 2, 1),), "a holder that missed it learns it when it renews"


def test_holders_learn_of_a_rewind_a_surplus_and_a_dead_group_but_not_of_an_expired_lease() -> None:
    m = Machine(alpha=1.0, batch=1, redundant=1, data_retries=0)
    m.start()
    m.lease(2, name="A")
    m.lease(2, name="B")
    m.put((0, 0, 1))
    m.put((0, 1, 1))
    assert cancelled(m, ev.ClaimStep("L", 0, 0)) == [("B-1", (1, 0, 1)), ("B-1", (1, 1, 1))]
    m.publish(Version(0, 1))
    m.ask(ev.Ack("L", V0))
    keys = m.lease(2, Version(0, 1), name="C")
    m.now = 11.0
    assert cancelled(m, ev.Tick()) == []
    assert m.put(keys[0]) == "OK", "its put still counts"
    (again,) = m.lease(1, Version(0, 1), name="C")
    assert cancelled(m, ev.Begin("L2", V0)) == [("C-1", again)]
    m.publish(Version(1, 0), "L2")
    *_, left, right = m.lease(4, Version(1, 0), name="D")
    assert cancelled(m, ev.PutMember(*left, "f", 10, failure=("DATA", "it broke"))) == [("D-1", right)]


def test_a_member_that_breaks_for_good_is_given_up_while_the_group_can_spare_it() -> None:
    m = started(data_retries=0)
    keys = m.lease(3)
    assert m.fail(keys[0], "DATA") == "OK"
    assert m.states() == {"LEASED": 1}
    with pytest.raises(NoCredit):
        m.lease(1)  # it is not tried again
    m.put(keys[1])
    m.put(keys[2])
    assert done(m, 0) == [1, 2]
    m.train(0)
    keys = m.lease(3, Version(0, 1))
    m.fail(keys[0], "DATA")
    m.fail(keys[1], "DATA")
    assert m.state.dead == 1, "one could be spared, not two"


def test_members_without_a_lease_are_given_up_too() -> None:
    m = started(spare=3)
    m.fill(2)
    assert m.states() == {"READY": 1}
    with pytest.raises(NoCredit, match="window"):
        m.lease(3)


def test_a_reissued_group_has_its_redundant_members_again() -> None:
    m = started(alpha=1.0)
    m.fill(3)
    m.train(0)
    (key, *_) = m.lease(3, Version(0, 1))
    m.put(key, Version(0, 1))
    m.ask(ev.Begin("L2", V0))  # the weights it was sampled at never happened
    (again,) = m.state.open.values()
    assert (again.reissue_of, again.wanted, len(again.slots)) == (1, 2, 3)


def test_a_straggling_group_is_closed_with_what_it_has() -> None:
    m = started(size=3, straggler_deadline_s=5.0)
    keys = m.lease(4)
    m.put(keys[0])
    m.put(keys[3])
    m.now = 6.0
    m.claim(0)
    assert m.state.shrunk == 1 and m.state.aborted_members == 0


def test_the_log_agrees_and_no_wanted_member_is_given_up() -> None:
    m = started(spare=2)
    m.fill(2)
    m.train(0)
    state, seen = State(), Known(m.core.settings)
    for event in m.log:
        assert broken_by(state, seen, event) == ""
    assert state.aborted_members == m.state.aborted_members == 2
    m = started()
    m.lease(3)
    why = impossible(seen, m.state, ev.Aborted(0, (0, 1), "failed"))
    assert "are aborted; 0 are done, 2 are wanted" in why
    assert impossible(seen, m.state, ev.Aborted(0, (0,), "failed")) == ""
    assert "are aborted" in impossible(seen, m.state, ev.Aborted(0, (0,), "enough"))


def test_records_from_before_there_were_redundant_members_still_open() -> None:
    m = started(spare=0)
    m.fill(2)
    (issued,) = [e for e in m.log if isinstance(e, ev.Issued)]
    fields = msgspec.msgpack.decode(wire.encode(issued))
    assert fields[-1] == issued.wanted == 0
    old = wire.decode(msgspec.msgpack.encode(fields[:-1]), ev.Issued)
    assert old == issued
