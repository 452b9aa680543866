"""The slot scheduler against a plain model of it, over random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxroll.errors import DataError
from jaxroll.schedule import slots
from jaxroll.schedule.slots import Limits, Placement, Prefill, Waiting


def waiting(count: int, *, prompts: int = 1, bucket: int = 8, first: int = 0) -> list[Waiting]:
    return [Waiting(first + i, bucket, f"prompt {(first + i) // prompts}") for i in range(count)]


def started(prefills: tuple[Prefill, ...]) -> list[int]:
    return [placement.id for prefill in prefills for placement in prefill.placements]


def test_a_group_shares_the_row_of_its_prompt():
    state = slots.arrive(slots.empty(6), waiting(6, prompts=4))
    state, prefills = slots.plan(state, Limits(rows=2, inserts=8))
    assert [tuple(placement) for placement in map(_astuple, prefills[0].placements)] == [
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 1, 4), (5, 1, 5),
    ]  # fmt: skip
    assert len(prefills) == 1 and prefills[0].rows == 2
    assert state.owners == (0, 1, 2, 3, 4, 5) and not state.waiting


def test_a_batch_is_cut_where_its_rows_or_its_inserts_are_full():
    state = slots.arrive(slots.empty(8), waiting(8))
    assert [len(p.placements) for p in slots.plan(state, Limits(rows=3, inserts=8))[1]] == [3, 3, 2]
    state = slots.arrive(slots.empty(8), waiting(8, prompts=8))
    assert [len(p.placements) for p in slots.plan(state, Limits(rows=3, inserts=5))[1]] == [5, 3]


def test_each_bucket_has_its_own_batch_and_the_oldest_get_the_slots():
    mixed = [Waiting(0, 16, "a"), Waiting(1, 8, "b"), Waiting(2, 16, "c"), Waiting(3, 8, "d")]
    state, prefills = slots.plan(slots.arrive(slots.empty(3), mixed), Limits(rows=4, inserts=4))
    assert {p.bucket: [x.id for x in p.placements] for p in prefills} == {8: [1], 16: [0, 2]}
    assert [w.id for w in state.waiting] == [3]


@pytest.mark.parametrize(
    ("owners", "queued", "due"),
    [
        ((None, None, 1, 2), 2, True),  # all that waits fits
        ((None, None, 1, 2), 3, False),  # more waits, and too few slots are free for a worthwhile prefill
        ((None, None, None, 2), 9, True),  # enough are free
        ((3, 4, 1, 2), 9, False),
        ((None, None, None, None), 0, False),
        ((None, None, None, None), 99, True),
    ],
)
def test_a_refill_waits_until_it_is_worth_its_cost(owners, queued, due):
    state = slots.arrive(slots.Slots(owners), waiting(queued, first=100))
    assert bool(slots.plan(state, Limits(rows=2, inserts=2, refill=3))[1]) is due


@pytest.mark.parametrize(("queued", "at"), [(0, None), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_a_refill_is_worth_it_for_all_that_wait_or_for_many(queued, at):
    state = slots.arrive(slots.empty(4), waiting(queued))
    assert slots.refill_at(state, Limits(rows=2, inserts=2, refill=3)) == at
    assert slots.refill_at(slots.hold(state, True), Limits(rows=2, inserts=2, refill=3)) is None


def test_a_refill_threshold_beyond_the_slots_cannot_starve():
    state = slots.arrive(slots.empty(2), waiting(9))
    assert started(slots.plan(state, Limits(rows=9, inserts=9, refill=100))[1]) == [0, 1]


def test_nothing_starts_while_held():
    state = slots.hold(slots.arrive(slots.empty(2), waiting(3)), True)
    assert slots.plan(state, Limits(1, 1)) == (state, ())
    assert started(slots.plan(slots.hold(state, False), Limits(1, 1))[1]) == [0, 1]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 8), (8, 8), (9, 32), (32, 32)])
def test_the_bucket_is_the_smallest_that_fits(tokens, bucket):
    assert slots.bucket_of(tokens, (32, 8)) == bucket


@pytest.mark.parametrize(("tokens", "words"), [(0, "empty"), (33, "33 tokens.*holds 32.*prefill_buckets")])
def test_a_prompt_without_a_bucket_is_refused(tokens, words):
    with pytest.raises(DataError, match=words):
        slots.bucket_of(tokens, (8, 32))


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_limits_below_one_are_refused(bad):
    with pytest.raises(ValueError, match="at least 1"):
        Limits(*bad)


@given(st.integers(-3, 0))
def test_no_slots_are_refused(count):
    with pytest.raises(ValueError, match="at least one"):
        slots.empty(count)


def _astuple(placement: Placement) -> tuple[int, int, int]:
    return placement.id, placement.row, placement.slot


class SlotHistory(RuleBasedStateMachine):
    """Any history of arrivals, ends, aborts and holds keeps order, owners and batches right."""

    @initialize(count=st.integers(1, 6), rows=st.integers(1, 4), inserts=st.integers(1, 6), refill=st.integers(1, 8))
    def begin(self, count, rows, inserts, refill):
        self.state, self.limits = slots.empty(count), Limits(rows, inserts, refill)
        self.next_id, self.content = 0, {}
        self.queue: list[int] = []  # the model: ids in order, and who sits where
        self.seated: dict[int, int] = {}

    @rule(news=st.lists(st.tuples(st.sampled_from([8, 16]), st.integers(0, 3)), max_size=6))
    def arrive(self, news):
        requests = []
        for bucket, prompt in news:
            requests.append(Waiting(self.next_id, bucket, (bucket, prompt)))
            self.content[self.next_id] = (bucket, prompt)
            self.queue.append(self.next_id)
            self.next_id += 1
        self.state = slots.arrive(self.state, requests)

    @rule(data=st.data())
    def end(self, data):
        if self.seated:
            ended = data.draw(st.sets(st.sampled_from(sorted(self.seated.values()))))
            self.state = slots.release(self.state, ended)
            self.seated = {id: slot for id, slot in self.seated.items() if slot not in ended}

    @rule(data=st.data())
    def abort(self, data):
        ids = data.draw(st.sets(st.integers(0, self.next_id + 1), max_size=4))
        expected = {id: None for id in self.queue if id in ids} | {i: s for i, s in self.seated.items() if i in ids}
        self.state, found = slots.abort(self.state, ids)
        assert found == expected
        self.queue = [id for id in self.queue if id not in ids]
        self.seated = {id: slot for id, slot in self.seated.items() if id not in ids}

    @rule(held=st.booleans())
    def hold(self, held):
        self.state = slots.hold(self.state, held)

    @rule()
    def plan(self):
        free, needed = len(self.state.free), min(self.limits.refill, len(self.queue), len(self.state.owners))
        due = bool(self.queue) and free >= needed and not self.state.held
        self.state, prefills = slots.plan(self.state, self.limits)
        ids = started(prefills)
        assert sorted(ids) == (self.queue[:free] if due else [])  # ids grow with arrival
        self.queue = self.queue[len(ids) :]
        for prefill in prefills:
            rows: dict[int, object] = {}
            assert len(prefill.placements) <= self.limits.inserts and prefill.rows <= self.limits.rows
            for placement in prefill.placements:
                assert self.content[placement.id][0] == prefill.bucket
                assert rows.setdefault(placement.row, self.content[placement.id]) == self.content[placement.id]
                assert placement.slot not in self.seated.values()
                self.seated[placement.id] = placement.slot
            assert len(set(rows.values())) == len(rows)  # no prompt is computed twice in a batch

    @invariant()
    def agrees_with_the_model(self):
        if hasattr(self, "state"):
            assert [request.id for request in self.state.waiting] == self.queue
            assert {o: s for s, o in enumerate(self.state.owners) if o is not None} == self.seated
            assert self.state.active == len(self.seated) == len(self.state.owners) - len(self.state.free)


TestSlotHistory = SlotHistory.TestCase
