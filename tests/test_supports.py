"""Supports of truncated sampling: serialization, its size, and malformed bytes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.errors import DataError
from jaxroll.protocols import Supports


@st.composite
def sampled(draw) -> tuple[list[set[int]], np.ndarray]:
    """The support of each token (empty: the whole vocabulary), and the tokens."""
    ids = st.one_of(st.integers(0, 300), st.integers(0, Supports.MAX_ID))
    each = draw(st.lists(st.sets(ids, max_size=9), max_size=12))
    tokens = [draw(st.sampled_from(sorted(one))) if one else draw(ids) for one in each]
    return each, np.array(tokens, np.int32)


def rows_of(each: list[set[int]]) -> np.ndarray:
    rows = np.full((len(each), 9), Supports.NONE, np.int32)
    for row, one in zip(rows, each, strict=True):
        row[: len(one)] = list(one)
    return rows


@given(sampled())
def test_supports_survive_serialisation(case):
    each, tokens = case
    found = Supports.decoded(Supports.of_rows(rows_of(each)).encoded(tokens), tokens)
    back = [set(row[row >= 0].tolist()) for row in found.rows(9)]
    assert back == each
    assert all(row[0] == token for row, token, one in zip(found.rows(9), tokens, each, strict=True) if one)
    assert [len(found.first(n).ids) for n in range(len(each))] == [sum(map(len, each[:n])) for n in range(len(each))]


def test_a_certain_token_takes_one_byte_and_neighbours_one_each():
    one = lambda ids: Supports.of_rows(np.array([ids], np.int32))  # noqa: E731
    assert one([150_000]).encoded(np.array([150_000])).tolist() == [1]
    assert one([7, 9, 8]).encoded(np.array([9])).tolist() == [3, 7, 0]
    assert Supports.whole(3).encoded(np.arange(3)).size == 0


@pytest.mark.parametrize(("width", "vocab"), [(1, 64), (40, 64), (256, 151_936), (4096, 262_144)])
def test_no_support_is_larger_than_the_bound(width, vocab):
    wide = np.linspace(0, vocab - 1, width).astype(np.int32)
    chance = np.sort(np.random.default_rng(0).permutation(vocab)[:width]).astype(np.int32)
    for ids in (wide, chance, np.arange(vocab - width, vocab, dtype=np.int32)):
        size = Supports.of_rows(ids[None]).encoded(ids[:1]).size
        assert size <= Supports.worst_bytes(width, vocab) <= 4 * width + 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([128], "cut off"),
        ([1], "do not match"),
        ([2, 1], "do not match"),
        ([2, 1, 0, 0], "do not match"),
        ([2, 1, 5], "its own token twice"),
        ([2, 1, 255, 255, 255, 255, 127], "token id"),
        ([2, 1, 128, 128, 128, 128, 128, 0], "too large"),
    ],
)
def test_malformed_bytes_are_refused(data, words):
    with pytest.raises(DataError, match=words):
        Supports.decoded(np.array(data, np.uint8), np.array([5, 6], np.int32))


def test_a_support_without_its_token_and_one_that_is_too_wide_are_errors():
    one = Supports.of_rows(np.array([[3, 4]], np.int32))
    with pytest.raises(ValueError, match="not in its support"):
        one.encoded(np.array([5]))
    with pytest.raises(ValueError, match="does not fit into 1"):
        one.rows(1)


@pytest.mark.soak
def test_bytes_per_token_of_stored_supports(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed: for a vocabulary of Qwen3's size and normal logits of several deviations, top-p 0.9 and at most 256 ids.

    The expected number is counted apart: the varints of the size and of the differences between ids.
    """
    vocab, tokens, most = 151_936, 300, 256
    rng = np.random.default_rng(0)

    def varint_bytes(value: int) -> int:
        return max(1, -(-value.bit_length() // 7))

    for deviation in (4.0, 6.0, 8.0, 12.0):
        rows, chosen, wanted = np.full((tokens, most), Supports.NONE, np.int32), np.zeros(tokens, np.int32), 0
        for at in range(tokens):
            logits = deviation * rng.standard_normal(vocab)
            probability = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            order = np.argsort(-probability)[:most]
            ids = np.sort(order[: 1 + np.searchsorted(np.cumsum(probability[order]), 0.9)])
            chosen[at], rows[at, : len(ids)] = rng.choice(ids), ids
            others = [-1, *ids[ids != chosen[at]].tolist()]
            wanted += varint_bytes(len(ids)) + sum(varint_bytes(b - a - 1) for a, b in itertools.pairwise(others))
        packed = Supports.of_rows(rows).encoded(chosen)
        assert np.array_equal(np.sort(Supports.decoded(packed, chosen).rows(most)), np.sort(rows))
        assert len(packed) == wanted
        sizes = (rows >= 0).sum(1)
        with capsys.disabled():
            print(f"\ndeviation {deviation:.0f}: {sizes.mean():.1f} ids, {len(packed) / tokens:.1f} bytes per token")
