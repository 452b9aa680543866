"""The curriculum in the core: skipped prompts, no skips while no group may be issued, and replay of the log."""

from __future__ import annotations

import pytest

from jaxroll.errors import NoCredit
from jaxroll.policy.selection import Curriculum
from jaxroll.records import Question, Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import status
from jaxroll.store.core.invariants import Known
from jaxroll.store.core.state import State
from jaxroll.store.log.replay import broken_by
from tests.harness.store.machine import V0, Machine

BAND = Curriculum("band", explore=1e-12)


def started(**rules) -> Machine:
    m = Machine(**({"alpha": 0.0, "curriculum": BAND} | rules))
    m.start()
    return m


def known(m: Machine, ordinal: int, mean: float) -> None:
    m.state.questions[f"{ordinal:016x}"] = Question(1, 1, 4, 4 * mean, 0)


def test_a_prompt_outside_of_the_band_is_skipped_and_the_next_one_issued() -> None:
    m = started()
    known(m, 0, 1.0)
    known(m, 1, 0.5)
    known(m, 2, 0.0)
    m.lease(4)
    hashes = [e.task.question_hash for e in m.log if isinstance(e, ev.Issued)]
    assert hashes[0] == f"{1:016x}"
    assert next(e.ordinal for e in m.log if isinstance(e, ev.Skipped)) == 0
    assert f"{2:016x}" not in hashes
    assert status(m.core.settings, m.state)["prompts_skipped"] == {"curriculum": 2}


def test_prompts_that_were_used_before_a_fork_are_not_counted_as_skipped_by_the_curriculum() -> None:
    m = started()
    known(m, 1, 1.0)
    m.state.passed = {0}
    m.lease(2)
    (skipped,) = (e for e in m.log if isinstance(e, ev.Skipped))
    assert (skipped.ordinal, skipped.curriculum) == (1, 1)


def test_nothing_is_skipped_while_the_window_is_full() -> None:
    m = started()
    m.lease(4)
    known(m, m.state.next_ordinal, 0.0)
    before = m.state.next_ordinal
    with pytest.raises(NoCredit, match="window"):
        m.lease(2)
    assert m.state.next_ordinal == before
    assert not [e for e in m.log if isinstance(e, ev.Skipped)]


def test_without_a_curriculum_every_prompt_is_issued() -> None:
    m = started(curriculum=Curriculum())
    known(m, 0, 1.0)
    m.lease(4)
    assert next(e.task.question_hash for e in m.log if isinstance(e, ev.Issued)) == f"{0:016x}"


def test_a_question_that_is_always_solved_does_not_return_and_the_log_replays() -> None:
    m = started()
    m.lease(4)
    for group, rewards in enumerate([(1.0, 1.0), (1.0, 0.0)]):
        for member, reward in enumerate(rewards):
            m.put((group, member, 1), V0, digest=f"{group}.{member}", reward=reward)
    m.train(0)
    tasks = [e.task for e in m.log if isinstance(e, ev.Issued)]
    offered = tuple((task, b"later%d" % place) for place, task in enumerate([*tasks, *tasks]))
    m.ask(ev.Lease("S", "S-1", Version(0, 1), 4, "again", offered))
    again = [e.task.question_hash for e in m.log if isinstance(e, ev.Issued)][2:]
    assert again == [tasks[1].question_hash] * 2
    assert m.state.cursor == b"later3"
    state, seen = State(), Known(m.core.settings)
    for event in m.log:
        assert broken_by(state, seen, event) == ""
    assert (state.next_ordinal, state.cursor) == (m.state.next_ordinal, m.state.cursor)
    assert state.questions == m.state.questions
    assert state.curriculum_skipped == m.state.curriculum_skipped == 2
