"""Attention over a contiguous cache: correct, bitwise independent of other rows, and limited to the needed levels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.kernels import attention
from jaxroll.kernels.attention import dense, levels, paged

N, K, H = 4, 2, 8
LENGTHS = (64, 64, 40)
TOKENS = sum(LENGTHS)
compiled = jax.jit(dense)


def problem(rows: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random queries [B, 1, N, H], keys and values [B, U, K, H]."""
    rng = np.random.default_rng(seed)
    real = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return real(rows, 1, N, H), real(rows, TOKENS, K, H), real(rows, TOKENS, K, H)


def by_levels(q: jax.Array, k: jax.Array, v: jax.Array, positions: np.ndarray, last: int | None = None) -> np.ndarray:
    cuts = np.cumsum(LENGTHS)[:-1]
    keys = tuple(jnp.split(k.transpose(0, 2, 3, 1), cuts, axis=3))
    values = tuple(jnp.split(v.transpose(0, 2, 1, 3), cuts, axis=2))
    return np.asarray(compiled(q, keys, values, positions, jnp.int32(max(positions) if last is None else last)))


@pytest.mark.parametrize("longest", [0, 63, 64, 127, 128, TOKENS - 1])
def test_equals_attention_in_one_piece(longest: int) -> None:
    q, k, v = problem(6)
    positions = np.array([longest, 0, longest // 2, longest // 3, longest, 1 if longest else 0], np.int32)
    mask = jnp.arange(TOKENS)[None, None] <= positions[:, None, None]
    wanted = np.asarray(attention.grouped(q, k, v, mask))
    np.testing.assert_allclose(by_levels(q, k, v, positions), wanted, atol=2e-6)


@pytest.mark.parametrize(("N", "K", "H"), [(16, 8, 128), (6, 2, 80), (4, 1, 128), (5, 5, 64)])
@pytest.mark.parametrize("form", ["dense", "paged", "grouped"])
def test_bfloat16_loses_little_more_than_the_rounding_of_its_output(form: str, N: int, K: int, H: int) -> None:
    """With sharp scores, against float64 over the same rounded numbers: scores and their scale are float32."""
    rng = np.random.default_rng(0)
    real = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    q, k, v = 4 * real(8, 1, N, H), real(8, 64, K, H), real(8, 64, K, H)
    positions = jnp.arange(8, 64, 7, dtype=jnp.int32)
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    scores = np.einsum("bkgh,bukh->bkgu", wide[0].reshape(8, K, N // K, H), wide[1]) / H**0.5
    scores = np.where(np.arange(64) <= np.asarray(positions)[:, None, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    wanted = np.einsum("bkgu,bukh->bkgh", weights, wide[2]).reshape(8, 1, N, H)
    if form == "dense":
        got = dense(q, (k.transpose(0, 2, 3, 1),), (v.transpose(0, 2, 1, 3),), positions, jnp.int32(63))
    elif form == "paged":
        pool = lambda x: x.transpose(2, 0, 1, 3)  # noqa: E731  (each row a page of its own)
        got = paged(q, pool(k), pool(v), jnp.arange(8, dtype=jnp.int32)[:, None], positions, jnp.ones(1, jnp.int32))
    else:
        got = attention.grouped(q, k, v, jnp.arange(64)[None, None] <= positions[:, None, None])
    lost = lambda x: np.sqrt(np.mean((np.asarray(x, np.float64) - wanted) ** 2))  # noqa: E731
    assert lost(got) < 2 * lost(jnp.asarray(wanted, jnp.bfloat16))


def test_a_row_does_not_depend_on_its_neighbours_to_the_bit() -> None:
    """In any row, next to rows of any length, for any number of levels."""
    rows, rng = 10, np.random.default_rng(2)
    (q, k, v), positions = problem(rows), rng.integers(0, TOKENS, rows).astype(np.int32)
    alone = by_levels(q, k, v, positions)
    for _ in range(8):
        order, others = rng.permutation(rows), rng.integers(-1, TOKENS, rows)
        kept = rng.random(rows) < 0.5
        here = np.where(kept, positions, others)[order].astype(np.int32)
        got = by_levels(q[order], k[order], v[order], here, int(rng.integers(max(here), TOKENS)))
        np.testing.assert_array_equal(got[kept[order]], alone[order][kept[order]])


def test_a_level_behind_the_last_position_is_not_read() -> None:
    q, k, v = problem(4)
    positions = np.array([3, 63, 60, 1], np.int32)
    poisoned = v.at[:, 64:].set(np.nan)
    np.testing.assert_array_equal(by_levels(q, k, poisoned, positions), by_levels(q, k, v, positions))
    assert np.isnan(by_levels(q, k, poisoned, positions, last=64)).all()


def test_rows_that_see_nothing_stay_finite() -> None:
    assert np.isfinite(by_levels(*problem(5), np.array([150, -1, 3, -1, -1], np.int32))).all()


@pytest.mark.parametrize("page", [1, 8, 16, 20, 64, 96])
@pytest.mark.parametrize("tokens", [1, 31, 48, 64, 80, 160, 272, 4000])
def test_levels_hold_all_tokens_in_whole_pages_and_none_is_short_but_the_only_one(tokens: int, page: int) -> None:
    lengths = levels(tokens, page)
    assert sum(lengths) == -(-tokens // page) * page
    assert all(length % page == 0 for length in lengths)
    assert len(lengths) == 1 or min(lengths) >= 32
    assert len(lengths) <= 8


def test_levels_are_no_longer_than_they_must_be() -> None:
    assert levels(48, 8) == (48,)
    assert levels(160, 32) == (64, 64, 32)
    assert levels(272, 16) == (64, 64, 64, 80)
    assert levels(4096, 64) == (512,) * 8
