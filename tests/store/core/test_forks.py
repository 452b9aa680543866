"""Forks: below the trim mark a run goes on only by name, and then as if the claims after the fork had never been."""

from __future__ import annotations

import contextlib
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxroll.errors import Closed, NoCredit, StaleClient
from jaxroll.policy.selection import NEW_LOG
from jaxroll.records import LogStart, Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.state import Batch, Lineage
from jaxroll.store.core.training import origin, shared_steps
from tests.harness.store.machine import V0, Machine, offer

FORKED = Version(1, 1)


def durable(machine: Machine, version: Version, session: str = "L") -> None:
    machine.ask(ev.Durable(session, version))


def trained_twice(steps: int = 2) -> Machine:
    """A run whose first `steps` claims are trained and trimmed, with more in flight."""
    m = Machine()
    m.start()
    for step in range(steps):
        m.fill(8, Version(0, step))
        m.train(step)
        durable(m, Version(0, step + 1))
    m.lease(8, Version(0, steps))
    return m


def indices(machine: Machine, batch: Batch) -> list[int]:
    """The prompts of a claim."""
    return sorted(machine.state.held[group].task.index for group in batch.groups)


def test_below_the_trim_mark_only_a_fork_goes_on() -> None:
    m = trained_twice(3)
    with pytest.raises(StaleClient, match="fork"):
        m.start(Version(0, 1), "L2")
    assert m.start(Version(0, 1), "L2", fork="again") == FORKED
    assert m.states() == {"TRIMMED": 6, "EXPIRED": 4}
    assert m.state.expired == {"lineage": 4}
    m.fill(8, FORKED)
    assert indices(m, m.train(1, 1, "L2")) == [2, 3], "the claim is made again, of the prompts that it had"
    durable(m, Version(1, 2), "L2")
    assert m.states()["TRIMMED"] == 8


def test_a_fork_at_the_beginning_needs_no_checkpoint_and_no_cut() -> None:
    m = trained_twice(2)
    assert m.start(None, "L2", fork="again") == Version(1, 0)
    assert (m.state.next_ordinal, m.state.cursor) == (0, None)
    m.fill(4, Version(1, 0))
    assert indices(m, m.claim(0, 1, "L2")) == [0, 1]


def test_a_fork_above_the_trim_mark_gives_up_the_claims_that_a_rewind_would_replay() -> None:
    m = Machine()
    m.start()
    for step in range(3):
        m.fill(8, Version(0, step))
        m.train(step)
    assert m.start(Version(0, 1), "L2", fork="again") == FORKED
    assert m.states() == {"TRIMMED": 2, "EXPIRED": 4 + 2}, "the checkpoint is durable, or it could not begin"
    assert m.state.replay_until == 1
    m.fill(4, FORKED)
    assert indices(m, m.claim(1, 1, "L2")) == [2, 3]


def test_the_same_fork_asked_again_is_an_ordinary_beginning() -> None:
    m = trained_twice(2)
    assert m.start(Version(0, 1), "L2", fork="again") == FORKED
    m.fill(4, FORKED)
    batch = m.train(1, 1, "L2")
    assert m.start(Version(0, 1), "L3", fork="again") == Version(2, 1), "a rewind of the fork, not another fork"
    assert m.claim(1, 2, "L3") == batch
    assert m.ask(ev.Begin("L4", Version(1, 1), "another")) == Version(3, 1)
    assert m.state.expired["lineage"] >= len(batch.groups)


def test_a_learner_of_the_ended_future_and_its_samplers_are_shut_out() -> None:
    m = trained_twice(2)
    key = (4, 0, 1)
    assert m.state.find(4) is not None
    m.start(Version(0, 1), "L2", fork="again")
    assert m.put(key, Version(0, 2)) == "SURPLUS"
    with pytest.raises(NoCredit, match="weights"):
        m.lease(2, Version(0, 2))
    with pytest.raises(StaleClient):
        m.claim(2)
    with pytest.raises(StaleClient, match="line"):
        m.start(Version(0, 2), "L3")


def test_a_line_that_was_left_can_be_gone_back_to_by_another_fork() -> None:
    m = trained_twice(4)
    m.start(Version(0, 1), "L2", fork="first")
    m.fill(4, FORKED)
    m.train(1, 1, "L2")
    assert m.start(Version(0, 3), "L3", fork="second") == Version(2, 3)
    m.fill(4, Version(2, 3))
    assert indices(m, m.train(3, 2, "L3")) == [6, 7]
    assert m.start(Version(1, 1), "L4", fork="third") == Version(3, 1), "1.1 is 0.1"
    m.fill(4, Version(3, 1))
    assert indices(m, m.claim(1, 3, "L4")) == [2, 3]


@pytest.mark.parametrize("start", [Version(0, 3), Version(0, 9), Version(2, 0), Version(0, -1), Version(-1, 0)])
def test_forks_from_what_was_never_there_are_refused(start: Version) -> None:
    m = trained_twice(2)
    before = m.states()
    with pytest.raises(StaleClient):
        m.start(start, "L2", fork="again")
    assert m.states() == before


def test_a_new_log_skips_the_prompts_that_the_lost_one_had_used() -> None:
    """Claims take the first groups to finish, so prompt 0 is left when 1 and 2 have been used."""
    lost = Machine(order="ready_first")
    lost.start()
    first = lost.lease(8)
    for key in first[2:6]:  # of the prompts 1 and 2
        lost.put(key)
    assert indices(lost, lost.train(0)) == [1, 2]
    log = LogStart(lost.state.claim_cuts[0], ((None, 0), (0, 0)))
    new = Machine(order="ready_first")
    assert new.ask(ev.Begin("L", Version(1, 1), NEW_LOG, log)) == Version(2, 1)
    assert [(line.parent, line.fork_step) for line in new.state.lineages] == [(None, 0), (0, 0), (1, 1)]
    new.restart()
    new.publish(Version(2, 1))
    new.fill(8, Version(2, 1))
    assert sorted(group.task.index for group in new.state.open.values()) == [0, 3, 4, 5]
    assert min(new.state.open) == log.cut.groups


def test_a_finished_run_and_an_ended_stream_go_on_from_a_fork() -> None:
    m = Machine(steps=2)
    m.prompts = 4
    m.start()
    for step in range(2):
        m.fill(4, Version(0, step))
        m.train(step)
        durable(m, Version(0, step + 1))
    m.ask(ev.EndData())
    m.ask(ev.Close("finished"))
    with pytest.raises(Closed):
        m.start(Version(0, 2), "L2")
    m.start(Version(0, 1), "L2", fork="again")
    m.fill(4, FORKED)
    assert indices(m, m.train(1, 1, "L2")) == [2, 3]
    with pytest.raises(Closed, match="finished"):
        m.lease(1, Version(1, 2))


def test_prompts_that_were_trained_before_the_fork_are_passed_over() -> None:
    m = Machine(alpha=4, order="ready_first")
    m.start()
    keys = m.lease(16)  # prompts 0 … 7
    for key in keys[4:8] + keys[12:]:  # groups 2, 3, then 6, 7
        m.put(key)
    assert indices(m, m.train(0)) == [2, 3]
    durable(m, Version(0, 1))
    assert indices(m, m.train(1)) == [6, 7]
    durable(m, Version(0, 2))
    m.start(Version(0, 1), "L2", fork="again")
    assert (m.state.next_ordinal, sorted(m.state.passed)) == (0, [2, 3])
    m.restart()
    m.lease(4, FORKED)
    assert [grant.task.index for grant in m.grants] == [0, 1]
    assert m.lease(2, FORKED) == [], "2 and 3 were trained before the fork"
    m.restart()
    m.lease(2, FORKED)
    assert [grant.task.index for grant in m.grants] == [4]
    assert m.state.passed == set()


def test_a_prompt_that_was_issued_again_and_not_yet_trained_comes_again_after_a_fork() -> None:
    m = Machine(alpha=1.0, size=1, order="ready_first")
    m.start()
    m.fill(4)
    m.train(0)
    m.train(1)
    old, *new = m.lease(4, Version(0, 2))
    m.put(old, V0)  # of prompt 4, stale: it is issued again, after prompt 7
    for key in new[:2]:
        m.put(key, Version(0, 2))
    assert indices(m, m.train(2)) == [5, 6]
    assert m.state.expired == {"stale": 1}
    durable(m, Version(0, 3))
    m.start(Version(0, 3), "L2", fork="again")
    m.lease(4, Version(1, 3))
    assert [grant.task.index for grant in m.grants] == [4, 7]


def test_when_all_that_is_offered_is_passed_over_the_answer_says_how_much() -> None:
    m = Machine(alpha=4, order="ready_first")
    m.start()
    m.fill(4)
    m.train(0)
    durable(m, Version(0, 1))
    m.start(Version(0, 1), "L2", fork="again")
    m.state.passed |= {2, 3}  # as if they had been trained too
    leases = m.ask(ev.Lease("S", "S-1", FORKED, 4, "one", offer(2, 4)))
    assert (leases.grants, leases.prompts_used, m.state.next_ordinal) == ((), 2, 4)
    assert [g.task.index for g in m.ask(ev.Lease("S", "S-1", FORKED, 4, "two", offer(4, 6))).grants] == [4, 5]


@given(st.integers(0, 2**32), st.sampled_from(["lease_order", "ready_first"]), st.sampled_from([0.0, 1.0, 2.0]))
@settings(max_examples=40)
def test_along_any_line_every_prompt_is_trained_once_and_none_is_lost(seed: int, order: str, alpha: float) -> None:
    """Random runs with forks and restarts; the line that survives has trained prompts 0, 1, 2, … without a repeat.

    Under `ready_first` some may still be open, so only repeats are excluded there.
    """
    rng = random.Random(seed)
    m = Machine(alpha=alpha, order=order, steps=12, reissues=100)
    m.prompts = 1000
    version, lives, line = m.start(), 0, {}
    disk: list[tuple[Version, dict[int, list[int]]]] = [(version, {})]
    while version.step < 12:
        session = f"L{lives}" if lives else "L"
        with contextlib.suppress(NoCredit):
            m.fill(rng.randint(1, 12), version)
        if rng.random() < 0.6 and len(ready(m)) >= 2 and (order != "lease_order" or head_ready(m)):
            batch = m.claim(version.step, version.lineage, session)
            line[version.step] = indices(m, batch)
            m.publish(Version(version.lineage, version.step + 1), session)
            m.ask(ev.Ack(session, version))
            version = Version(version.lineage, version.step + 1)
            if rng.random() < 0.5:
                durable(m, version, session)
                disk.append((version, dict(line)))
        elif rng.random() < 0.04:
            lives += 1
            chosen, line = rng.choice(disk)
            line = dict(line)
            version = m.start(chosen, f"L{lives}", fork=f"fork{lives}")
        elif rng.random() < 0.04:
            m.restart()
    trained = list(itertools.chain(*(line[step] for step in sorted(line))))
    assert sorted(line) == list(range(12))
    assert len(set(trained)) == len(trained)
    if order == "lease_order":
        assert trained == list(range(24))


def ready(machine: Machine) -> list[int]:
    return [group.id for group in machine.state.open.values() if group.ready]


def head_ready(machine: Machine) -> bool:
    return all(group.ready for group in list(machine.state.open.values())[:2])


def test_lineages_by_hand() -> None:
    """0 ── 1 left 0 at 5, 2 left 1 at 3 (so at 0.3), 3 left 0 at 4."""
    lines = [Lineage(), Lineage(0, 5), Lineage(1, 3), Lineage(0, 4)]
    assert origin(lines, Version(2, 3)) == Version(0, 3)
    assert origin(lines, Version(1, 6)) == Version(1, 6)
    assert [shared_steps(lines, Version(*v)) for v in ((3, 9), (0, 2), (0, 9), (1, 9), (2, 9))] == [9, 2, 4, 4, 3]
    assert origin(lines, Version(3, 0)) == V0
