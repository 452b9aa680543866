"""Leases of the longest members of a claim first, by the lengths of the run's own answers."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.errors import NoCredit
from jaxroll.policy.selection import longest_first, predicted_tokens
from jaxroll.records import Task, Version, VersionRun
from jaxroll.store.core import events as ev
from tests.harness.store.machine import V0, Machine

lengths = st.lists(st.floats(0, 1e4), min_size=1, max_size=24)


@given(lengths, st.integers(1, 6))
def test_claims_keep_their_groups_and_the_longest_of_each_comes_first(predicted: list[float], batch: int) -> None:
    order = longest_first(range(len(predicted)), predicted, batch)
    claims = [index // batch for index in order]
    assert sorted(order) == [*range(len(predicted))] and claims == sorted(claims)
    for one in set(claims):
        own = [predicted[index] for index in order if index // batch == one]
        assert own == sorted(own, reverse=True)


@given(st.integers(1, 24), st.integers(1, 6), st.floats(0, 1e4))
def test_equal_lengths_leave_the_order_of_arrival(groups: int, batch: int, tokens: float) -> None:
    assert longest_first(range(groups), [tokens] * groups, batch) == [*range(groups)]


def test_predictions_by_hand() -> None:
    assert predicted_tokens((0, 0), (0, 0), (0, 0)) == 0.0
    assert predicted_tokens((0, 0), (0, 0), (10, 100)) == 10.0
    assert predicted_tokens((0, 0), (10, 1000), (20, 1200)) == pytest.approx((1000 + 4 * 60) / 14)
    assert predicted_tokens((1, 500), (0, 0), (10, 100)) == pytest.approx((500 + 4 * 10) / 5)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10_000)), min_size=3, max_size=3))
def test_a_prediction_lies_between_the_means(seen: list[tuple[int, int]]) -> None:
    means = [tokens / members for members, tokens in seen]
    assert min(means) * (1 - 1e-9) <= predicted_tokens(*seen) <= max(means) * (1 + 1e-9)
    many = ((10**7, 10**7 * 50), *seen[1:])
    assert predicted_tokens(*many) == pytest.approx(50, rel=0.01)


class Sources(Machine):
    """A machine whose prompts come from three sources in turn; their answers have 5, 50 and 500 tokens."""

    def __init__(self, **rules) -> None:
        super().__init__(**({"batch": 3, "size": 1, "alpha": 1.0, "longest_first": True} | rules))
        self.start()

    def take(self, members: int, version: Version = V0, name: str = "S") -> list[int]:
        """The groups of the leased members, in their order; all that the window holds is offered."""
        self.requests += 1
        while True:  # as the service does
            first = self.state.next_ordinal
            tasks = [Task(i % 3 * SOURCE_ITEMS + i, (), "env", "{}", 0, f"{i:016x}") for i in range(first, first + 6)]
            prompts = tuple((task, b"%d" % task.index) for task in tasks)
            try:
                reply = self.ask(ev.Lease(name, f"{name}-1", version, members, f"q{self.requests}", prompts))
            except NoCredit:
                return []
            if reply.grants or not reply.prompts_used:
                return [grant.group for grant in reply.grants for _ in grant.members]

    def end(self, group: int, version: Version = V0) -> None:
        tokens = (5, 50, 500)[group % 3]
        for member, slot in enumerate(self.state.open[group].slots):
            self.ask(ev.PutMember(group, member, slot.attempt, "d", 100, (VersionRun(version, tokens),)))


def test_a_run_learns_the_lengths_of_its_sources_and_starts_with_the_longest() -> None:
    m = Sources()
    assert m.take(3) == [0, 1, 2], "nothing is known yet"
    for group in range(3):
        m.end(group)
    m.train(0)
    assert m.take(1, Version(0, 1)) == [5], "of the next claim the one with the longest answers"
    assert m.take(2, Version(0, 1)) == [4, 3]
    assert m.take(3, Version(0, 1)) == [8, 7, 6], "the claim after it comes later, however long its answers are"
    assert [*m.state.open] == [3, 4, 5, 6, 7, 8], "groups keep the order of their prompts"


def test_oldest_first_is_the_order_of_prompts_whatever_the_lengths_are() -> None:
    m = Sources(longest_first=False)
    for group in m.take(3):
        m.end(group)
    m.train(0)
    assert m.take(3, Version(0, 1)) == [3, 4, 5]
    m.ask(ev.Release(tuple((group, 0, 1) for group in (3, 4, 5))))
    assert m.take(3, Version(0, 1)) == [3, 4, 5], "released ones, too"


def test_what_was_learned_survives_a_restart_of_the_store() -> None:
    m = Sources()
    for group in m.take(3):
        m.end(group)
    m.train(0)
    m.restart()
    assert m.state.lengths.by_source == {0: (1, 5), 1: (1, 50), 2: (1, 500)}
    assert m.take(3, Version(0, 1)) == [5, 4, 3]


def test_groups_that_stay_together_are_leased_whole() -> None:
    m = Sources(size=2, replicate="together")
    assert m.take(4) == [0, 0, 1, 1]
    assert m.take(1) == [2]
    m = Sources(size=2, replicate="together")
    m.take(12)
    m.ask(ev.Arrive("T", "T-1"))
    assert m.take(12, name="T") == [], "the window is full: T has room from now on"
    for group in range(6):
        m.end(group)
    m.train(0)
    assert m.take(2, Version(0, 1)) == [8, 8], "its share is one member"


def test_a_sampler_that_lags_gets_the_groups_that_its_weights_may_sample() -> None:
    m = Sources(alpha=0.67)
    for group in m.take(3):
        m.end(group)
    m.train(0)
    assert m.take(1, Version(0, 1)) == [5]
    m.ask(ev.Release(((5, 0, 1),)))
    assert m.take(1, V0) == [4], "group 5 would be too old, and it is the longest"
