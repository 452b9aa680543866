"""The contract, promise by promise, on the machine alone."""

from __future__ import annotations

import pytest

from jaxroll.errors import Closed, Conflict, Fenced, NoCredit, NotReady, StaleClient
from jaxroll.records import Snapshot, Version
from jaxroll.store.core import requests as rq
from jaxroll.store.core.state import NAMES_KNOWN, next_straggler_s, outstanding, straggler_due
from jaxroll.store.core.waits import waits
from tests.store.machine import V0, Machine


@pytest.fixture
def machine() -> Machine:
    m = Machine()
    m.start()
    return m


# --- leases and the window


def test_nothing_is_leased_before_weights_are_published() -> None:
    m = Machine()
    with pytest.raises(NoCredit, match="weights"):
        m.lease(4)
    m.ask(rq.Begin("L", None))
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
    machine.ask(rq.Tick())
    assert machine.states() == {"LEASED": 2}
    machine.now = 10.0
    machine.ask(rq.Tick())
    assert machine.states() == {"PENDING": 2}
    assert machine.lease(4, name="T") == [(0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 1)]


def test_a_renewed_lease_lives_on_and_what_is_lost_is_said(machine: Machine) -> None:
    keys = machine.lease(3)
    machine.now = 9.0
    assert machine.ask(rq.Renew("S-1", (keys[0],))) == ()
    machine.now = 11.0
    machine.ask(rq.Tick())
    assert machine.ask(rq.Renew("S-1", tuple(keys))) == tuple(keys[1:])
    assert machine.ask(rq.Renew("T-1", (keys[0],))) == (keys[0],), "another process must not renew it"


def test_a_store_that_stood_still_forgives_the_holders(machine: Machine) -> None:
    machine.lease(2)
    machine.now = 60.0
    machine.ask(rq.Tick(stalled_s=55.0))
    machine.ask(rq.Tick())
    assert machine.states() == {"LEASED": 1}


def test_released_leases_are_free_at_once(machine: Machine) -> None:
    keys = machine.lease(2)
    machine.ask(rq.Release((*keys, (7, 0, 1), (0, 9, 1))))
    assert machine.states() == {"PENDING": 1}
    assert machine.lease(2) == [(0, 0, 2), (0, 1, 2)]


def test_a_process_under_an_old_name_ends_the_leases_of_the_former(machine: Machine) -> None:
    machine.ask(rq.Arrive("S", "S-1"))
    machine.lease(2)
    machine.lease(2, name="T")
    machine.ask(rq.Arrive("S", "S-2"))
    assert machine.states() == {"PENDING": 1, "LEASED": 1}
    with pytest.raises(StaleClient, match="took the name"):
        machine.lease(2)
    assert machine.lease(2, session="S-2") == [(0, 0, 2), (0, 1, 2)]


def test_of_names_without_end_the_newest_are_known(machine: Machine) -> None:
    """Else whoever may join makes the state grow for ever; who joins again counts as new."""
    for i in range(NAMES_KNOWN):
        machine.ask(rq.Arrive(f"s{i}", "1"))
    machine.ask(rq.Arrive("s0", "2"))
    machine.ask(rq.Arrive("one", "1"))
    machine.ask(rq.Arrive("more", "1"))
    known = machine.core.state.sessions
    assert len(known) == NAMES_KNOWN and (known["s0"], known["more"]) == ("2", "1")
    assert not {"s1", "s2"} & known.keys()


# --- puts


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
    machine.ask(rq.Durable("L", Version(0, 1)))
    assert machine.states() == {"TRIMMED": 2}
    assert machine.put(keys[0], recorded=rq.Recorded(1, "d")) == "OK"
    with pytest.raises(Conflict):
        machine.put(keys[0], digest="other", recorded=rq.Recorded(1, "d"))
    with pytest.raises(Fenced):
        machine.put(keys[0], recorded=rq.Recorded(2, "d"))
    assert machine.put(keys[0]) == "SURPLUS"


def test_a_lower_attempt_is_fenced_once_the_member_is_leased_again(machine: Machine) -> None:
    keys = machine.lease(2)
    machine.now = 10.0
    machine.ask(rq.Tick())
    assert machine.put(keys[0]) == "OK", "late, but nobody else works on it"
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
        machine.ask(rq.PutMember(*key, "d", 1, ()))
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
    machine.ask(rq.Release((keys[1],)))
    assert machine.lease(2) == [(0, 0, 2), (0, 1, 2)]
    assert [g.key_salt for g in machine.grants] == [1, 0]


# --- claims


def test_a_claim_waits_for_whole_groups_and_is_the_same_ever_after(machine: Machine) -> None:
    keys = machine.lease(8)
    for key in keys[1:]:
        machine.put(key)
    with pytest.raises(NotReady, match=r"group 0 misses members \[0\]"):
        machine.claim(0)
    machine.put(keys[0])
    batch = machine.claim(0)
    assert sorted(batch.groups) == [0, 1]
    assert machine.claim(0) == batch
    assert machine.states() == {"CLAIMED": 2, "READY": 2}
    with pytest.raises(StaleClient):
        machine.claim(2)


def test_a_claim_that_is_ready_waits_for_nobody_elses_groups(machine: Machine) -> None:
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
    m.put(late[0], V0)  # a generation that began before the flip and never saw a new token
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


def test_the_store_looks_again_when_the_next_straggler_is_due_and_not_for_those_that_were() -> None:
    m = Machine(batch=2, size=2, alpha=1.0, straggler_deadline_s=100.0)
    m.start()
    assert next_straggler_s(m.state, 2, 100.0, 0.0) is None, "nothing is in work"
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
    m.ask(rq.EndData())
    m.train(0)
    assert len(m.train(1).groups) == 1
    with pytest.raises(Closed, match="end of data"):
        m.claim(2)
    with pytest.raises(Closed, match="end of data"):
        m.lease(1, Version(0, 2))


# --- acks, durable, retention


def test_acks_come_in_order_and_again_without_effect(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.ask(rq.Ack("L", V0))
    with pytest.raises(StaleClient):
        machine.ask(rq.Ack("L", Version(0, 1)))
    with pytest.raises(StaleClient):
        machine.ask(rq.Ack("L", Version(1, 0)))


def test_durable_trims_what_it_covers_and_no_more(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.train(1)
    with pytest.raises(StaleClient):
        machine.ask(rq.Durable("L", Version(0, 3)))
    machine.ask(rq.Durable("L", Version(0, 1)))
    assert machine.states() == {"TRIMMED": 2, "ACKED": 2}
    machine.ask(rq.Durable("L", Version(0, 1)))
    machine.ask(rq.Durable("L", V0))
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
    m.ask(rq.Durable("L", Version(0, 1)))
    with pytest.raises(NoCredit, match="retention"):
        m.lease(2, Version(0, 1))  # open leases reserve as much as the largest member seen


# --- lineages


def test_the_first_begin_is_version_zero_and_repeats(machine: Machine) -> None:
    assert machine.ask(rq.Begin("L", None)) == V0
    assert machine.ask(rq.Begin("L", V0)) == V0


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
    machine.ask(rq.Durable("L", Version(0, 1)))
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
    assert machine.ask(rq.Begin("L2", V0)) == Version(1, 0), "the reply was lost; no second lineage"
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
    machine.ask(rq.Durable("L", Version(0, 1)))
    with pytest.raises(StaleClient):
        machine.ask(rq.Begin("L2", durable))


def test_a_checkpoint_of_a_line_that_was_left_is_refused(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.train(1)
    machine.start(Version(0, 1), "L2")
    machine.publish(Version(1, 2), "L2")
    with pytest.raises(StaleClient, match="line"):
        machine.ask(rq.Begin("L3", Version(0, 2)))
    assert machine.ask(rq.Begin("L3", Version(0, 1))) == Version(2, 1)


def test_the_former_learner_is_shut_out(machine: Machine) -> None:
    machine.fill(8)
    machine.start(None, "L2")
    for request in (
        rq.ClaimStep("L", 0, 0),
        rq.Ack("L", V0),
        rq.Durable("L", V0),
        rq.Publish("L", Snapshot(V0, "tcp", "x", "d")),
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
    machine.ask(rq.Publish("L", Snapshot(Version(0, 1), "tcp", "elsewhere", "d")))
    assert machine.state.published is not None
    assert machine.state.published.address == "elsewhere"


# --- the end, and who is waited for


def test_a_closed_run_leases_and_claims_nothing_but_takes_what_is_on_its_way(machine: Machine) -> None:
    keys = machine.lease(2)
    machine.ask(rq.Close("stopped by hand"))
    machine.ask(rq.Close("another reason"))
    for attempt in (lambda: machine.lease(1), lambda: machine.claim(0), lambda: machine.start(None, "L2")):
        with pytest.raises(Closed, match="stopped by hand"):
            attempt()
    assert machine.put(keys[0]) == "OK"
    machine.ask(rq.Open())
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
    assert waits(m.core.settings, m.state) == {"S": "group 0 misses members [0, 1]"}
    for key in keys:
        m.put(key)
    assert "has not claimed step 0" in waits(m.core.settings, m.state)["learner"]
    m.claim(0)
    assert "training claim 0" in waits(m.core.settings, m.state)["learner"]
