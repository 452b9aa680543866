"""Leases and the in-flight window."""

from __future__ import annotations

import pytest

from jaxroll.errors import Closed, NoCredit, StaleClient
from jaxroll.records import Version
from jaxroll.store.core import admission
from jaxroll.store.core import events as ev
from jaxroll.store.core.machine import apply
from jaxroll.store.core.state import NAMES_KNOWN, outstanding
from tests.harness.store.machine import V0, Machine


def test_nothing_is_leased_before_weights_are_published() -> None:
    m = Machine()
    with pytest.raises(NoCredit, match="weights"):
        m.lease(4)
    m.ask(ev.Begin("L", None))
    with pytest.raises(NoCredit, match="weights"):
        m.lease(4)


def test_a_lease_fits_the_room_and_the_next_one_completes_the_group(machine: Machine) -> None:
    assert machine.lease(3) == [(0, 0, 1), (0, 1, 1), (1, 0, 1)]
    assert machine.lease(2) == [(1, 1, 1), (2, 0, 1)]


def test_the_window_closes_at_alpha_and_opens_with_the_publication(machine: Machine) -> None:
    assert len(machine.fill(100)) == 8  # (1 + 1) * 2 groups of 2
    with pytest.raises(NoCredit, match="window: 4 groups outstanding of 4"):
        machine.lease(1)
    machine.claim(0)
    with pytest.raises(NoCredit, match="window"):
        machine.lease(1)
    machine.publish(Version(0, 1))
    assert outstanding(machine.state) == 2
    assert len(machine.lease(100, Version(0, 1))) == 4


def test_a_sampler_that_lags_gets_less_and_then_nothing(machine: Machine) -> None:
    machine.fill(4)
    machine.train(0)
    assert len(machine.lease(100, V0)) == 4  # one version behind: B groups
    with pytest.raises(NoCredit, match="weights"):
        machine.lease(100, V0)
    assert len(machine.lease(100, Version(0, 1))) == 4


def test_a_sampler_from_the_future_or_of_an_ended_lineage_gets_none(machine: Machine) -> None:
    with pytest.raises(StaleClient):
        machine.lease(1, Version(0, 1))
    machine.fill(4)
    machine.train(0)
    machine.start(None, "L2")
    assert machine.state.lineage == 1
    with pytest.raises(NoCredit, match="weights"):
        machine.lease(1, V0)
    with pytest.raises(StaleClient):
        machine.lease(1, Version(1, 1))


def test_a_repeated_request_gets_the_same_grants(machine: Machine) -> None:
    first = machine.lease(3, request="same")
    assert machine.lease(3, request="same") == first
    machine.put(first[0])
    assert machine.lease(3, request="same") == first[1:]
    assert machine.state.issued == 2


def test_no_more_prompts_are_issued_than_the_steps_left_can_train() -> None:
    m = Machine(alpha=2, steps=2)
    m.start()
    assert len(m.fill(100)) == 2 * 2 * 2
    with pytest.raises(NoCredit, match="steps that are left"):
        m.lease(1)
    m.train(0)
    m.train(1)
    with pytest.raises(Closed, match="finished"):
        m.lease(1, Version(0, 2))
    with pytest.raises(Closed, match="finished"):
        m.claim(2)


def test_expired_leases_are_granted_again_before_new_prompts_with_the_next_attempt(machine: Machine) -> None:
    keys = machine.lease(4)
    machine.put(keys[0])
    machine.now = 9.9
    machine.ask(ev.Tick())
    assert machine.states() == {"LEASED": 2}
    machine.now = 10.0
    machine.ask(ev.Tick())
    assert machine.states() == {"PENDING": 2}
    assert machine.lease(4, name="T") == [(0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 1)]


def test_a_renewal_extends_leases_and_reports_lost_ones(machine: Machine) -> None:
    keys = machine.lease(3)
    machine.now = 9.0
    assert machine.ask(ev.Renew("S-1", (keys[0],))) == ()
    machine.now = 11.0
    machine.ask(ev.Tick())
    assert machine.ask(ev.Renew("S-1", tuple(keys))) == tuple(keys[1:])
    assert machine.ask(ev.Renew("T-1", (keys[0],))) == (keys[0],), "another process must not renew it"


def test_a_store_that_stood_still_forgives_the_holders(machine: Machine) -> None:
    machine.lease(2)
    machine.now = 60.0
    machine.ask(ev.Tick(stalled_s=55.0))
    machine.ask(ev.Tick())
    assert machine.states() == {"LEASED": 1}


def test_released_leases_are_free_at_once(machine: Machine) -> None:
    keys = machine.lease(2)
    machine.ask(ev.Release((*keys, (7, 0, 1), (0, 9, 1))))
    assert machine.states() == {"PENDING": 1}
    assert machine.lease(2) == [(0, 0, 2), (0, 1, 2)]


def test_a_process_under_an_old_name_ends_the_leases_of_the_former(machine: Machine) -> None:
    machine.ask(ev.Arrive("S", "S-1"))
    machine.lease(2)
    machine.lease(2, name="T")
    machine.ask(ev.Arrive("S", "S-2"))
    assert machine.states() == {"PENDING": 1, "LEASED": 1}
    with pytest.raises(StaleClient, match="took the name"):
        machine.lease(2)
    assert machine.lease(2, session="S-2") == [(0, 0, 2), (0, 1, 2)]


def test_a_process_that_leaves_ends_its_leases_and_is_forgotten(machine: Machine) -> None:
    machine.ask(ev.Arrive("S", "S-1"))
    machine.ask(ev.Arrive("T", "T-1"))
    machine.lease(100)
    with pytest.raises(NoCredit, match="window"):
        machine.lease(1)
    known = ("seen_s", "hungry", "rooms", "idle_s")
    assert all("S" in getattr(machine.state, table) for table in known)
    machine.ask(ev.Leave("S", "S-1"))
    assert machine.states() == {"PENDING": 4}
    assert not any("S" in getattr(machine.state, table) for table in known), "no holder waits for it or yields to it"
    with pytest.raises(StaleClient):
        machine.lease(1)
    assert len(machine.lease(100, name="T")) == 8


def test_a_process_that_is_away_counts_as_absent_until_it_asks_again(machine: Machine) -> None:
    settings, state = machine.core.settings, machine.state
    machine.lease(1, name="T")
    keys = machine.lease(100)
    present = lambda: list(admission.others(settings, machine.state, "T", machine.now))  # noqa: E731
    with pytest.raises(NoCredit, match="window"):
        machine.lease(1)
    assert present() == ["S"] and "S" in state.rooms
    machine.ask(ev.Release(tuple(keys), away="S"))
    assert present() == [] and not any("S" in table for table in (state.rooms, state.hungry, state.behind))
    assert admission.yields_to(settings, state, "T", machine.now) == ""
    machine.ask(ev.Renew("S-1", ()))
    assert present() == []
    assert machine.lease(1) and present() == ["S"]


def test_a_process_that_leaves_late_takes_nothing_from_its_successor(machine: Machine) -> None:
    machine.ask(ev.Arrive("S", "S-1"))
    machine.ask(ev.Arrive("S", "S-2"))
    machine.lease(2, session="S-2")
    machine.ask(ev.Leave("S", "S-1"))
    assert machine.states() == {"LEASED": 1}
    assert machine.lease(1, session="S-2")


def test_of_names_without_end_the_newest_are_known(machine: Machine) -> None:
    """Otherwise joining processes make the state grow without limit; a name that joins again counts as new."""
    for i in range(NAMES_KNOWN):
        machine.ask(ev.Arrive(f"s{i}", "1"))
    state = machine.core.state
    for name in ("s1", "s3"):
        apply(state, ev.Hungry(name, "window", 3), 0.0)
    machine.ask(ev.Arrive("s0", "2"))
    machine.ask(ev.Arrive("one", "1"))
    machine.ask(ev.Arrive("more", "1"))
    known = state.sessions
    assert len(known) == NAMES_KNOWN and (known["s0"], known["more"]) == ("2", "1")
    assert not {"s1", "s2"} & known.keys()
    assert state.rooms.keys() == state.hungry.keys() == {"s3"}
