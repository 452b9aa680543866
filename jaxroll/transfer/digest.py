"""A checksum of a leaf that survives resharding: additive over disjoint boxes, so any partition gives the same sum.

    D(A) = Σ_i  u(A_i) · Π_k w_k(i_k)   mod 2⁶⁴

u(x) is the element's bits read as an unsigned integer, i its index in the *whole* leaf, and w_k(p) the odd 64-bit
number splitmix64(k · 2⁴⁸ + p) | 1 of position p on axis k (an empty product, for scalars, is 1).

- Additive: D over a box is the same sum restricted to the box, so D(A) = Σ D(boxes) for any disjoint cover.
- Every change inside one element is seen: its difference d satisfies 0 < |d| < 2⁶⁴ and is multiplied by an odd number,
  which is invertible mod 2⁶⁴. (All-or-nothing for elements of at most 64 bits.)
- Bytes in the wrong place are seen unless weights collide: exchanging elements i and j adds (w_i − w_j)(u_j − u_i), and
  for pseudo-random weights that vanishes with probability about 2⁻⁶⁴·(the power of two in u_j − u_i); the worst case,
  sign bits only, is 2⁻³² for 32-bit elements and 2⁻⁴⁸ for 16-bit ones.
- It is no signature: who can write to the wire on purpose can forge it. Authenticity is the token's and the network's.

Cost: one multiply-add per element (np.einsum over the last axis, which releases the GIL), then ever smaller sums.
"""

from __future__ import annotations

import functools

import numpy as np

from jaxroll.transfer.plan import Box, shape_of

_MASK = (1 << 64) - 1
_BITS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_CACHED_POSITIONS = 1 << 18  # longer runs of weights are computed block by block and not kept
_COLUMNS = 1 << 12  # trailing axes are merged up to this many columns, so that short last axes stay fast


def bits(array: np.ndarray) -> np.ndarray:
    """The same memory read as unsigned integers of the element's width."""
    return array.view(_BITS[array.dtype.itemsize])


def bits_dtype(itemsize: int) -> np.dtype:
    """The unsigned dtype of that many bytes."""
    return _BITS[itemsize]


def _splitmix64(counter: np.ndarray) -> np.ndarray:
    """uint64: Steele, Lea & Flood (2014), the finaliser of SplitMix, elementwise."""
    z = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _positions(axis: int, start: int, stop: int) -> np.ndarray:
    counter = np.arange(start, stop, dtype=np.uint64) + np.uint64(axis << 48)
    return _splitmix64(counter) | np.uint64(1)


@functools.lru_cache(maxsize=256)
def _cached_positions(axis: int, start: int, stop: int) -> np.ndarray:
    weights = _positions(axis, start, stop)
    weights.flags.writeable = False
    return weights


def weights(axis: int, start: int, stop: int) -> np.ndarray:
    """uint64 [stop - start]: the odd weights of these positions of `axis`."""
    make = _cached_positions if stop - start <= _CACHED_POSITIONS else _positions
    return make(axis, start, stop)


def of_box(array: np.ndarray, box: Box) -> int:
    """D restricted to `box`, whose elements (in C order) are `array`."""
    if array.shape != shape_of(box):
        raise ValueError(f"an array of shape {array.shape} does not fill the box {box}")
    if array.size == 0:
        return 0
    values = bits(np.ascontiguousarray(array).reshape(array.shape))
    if values.ndim == 0:
        return int(values)
    if values.ndim == 1:
        return _of_row(values, box[0])
    columns, rest = _merged_columns(values, box)
    while columns.ndim > 0:
        axis = columns.ndim - 1
        columns = np.einsum("...n,n->...", columns, rest if rest is not None else weights(axis, *box[axis]))
        rest = None
    return int(columns)


def _of_row(values: np.ndarray, span: tuple[int, int]) -> int:
    total = 0
    for at in range(0, len(values), _CACHED_POSITIONS):
        part = values[at : at + _CACHED_POSITIONS]
        total += int(np.einsum("n,n->", part, weights(0, span[0] + at, span[0] + at + len(part))))
    return total & _MASK


def _merged_columns(values: np.ndarray, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """The array with short trailing axes flattened into one, and the product weights of that one."""
    last = values.ndim - 1
    columns = weights(last, *box[last])
    while last > 0 and len(columns) * values.shape[last - 1] <= _COLUMNS:
        last -= 1
        columns = np.multiply.outer(weights(last, *box[last]), columns).reshape(-1)
    return values.reshape(*values.shape[:last], len(columns)), columns


def total(parts: list[int] | tuple[int, ...]) -> int:
    """The digest of the union of disjoint boxes from theirs."""
    return sum(parts) & _MASK
