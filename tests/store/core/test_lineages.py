"""Lineages: resumes, rewinds, checkpoints and former learners."""

from __future__ import annotations

import pytest

from jaxroll.errors import Fenced, NoCredit, StaleClient
from jaxroll.records import Version, VersionRef
from jaxroll.store.core import events as ev
from jaxroll.store.core.state import outstanding
from tests.harness.store.machine import V0, Machine


def test_the_first_begin_is_version_zero_and_repeats(machine: Machine) -> None:
    assert machine.ask(ev.Begin("L", None)) == V0
    assert machine.ask(ev.Begin("L", V0)) == V0


def test_a_clean_stop_resumes_in_the_same_lineage_with_nothing_lost(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    before = machine.states()
    assert machine.start(Version(0, 1), "L2") == Version(0, 1)
    assert machine.states() == {"READY": 2, "TRIMMED": 2} != before, "the checkpoint is durable, or it could not begin"
    assert sorted(machine.claim(1, session="L2").groups) == [2, 3]


def test_a_learner_killed_in_a_step_gets_the_same_claim_in_the_same_lineage(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.ask(ev.Durable("L", Version(0, 1)))
    batch = machine.claim(1)
    assert machine.start(Version(0, 1), "L2") == Version(0, 1)
    assert machine.claim(1, session="L2") == batch
    assert machine.state.replay_until == 2


def test_a_rewind_opens_a_lineage_replays_its_claims_and_expires_what_never_happened(machine: Machine) -> None:
    machine.fill(8)
    batches = [machine.train(0), machine.train(1)]
    new = machine.lease(8, Version(0, 2))
    machine.put(new[0], Version(0, 2))  # above the fork: never happened
    machine.put(new[2], V0, Version(0, 2))
    assert machine.start(V0, "L2") == Version(1, 0)
    assert machine.states() == {"CLAIMED": 4, "EXPIRED": 2, "PENDING": 4}
    assert machine.state.expired == {"lineage": 2}
    with pytest.raises(Fenced):
        machine.put(new[4], Version(0, 2))
    assert [machine.claim(s, 1, "L2") for s in (0, 1)] == batches
    assert machine.ask(ev.Begin("L2", V0)) == Version(1, 0), "the reply was lost; no second lineage"
    with pytest.raises(StaleClient):
        machine.claim(0, 0, "L2")


def test_tokens_below_the_fork_survive_a_rewind(machine: Machine) -> None:
    keys = machine.lease(8)
    for key in keys[:5]:
        machine.put(key)
    machine.train(0)
    assert machine.start(V0, "L2") == Version(1, 0)
    assert machine.states() == {"CLAIMED": 2, "PENDING": 2}
    assert machine.state.expired == {}
    assert machine.put(keys[4]) == "OK"
    with pytest.raises(Fenced):
        machine.put(keys[5])


def test_publish_before_ack_then_death_is_a_rewind(machine: Machine) -> None:
    machine.fill(8)
    machine.claim(0)
    machine.publish(Version(0, 1))
    assert machine.start(None, "L2") == Version(1, 0)


def test_replays_count_as_outstanding(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.fill(4, Version(0, 1))
    machine.train(1)
    machine.start(None, "L2")
    assert outstanding(machine.state) == 4
    with pytest.raises(NoCredit, match="window"):
        machine.lease(1, Version(1, 0))


@pytest.mark.parametrize("durable", [Version(0, 3), Version(1, 0), Version(0, -1), Version(-1, 0), V0, None])
def test_checkpoints_of_no_use_are_refused(machine: Machine, durable: Version | None) -> None:
    machine.fill(8)
    machine.train(0)
    machine.train(1)
    machine.ask(ev.Durable("L", Version(0, 1)))
    with pytest.raises(StaleClient):
        machine.ask(ev.Begin("L2", durable))


def test_a_checkpoint_of_a_line_that_was_left_is_refused(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.train(1)
    machine.start(Version(0, 1), "L2")
    machine.publish(Version(1, 2), "L2")
    with pytest.raises(StaleClient, match="line"):
        machine.ask(ev.Begin("L3", Version(0, 2)))
    assert machine.ask(ev.Begin("L3", Version(0, 1))) == Version(2, 1)


def test_the_former_learner_is_shut_out(machine: Machine) -> None:
    machine.fill(8)
    machine.start(None, "L2")
    for request in (
        ev.ClaimStep("L", 0, 0),
        ev.Ack("L", V0),
        ev.Durable("L", V0),
        ev.Publish("L", VersionRef(V0, "tcp", "x", "d")),
    ):
        with pytest.raises(StaleClient, match="another learner"):
            machine.ask(request)


def test_published_steps_only_grow_and_never_pass_the_claims(machine: Machine) -> None:
    machine.fill(8)
    with pytest.raises(StaleClient):
        machine.publish(Version(0, 1))
    machine.train(0)
    with pytest.raises(StaleClient):
        machine.publish(V0)
    machine.ask(ev.Publish("L", VersionRef(Version(0, 1), "tcp", "elsewhere", "d")))
    assert machine.state.published is not None
    assert machine.state.published.address == "elsewhere"
