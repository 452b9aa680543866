"""End of the data, retention limits, and the state's counts of difficulty and length."""

from __future__ import annotations

import pytest

from jaxroll import records, wire
from jaxroll.errors import Closed, NoCredit, NotReady, StaleClient
from jaxroll.records import Version, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import checkpoint_wanted, status, waits
from jaxroll.store.core.machine import Core
from jaxroll.store.core.state import State
from tests.harness.store.machine import V0, Machine

# --- the last, short batch


def short_of_prompts(prompts: int, **rules) -> Machine:
    m = Machine(**rules)
    m.prompts = prompts
    m.start()
    m.fill(100)
    m.ask(ev.EndData())
    return m


def test_the_last_short_batch_is_delivered_by_default_and_then_the_run_is_over() -> None:
    m = short_of_prompts(3)
    m.train(0)
    assert len(m.train(1).groups) == 1
    with pytest.raises(Closed, match="end of data"):
        m.claim(2)
    assert status(m.core.settings, m.state)["closed"] == "end of data"
    assert waits(m.core.settings, m.state) == {}


def test_the_last_short_batch_may_be_dropped_and_says_so() -> None:
    m = short_of_prompts(3, last_batch="drop")
    m.train(0)
    for _ in range(2):
        with pytest.raises(Closed, match="end of data"):
            m.claim(1)
    with pytest.raises(Closed, match="end of data"):
        m.lease(1, Version(0, 1))
    assert m.state.expired == {"last_batch": 1}
    assert status(m.core.settings, m.state)["closed"] == "end of data"


def test_a_batch_that_is_whole_is_not_dropped_and_unfinished_groups_are() -> None:
    m = Machine(last_batch="drop")
    m.prompts = 3
    m.start()
    keys = m.lease(6)
    m.ask(ev.EndData())
    for key in keys[:3]:
        m.put(key)
    with pytest.raises(NotReady):
        m.claim(0)
    m.put(keys[3])
    m.train(0)
    with pytest.raises(Closed):
        m.claim(1)
    assert m.put(keys[4]) == "SURPLUS"


@pytest.mark.parametrize("policy", ["deliver", "drop"])
def test_with_redundant_groups_the_end_is_the_same(policy: str) -> None:
    m = short_of_prompts(5, redundant=1, last_batch=policy)  # two are claimed and one is surplus, so two are left
    m.train(0)
    assert len(m.train(1).groups) == 2
    with pytest.raises(Closed, match="end of data"):
        m.claim(2)


# --- how many groups are kept


def test_no_more_groups_are_kept_than_the_buffer_holds() -> None:
    m = Machine(alpha=1.0, size=1, buffer_groups=5)
    m.start()
    assert len(m.lease(100)) == 4
    for key in [(g, 0, 1) for g in range(4)]:
        m.put(key)
    m.train(0)
    assert checkpoint_wanted(m.core.settings, m.state), "four of five"
    assert len(m.lease(100, Version(0, 1))) == 1, "two open, two trained but not durable, one more"
    with pytest.raises(NoCredit, match="retention"):
        m.lease(100, Version(0, 1))
    m.ask(ev.Durable("L", Version(0, 1)))
    assert not checkpoint_wanted(m.core.settings, m.state)
    assert len(m.lease(100, Version(0, 1))) == 1


def test_a_full_buffer_never_keeps_the_next_claim_from_its_groups() -> None:
    m = Machine(alpha=0.0, size=1, buffer_groups=2, steps=20)
    version = m.start()
    for step in range(10):  # no checkpoint at all
        version = Version(0, step)
        assert len(m.fill(100, version)) == 2
        m.train(step)
    assert m.states() == {"ACKED": 20}


def test_without_a_buffer_only_bytes_limit() -> None:
    m = Machine(alpha=4.0, size=1, steps=50)
    m.start()
    for step in range(10):
        m.fill(100, Version(0, step))
        m.train(step)
    assert not checkpoint_wanted(m.core.settings, m.state)


# --- difficulty


def graded(m: Machine, group: int, *rewards: float, tokens: int = 5) -> None:
    for member, reward in enumerate(rewards):
        m.ask(ev.PutMember(group, member, 1, "d", 100, (VersionRun(V0, tokens),), reward=reward))


def test_difficulty_is_counted_when_a_group_is_claimed_and_once() -> None:
    m = Machine(alpha=1.0)
    m.start()
    m.lease(8)
    graded(m, 0, 1.0, 0.0)
    graded(m, 1, 1.0, 1.0)
    graded(m, 2, 0.0, 0.5)
    m.train(0)
    m.start(None, "L2")
    m.claim(0, 1, "L2")  # replayed
    rows = {task: m.state.questions[f"{task:016x}"] for task in range(3)}
    assert [(r.issued, r.trained, r.members, r.reward_mean, r.last_step) for r in rows.values()] == [
        (1, 1, 2, 0.5, 0),
        (1, 1, 2, 1.0, 0),
        (1, 0, 0, None, None),
    ]


def test_difficulty_survives_a_restart_and_a_compaction() -> None:
    m = Machine()
    m.start()
    m.lease(4)
    graded(m, 0, 1.0, 0.0)
    graded(m, 1, 1.0, 1.0)
    m.train(0)
    before = m.state.questions
    m.restart()
    assert m.state.questions == before
    assert list(wire.decode(wire.encode(m.state), State).questions.items()) == list(before.items())
    assert Core.recovered(m.core.settings, m.state, [], 9.0).state.questions == before


def test_a_question_that_comes_again_is_one_row_and_the_oldest_of_too_many_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "QUESTIONS_KEPT", 3)
    m = Machine(alpha=0, batch=1, size=1, reissues=5, steps=9)
    m.start()
    m.fill(1)
    m.train(0)
    (key,) = m.lease(1, Version(0, 1))
    m.put(key, V0)  # stale: its prompt comes again
    with pytest.raises(NotReady):
        m.claim(1)
    assert m.state.questions[f"{1:016x}"].issued == 2
    for step in (1, 2, 3):
        m.fill(1, Version(0, step))
        m.train(step)
    assert list(m.state.questions) == [f"{task:016x}" for task in (1, 2, 3)]


# --- length


def test_reissues_are_counted_by_the_length_of_what_ended() -> None:
    m = Machine(alpha=0, batch=2, size=1, order="ready_first", reissues=1)
    m.start()
    m.fill(2)
    m.train(0)
    keys = m.lease(4, Version(0, 1))
    for key, tokens in zip(keys, (5, 128), strict=False):
        m.ask(ev.PutMember(*key, "d", 100, (VersionRun(V0, tokens),)))
    with pytest.raises(NotReady):
        m.claim(1)
    report = status(m.core.settings, m.state)
    assert report["reissues_by_length"] == {"8": 1, "128": 1}
    assert report["tokens_expired"] == {"stale": 133}
    for key in m.lease(2, Version(0, 1)):
        m.put(key, V0)
    with pytest.raises(NotReady):
        m.claim(1)
    assert status(m.core.settings, m.state)["reissues_by_length"] == {"8": 1, "128": 1}, "capped at one a prompt"


def test_finished_members_are_counted_with_their_lengths_trained_or_lost() -> None:
    m = Machine(alpha=0, redundant=1, size=1, steps=9)
    m.start()
    m.lease(3)
    for group, tokens in ((0, 10), (1, 10)):
        graded(m, group, 1.0, tokens=tokens)
    m.train(0)
    assert status(m.core.settings, m.state)["lengths"] == {"trained": [2, 20], "lost": [0, 0]}
    keys = m.lease(3, Version(0, 1))
    for key, tokens in zip(keys, (10, 10, 70), strict=True):
        m.ask(ev.PutMember(*key, "d", 100, (VersionRun(Version(0, 1), tokens),)))
    m.train(1)
    assert m.state.tokens_expired == {"surplus": 70}
    assert status(m.core.settings, m.state)["lengths"] == {"trained": [4, 40], "lost": [1, 70]}


def test_a_fork_gives_trained_lengths_back() -> None:
    m = Machine(alpha=1.0, size=1)
    m.start()
    m.fill(4)
    m.train(0)
    m.start(None, "L2", fork="again")
    assert (m.state.lengths.trained_members, m.state.lengths.lost_members) == (0, 4)


# --- two learners, and versions that cannot be (faults 17 and 19)


def test_of_two_learners_the_later_one_trains_and_the_other_is_refused() -> None:
    m = Machine()
    m.start(None, "A")
    m.fill(8)
    m.claim(0, session="A")
    assert m.start(None, "B") == V0
    m.claim(0, session="B")
    for session_asks in (lambda: m.claim(0, session="A"), lambda: m.train(0, session="A"), lambda: durable(m, "A")):
        with pytest.raises(StaleClient, match="another learner"):
            session_asks()
    assert m.train(0, session="B")
    m.start(V0, "A")  # it may come back, and then the other is shut out
    with pytest.raises(StaleClient, match="another learner"):
        m.claim(0, 1, "B")


def durable(m: Machine, session: str) -> None:
    m.ask(ev.Durable(session, V0))


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ((Version(0, 9),), "never published"),
        ((Version(3, 0),), "never published"),
        ((Version(0, 1), V0), "after"),
        ((V0, Version(0, 1), V0), "after"),
    ],
)
def test_members_from_the_future_or_with_a_regressing_version_are_refused_and_the_lease_stays(
    versions: tuple[Version, ...], why: str
) -> None:
    m = Machine()
    m.start()
    m.fill(4)
    m.train(0)
    (key, _) = m.lease(2, Version(0, 1))
    with pytest.raises(StaleClient, match=why):
        m.put(key, *versions)
    assert m.states()["LEASED"] == 1
    assert m.put(key, V0, Version(0, 1)) == "OK"
