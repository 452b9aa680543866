"""Samples into rows of one length, rows into micro-batches of a few fixed shapes. Pure; nothing is lost or repeated.

R rows, T tokens of a row. Several samples share a row; `segment_ids` tells them apart (0 is padding) and attention
stays inside a segment. The same samples always give the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxroll.errors import ConfigError
from jaxroll.learner.samples import Sample

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


def pack(samples: Sequence[Sample], row_tokens: int, buckets: Sequence[int]) -> list[MicroBatch]:
    """Micro-batches that hold every token of `samples` exactly once; none when there are no samples."""
    lengths = [len(sample.tokens) for sample in samples]
    if lengths and max(lengths) > row_tokens:
        raise ConfigError(
            "learner.row_tokens",
            row_tokens,
            f"a sample of {max(lengths)} tokens does not fit into a row",
            f"Use at least {max(lengths)}, or lower task.max_prompt_tokens or sampling.max_tokens.",
        )
    rows = first_fit_decreasing(lengths, row_tokens)
    batches, first = [], 0
    for count in split_rows(len(rows), buckets):
        batches.append(_filled(samples, rows[first : first + count], count, row_tokens))
        first += count
    return batches


def padding_waste(batches: Sequence[MicroBatch]) -> float:
    """1 − real tokens / (rows · row tokens): the share of the device's work spent on padding; 0 for no batches."""
    cells = sum(batch.streams["segment_ids"].size for batch in batches)
    real = sum(int((batch.streams["segment_ids"] > 0).sum()) for batch in batches)
    return 1.0 - real / cells if cells else 0.0


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
