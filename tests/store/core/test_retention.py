"""Acknowledgements, durable steps and retention."""

from __future__ import annotations

import pytest

from jaxroll.errors import NoCredit, StaleClient
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from tests.harness.store.machine import V0, Machine


def test_acks_come_in_order_and_again_without_effect(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.ask(ev.Ack("L", V0))
    with pytest.raises(StaleClient):
        machine.ask(ev.Ack("L", Version(0, 1)))
    with pytest.raises(StaleClient):
        machine.ask(ev.Ack("L", Version(1, 0)))


def test_durable_trims_what_it_covers_and_no_more(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.train(1)
    with pytest.raises(StaleClient):
        machine.ask(ev.Durable("L", Version(0, 3)))
    machine.ask(ev.Durable("L", Version(0, 1)))
    assert machine.states() == {"TRIMMED": 2, "ACKED": 2}
    machine.ask(ev.Durable("L", Version(0, 1)))
    machine.ask(ev.Durable("L", V0))
    with pytest.raises(StaleClient, match="trimmed"):
        machine.claim(0)
    assert machine.states() == {"TRIMMED": 2, "ACKED": 2}


def test_a_full_budget_stops_leases_beyond_the_next_claim_only() -> None:
    m = Machine(alpha=4, retention_bytes=1000)
    m.start()
    for key in m.lease(4):
        m.put(key, size_bytes=400)
    with pytest.raises(NoCredit, match="retention"):
        m.lease(2)
    m.train(0)
    assert len(m.lease(4, Version(0, 1))) == 4, "the next claim always gets its groups"
    with pytest.raises(NoCredit, match="retention"):
        m.lease(2, Version(0, 1))
    m.ask(ev.Durable("L", Version(0, 1)))
    with pytest.raises(NoCredit, match="retention"):
        m.lease(2, Version(0, 1))  # open leases reserve as much as the largest member seen
