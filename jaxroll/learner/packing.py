"""Samples into rows of one length, rows into micro-batches of a few fixed shapes. Pure; nothing is lost or repeated.

R rows, T tokens of a row. Several samples share a row; `segment_ids` tells them apart (0 is padding) and attention
stays inside a segment. The same samples always give the same micro-batches.

All shards wait for the slowest at the end of a micro-batch, so each should have the same work: `work` counts it, and
the rows of a micro-batch are filled evenly and dealt to the shards by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxroll.errors import ConfigError
from jaxroll.learner.samples import Sample
from jaxroll.models.families import ModelSpec, parameter_count

BUCKETS = 3  # at most: each is one more program to compile


@dataclass(frozen=True)
class Placement:
    """Where sample `sample` lies: `length` tokens of row `row` from `start`."""

    sample: int
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class MicroBatch:
    """R packed rows. `streams` are the arrays that go to the device; see `STREAMS`."""

    streams: dict[str, np.ndarray]
    placements: tuple[Placement, ...]

    @property
    def rows(self) -> int:
        """R."""
        return self.streams["tokens"].shape[0]


# Every array is [R, T]. `weight` is 0 where `mask` is False, so the loss of a step is Σ weight · token loss.
STREAMS: dict[str, np.dtype] = {
    "tokens": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "segment_ids": np.dtype(np.int32),
    "ages": np.dtype(np.int32),
    "mask": np.dtype(bool),
    "fresh": np.dtype(bool),
    "behaviour": np.dtype(np.float32),
    "advantage": np.dtype(np.float32),
    "weight": np.dtype(np.float32),
}


def row_buckets(micro_rows: int, divisor: int) -> tuple[int, ...]:
    """Row counts a micro-batch may have, largest first: `micro_rows` and its halves that `divisor` still divides."""
    if micro_rows % divisor:
        raise ConfigError(
            "learner.micro_rows",
            micro_rows,
            f"it must be divisible by data*fsdp = {divisor} of learner.mesh",
            f"Use {-(-micro_rows // divisor) * divisor}.",
        )
    buckets = [micro_rows]
    while len(buckets) < BUCKETS and buckets[-1] % 2 == 0 and (buckets[-1] // 2) % divisor == 0:
        buckets.append(buckets[-1] // 2)
    return tuple(buckets)


def split_rows(rows: int, buckets: Sequence[int]) -> list[int]:
    """Row counts of the micro-batches that hold `rows` rows: as few rows in all, then as few batches, as possible."""
    smallest = buckets[-1]
    left = -(-rows // smallest) * smallest
    counts = []
    for bucket in buckets:
        counts += [bucket] * (left // bucket)
        left %= bucket
    return counts


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity`: longest first, each into the first bin with room for it.

    Ties go by index, so the result is a function of `lengths`. Uses at most 11/9 of the fewest bins possible, plus one.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if fit is None:
            fit = len(bins)
            bins.append([])
            room.append(capacity)
        bins[fit].append(index)
        room[fit] -= lengths[index]
    return bins


def work(lengths: np.ndarray | Sequence[int], quadratic: float) -> np.ndarray:
    """float64: what a sample of n tokens costs, n + quadratic·n², in units of one token's matrix products.

    Attention is the quadratic part: a token meets n/2 others in the mean. See `attention_share`.
    """
    tokens = np.asarray(lengths, np.float64)
    return tokens + quadratic * tokens**2


def attention_share(spec: ModelSpec) -> float:
    """`quadratic` of `work` for this model: multiplications a pair of tokens costs over those that one token costs.

    Per layer a query meets a key in N·H products for its score and as many for its value, for half of all pairs; one
    token costs a product a parameter that it is multiplied with (embeddings count once, for the logits).
    """
    products = parameter_count(spec) - (0 if spec.tied_embeddings else spec.vocab_size * spec.width)
    return spec.layers * spec.heads * spec.head_dim / products


def pack(
    samples: Sequence[Sample],
    row_tokens: int,
    buckets: Sequence[int],
    *,
    shards: int = 1,
    quadratic: float = 0.0,
    together: int = 1,
) -> list[MicroBatch]:
    """Micro-batches that hold every token of `samples` exactly once; none when there are no samples.

    `shards` are the parts into which the mesh cuts the rows; `quadratic` is that of `work`. Of `samples` each
    `together` that follow one another (2: 0 and 1, 2 and 3, …) share a row, side by side and in order.
    """
    units = [range(first, first + together) for first in range(0, len(samples), together)]
    lengths = [sum(len(samples[index].tokens) for index in unit) for unit in units]
    if lengths and max(lengths) > row_tokens:
        raise ConfigError(
            "learner.row_tokens",
            row_tokens,
            f"{'a sample' if together == 1 else f'{together} samples that belong together'} of {max(lengths)} tokens "
            f"{'does' if together == 1 else 'do'} not fit into a row",
            f"Use at least {max(lengths)}, or lower task.max_prompt_tokens or sampling.max_tokens.",
        )
    rows = first_fit_decreasing(lengths, row_tokens)
    cost = np.array([work([len(samples[index].tokens) for index in unit], quadratic).sum() for unit in units])
    batches, first = [], 0
    for count in split_rows(len(rows), buckets):
        even = levelled(rows[first : first + count], lengths, cost, count, row_tokens)
        filled = [[index for unit in row for index in units[unit]] for row in dealt(even, cost, shards)]
        batches.append(_filled(samples, filled, count, row_tokens))
        first += count
    return batches


def levelled(
    rows: Sequence[list[int]], lengths: Sequence[int], cost: np.ndarray, count: int, capacity: int
) -> list[list[int]]:
    """The samples of `rows` in `count` rows of as even a cost as longest-first finds; the given ones if better.

    Each sample, dearest first, goes into the cheapest row that has room (R. L. Graham, "Bounds on multiprocessing
    timing anomalies", 1969). Full rows often admit no other arrangement: they stay, and are even because they are full.
    """
    given = [*rows, *([] for _ in range(count - len(rows)))]
    even: list[list[int]] = [[] for _ in range(count)]
    room, total = [capacity] * count, [0.0] * count
    for index in sorted((i for row in rows for i in row), key=lambda i: (-cost[i], i)):
        fits = [r for r in range(count) if room[r] >= lengths[index]]
        if not fits:
            return given
        row = min(fits, key=lambda r: (total[r], r))
        even[row].append(index)
        room[row] -= lengths[index]
        total[row] += cost[index]
    return even if max(total) < max(_costs(given, cost)) else given


def dealt(rows: list[list[int]], cost: np.ndarray, shards: int) -> list[list[int]]:
    """`rows` in the order in which `shards` parts of a mesh get equal work: part s holds the s-th block of them."""
    if shards == 1:
        return rows
    totals, each = _costs(rows, cost), len(rows) // shards
    hands: list[list[int]] = [[] for _ in range(shards)]
    held = [0.0] * shards
    for row in sorted(range(len(rows)), key=lambda r: (-totals[r], r)):
        shard = min((s for s in range(shards) if len(hands[s]) < each), key=lambda s: (held[s], s))
        hands[shard].append(row)
        held[shard] += totals[row]
    return [rows[row] for hand in hands for row in hand]


def shard_imbalance(batches: Sequence[MicroBatch], shards: int, quadratic: float) -> float:
    """Work of the busiest shard over the mean, each micro-batch by itself and weighted by its work; 1 is even."""
    busiest = mean = 0.0
    for batch in batches:
        held = np.zeros(shards)
        for place in batch.placements:
            held[place.row * shards // batch.rows] += work([place.length], quadratic)[0]
        busiest, mean = busiest + held.max(), mean + held.mean()
    return float(busiest / mean) if mean else 1.0


def padding_waste(batches: Sequence[MicroBatch]) -> float:
    """1 − real tokens / (rows · row tokens): the share of the device's work spent on padding; 0 for no batches."""
    cells = sum(batch.streams["segment_ids"].size for batch in batches)
    real = sum(int((batch.streams["segment_ids"] > 0).sum()) for batch in batches)
    return 1.0 - real / cells if cells else 0.0


def gathered(batches: Sequence[MicroBatch], values: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
    """[T] for each of the samples: what `values` (an array [R, T] for every micro-batch) say about its tokens."""
    found = [np.zeros(0)] * samples
    for batch, rows in zip(batches, values, strict=True):
        for place in batch.placements:
            found[place.sample] = rows[place.row, place.start : place.start + place.length]
    return found


def spread(batch: MicroBatch, values: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [R, T]: the values of each sample ([T] for every one) where it lies in `batch`, 0 in the padding."""
    rows = np.zeros(batch.streams["tokens"].shape, np.float32)
    for place in batch.placements:
        rows[place.row, place.start : place.start + place.length] = values[place.sample]
    return rows


def _costs(rows: Sequence[Sequence[int]], cost: np.ndarray) -> list[float]:
    return [float(sum(cost[index] for index in row)) for row in rows]


def empty_streams(rows: int, row_tokens: int) -> dict[str, np.ndarray]:
    """All streams of a micro-batch without samples."""
    return {name: np.zeros((rows, row_tokens), dtype) for name, dtype in STREAMS.items()}


def _filled(samples: Sequence[Sample], rows: list[list[int]], count: int, row_tokens: int) -> MicroBatch:
    """A micro-batch of `count` rows; the first of them hold the samples that `rows` lists."""
    streams, placements = empty_streams(count, row_tokens), []
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices, start=1):
            place = Placement(index, row, start, len(samples[index].tokens))
            _write(streams, place, samples[index], segment)
            placements.append(place)
            start += place.length
    return MicroBatch(streams, tuple(placements))


def _write(streams: dict[str, np.ndarray], place: Placement, sample: Sample, segment: int) -> None:
    """Put one sample at its place."""
    at = (place.row, slice(place.start, place.start + place.length))
    streams["tokens"][at] = sample.tokens
    streams["positions"][at] = np.arange(place.length)
    streams["segment_ids"][at] = segment
    streams["ages"][at] = sample.ages
    streams["mask"][at] = sample.mask
    streams["fresh"][at] = sample.mask & sample.fresh
    streams["behaviour"][at] = sample.behaviour
    streams["advantage"][at] = sample.advantage
    streams["weight"][at] = np.where(sample.mask, sample.weight, 0.0)
