"""Bugs that the random test (test_reference_model.py) found, each as the shortest run that shows it."""

from __future__ import annotations

import pytest

from jaxroll.errors import Fenced, NoCredit
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from tests.harness.store.machine import V0, Machine


def test_after_a_rewind_an_attempt_that_was_never_granted_is_no_key() -> None:
    """A rewind fences the open leases; it made the next attempt valid before anyone had leased it."""
    machine = Machine()
    machine.start()
    machine.fill(4)
    machine.train(0)
    group, member, attempt = machine.lease(1, Version(0, 1))[0]
    machine.start(None, "L2")
    for never_valid_again in (attempt, attempt + 1):
        with pytest.raises(Fenced):
            machine.put((group, member, never_valid_again), V0)
    again = machine.lease(1, Version(1, 0))[0]
    assert again[:2] == (group, member)
    assert again[2] > attempt
    assert machine.put(again, Version(1, 0)) == "OK"


def test_members_leased_again_reserve_their_space_before_new_prompts_do() -> None:
    """One call leased missing members and a new prompt, which only fitted without the former."""
    machine = Machine(alpha=3.0, batch=1, size=2, retention_bytes=20_000)
    machine.start()
    keys = machine.lease(4)
    machine.put(keys[0], size_bytes=5000)
    machine.ask(ev.Release(tuple(keys[1:])))
    assert machine.lease(5) == [(0, 1, 2), (1, 0, 2), (1, 1, 2)]  # 5000 there and three to come: full
    with pytest.raises(NoCredit, match="retention"):
        machine.lease(1)


def test_redundant_groups_are_leased_only_with_a_claim_that_can_train_them() -> None:
    """α = 0, claim 0 made: what is sampled at version 0 is too old for claim 1, but the R of the window let it in."""
    machine = Machine(alpha=0.0, batch=1, size=1, redundant=2)
    machine.start()
    first = machine.lease(1)[0]
    machine.put(first)
    assert machine.claim(0).groups == (0,)
    with pytest.raises(NoCredit, match="window"):
        machine.lease(1)
    machine.publish(Version(0, 1))
    assert len(machine.lease(9, Version(0, 1))) == 3
