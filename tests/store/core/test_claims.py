"""Claims: whole groups, stale tokens, stragglers, the last batch, and the order of groups."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxroll.errors import Closed, NotReady, StaleClient
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.invariants import Known, impossible
from jaxroll.store.core.training import Candidate, pick, shuffled
from jaxroll.store.server.server import next_straggler_s, straggler_due
from tests.harness.store.machine import V0, Machine


def test_a_claim_waits_for_whole_groups_and_is_the_same_ever_after(machine: Machine) -> None:
    keys = machine.lease(8)
    for key in keys[1:]:
        machine.put(key)
    with pytest.raises(NotReady, match=r"group 0 misses members 0"):
        machine.claim(0)
    machine.put(keys[0])
    batch = machine.claim(0)
    assert sorted(batch.groups) == [0, 1]
    assert machine.claim(0) == batch
    assert machine.states() == {"CLAIMED": 2, "READY": 2}
    with pytest.raises(StaleClient):
        machine.claim(2)


def test_a_claim_that_is_ready_does_not_wait_for_other_groups(machine: Machine) -> None:
    machine.lease(4)
    for key in [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]:
        machine.put(key)
    machine.lease(2)
    assert machine.claim(0)


def test_a_stale_group_is_expired_at_the_claim_and_its_prompt_comes_again() -> None:
    m = Machine(alpha=0, order="ready_first")
    m.start()
    keys = m.lease(4)
    for key in keys:
        m.put(key)
    m.train(0)
    late = m.lease(4, Version(0, 1))
    m.put(late[0], V0)  # a generation that began before the weight swap and never saw a new token
    for key in late[1:]:
        m.put(key, Version(0, 1))
    with pytest.raises(NotReady):
        m.claim(1)
    assert m.states() == {"ACKED": 2, "EXPIRED": 1, "READY": 1, "PENDING": 1}
    assert m.state.expired == {"stale": 1}
    reissued = m.lease(2, Version(0, 1))
    assert reissued == [(4, 0, 1), (4, 1, 1)]
    assert m.grants[0].task.index == 2, "the prompt of the expired group"
    for key in reissued:
        m.put(key, Version(0, 1))
    assert sorted(m.claim(1).groups) == [3, 4]


def test_reissues_are_capped() -> None:
    m = Machine(alpha=0, batch=1, size=1, reissues=1)
    m.start()
    m.fill(1)
    m.train(0)
    for group in (1, 2):
        (key,) = m.lease(1, Version(0, 1))
        assert key[0] == group
        m.put(key, V0)
        with pytest.raises(NotReady):
            m.claim(1)
    assert m.states() == {"ACKED": 1, "EXPIRED": 2}


def test_mask_keeps_a_group_with_some_fresh_tokens_and_counts_the_stale_ones() -> None:
    m = Machine(alpha=0, batch=1, size=1, on_stale="mask")
    m.start()
    m.fill(1)
    m.train(0)
    (key,) = m.lease(1, Version(0, 1))
    m.put(key, V0, Version(0, 1))
    assert m.claim(1).groups == (1,)
    assert m.state.tokens_masked == 5


def test_redundant_groups_race_and_the_losers_are_surplus() -> None:
    m = Machine(alpha=0, redundant=1)
    m.start()
    keys = m.lease(6)
    for key in keys[2:]:
        m.put(key)
    assert sorted(m.claim(0).groups) == [1, 2]
    assert m.states() == {"CLAIMED": 2, "EXPIRED": 1}
    assert m.put(keys[0]) == "SURPLUS"


def test_stragglers_are_left_behind_only_when_two_members_are_there() -> None:
    m = Machine(batch=1, size=4, straggler_deadline_s=100.0)
    m.start()
    keys = m.lease(4)
    m.put(keys[0])
    m.now = 100.0
    with pytest.raises(NotReady):
        m.claim(0)
    m.put(keys[2])
    batch = m.claim(0)
    group = m.state.held[batch.groups[0]]
    assert [member for member, _ in group.done()] == [0, 2]
    assert group.note == "straggler"
    assert m.put(keys[1]) == "SURPLUS"


def test_a_straggler_in_a_group_of_two_is_left_behind_too() -> None:
    m = Machine(batch=1, size=2, straggler_deadline_s=100.0)
    m.start()
    keys = m.lease(2)
    m.now = 100.0
    with pytest.raises(NotReady):
        m.claim(0)
    m.put(keys[1])
    assert m.claim(0).groups == (keys[1][0],)
    assert m.put(keys[0]) == "SURPLUS"


@pytest.mark.parametrize(("size", "done", "least"), [(2, 0, 1), (2, 1, 0), (3, 1, 2), (3, 2, 0)])
def test_the_replay_knows_how_many_members_a_closed_group_has(size: int, done: int, least: int) -> None:
    m = Machine(batch=1, size=size)
    m.start()
    keys = m.lease(size)
    for key in keys[:done]:
        m.put(key)
    dropped = tuple(member for _, member, _ in keys[done:])
    why = impossible(Known(m.core.settings), m.state, ev.Shrunk(keys[0][0], dropped, "straggler"))
    assert (f"{least} are the least" in why) if least else (why == "")


def test_the_store_looks_again_when_the_next_straggler_is_due_and_not_for_those_that_were() -> None:
    m = Machine(batch=2, size=2, alpha=1.0, straggler_deadline_s=100.0)
    m.start()
    assert next_straggler_s(m.state, 2, 100.0, 0.0) is None, "nothing is leased"
    m.lease(2)
    m.now = 3.0
    m.lease(4)  # the third group is not of the next claim
    found = [next_straggler_s(m.state, 2, 100.0, now_s) for now_s in (99.0, 100.0, 103.0)]
    assert found == [100.0, 103.0, None]
    assert [straggler_due(m.state, 2, 100.0, now_s) for now_s in (99.0, 100.0, 103.0)] == [False, True, True]


def test_wait_never_shrinks() -> None:
    m = Machine(batch=1, size=4, straggler="wait", straggler_deadline_s=1.0)
    m.start()
    for key in m.lease(4)[:3]:
        m.put(key)
    m.now = 1000.0
    with pytest.raises(NotReady):
        m.claim(0)


def test_the_end_of_the_data_gives_a_short_batch_and_then_closes() -> None:
    m = Machine()
    m.prompts = 3
    m.start()
    m.fill(6)
    m.ask(ev.EndData())
    m.train(0)
    assert len(m.train(1).groups) == 1
    with pytest.raises(Closed, match="end of data"):
        m.claim(2)
    with pytest.raises(Closed, match="end of data"):
        m.lease(1, Version(0, 2))


# --- order

READY = [Candidate(0, 3, 5), Candidate(1, 0, 7), Candidate(2, None), Candidate(3, 1, 6), Candidate(4, 2, 7)]


def test_lease_order_waits_for_the_head() -> None:
    assert pick("lease_order", READY, 2, 0, last=False).chosen == (0, 1)
    assert pick("lease_order", READY[1:], 2, 0, last=False).missing == (2,)
    assert pick("lease_order", READY[:2], 3, 0, last=False).missing == ()


def test_redundancy_takes_the_first_to_finish_and_gives_up_the_rest() -> None:
    found = pick("lease_order", READY, 3, 2, last=False)
    assert found.chosen == (1, 3, 4)
    assert found.surplus == (0, 2)
    assert pick("lease_order", READY, 3, 1, last=False).surplus == (2,)


def test_other_orders_take_from_the_whole_pool() -> None:
    assert pick("ready_first", READY, 2, 0, last=False).chosen == (1, 3)
    assert pick("freshest_first", READY, 2, 0, last=False).chosen == (1, 4)
    assert pick("ready_first", READY[2:3], 1, 0, last=False).missing == (2,)


def test_the_last_batch_may_be_short_but_not_partial() -> None:
    assert pick("lease_order", READY[:2], 3, 0, last=True).chosen == (0, 1)
    assert pick("lease_order", READY[:3], 4, 0, last=True).missing == (2,)
    assert pick("lease_order", [], 4, 0, last=True).chosen == ()


@given(st.lists(st.integers(), unique=True), st.integers(0, 2**31))
def test_a_shuffle_is_a_permutation_that_its_seed_decides(groups: list[int], seed: int) -> None:
    assert sorted(shuffled(groups, seed)) == sorted(groups)
    assert shuffled(groups, seed) == shuffled(groups, seed)


def test_a_shuffle_shuffles() -> None:
    assert shuffled(range(50), 1) != shuffled(range(50), 2) != tuple(range(50))


def test_time_in_which_the_learner_computes_early_groups_is_no_wait() -> None:
    m = Machine(alpha=0.0, batch=2, size=1)
    m.start()
    m.fill(2)
    m.claim(0)
    m.publish(Version(0, 1))
    m.now += 1.0
    with pytest.raises(NotReady):
        m.claim(1)
    m.now += 10.0
    m.fill(2, Version(0, 1))
    m.ask(ev.ClaimStep("L", 0, 1, computed_s=7.0))
    claimed = [event for event in m.log if isinstance(event, ev.Claimed)][-1]
    assert (claimed.waited_s, claimed.worked_s) == (3.0, 8.0)
