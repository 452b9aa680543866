"""Packing: nothing lost, nothing twice, everything in its segment at its position, and little waste."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.errors import ConfigError
from jaxroll.learner import packing
from jaxroll.learner.minibatch import Sample
from jaxroll.models import families

LENGTHS = st.lists(st.integers(1, 32), max_size=40)
BUCKETS = st.sampled_from([(8, 4, 2), (4,), (6, 3), (1,), (12, 6)])


def sample(length: int, number: int) -> Sample:
    """A sample whose every stream is recognizable."""
    at = np.arange(length)
    return Sample(
        tokens=(100 * number + at + 1).astype(np.int32),
        mask=(at % 2 == 1),
        behaviour=(-at / 10 - number).astype(np.float32),
        ages=(at % 3).astype(np.int32),
        sampled_tokens=length // 2,
        fresh=number % 2 == 0,
        reward=0.0,
        advantage=number + 0.5,
        weight=1.0 / (number + 1),
    )


@given(lengths=LENGTHS, buckets=BUCKETS)
def test_every_token_is_packed_exactly_once(lengths, buckets):
    given_samples = [sample(length, number) for number, length in enumerate(lengths)]
    batches = packing.pack(given_samples, 32, buckets)
    seen = []
    for batch in batches:
        assert batch.rows in buckets
        assert all(stream.shape == (batch.rows, 32) for stream in batch.streams.values())
        covered = np.zeros((batch.rows, 32), bool)
        for place in batch.placements:
            cells = (place.row, slice(place.start, place.start + place.length))
            here, want = {name: stream[cells] for name, stream in batch.streams.items()}, given_samples[place.sample]
            assert not covered[cells].any()
            covered[cells] = True
            seen.append(place.sample)
            np.testing.assert_array_equal(here["tokens"], want.tokens)
            np.testing.assert_array_equal(here["positions"], np.arange(place.length))
            np.testing.assert_array_equal(here["mask"], want.mask)
            np.testing.assert_array_equal(here["ages"], want.ages)
            np.testing.assert_array_equal(here["behaviour"], want.behaviour)
            np.testing.assert_array_equal(here["fresh"], want.mask & want.fresh)
            np.testing.assert_array_equal(here["advantage"], np.full(place.length, want.advantage, np.float32))
            np.testing.assert_allclose(here["weight"], np.where(want.mask, want.weight, 0), rtol=1e-6)
            assert (batch.streams["segment_ids"][place.row] == here["segment_ids"][0]).sum() == place.length
        np.testing.assert_array_equal(batch.streams["segment_ids"] > 0, covered)
        assert not any(stream[~covered].any() for stream in batch.streams.values())
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_first_fit_decreasing_keeps_its_bound(lengths):
    """At most 11/9 of the optimum plus 6/9, the optimum found by trying everything."""
    bins = packing.first_fit_decreasing(lengths, 10)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in content) <= 10 for content in bins)

    def fits(count: int) -> bool:
        for choice in itertools.product(range(count), repeat=len(lengths)):
            if np.bincount(choice, lengths, minlength=count).max() <= 10:
                return True
        return False

    best = next(count for count in range(1, len(lengths) + 1) if fits(count))
    assert len(bins) <= 11 / 9 * best + 6 / 9


@given(rows=st.integers(0, 60), buckets=BUCKETS)
def test_split_rows_wastes_less_than_the_smallest_bucket(rows, buckets):
    counts = packing.split_rows(rows, buckets)
    assert set(counts) <= set(buckets)
    assert 0 <= sum(counts) - rows < buckets[-1] or rows == 0 == sum(counts)
    assert counts == sorted(counts, reverse=True)


def test_row_buckets_are_halves_that_the_mesh_divides():
    assert packing.row_buckets(8, 2) == (8, 4, 2)
    assert packing.row_buckets(8, 4) == (8, 4)
    assert packing.row_buckets(12, 4) == (12,)
    assert packing.row_buckets(32, 1) == (32, 16, 8)
    with pytest.raises(ConfigError, match=r"learner\.micro_batch_rows = 6: .*data \* fsdp \* expert = 4.* Use 8\."):
        packing.row_buckets(6, 4)


@pytest.mark.parametrize("seed", range(20))
def test_typical_claims_waste_little(seed):
    """24 groups of 8 members of 8–22 tokens in rows of 128, learner on fsdp=2."""
    lengths = np.random.default_rng(seed).integers(8, 23, 24 * 8)
    batches = packing.pack([sample(int(n), 0) for n in lengths], 128, packing.row_buckets(8, 2))
    assert packing.padding_waste(batches) < 0.1
    assert len(batches) <= 5


def test_no_samples_no_batches():
    assert packing.pack([], 32, (4, 2)) == []
    assert packing.padding_waste([]) == 0.0


def test_a_sample_longer_than_a_row_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"learner\.row_tokens = 32.*33 tokens.*at least 33"):
        packing.pack([sample(33, 0)], 32, (4,))


@given(lengths=LENGTHS)
def test_the_same_samples_give_the_same_batches(lengths):
    first, second = (packing.pack([sample(n, i) for i, n in enumerate(lengths)], 32, (4, 2)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.placements == other.placements
        for name in packing.STREAMS:
            np.testing.assert_array_equal(one.streams[name], other.streams[name])


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.soak), 4])
@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.soak), 8])
@pytest.mark.parametrize("per_shard", [16, *(pytest.param(n, marks=pytest.mark.soak) for n in (40, 128))])
def test_shards_get_equal_work_of_lengths_that_are_very_unequal(per_shard, shards, each):
    """Log-normal lengths (σ = 1, at most 16 medians), 20 claims, each within 5 %.

    With one row per shard the longest sample can cost more than any other row: then within 1 % of the lower bound.
    """
    quadratic = packing.attention_share(families.spec("qwen3_0p6b"))
    buckets = packing.row_buckets(each * shards, shards)
    found = {}
    for seed in range(20):
        chance = np.random.default_rng(seed)
        lengths = np.clip(chance.lognormal(np.log(128), 1.0, per_shard * shards), 1, 2048).astype(int)
        samples = [sample(int(n), i) for i, n in enumerate(lengths)]
        batches = packing.pack(samples, 2048, buckets, shards=shards, quadratic=quadratic)
        assert sorted(place.sample for batch in batches for place in batch.placements) == list(range(len(samples)))
        least = least_imbalance(lengths, packing.work(lengths, quadratic), shards, 2048 * each * shards)
        allowed = max(1.05, 1.01 * least) if each == 1 else 1.05
        found[seed] = packing.shard_imbalance(batches, shards, quadratic), allowed
    assert {seed: pair for seed, pair in found.items() if pair[0] > pair[1]} == {}


def least_imbalance(lengths: np.ndarray, cost: np.ndarray, shards: int, tokens: int) -> float:
    """A lower bound of the imbalance of micro-batches of `tokens` tokens: one shard must compute the costliest sample.

    The micro-batch of that sample costs at most as much as the costliest tokens together, so its other shards wait; the
    rest of the claim may be even. If the claim fits into one micro-batch, the bound is the costliest sample over the
    mean.
    """
    order = np.argsort(-lengths)
    before = np.cumsum(lengths[order]) - lengths[order]
    fullest = (cost[order] * np.clip((tokens - before) / lengths[order], 0, 1)).sum() / shards
    mean = cost.sum() / shards
    return float(1 + max(cost.max() - fullest, 0) / mean)


@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=40),
    shards=st.sampled_from([1, 2, 4]),
    together=st.sampled_from([1, 2]),
)
def test_dealing_to_shards_loses_nothing_and_needs_no_more_rows(lengths, shards, together):
    lengths = lengths * together  # an even number of them
    samples, buckets = [sample(n, i) for i, n in enumerate(lengths)], packing.row_buckets(8, shards)
    capacity = 32 * together
    batches = packing.pack(samples, capacity, buckets, shards=shards, quadratic=0.1, together=together)
    assert sorted(place.sample for batch in batches for place in batch.placements) == list(range(len(lengths)))
    units = np.reshape(lengths, (-1, together)).sum(axis=1).tolist()
    rows = len(packing.first_fit_decreasing(units, capacity))
    assert [batch.rows for batch in batches] == packing.split_rows(rows, buckets)
    for batch in batches:
        used = (batch.streams["segment_ids"] > 0).sum(axis=1)
        assert used.sum() == sum(place.length for place in batch.placements)
        pairs = zip(batch.placements[::2], batch.placements[1::2], strict=True) if together == 2 else ()
        for one, other in pairs:
            assert one.sample % 2 == 0
            assert (other.sample, other.row, other.start) == (one.sample + 1, one.row, one.start + one.length)


def test_the_work_of_a_sample_is_its_matrix_products_and_its_attention():
    """A model of one layer of width 4, one head of 2, hidden 3, five words: 4·2·4 + 3·4·3 + 5·4 + norms products."""
    spec = families.ModelSpec("by hand", 5, 1, 4, 1, 1, 2, 3, qk_norm=False)
    products = 4 * 2 * 4 + 3 * 4 * 3 + 5 * 4 + 2 * 4 + 4
    assert packing.attention_share(spec) == pytest.approx(1 * 1 * 2 / products)
    untied = dataclasses.replace(spec, tied_embeddings=False)
    assert packing.attention_share(untied) == packing.attention_share(spec)
    assert packing.work([1, 10], 0.5).tolist() == [1.5, 60.0]
