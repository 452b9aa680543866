"""Claim order (docs/store_contract.md, promise 8). Pure.

`lease_order` takes groups in the order of their prompts, so short answers are not favoured and a run is reproducible;
`ready_first` takes the groups that finished first; `freshest_first` those sampled last. With the latter two, the other
groups grow stale.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """Unclaimed group. `ready_place` is its position in the order of completion; None if it is unfinished."""

    group: int
    ready_place: int | None
    oldest_step: int = 0  # the version of its oldest token


@dataclass(frozen=True)
class Pick:
    """Groups `chosen` for a claim and `surplus` ones to abort; or the unfinished groups that are `missing` for it."""

    chosen: tuple[int, ...] = ()
    surplus: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


def pick(policy: str, candidates: Sequence[Candidate], batch: int, redundant: int, last: bool) -> Pick:
    """Pick the groups of the next claim from `candidates` (in the order of issue).

    `last`: no further group will come, so the batch may be short. With `redundant` groups the first `batch` to finish
    among `batch + redundant` are chosen and the others are surplus.
    """
    head = candidates[: batch + redundant] if policy == "lease_order" else candidates
    ready = [c for c in head if c.ready_place is not None]
    wanted = min(batch, len(candidates)) if last else batch
    if len(ready) < wanted or wanted == 0:
        return Pick(missing=tuple(c.group for c in head if c.ready_place is None))
    if policy == "ready_first":
        ready.sort(key=lambda c: (c.ready_place, c.group))
    elif policy == "freshest_first":
        ready.sort(key=lambda c: (-c.oldest_step, c.group))
    elif redundant:
        ready.sort(key=lambda c: (c.ready_place, c.group))
    chosen = sorted(c.group for c in ready[:wanted])
    return Pick(chosen=tuple(chosen), surplus=_surplus(head, chosen, redundant))


def _surplus(head: Sequence[Candidate], chosen: list[int], redundant: int) -> tuple[int, ...]:
    """At most `redundant` groups of the head that were not chosen; unfinished ones first, because they cost least."""
    rest = [c for c in head if c.group not in set(chosen)]
    rest.sort(key=lambda c: (c.ready_place is not None, c.group))
    return tuple(sorted(c.group for c in rest[:redundant]))


def shuffled(groups: Sequence[int], seed: int) -> tuple[int, ...]:
    """`groups` in a random order determined by `seed`."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    return tuple(order)
