"""Packing of samples into rows that store each prompt once for all of its answers. Pure, like `packing`.

Answers share their prompt except its last token. That token is copied, because the hidden state at it predicts an
answer's first token: so every trained token has its own previous state, and losses and statistics do not depend on
sharing. If the answers of a prompt do not fit into one row, they go into several rows, each with a copy of the
prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxroll.errors import ConfigError
from jaxroll.kernels.attention import SharedRows
from jaxroll.learner.minibatch import Sample
from jaxroll.learner.packing import (
    PROMPT_IDS,
    MicroBatch,
    Placement,
    empty_streams,
    sharded,
    split_rows,
    work,
    write,
)


@dataclass(frozen=True)
class PromptGroup:
    """Samples whose first `shared` tokens are equal and stored once; `shared` is 0 for a sample that shares none.

    `lengths` are the numbers of their other tokens; `cost` is the group's total, in the units of `packing.work`.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    shared: int
    cost: float

    @classmethod
    def of(cls, members: Iterable[tuple[int, int]], shared: int, quadratic: float) -> PromptGroup:
        """The group of `members`: (sample, number of its own tokens)."""
        samples, lengths = zip(*members, strict=True)
        own = work(lengths, quadratic) + 2 * quadratic * shared * np.asarray(lengths)
        return cls(samples, lengths, shared, float(own.sum() + work([shared], quadratic)[0]))


class _Row:
    """A partly filled row, with its free space."""

    def __init__(self, rows: SharedRows) -> None:
        self.groups: list[PromptGroup] = []
        self.answers: list[list[tuple[int, PromptGroup]]] = [[] for _ in range(rows.stretches)]  # samples by stretch
        self.cost = 0.0
        self._prompts, self._left = rows.prompt_tokens, [rows.tokens] * rows.stretches

    def places(self, group: PromptGroup) -> dict[int, int]:
        """The stretch for each sample of `group` that fits: longest sample first, into the fullest stretch."""
        left, found = list(self._left), {}
        if group.shared > self._prompts:
            return found
        for length, index in sorted(zip(group.lengths, group.samples, strict=True), key=lambda p: (-p[0], p[1])):
            fits = [(room, stretch) for stretch, room in enumerate(left) if room >= length]
            if fits:
                found[index] = stretch = min(fits)[1]
                left[stretch] -= length
        return found

    def put(self, group: PromptGroup) -> bool:
        """Add the whole group; return False and add nothing if it does not fit."""
        if sum(group.lengths) > sum(self._left):
            return False
        places = self.places(group)
        if len(places) < len(group.samples):
            return False
        self.groups.append(group)
        self.cost += group.cost
        self._prompts -= group.shared
        for index, length in zip(group.samples, group.lengths, strict=True):
            self.answers[places[index]].append((index, group))
            self._left[places[index]] -= length
        return True


def prompt_groups(samples: Sequence[Sample], rows: SharedRows, quadratic: float = 0.0) -> list[PromptGroup]:
    """`samples` grouped by equal prompts, in order of first appearance."""
    found: dict[tuple[int, bytes], list[int]] = {}
    for index, sample in enumerate(samples):
        shared = prompt_tokens(sample) - 1
        own = shared <= 0 or shared > rows.prompt_tokens
        key = (-1 - index, b"") if own else (shared, sample.tokens[:shared].tobytes())
        found.setdefault(key, []).append(index)
    return [
        PromptGroup.of([(i, len(samples[i].tokens) - max(shared, 0)) for i in members], max(shared, 0), quadratic)
        for (shared, _), members in found.items()
    ]


def prompt_tokens(sample: Sample) -> int:
    """The number of tokens before the first one that the model sampled."""
    first = int(np.argmax(sample.mask)) if sample.mask.any() else len(sample.tokens)
    return min([first, *(turn.start for turn in sample.turns[:1])])


def pack(
    samples: Sequence[Sample],
    rows: SharedRows,
    buckets: Sequence[int],
    *,
    shards: int = 1,
    quadratic: float = 0.0,
    support: int = 0,
) -> list[MicroBatch]:
    """Micro-batches that contain every answer exactly once, and every prompt in as few rows as its answers allow.

    The arguments are those of `packing.pack`; buckets count rows of `rows.row_tokens`. ConfigError when an answer is
    longer than a row.
    """
    units = prompt_groups(samples, rows, quadratic)
    _check(max((length for unit in units for length in unit.lengths), default=0), rows)
    filled = _first_fit(units, rows, quadratic)
    batches = []
    for count in split_rows(len(filled), buckets):
        part, filled = _balanced(filled[:count], count, rows), filled[count:]
        costs = np.array([row.cost for row in part])
        order = sharded([[at] for at in range(count)], costs, shards)
        batches.append(_filled(samples, [part[at] for (at,) in order], rows, support))
    return batches


def _check(longest: int, rows: SharedRows) -> None:
    if longest > rows.tokens:
        raise ConfigError(
            "learner.row_tokens",
            rows.tokens,
            f"an answer of {longest} tokens does not fit into a row",
            f"Use at least {longest}, or lower sampling.max_tokens; a prompt of more than learner.shared_prompt_tokens "
            f"= {rows.prompt_tokens} tokens is copied for each of its answers.",
        )


def _first_fit(units: Sequence[PromptGroup], rows: SharedRows, quadratic: float) -> list[_Row]:
    """Rows that hold all units.

    The most expensive unit goes first, into the first row with room for all of it, or into a new row. A unit that does
    not fit into one row is split over several.
    """
    filled: list[_Row] = []
    for unit in sorted(units, key=lambda unit: (-unit.cost, unit.samples)):
        left = unit
        while not any(row.put(left) for row in filled):
            filled.append(row := _Row(rows))
            first = row.places(left)
            if len(first) < len(left.samples):
                pairs = list(zip(left.samples, left.lengths, strict=True))
                taken = PromptGroup.of([pair for pair in pairs if pair[0] in first], left.shared, quadratic)
                assert row.put(taken), "an empty row has room for the samples that `places` returned"
                left = PromptGroup.of([pair for pair in pairs if pair[0] not in first], left.shared, quadratic)
    return filled


def _balanced(given: Sequence[_Row], count: int, rows: SharedRows) -> list[_Row]:
    """The groups of `given` in `count` rows of more even cost; `given` itself, padded, if that is not better.

    The most expensive group goes first, into the cheapest row with room for it.
    """
    even = [_Row(rows) for _ in range(count)]
    groups = sorted((unit for row in given for unit in row.groups), key=lambda unit: (-unit.cost, unit.samples))
    fits = all(any(row.put(unit) for row in sorted(even, key=lambda row: row.cost)) for unit in groups)
    if fits and max(row.cost for row in even) < max(row.cost for row in given):
        return even
    return [*given, *(_Row(rows) for _ in range(count - len(given)))]


def _filled(samples: Sequence[Sample], filled: Sequence[_Row], rows: SharedRows, support: int) -> MicroBatch:
    """The micro-batch of `filled`; segments are numbered in order, prompts first."""
    streams = empty_streams(len(filled), rows.row_tokens, support)
    streams[PROMPT_IDS] = np.zeros((len(filled), rows.row_tokens), np.int32)
    answers, prompts = [], []
    for at, row in enumerate(filled):
        start, shared = 0, [unit for unit in row.groups if unit.shared]
        number = {unit.samples: segment for segment, unit in enumerate(shared, start=1)}
        for unit in shared:
            prompts.append(Placement(unit.samples[0], at, start, unit.shared))
            write(streams, prompts[-1], samples[unit.samples[0]], number[unit.samples])
            start += unit.shared
        segment = len(shared)
        for stretch, held in enumerate(row.answers):
            start = rows.prompt_tokens + stretch * rows.tokens
            for index, unit in held:
                segment += 1
                place = Placement(index, at, start, len(samples[index].tokens) - unit.shared, unit.shared)
                write(streams, place, samples[index], segment)
                streams[PROMPT_IDS][at, start : start + place.length] = number.get(unit.samples, 0)
                answers.append(place)
                start += place.length
    return MicroBatch(streams, tuple(answers), tuple(prompts))
