"""Packing of samples into rows of one length, and of rows into micro-batches of a few fixed shapes. Pure.

R rows, T tokens of a row. Several samples share a row; `segment_ids` separates them (0 is padding) and attention stays
inside a segment. The same samples always give the same micro-batches, which contain each sample exactly once.

All shards wait for the slowest at the end of a micro-batch, so each should have the same work (see `work`). Two
packings are tried, and the more even one is used: fill rows evenly and assign whole rows to shards (`rows_first`), or
assign samples to shards and pack each shard's rows (`shards_first`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxroll.config import LearnerConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.learner.minibatch import Prepared, Sample
from jaxroll.models import moe
from jaxroll.models.families import ModelSpec, active_parameter_count
from jaxroll.protocols import Supports

FILLED = 0.1  # padding of a micro-batch that waits for no more samples
BUCKETS = 3  # at most: each is one more program to compile
SLACKS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, np.inf)  # tried in turn, until the samples fit into their rows


@dataclass(frozen=True)
class Placement:
    """The position of sample `sample` in a micro-batch: `length` tokens of row `row` from `start`."""

    sample: int
    row: int
    start: int
    length: int
    skipped: int = 0  # tokens of the sample before these, stored in a shared prompt


@dataclass(frozen=True)
class MicroBatch:
    """R packed rows. `streams` are the arrays that go to the device; see `STREAMS`."""

    streams: dict[str, np.ndarray]
    placements: tuple[Placement, ...]
    prompts: tuple[Placement, ...] = ()  # shared prompts; `sample` is the first of the samples that share one

    @property
    def rows(self) -> int:
        """R."""
        return self.streams["tokens"].shape[0]


@dataclass
class Streamed:
    """Groups of a batch that may not be complete (`learner.streaming`), by their number, as claimed.

    Weights of `samples` lack the step's denominator, to which they add `counted`. The gradients of `packed` are
    accumulated; the `waiting` samples fill no micro-batch yet.
    """

    lineage: int
    step: int
    groups: dict[int, list[Sample]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    waiting: list[Sample] = field(default_factory=list)
    packed: list[MicroBatch] = field(default_factory=list)
    counted: float = 0.0

    def add(self, numbers: Sequence[int], prepared: Prepared) -> None:
        """Add groups, of which none is there yet."""
        self.groups |= zip(numbers, prepared.groups, strict=True)
        self.samples += prepared.minibatches[0]
        self.waiting += prepared.minibatches[0]
        self.counted += prepared.counted

    def note_computed(self, batches: Sequence[MicroBatch]) -> None:
        """Note that the gradients of `batches`, of some waiting samples, are accumulated."""
        computed = {place.sample for batch in batches for place in batch.placements}
        self.waiting = [sample for place, sample in enumerate(self.waiting) if place not in computed]
        self.packed += batches


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
SHARE = "share"  # extra stream of models with experts: see `token_shares`
EXPERTS = "experts"  # extra stream [R, T, X] of recorded experts, for routing replay
PROMPT_IDS = "prompt_ids"  # extra stream in rows that share prompts: the segment of the prompt that a token continues
SUPPORT = "support"  # extra stream of truncated samples, [R, T, K]: the ids to which a token was restricted, then -1


def learner_buckets(learner: LearnerConfig, sharing: int = 1) -> tuple[int, ...]:
    """The `row_buckets` of the learner's mesh."""
    return row_buckets(learner.micro_batch_rows, learner.mesh.shards, sharing)


def row_buckets(micro_batch_rows: int, divisor: int, sharing: int = 1) -> tuple[int, ...]:
    """Row counts a micro-batch may have, largest first: `micro_batch_rows` and its halves that `divisor` still divides.

    `sharing` rows that share their prompts count as one. ConfigError when `micro_batch_rows` is not divisible.
    """
    if micro_batch_rows % (divisor * sharing):
        shared = f" times learner.shared_prompt_rows = {sharing}" if sharing > 1 else ""
        raise ConfigError(
            "learner.micro_batch_rows",
            micro_batch_rows,
            f"it must be divisible by data * fsdp * expert = {divisor} of learner.mesh{shared}",
            f"Use {-(-micro_batch_rows // (divisor * sharing)) * divisor * sharing}.",
        )
    buckets = [micro_batch_rows // sharing]
    while len(buckets) < BUCKETS and buckets[-1] % 2 == 0 and (buckets[-1] // 2) % divisor == 0:
        buckets.append(buckets[-1] // 2)
    return tuple(buckets)


def split_rows(rows: int, buckets: Sequence[int]) -> list[int]:
    """Row counts of the micro-batches for `rows` rows: as few rows in total, then as few batches, as possible."""
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
    """float64: the cost of a sample of n tokens, n + quadratic·n², in units of one token's matrix products.

    Attention is the quadratic part: a token attends to n/2 tokens on average. See `attention_share`.
    """
    tokens = np.asarray(lengths, np.float64)
    return tokens + quadratic * tokens**2


def attention_share(spec: ModelSpec) -> float:
    """`quadratic` of `work` for this model: multiplications per pair of tokens over multiplications per token.

    Per layer, a query and a key need N·H multiplications for the score and as many for the value, for half of all
    pairs. A token needs one multiplication per parameter (embeddings count once, for the logits;
    of the experts only its own).
    """
    products = active_parameter_count(spec) - (0 if spec.tied_embeddings else spec.vocab_size * spec.width)
    return spec.layers * spec.heads * spec.head_dim / products


def pack(
    samples: Sequence[Sample],
    row_tokens: int,
    buckets: Sequence[int],
    *,
    shards: int = 1,
    quadratic: float = 0.0,
    together: int = 1,
    support: int = 0,
    by_rows: bool = False,
) -> list[MicroBatch]:
    """Micro-batches that contain every token of `samples` exactly once; none when there are no samples.

    `shards` is the number of parts into which the mesh divides the rows; `quadratic` is the argument of `work`. Each
    run of `together` consecutive samples (for 2: samples 0 and 1, 2 and 3, …) is adjacent in one row, in order.
    `support` is the K of the stream SUPPORT (0: there is none). With `by_rows` rows are filled before shards, so that
    all micro-batches but the last are full. ConfigError when a sample (or such a run) is longer than a row.
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
    if shards > 1 and not by_rows and (other := shards_first(lengths, cost, counts, row_tokens, shards)):
        ways.append(other)
    evenest = min(ways, key=lambda way: sum(_largest_cost(filled, cost, shards) for filled in way))
    return [
        _filled(
            samples, [[index for unit in row for index in units[unit]] for row in filled], count, row_tokens, support
        )
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
    """The rows of micro-batches of `counts` rows: consecutive `rows`, balanced, then assigned whole to shards."""
    ends = np.cumsum(counts).tolist()
    taken = [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return [
        sharded(balanced(part, lengths, cost, count, capacity), cost, shards)
        for part, count in zip(taken, counts, strict=True)
    ]


def shards_first(
    lengths: Sequence[int], cost: np.ndarray, counts: Sequence[int], capacity: int, shards: int
) -> list[list[list[int]]] | None:
    """The rows of micro-batches of `counts` rows, filled shard by shard; None if the samples do not fit that way.

    Samples are placed in order of falling cost, each on the cheapest shard with room, in the fullest row that fits.
    A shard of one micro-batch takes up to its share of the remaining cost, or the cost of the most expensive sample if
    that is larger: the other shards are then filled to the same level, and later micro-batches are even without that
    sample. Expensive samples have few tokens for their cost, so the remaining ones may need more rows than are left;
    then earlier micro-batches take more (`SLACKS`).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-cost[i], i))
    for slack in SLACKS:
        left, batches, rows_left = order, [], sum(counts)
        for count in counts:
            share = sum(cost[index] for index in left) * count / rows_left / shards
            rows_left -= count
            level = max([slack * share, *(cost[index] for index in left[:1])]) if rows_left else np.inf
            filled, left = _costliest_first(left, lengths, cost, (shards, count // shards), capacity, level)
            batches.append(filled)
        if not left and all(any(filled) for filled in batches):
            return batches
    return None


def balanced(
    rows: Sequence[list[int]], lengths: Sequence[int], cost: np.ndarray, count: int, capacity: int
) -> list[list[int]]:
    """The samples of `rows` in `count` rows of more even cost; the given rows if those are as even.

    Full rows often allow no other arrangement; they are nearly even because they are full.
    """
    given = [*rows, *([] for _ in range(count - len(rows)))]
    order = sorted((i for row in rows for i in row), key=lambda i: (-cost[i], i))
    even, left = _costliest_first(order, lengths, cost, (count, 1), capacity)
    return even if not left and _largest_cost(even, cost, count) < _largest_cost(given, cost, count) else given


def _costliest_first(
    order: Sequence[int],
    lengths: Sequence[int],
    cost: np.ndarray,
    blocks: tuple[int, int],
    capacity: int,
    level: float = np.inf,
) -> tuple[list[list[int]], list[int]]:
    """The rows of `blocks` (number of blocks, rows of each), and the samples of `order` that did not fit.

    Each sample goes into the cheapest block with room for it (R. L. Graham, "Bounds on multiprocessing timing
    anomalies", 1969) whose cost stays at or below `level`.
    """
    count, each = blocks
    rows: list[list[int]] = [[] for _ in range(count * each)]
    room, total, left = [capacity] * (count * each), [0.0] * count, []
    for index in order:
        fits = [r for r in range(count * each) if room[r] >= lengths[index] and total[r // each] + cost[index] <= level]
        if not fits:
            left.append(index)
            continue
        row = min(fits, key=lambda r: (total[r // each], r // each, room[r], r))
        rows[row].append(index)
        room[row] -= lengths[index]
        total[row // each] += cost[index]
    return rows, left


def sharded(rows: list[list[int]], cost: np.ndarray, shards: int) -> list[list[int]]:
    """`rows` reordered so that `shards` parts of a mesh get similar work; shard s computes the s-th block of rows."""
    if shards == 1:
        return rows
    totals, each = _costs(rows, cost), len(rows) // shards
    assigned: list[list[int]] = [[] for _ in range(shards)]
    held = [0.0] * shards
    for row in sorted(range(len(rows)), key=lambda r: (-totals[r], r)):
        shard = min((s for s in range(shards) if len(assigned[s]) < each), key=lambda s: (held[s], s))
        assigned[shard].append(row)
        held[shard] += totals[row]
    return [rows[row] for of_shard in assigned for row in of_shard]


def shard_imbalance(batches: Sequence[MicroBatch], shards: int, quadratic: float) -> float:
    """Work of the busiest shard over the mean, per micro-batch, averaged by their work; 1 is perfectly even."""
    busiest = mean = 0.0
    for batch in batches:
        held = np.zeros(shards)
        for place in (*batch.placements, *batch.prompts):
            before = place.skipped * place.length * 2.0  # pairs with the shared prompt, in the units of n² in `work`
            held[place.row * shards // batch.rows] += work([place.length], quadratic)[0] + quadratic * before
        busiest, mean = busiest + held.max(), mean + held.mean()
    return float(busiest / mean) if mean else 1.0


def spread_experts(batch: MicroBatch, samples: Sequence[Sample], width: int, dtype: np.dtype) -> np.ndarray:
    """[R, T, X]: the recorded experts of each token of `batch`, and the largest number for tokens without a record.

    DataError when a record has another width or dtype: it is one of another model.
    """
    rows = np.full((*batch.streams["tokens"].shape, width), np.iinfo(dtype).max, dtype)
    for place in (*batch.placements, *batch.prompts):
        experts = samples[place.sample].experts
        if experts is None:
            continue
        if experts.dtype != dtype or experts.shape[1] != width:
            found = f"{experts.shape[1]} {experts.dtype}"
            raise DataError(f"a sample records {found} per token, this model has {width} {dtype}")
        own = experts[place.skipped : place.skipped + place.length]
        rows[place.row, place.start : place.start + len(own)] = own
    return rows


def token_shares(batches: Sequence[MicroBatch], *, of_all: bool = True) -> list[np.ndarray]:
    """float32 [R, T] of each micro-batch: 1 / (number of real tokens in all of them), and 0 in the padding.

    Without `of_all`, which needs all micro-batches of a step, it is 1 instead.
    """
    real = [batch.streams["segment_ids"] > 0 for batch in batches]
    total = max(real_tokens(batches), 1) if of_all else 1
    return [of.astype(np.float32) / np.float32(total) for of in real]


def padding_waste(batches: Sequence[MicroBatch]) -> float:
    """1 − real tokens / (rows · row tokens): the fraction of row tokens that are padding; 0 for no batches."""
    cells = sum(batch.streams["segment_ids"].size for batch in batches)
    return 1.0 - real_tokens(batches) / cells if cells else 0.0


def full_batches(batches: Sequence[MicroBatch], rows: int) -> list[MicroBatch]:
    """Those of `batches` whose `rows` are all in use, if another one follows or little is padding (`FILLED`)."""
    full = [len({place.row for place in batch.placements}) == rows for batch in batches]
    each = enumerate(zip(batches, full, strict=True), 1)
    return [one for at, (one, used) in each if used and (at < len(batches) or padding_waste([one]) <= FILLED)]


def real_tokens(batches: Sequence[MicroBatch]) -> int:
    """The number of tokens that are not padding."""
    return sum(int((batch.streams["segment_ids"] > 0).sum()) for batch in batches)


def shared_tokens(batches: Sequence[MicroBatch]) -> float:
    """The fraction of the samples' tokens that are not computed again because they belong to a shared prompt."""
    computed = sum(place.length for batch in batches for place in (*batch.placements, *batch.prompts))
    total = sum(place.length + place.skipped for batch in batches for place in batch.placements)
    return 1.0 - computed / total if total else 0.0


def gathered(batches: Sequence[MicroBatch], values: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
    """Per-token values of each sample ([T]), collected from `values` (an array [R, T] for every micro-batch).

    Tokens of a shared prompt get 0: they are not trained on.
    """
    found = [np.zeros(0)] * samples
    for batch, rows in zip(batches, values, strict=True):
        for place in batch.placements:
            own = rows[place.row, place.start : place.start + place.length]
            found[place.sample] = np.concatenate([np.zeros(place.skipped, own.dtype), own])
    return found


def spread(batch: MicroBatch, values: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [R, T]: the values of each sample ([T]) at its position in `batch`, 0 in the padding."""
    rows = np.zeros(batch.streams["tokens"].shape, np.float32)
    for place in batch.placements:
        rows[place.row, place.start : place.start + place.length] = values[place.sample][place.skipped :]
    return rows


def _costs(rows: Sequence[Sequence[int]], cost: np.ndarray) -> list[float]:
    return [float(sum(cost[index] for index in row)) for row in rows]


def _largest_cost(rows: Sequence[Sequence[int]], cost: np.ndarray, parts: int) -> float:
    """The cost of the most expensive of `parts` equal blocks of `rows`."""
    each = len(rows) // parts
    totals = _costs(rows, cost)
    return max(sum(totals[first : first + each]) for first in range(0, len(rows), each))


def empty_streams(rows: int, row_tokens: int, support: int = 0) -> dict[str, np.ndarray]:
    """All streams of a micro-batch without samples; with `support`, also that of supports."""
    streams = {name: np.zeros((rows, row_tokens), dtype) for name, dtype in STREAMS.items()}
    return streams | ({SUPPORT: np.full((rows, row_tokens, support), Supports.NONE, np.int32)} if support else {})


def _filled(samples: Sequence[Sample], rows: list[list[int]], count: int, row_tokens: int, support: int) -> MicroBatch:
    """A micro-batch of `count` rows; the first rows hold the samples that `rows` lists, the others are empty."""
    streams, placements = empty_streams(count, row_tokens, support), []
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices, start=1):
            place = Placement(index, row, start, len(samples[index].tokens))
            write(streams, place, samples[index], segment)
            placements.append(place)
            start += place.length
    return MicroBatch(streams, tuple(placements))


def write(streams: dict[str, np.ndarray], place: Placement, sample: Sample, segment: int) -> None:
    """Write the tokens of `sample` that belong to `place` into `streams`."""
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
    if SUPPORT in streams and sample.supports is not None:
        streams[SUPPORT][at] = sample.supports.rows(streams[SUPPORT].shape[2])[of]


# --- streams of models with experts


def add_routing(
    batches: Sequence[MicroBatch], samples: Sequence[Sample], spec: ModelSpec, *, replay: bool, of_all: bool
) -> None:
    """Add the stream SHARE (see `token_shares`) to the micro-batches of `samples`, and with `replay` EXPERTS."""
    for batch, shares in zip(batches, token_shares(batches, of_all=of_all), strict=True):
        batch.streams[SHARE] = shares
        if replay:
            width, dtype = moe.recorded_width(spec), moe.recorded_dtype(spec)
            batch.streams[EXPERTS] = spread_experts(batch, samples, width, dtype)
