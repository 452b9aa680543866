"""The digest against its formula in Python integers, and its promises: additive, blind to nothing small."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.transfer import manifest as manifests

MASK = (1 << 64) - 1


def _slow_weight(axis: int, position: int) -> int:
    z = ((axis << 48) + position + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def _slow_digest(array: np.ndarray, box: manifests.Box) -> int:
    total = 0
    for index in np.ndindex(array.shape):
        weight = 1
        for axis, (at, (start, _)) in enumerate(zip(index, box, strict=True)):
            weight = weight * _slow_weight(axis, start + at) & MASK
        total += weight * int.from_bytes(array[index].tobytes(), "little")
    return total & MASK


DTYPES = st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int8, np.float64])


@st.composite
def _arrays(draw: st.DrawFn, min_dims: int = 0) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=min_dims, max_size=4)))
    seed = draw(st.integers(0, 2**32 - 1))
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * 50).astype(draw(DTYPES))


@given(_arrays(), st.lists(st.integers(0, 10**6), min_size=4, max_size=4))
def test_it_is_the_formula(array: np.ndarray, offsets: list[int]) -> None:
    box = tuple((at, at + n) for at, n in zip(offsets, array.shape, strict=False))
    assert manifests.of_box(array, box) == _slow_digest(array, box)


@given(_arrays(min_dims=1), st.data())
def test_any_partition_has_the_same_total(array: np.ndarray, data: st.DataObject) -> None:
    spans = []
    for n in array.shape:
        edges = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
        spans.append(list(itertools.pairwise(edges)))
    boxes = list(itertools.product(*spans))
    whole = manifests.whole(array.shape)
    parts = [manifests.of_box(array[manifests.within(box, whole)], box) for box in boxes]
    assert manifests.total(parts) == manifests.of_box(array, whole)


@given(_arrays(), st.data())
def test_a_flipped_bit_is_always_seen(array: np.ndarray, data: st.DataObject) -> None:
    whole = manifests.whole(array.shape)
    before = manifests.of_box(array, whole)
    raw = np.frombuffer(bytearray(array.tobytes()), np.uint8)
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert manifests.of_box(raw.view(array.dtype).reshape(array.shape), whole) != before


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_exchange_of_rows_columns_and_elements_is_seen(dtype: type) -> None:
    array = np.arange(1, 65, dtype=np.float32).reshape(8, 8).astype(dtype)
    whole = manifests.whole(array.shape)
    before = manifests.of_box(array, whole)
    flat = array.reshape(-1)
    for i, j in itertools.combinations(range(64), 2):
        swapped = flat.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert manifests.of_box(swapped.reshape(8, 8), whole) != before
    for i, j in itertools.combinations(range(8), 2):
        order = list(range(8))
        order[i], order[j] = j, i
        assert manifests.of_box(array[order], whole) != before
        assert manifests.of_box(array[:, order], whole) != before
    assert manifests.of_box(array.T, whole) != before


def test_signs_and_nans_are_bits() -> None:
    zero, minus = np.zeros(3, np.float32), -np.zeros(3, np.float32)
    assert manifests.of_box(zero, ((0, 3),)) != manifests.of_box(minus, ((0, 3),))
    nan = np.full(3, np.nan, np.float32)
    assert manifests.of_box(nan, ((0, 3),)) == manifests.of_box(nan.copy(), ((0, 3),))


def test_a_long_row_is_the_sum_of_its_blocks() -> None:
    row = np.random.default_rng(0).normal(size=700_001).astype(np.float32)
    halves = [manifests.of_box(row[:333_333], ((0, 333_333),)), manifests.of_box(row[333_333:], ((333_333, 700_001),))]
    assert manifests.of_box(row, ((0, 700_001),)) == manifests.total(halves)


def test_strided_views_and_empty_boxes() -> None:
    array = np.arange(48, dtype=np.float32).reshape(6, 8)
    assert manifests.of_box(array[:, 2:5], ((0, 6), (2, 5))) == _slow_digest(array[:, 2:5], ((0, 6), (2, 5)))
    assert manifests.of_box(array[:0], ((0, 0), (0, 8))) == 0
    with pytest.raises(ValueError, match="does not fill"):
        manifests.of_box(array, ((0, 5), (0, 8)))
