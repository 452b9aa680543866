"""Dynamic filtering in the core: rejected groups end at once, others take their place, and it cannot spin forever."""

from __future__ import annotations

import pytest

from jaxroll.errors import Closed, NoCredit, NotReady
from jaxroll.policy.selection import Filter
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.invariants import Known, impossible
from jaxroll.store.core.state import State, outstanding
from jaxroll.store.log.replay import broken_by
from tests.harness.store.machine import V0, Machine

ALIKE = Filter("min_std")


def put_group(m: Machine, group: int, *rewards: float, version: Version = V0) -> str:
    answers = {
        m.put((group, member, 1), version, digest=f"{group}.{member}", reward=reward)
        for member, reward in enumerate(rewards)
    }
    assert answers == {"OK"}
    found = m.state.find(group)
    return found.state if found else "ENDED"


def started(**rules) -> Machine:
    m = Machine(**({"alpha": 0.0, "filter": ALIKE} | rules))
    m.start()
    return m


def test_a_rejected_group_makes_room_for_another_prompt_at_once() -> None:
    m = started()
    m.lease(4)
    with pytest.raises(NoCredit, match="window"):
        m.lease(2)
    assert put_group(m, 0, 1.0, 1.0) == "ENDED"
    assert outstanding(m.state) == 1
    assert {group for group, _, _ in m.lease(4)} == {2}, "one group was rejected, so one is issued"
    put_group(m, 1, 1.0, 0.0)
    with pytest.raises(NotReady):
        m.claim(0)
    put_group(m, 2, 0.0, 1.0)
    assert sorted(m.claim(0).groups) == [1, 2]
    assert (m.state.expired, m.state.tokens_expired) == ({"filtered": 1}, {"filtered": 10})


def test_the_filters_verdict_is_in_the_log_and_the_question_counts() -> None:
    m = started()
    m.lease(4)
    put_group(m, 0, 0.0, 0.0)
    assert [e.reason for e in m.log if isinstance(e, ev.Expired)] == ["filtered: rewards too alike"]
    question = m.state.questions[f"{0:016x}"]
    assert (question.issued, question.trained, question.members, question.reward_mean) == (1, 0, 2, 0.0)


def test_a_put_of_a_rejected_group_is_acknowledged_again() -> None:
    m = started()
    m.lease(4)
    put_group(m, 0, 1.0, 1.0)
    again = ev.PutMember(0, 0, 1, "0.0", 100, (), None, ev.Recorded(1, "0.0"))
    assert m.ask(again) == "OK"
    assert m.ask(ev.PutMember(0, 1, 2, "new", 100)) == "SURPLUS"


def test_a_task_that_teaches_nothing_ends_the_run_by_name() -> None:
    m = started(filter=Filter("min_std", windows=2))  # two groups a window: the fourth rejection is too many
    for step in range(3):
        (group,) = {group for group, _, _ in m.lease(2)}
        put_group(m, group, 1.0, 1.0)
        assert not m.state.closed, step
    (group,) = {group for group, _, _ in m.lease(2)}
    put_group(m, group, 1.0, 1.0)
    assert "min_std rejected 4 groups for claim 0 (schedule.filter_limit)" in m.state.closed
    with pytest.raises(Closed, match="rewards too alike"):
        m.lease(2)
    with pytest.raises(Closed, match=r"schedule\.filter"):
        m.claim(0)
    m.ask(ev.Open())  # the next start of the store gives it as many again
    assert (m.state.closed, m.state.filtered) == ("", 0)


def test_delivery_at_the_limit_lets_groups_pass_until_the_next_claim() -> None:
    m = started(filter=Filter("min_std", windows=1, at_limit="deliver"))
    fates = []
    for _ in range(4):
        (group,) = {group for group, _, _ in m.lease(2)}
        fates.append(put_group(m, group, 1.0, 1.0))
    assert fates == ["ENDED", "ENDED", "READY", "READY"]
    m.train(0)
    (group,) = {group for group, _, _ in m.lease(2, Version(0, 1))}
    assert put_group(m, group, 1.0, 1.0, version=Version(0, 1)) == "ENDED"


def test_a_group_closed_as_a_straggler_is_judged_by_what_it_has() -> None:
    m = started(size=3, batch=1, straggler_deadline_s=5.0)
    m.lease(3)
    for member in range(2):
        m.put((0, member, 1), reward=1.0)
    m.now = 6.0
    with pytest.raises(NotReady):
        m.claim(0)
    assert m.states() == {"EXPIRED": 1}
    m.lease(3)
    for member in range(2):
        m.put((1, member, 1), reward=float(member))
    m.now = 12.0
    assert m.claim(0).groups == (1,)


def test_the_last_prompts_may_all_be_rejected() -> None:
    m = started()
    m.prompts = 2
    m.lease(4)
    m.ask(ev.EndData())
    put_group(m, 0, 1.0, 1.0)
    put_group(m, 1, 0.0, 0.0)
    with pytest.raises(Closed, match="end of data"):
        m.claim(0)


def test_a_hook_that_fails_ends_the_run_by_name() -> None:
    m = started(filter=Filter("math:sqrt"))  # which wants a number, not a tuple
    m.lease(2)
    put_group(m, 0, 1.0, 0.0)
    assert m.state.closed.startswith("schedule.filter: math:sqrt raised TypeError")
    assert m.states() == {"EXPIRED": 1}


def test_the_log_of_a_filtering_run_gives_the_same_state_and_no_unfinished_group_is_filtered() -> None:
    m = started()
    m.lease(4)
    put_group(m, 0, 1.0, 1.0)
    state, seen = State(), Known(m.core.settings)
    for event in m.log:
        assert broken_by(state, seen, event) == ""
    assert (state.expired, state.filtered) == (m.state.expired, m.state.filtered) == ({"filtered": 1}, 1)
    before = State()
    for event in m.log[:-2]:  # without the last put, and what followed from it
        assert broken_by(before, seen, event) == ""
    assert "is filtered, but it is LEASED" in impossible(seen, before, m.log[-1])
