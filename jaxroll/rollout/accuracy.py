"""Accuracy of evaluated tasks: pass@k, mean@n, intervals, accuracy by source. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

RESAMPLES = 1000


class Scored(Protocol):
    """A scored answer: whether it is right, and whether it counts."""

    @property
    def right(self) -> bool: ...

    @property
    def pinned(self) -> bool: ...


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate 1 − C(n−c, k)/C(n, k) of the chance that one of k samples is right, given c right of n.

    Source: Chen et al. 2021, arXiv 2107.03374, 2.1. ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {c} right among {n} samples is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean(values: Sequence[float]) -> float:
    """The mean; ValueError for no values."""
    if not values:
        raise ValueError("the mean of no values is not defined")
    return math.fsum(values) / len(values)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean of `values`, by resampling items (Efron 1979); the same for equal seeds."""
    draw = random.Random(seed)
    means = sorted(mean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def counts(samples: Sequence[Sequence[Scored]]) -> list[tuple[int, int]]:
    """(answers that count, right ones) of each item, for the items with any; `samples` has one list per repetition."""
    found = []
    for answers in zip(*samples, strict=True):
        counted = [answer.right for answer in answers if answer.pinned]
        if counted:
            found.append((len(counted), sum(counted)))
    return found


def table(found: Sequence[tuple[int, int]], ks: Sequence[int]) -> dict[str, tuple[float, float, float]]:
    """(estimate, low, high) of mean@n and of pass@k for each k, over items with (n, c); with 95 % bootstrap intervals.

    An item with fewer than k answers that count is left out of pass@k.
    """
    most = max(n for n, _ in found)
    rows: dict[str, list[float]] = {f"mean@{most}": [c / n for n, c in found]}
    rows |= {f"pass@{k}": [pass_at_k(n, c, k) for n, c in found if n >= k] for k in ks}
    return {name: (mean(values), *bootstrap(values)) for name, values in rows.items() if values}


def grouped(values: Sequence[Any], key: Callable[[Any], str]) -> Mapping[str, list[Any]]:
    """`values` by key, in order of the keys; empty if only one key, the empty one, occurs."""
    found: dict[str, list[Any]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return {} if set(found) <= {""} else dict(sorted(found.items()))
