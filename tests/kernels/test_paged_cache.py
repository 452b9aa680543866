"""The loop over pages: right, blind to the neighbors to the bit, and no further than each block of rows needs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.kernels import attention
from jaxroll.kernels.attention import blocks, paged, reach, window_pages, within

N, K, H, U, J = 4, 2, 8, 8, 9
loop = jax.jit(paged)


def problem(rows: int, queries: int = 1, seed: int = 0) -> dict[str, jax.Array]:
    """Random queries and pages; every row has pages of its own."""
    rng = np.random.default_rng(seed)
    pool = (K, rows * J, U, H)
    return {
        "q": jnp.asarray(rng.normal(size=(rows, queries, N, H)), jnp.float32),
        "keys": jnp.asarray(rng.normal(size=pool), jnp.float32),
        "values": jnp.asarray(rng.normal(size=pool), jnp.float32),
        "tables": jnp.asarray(rng.permutation(rows * J).reshape(rows, J), jnp.int32),
    }


def looped(given: dict[str, jax.Array], starts: np.ndarray, count: int) -> np.ndarray:
    queries = given["q"].shape[1]
    return np.asarray(loop(**given, starts=starts, reach=reach(jnp.asarray(starts), queries, U, count)))


def at_once(given: dict[str, jax.Array], starts: np.ndarray) -> np.ndarray:
    """The same with every row's pages laid out in one piece."""
    unrolled = lambda pool: pool[:, given["tables"]].transpose(1, 2, 3, 0, 4).reshape(len(starts), J * U, K, H)  # noqa: E731
    positions = starts[:, None] + np.arange(given["q"].shape[1])
    mask = jnp.arange(J * U).reshape((1,) * positions.ndim + (-1,)) <= positions[..., None]
    return np.asarray(attention.grouped(given["q"], unrolled(given["keys"]), unrolled(given["values"]), mask))


@pytest.mark.parametrize(("rows", "count", "queries"), [(1, 1, 1), (6, 1, 3), (8, 2, 1), (7, 2, 1), (9, 4, 1)])
def test_equals_attention_over_pages_in_one_piece(rows, count, queries):
    given = problem(rows, queries)
    starts = np.random.default_rng(1).integers(0, J * U - queries, rows)
    starts[-1] = J * U - queries  # the last page to its end
    np.testing.assert_allclose(looped(given, starts, count), at_once(given, starts), atol=2e-6)


def test_a_row_does_not_depend_on_its_neighbours_to_the_bit():
    """In any row, next to rows of any length: a row that moves takes its query, its table and its start along."""
    rows, rng = 10, np.random.default_rng(2)
    given, starts = problem(rows), rng.integers(0, J * U, rows)
    alone = looped(given, starts, 3)
    for _ in range(8):
        order, others = rng.permutation(rows), rng.integers(-1, J * U, rows)
        kept = rng.random(rows) < 0.5
        moved = given | {"q": given["q"][order], "tables": given["tables"][order]}
        got = looped(moved, np.where(kept, starts, others)[order], 3)
        np.testing.assert_array_equal(got[kept[order]], alone[order][kept[order]])


def test_a_block_reads_no_further_than_its_own_longest_row():
    """The content of later pages has no effect, even if it is NaN."""
    rows, starts = 8, np.array([J * U - 1, 3, 5, 7, 1, 30, 2, 4])
    given, far = problem(rows), [J, 4]  # pages, read in chunks of 4
    assert reach(jnp.asarray(starts), 1, U, 2).tolist() == [J, 4]
    clean = looped(given, starts, 2)
    spoilt = np.concatenate(
        [given["tables"][4 * block : 4 * block + 4, pages:].ravel() for block, pages in enumerate(far)]
    )
    poisoned = given | {"values": given["values"].at[:, spoilt].set(np.nan)}
    np.testing.assert_array_equal(looped(poisoned, starts, 2), clean)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_window_reads_only_the_pages_of_its_own_row(queries):
    """Other pages have no effect, even NaN, although the rows of a block are far apart."""
    window, starts = 9, np.array([J * U - queries, 3, 66, 40, 17, 0, -1, 50])
    given, count = problem(8, queries), window_pages(window, queries, U)
    tables, near = within(given["tables"], jnp.asarray(starts), window, queries, U)
    assert tables.shape == (8, count) and count == 1 + (queries + 1) // 2 and near[6] == -1
    attend = jax.jit(functools.partial(paged, window=window))
    whole = attend(**given, starts=starts, reach=reach(jnp.asarray(starts), queries, U, 2))
    spoilt = np.setdiff1d(given["tables"], np.append(tables, 0))  # page 0 fills the last chunk of a table
    poisoned = given | {"values": given["values"].at[:, spoilt].set(np.nan)}
    found = np.asarray(attend(**poisoned | {"tables": tables}, starts=near, reach=reach(near, queries, U, 2)))
    seen = starts >= 0
    np.testing.assert_allclose(found[seen], np.asarray(whole)[seen], atol=2e-6)
    assert np.isfinite(found).all()


def test_tables_stay_as_they_are_without_a_window_or_with_a_long_one():
    tables, starts = problem(2)["tables"], jnp.array([J * U - 1, 30])
    for window in (0, J * U):
        assert within(tables, starts, window, 1, U) == (tables, starts)


def test_a_window_has_as_many_pages_as_the_queries_can_see():
    for window, queries, page in ((1, 1, 1), (1, 1, 8), (8, 1, 8), (9, 1, 8), (10, 1, 8), (5, 4, 3), (2, 1, 8)):
        seen = [(start + queries - 1) // page - (start - window + 1) // page + 1 for start in range(50, 50 + page)]
        assert window_pages(window, queries, page) == max(seen)


def test_reach_is_the_most_of_all_shards_and_zero_for_idle_rows():
    starts = jnp.array([[31, 7, -1, -1], [8, 8, -1, -1]])
    assert reach(starts, 1, 8, 2).tolist() == [4, 0]
    assert reach(starts, 2, 8, 1).tolist() == [5]
    assert reach(jnp.array([40, 9, 8]), 1, 8, 2).tolist() == [6, 2]  # the last block begins within the first


def test_rows_that_see_nothing_stay_finite():
    assert np.isfinite(looped(problem(5), np.array([20, -1, 3, -1, -1]), 2)).all()


def test_small_blocks_on_a_cpu():
    assert [blocks(rows, None) for rows in (1, 4, 5, 64)] == [1, 1, 2, 16]
