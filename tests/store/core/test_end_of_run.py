"""The end of a run, and the party that the store waits for."""

from __future__ import annotations

import pytest

from jaxroll.errors import Closed
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import waits
from tests.harness.store.machine import Machine


def test_a_closed_run_leases_and_claims_nothing_but_takes_what_is_on_its_way(machine: Machine) -> None:
    keys = machine.lease(2)
    machine.ask(ev.Close("stopped by hand"))
    machine.ask(ev.Close("another reason"))
    for attempt in (lambda: machine.lease(1), lambda: machine.claim(0), lambda: machine.start(None, "L2")):
        with pytest.raises(Closed, match="stopped by hand"):
            attempt()
    assert machine.put(keys[0]) == "OK"
    machine.ask(ev.Open())
    assert machine.lease(1)


def test_waits_name_who_must_act() -> None:
    m = Machine()
    assert list(waits(m.core.settings, m.state)) == ["learner"]
    m.start()
    assert list(waits(m.core.settings, m.state)) == ["samplers"]
    assert waits(m.core.settings, m.state, prompts_ready=False) == {
        "feeder": "has no prompt ready, and step 0 lacks 2 groups"
    }
    keys = m.lease(8)
    assert waits(m.core.settings, m.state) == {"S": "group 0 misses members 0, 1"}
    for key in keys:
        m.put(key)
    assert "has not claimed step 0" in waits(m.core.settings, m.state)["learner"]
    m.claim(0)
    assert "training claim 0" in waits(m.core.settings, m.state)["learner"]
