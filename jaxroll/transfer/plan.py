"""Transfer plans: intersections of the boxes of source shards with those of target shards. Pure; touches no array.

A *box* is a tuple of (start, stop) per axis of the whole leaf; a scalar's box is `()`. A sharding gives one box per
device; replicas share a box, which is fetched once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import jax

Box = tuple[tuple[int, int], ...]


class Copy(NamedTuple):
    """A copy of `box` of the leaf from source box number `source` to target box number `target`."""

    source: int
    target: int
    box: Box


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that the slices `index` (stride 1, as in shardings) select from an array of `shape`."""
    return tuple((part.indices(n)[0], part.indices(n)[1]) for part, n in zip(index, shape, strict=True))


def boxes(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> dict[Any, Box]:
    """The box of every device of `sharding`, including devices of other processes."""
    return {device: box_of(index, shape) for device, index in sharding.devices_indices_map(tuple(shape)).items()}


def local_boxes(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> dict[Any, Box]:
    """The box of every device of `sharding` that belongs to this process."""
    index_map = sharding.addressable_devices_indices_map(tuple(shape))
    return {device: box_of(index, shape) for device, index in index_map.items() if index is not None}


def unique(device_boxes: Mapping[Any, Box]) -> tuple[Box, ...]:
    """The distinct boxes, sorted; replicas count once."""
    return tuple(sorted(set(device_boxes.values())))


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of an array that fills `box`."""
    return tuple(stop - start for start, stop in box)


def size_of(box: Box) -> int:
    """The number of elements in `box`; 1 for a scalar."""
    return math.prod(shape_of(box))


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole leaf of `shape`."""
    return tuple((0, n) for n in shape)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of `box` inside an array that holds `outer`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def contains(outer: Box, box: Box) -> bool:
    """True if `box` has the rank of `outer`, has no negative extent, and is contained in it."""
    return len(outer) == len(box) and all(s <= a <= b <= e for (s, e), (a, b) in zip(outer, box, strict=True))


def _corners(some: Sequence[Box], rank: int) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(some, np.int64).reshape(len(some), rank, 2)
    return table[:, :, 0], table[:, :, 1]


def copies(sources: Sequence[Box], targets: Sequence[Box]) -> list[Copy]:
    """The slice copies that fill every target box from the source boxes, in target order.

    If the source boxes are disjoint and cover the leaf, each target element is in exactly one copy, and no copy
    contains an element outside of its target.
    """
    if not sources or not targets:
        return []
    rank = len(targets[0])
    source_start, source_stop = _corners(sources, rank)
    found = []
    for number, target in enumerate(targets):
        target_start, target_stop = _corners([target], rank)
        start, stop = np.maximum(source_start, target_start), np.minimum(source_stop, target_stop)
        for source in np.flatnonzero((start < stop).all(axis=1)).tolist():
            box = tuple(zip(start[source].tolist(), stop[source].tolist(), strict=True))
            found.append(Copy(source, number, box))
    return found


def covers_once(some: Sequence[Box], shape: Sequence[int]) -> bool:
    """True if the boxes are disjoint, inside `shape`, and together contain every element of it."""
    outer = whole(shape)
    if not all(contains(outer, box) for box in some) or sum(map(size_of, some)) != size_of(outer):
        return False
    filled = [box for box in some if size_of(box)]
    if len(filled) < 2:
        return True
    start, stop = _corners(filled, len(outer))
    for box in range(len(filled) - 1):  # one box at a time, because memory for all pairs would be quadratic
        meets = np.maximum(start[box], start[box + 1 :]) < np.minimum(stop[box], stop[box + 1 :])
        if meets.all(axis=1).any():
            return False
    return True


def split(box: Box, limit: int) -> list[Box]:
    """`box` as slabs of at most `limit` elements, cut along leading axes so that each is contiguous in memory."""
    if size_of(box) <= max(1, limit):
        return [box]
    axis = next(k for k, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[axis]
    step = max(1, limit // (size_of(box) // (stop - start)))
    slabs = [(*box[:axis], (at, min(at + step, stop)), *box[axis + 1 :]) for at in range(start, stop, step)]
    return [part for slab in slabs for part in split(slab, limit)]
