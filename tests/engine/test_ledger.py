"""The ring of rows and the record of weight swaps against lists that keep everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.engine.ledger import History, WeightSwaps
from jaxroll.records import Version, VersionRun


@given(
    capacity=st.integers(4, 9),
    dispatches=st.lists(st.integers(0, 4), max_size=12),
    data=st.data(),
)
def test_a_column_returns_the_rows_that_were_added(capacity, dispatches, data):
    history, rows = History(capacity, 3), []
    for steps in dispatches:
        new = [[len(rows) + i, 100 + len(rows) + i, 200 + len(rows) + i] for i in range(steps)]
        block = np.array(new, np.int32).reshape(steps, 3)
        history.add(block, -block.astype(np.float32))
        rows += new
    assert history.rows.tolist() == [len(rows)] * 3
    held = min(capacity, len(rows))
    start = data.draw(st.integers(len(rows) - held, len(rows)))
    count = data.draw(st.integers(0, len(rows) - start))
    slot = data.draw(st.integers(0, 2))
    tokens, logprobs = history.column(slot, start, count)
    assert tokens.tolist() == [row[slot] for row in rows[start : start + count]]
    assert logprobs.tolist() == [-float(row[slot]) for row in rows[start : start + count]]


@given(
    capacity=st.integers(4, 9),
    dispatches=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), max_size=12),
    data=st.data(),
)
def test_a_column_returns_the_tokens_that_its_slot_sampled(capacity, dispatches, data):
    """With several tokens a step, slots have different numbers of tokens."""
    history, columns = History(capacity, 3), [[], [], []]
    for counts in dispatches:
        block = np.full((4, 3), -7, np.int32)
        support = np.full((4, 3, 2), -1, np.int32)
        for slot, count in enumerate(counts):
            new = range(100 * slot + len(columns[slot]), 100 * slot + len(columns[slot]) + count)
            block[:count, slot], support[:count, slot, 0] = new, new
            columns[slot] += new
        history.add(block, -block.astype(np.float32), support, np.array(counts))
    slot = data.draw(st.integers(0, 2))
    held = min(capacity, len(columns[slot]))
    start = data.draw(st.integers(len(columns[slot]) - held, len(columns[slot])))
    count = data.draw(st.integers(0, len(columns[slot]) - start))
    wanted = columns[slot][start : start + count]
    tokens, logprobs = history.column(slot, start, count)
    assert tokens.tolist() == wanted and logprobs.tolist() == [-float(token) for token in wanted]
    found = history.supports(slot, start, count)
    assert found.sizes.tolist() == [1] * count and found.ids.tolist() == wanted


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 4), (1, 1), (5, 2)])
def test_rows_that_are_not_held_are_refused(start, count):
    history = History(4, 1)
    history.add(np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32))
    history.add(np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32))
    with pytest.raises(IndexError, match="not held"):
        history.column(0, start, count)


@given(
    flips=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=8),
    before=st.integers(0, 20),
    count=st.integers(0, 12),
    first=st.integers(0, 2),
)
def test_runs_are_the_versions_row_by_row(flips, before, count, first):
    """`flips` are (rows since the last weight swap, version); a request starts at a row after the first one."""
    record, versions, row = WeightSwaps(), [], 0
    for gap, step in flips:
        versions += [versions[-1]] * gap if versions else []
        row = len(versions)
        record.add(row, Version(0, step))
        versions = [*versions[:row], Version(0, step)]
    versions += [versions[-1]] * 40
    start = min(before, len(versions) - count - 1)
    record.forget_before(start)
    runs = record.runs((VersionRun(Version(0, first), 1),), start, count)
    expected = [Version(0, first), *versions[start : start + count]]
    assert [run.version for run in runs for _ in range(run.count)] == expected
    assert all(a.version != b.version for a, b in itertools.pairwise(runs))
    assert all(isinstance(run, VersionRun) and run.count > 0 for run in runs)
