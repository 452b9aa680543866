"""Puts: identity, fencing, refusals and failures."""

from __future__ import annotations

import pytest

from jaxroll.errors import Conflict, Fenced, StaleClient
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from tests.harness.store.machine import V0, Machine


def test_a_put_is_idempotent_and_other_bytes_conflict(machine: Machine) -> None:
    key = machine.lease(2)[0]
    assert [machine.put(key) for _ in range(1000)] == ["OK"] * 1000
    with pytest.raises(Conflict):
        machine.put(key, digest="other")
    assert machine.state.tokens_put == 5


def test_a_put_is_idempotent_after_consumption(machine: Machine) -> None:
    keys = machine.fill(4)
    machine.train(0)
    assert machine.put(keys[0]) == "OK"
    with pytest.raises(Conflict):
        machine.put(keys[0], digest="other")
    machine.ask(ev.Durable("L", Version(0, 1)))
    assert machine.states() == {"TRIMMED": 2}
    assert machine.put(keys[0], recorded=ev.Recorded(1, "d")) == "OK"
    with pytest.raises(Conflict):
        machine.put(keys[0], digest="other", recorded=ev.Recorded(1, "d"))
    with pytest.raises(Fenced):
        machine.put(keys[0], recorded=ev.Recorded(2, "d"))
    assert machine.put(keys[0]) == "SURPLUS"


def test_a_lower_attempt_is_fenced_once_the_member_is_leased_again(machine: Machine) -> None:
    keys = machine.lease(2)
    machine.now = 10.0
    machine.ask(ev.Tick())
    assert machine.put(keys[0]) == "OK", "late, but no other sampler has leased it"
    assert machine.lease(1) == [(0, 1, 2)]
    with pytest.raises(Fenced, match="attempt 2"):
        machine.put(keys[1])
    assert machine.put((0, 1, 2)) == "OK"


@pytest.mark.parametrize("key", [(0, 0, 2), (0, 0, 0), (0, 0, -1)])
def test_an_attempt_that_was_never_granted_is_fenced(machine: Machine, key: tuple[int, int, int]) -> None:
    machine.lease(2)
    with pytest.raises(Fenced):
        machine.put(key)


@pytest.mark.parametrize("key", [(5, 0, 1), (-1, 0, 1), (0, 2, 1), (0, -1, 1)])
def test_a_put_for_nothing_that_exists_is_refused(machine: Machine, key: tuple[int, int, int]) -> None:
    machine.lease(2)
    with pytest.raises(StaleClient):
        machine.put(key)


def test_versions_that_cannot_be_are_refused(machine: Machine) -> None:
    machine.fill(4)
    machine.train(0)
    key = machine.lease(1, Version(0, 1))[0]
    for versions in [(Version(0, 2),), (Version(1, 0),), (Version(0, 1), V0), (Version(0, -1),)]:
        with pytest.raises(StaleClient):
            machine.put(key, *versions)
    with pytest.raises(StaleClient, match="no sampled token"):
        machine.ask(ev.PutMember(*key, "d", 1, ()))
    assert machine.put(key, V0, Version(0, 1)) == "OK"


def test_infra_failures_rest_longer_each_time_and_keep_the_key() -> None:
    m = Machine(infra_retries=2)
    m.start()
    key = m.lease(1)[0]
    assert m.fail(key, "INFRA") == "OK"
    assert m.fail(key, "INFRA") == "OK", "the reply was lost and the put came again"
    with pytest.raises(Conflict):
        m.fail(key, "INFRA", digest="other")
    m.lease(1)  # the group's other member
    assert m.lease(1) == [(1, 0, 1)], "the failed one rests"
    m.now = 0.5
    assert m.lease(1) == [(0, 0, 2)]
    assert m.grants[0].key_salt == 0
    m.fail((0, 0, 2), "INFRA")
    m.now = 1.4
    assert m.lease(1) == [(1, 1, 1)]
    m.now = 1.5
    assert m.lease(1) == [(0, 0, 3)]
    m.fail((0, 0, 3), "INFRA")
    assert m.states() == {"DEAD": 1, "LEASED": 1}
    assert m.put((0, 1, 1)) == "SURPLUS"


def test_data_failures_change_the_salt_and_then_kill_the_group(machine: Machine) -> None:
    key = machine.lease(2)[0]
    machine.fail(key, "DATA")
    assert machine.lease(1) == [(0, 0, 2)]
    assert machine.grants[0].key_salt == 1
    machine.fail((0, 0, 2), "DATA", digest="g")
    machine.fail(machine.lease(1)[0], "DATA", digest="h")
    assert machine.states() == {"DEAD": 1}


def test_members_of_one_group_with_different_salts_come_as_two_grants(machine: Machine) -> None:
    keys = machine.lease(2)
    machine.fail(keys[0], "DATA")
    machine.ask(ev.Release((keys[1],)))
    assert machine.lease(2) == [(0, 0, 2), (0, 1, 2)]
    assert [g.key_salt for g in machine.grants] == [1, 0]
