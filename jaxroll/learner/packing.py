"""Samples into rows of one length, rows into micro-batches of a few fixed shapes. Pure; nothing is lost or repeated.

R rows, T tokens of a row. Several samples share a row; `segment_ids` tells them apart (0 is padding) and attention
stays inside a segment. The same samples always give the same micro-batches.

All shards wait for the slowest at the end of a micro-batch, so each should have the same work: `work` counts it.
Rows are filled evenly and dealt whole, or samples go to the shards at once: of the two, the more even packing counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxroll.errors import ConfigError
from jaxroll.learner.samples import Sample
from jaxroll.models.families import ModelSpec, parameter_count

BUCKETS = 3  # at most: each is one more program to compile
SLACKS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, np.inf)  # tried in turn, until the samples fit into their rows


@dataclass(frozen=True)
class Placement:
    """Where sample `sample` lies: `length` tokens of row `row` from `start`."""

    sample: int
    row: int
    start: int
    length: int
    skipped: int = 0  # tokens of the sample before these: they lie in a prompt that it shares


@dataclass(frozen=True)
class MicroBatch:
    """R packed rows. `streams` are the arrays that go to the device; see `STREAMS`."""

    streams: dict[str, np.ndarray]
    placements: tuple[Placement, ...]
    prompts: tuple[Placement, ...] = ()  # those that lie once for several samples, each of the first of them

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
PROMPT_IDS = "prompt_ids"  # one stream more in rows that share prompts: the segment that a token's own continues


def row_buckets(micro_batch_rows: int, divisor: int, sharing: int = 1) -> tuple[int, ...]:
    """Row counts a micro-batch may have, largest first: `micro_batch_rows` and its halves that `divisor` still divides.

    Where `sharing` rows share their prompts they count as one.
    """
    if micro_batch_rows % (divisor * sharing):
        shared = f" times learner.shared_prompt_rows = {sharing}" if sharing > 1 else ""
        raise ConfigError(
            "learner.micro_batch_rows",
            micro_batch_rows,
            f"it must be divisible by data*fsdp = {divisor} of learner.mesh{shared}",
            f"Use {-(-micro_batch_rows // (divisor * sharing)) * divisor * sharing}.",
        )
    buckets = [micro_batch_rows // sharing]
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
    counts = split_rows(len(rows), buckets)
    ways = [rows_first(rows, lengths, cost, counts, row_tokens, shards)]
    if shards > 1 and (other := shards_first(lengths, cost, counts, row_tokens, shards)):
        ways.append(other)
    evenest = min(ways, key=lambda way: sum(_busiest(filled, cost, shards) for filled in way))
    return [
        _filled(samples, [[index for unit in row for index in units[unit]] for row in filled], count, row_tokens)
        for filled, count in zip(evenest, counts, strict=True)
    ]


def rows_first(
    rows: Sequence[list[int]],
    lengths: Sequence[int],
    cost: np.ndarray,
    counts: Sequence[int],
    capacity: int,
    shards: int,
) -> list[list[list[int]]]:
    """The rows of micro-batches of `counts` rows: `rows` as they follow one another, levelled, then dealt whole."""
    ends = np.cumsum(counts).tolist()
    taken = [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return [
        dealt(levelled(part, lengths, cost, count, capacity), cost, shards)
        for part, count in zip(taken, counts, strict=True)
    ]


def shards_first(
    lengths: Sequence[int], cost: np.ndarray, counts: Sequence[int], capacity: int, shards: int
) -> list[list[list[int]]] | None:
    """The rows of micro-batches of `counts` rows, filled shard by shard; None where the samples do not fit in so.

    Each sample, dearest first, goes to the cheapest shard with room for it, there into the fullest such row. A shard
    of one micro-batch takes its share of what is left, or what the dearest sample costs where that is more: beside
    that sample all others get as much, and later micro-batches are even without it. Dear samples are few tokens for
    their cost, so those left may be too many for the rows left: then earlier micro-batches take more (`SLACKS`).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-cost[i], i))
    for slack in SLACKS:
        left, batches, rows_left = order, [], sum(counts)
        for count in counts:
            share = sum(cost[index] for index in left) * count / rows_left / shards
            rows_left -= count
            level = max([slack * share, *(cost[index] for index in left[:1])]) if rows_left else np.inf
            filled, left = _dearest_first(left, lengths, cost, (shards, count // shards), capacity, level)
            batches.append(filled)
        if not left and all(any(filled) for filled in batches):
            return batches
    return None


def levelled(
    rows: Sequence[list[int]], lengths: Sequence[int], cost: np.ndarray, count: int, capacity: int
) -> list[list[int]]:
    """The samples of `rows` in `count` rows of as even a cost as dearest-first finds; the given ones if better.

    Full rows often admit no other arrangement: they stay, and are nearly even because they are full.
    """
    given = [*rows, *([] for _ in range(count - len(rows)))]
    order = sorted((i for row in rows for i in row), key=lambda i: (-cost[i], i))
    even, left = _dearest_first(order, lengths, cost, (count, 1), capacity)
    return even if not left and _busiest(even, cost, count) < _busiest(given, cost, count) else given


def _dearest_first(
    order: Sequence[int],
    lengths: Sequence[int],
    cost: np.ndarray,
    blocks: tuple[int, int],
    capacity: int,
    level: float = np.inf,
) -> tuple[list[list[int]], list[int]]:
    """The rows of `blocks` (how many, of how many rows each), and those of `order` for which there was no room.

    Each goes into the cheapest block with room for it (R. L. Graham, "Bounds on multiprocessing timing anomalies",
    1969), if that does not lift it above `level`.
    """
    count, each = blocks
    rows: list[list[int]] = [[] for _ in range(count * each)]
    room, total, left = [capacity] * (count * each), [0.0] * count, []
    for index in order:
        fits = [r for r in range(count * each)
                if room[r] >= lengths[index] and total[r // each] + cost[index] <= level]  # fmt: skip
        if not fits:
            left.append(index)
            continue
        row = min(fits, key=lambda r: (total[r // each], r // each, room[r], r))
        rows[row].append(index)
        room[row] -= lengths[index]
        total[row // each] += cost[index]
    return rows, left


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
        for place in (*batch.placements, *batch.prompts):
            before = place.skipped * place.length * 2.0  # as many pairs again as the place has by itself
            held[place.row * shards // batch.rows] += work([place.length], quadratic)[0] + quadratic * before
        busiest, mean = busiest + held.max(), mean + held.mean()
    return float(busiest / mean) if mean else 1.0


def padding_waste(batches: Sequence[MicroBatch]) -> float:
    """1 − real tokens / (rows · row tokens): the share of the device's work spent on padding; 0 for no batches."""
    cells = sum(batch.streams["segment_ids"].size for batch in batches)
    real = sum(int((batch.streams["segment_ids"] > 0).sum()) for batch in batches)
    return 1.0 - real / cells if cells else 0.0


def shared_tokens(batches: Sequence[MicroBatch]) -> float:
    """The share of the samples' tokens that are not computed, for they lie in a prompt that another sample had too."""
    lying = sum(place.length for batch in batches for place in (*batch.placements, *batch.prompts))
    all_of_them = sum(place.length + place.skipped for batch in batches for place in batch.placements)
    return 1.0 - lying / all_of_them if all_of_them else 0.0


def gathered(batches: Sequence[MicroBatch], values: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
    """[T] for each of the samples: what `values` (an array [R, T] for every micro-batch) say about its tokens.

    0 for those of a prompt that it shares: nothing trains on them.
    """
    found = [np.zeros(0)] * samples
    for batch, rows in zip(batches, values, strict=True):
        for place in batch.placements:
            own = rows[place.row, place.start : place.start + place.length]
            found[place.sample] = np.concatenate([np.zeros(place.skipped, own.dtype), own])
    return found


def spread(batch: MicroBatch, values: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [R, T]: the values of each sample ([T] for every one) where it lies in `batch`, 0 in the padding."""
    rows = np.zeros(batch.streams["tokens"].shape, np.float32)
    for place in batch.placements:
        rows[place.row, place.start : place.start + place.length] = values[place.sample][place.skipped :]
    return rows


def _costs(rows: Sequence[Sequence[int]], cost: np.ndarray) -> list[float]:
    return [float(sum(cost[index] for index in row)) for row in rows]


def _busiest(rows: Sequence[Sequence[int]], cost: np.ndarray, parts: int) -> float:
    """The cost of the dearest of `parts` blocks of as many `rows`."""
    each = len(rows) // parts
    totals = _costs(rows, cost)
    return max(sum(totals[first : first + each]) for first in range(0, len(rows), each))


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
            write(streams, place, samples[index], segment)
            placements.append(place)
            start += place.length
    return MicroBatch(streams, tuple(placements))


def write(streams: dict[str, np.ndarray], place: Placement, sample: Sample, segment: int) -> None:
    """Put what of one sample belongs to a place there."""
    at = (place.row, slice(place.start, place.start + place.length))
    of = slice(place.skipped, place.skipped + place.length)
    mask = sample.mask[of]
    streams["tokens"][at] = sample.tokens[of]
    streams["positions"][at] = np.arange(of.start, of.stop)
    streams["segment_ids"][at] = segment
    streams["ages"][at] = sample.ages[of]
    streams["mask"][at] = mask
    streams["fresh"][at] = mask & sample.fresh
    streams["behaviour"][at] = sample.behaviour[of]
    streams["advantage"][at] = np.broadcast_to(sample.advantage, len(sample.tokens))[of]
    streams["weight"][at] = np.where(mask, sample.weight, 0.0)
