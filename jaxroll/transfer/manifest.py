"""Manifests of snapshots, with a checksum per leaf that does not depend on its sharding; transfer plans (boxes).

The checksum is additive over disjoint boxes, so any partition of a leaf gives the same sum:

    D(A) = Σ_i  u(A_i) · Π_k w_k(i_k)   mod 2⁶⁴

u(x) is the element's bits read as an unsigned integer, i its index in the *whole* leaf, and w_k(p) the odd 64-bit
number splitmix64(k · 2⁴⁸ + p) | 1 of position p on axis k (an empty product, for scalars, is 1).

- Additive: D over a box is the same sum restricted to the box, so D(A) = Σ D(boxes) for any disjoint cover.
- Every change of one element is detected: its difference d satisfies 0 < |d| < 2⁶⁴ and is multiplied by an odd number,
  which is invertible mod 2⁶⁴. (This holds for elements of at most 64 bits.)
- Misplaced bytes are detected unless weights collide: exchanging elements i and j adds (w_i − w_j)(u_j − u_i), and for
  pseudo-random weights that vanishes with probability about 2⁻⁶⁴·(the power of two in u_j − u_i); the worst case, sign
  bits only, is 2⁻³² for 32-bit elements and 2⁻⁴⁸ for 16-bit ones.
- It is not a signature: an attacker on the network can forge it. The token and TLS provide authenticity.

Cost: one multiply-add per element (np.einsum over the last axis, which releases the GIL), then ever smaller sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np

from jaxroll import records, wire
from jaxroll.errors import DigestMismatch, TransferError, VersionMixed
from jaxroll.records import Version

# --- Transfer plans: intersections of the boxes of source shards with those of target shards; no arrays
#
# A *box* is a tuple of (start, stop) per axis of the whole leaf; a scalar's box is `()`. A sharding gives one box per
# device; replicas share a box, which is fetched once.

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


def bounds(some: Sequence[Box]) -> Box:
    """The least box that contains all of them."""
    return tuple(
        (min(start for start, _ in spans), max(stop for _, stop in spans)) for spans in zip(*some, strict=True)
    )


def is_contiguous(box: Box, outer: Box) -> bool:
    """True if the elements of `box` follow one another in an array that holds `outer`."""
    shape, outer_shape = shape_of(box), shape_of(outer)
    cut = next((k for k, extent in enumerate(shape) if extent != 1), len(shape))
    return shape[cut + 1 :] == outer_shape[cut + 1 :]


def runs(box: Box, outer: Box, strides: tuple[int, ...], itemsize: int) -> np.ndarray:
    """int64 [runs, 3]: the parts of an array that holds `box` which are contiguous in it and in an array of `outer`.

    The columns are the offset in the bytes of `outer`, the offset from the array's address, and the length in bytes.
    """
    start, step, length, loops = 0, itemsize, itemsize, list[tuple[int, int, int]]()
    for (a, b), (first, last), stride in zip(box[::-1], outer[::-1], strides[::-1], strict=True):
        start += (a - first) * step
        if b - a != 1 and not stride == step == length:
            loops.append((b - a, step, stride))
        else:
            length *= b - a
        step *= last - first
    offsets, addresses = np.array([start]), np.array([0])
    for extent, step, stride in loops[::-1]:
        offsets = np.add.outer(offsets, np.arange(extent) * step).reshape(-1)
        addresses = np.add.outer(addresses, np.arange(extent) * stride).reshape(-1)
    return np.stack([offsets, addresses, np.full_like(offsets, length)], axis=1)


# --- Manifests of snapshots, with a checksum per leaf that does not depend on its sharding

_MASK = (1 << 64) - 1
_BITS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_CACHED_POSITIONS = 1 << 18  # longer runs of weights are computed block by block and not cached
_COLUMNS = 1 << 12  # trailing axes are merged up to this many columns, so that short last axes stay fast


def bits(array: np.ndarray) -> np.ndarray:
    """The same memory read as unsigned integers of the element's width."""
    return array.view(_BITS[array.dtype.itemsize])


def bits_dtype(itemsize: int) -> np.dtype:
    """The unsigned integer dtype of `itemsize` bytes."""
    return _BITS[itemsize]


def _splitmix64(counter: np.ndarray) -> np.ndarray:
    """uint64: the finalizer of SplitMix, elementwise (Steele, Lea & Flood, 2014)."""
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
    """uint64 [stop - start]: the odd weights of positions `start` to `stop` of `axis`."""
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
    """The array with short trailing axes flattened into one, and the product weights of that axis."""
    last = values.ndim - 1
    columns = weights(last, *box[last])
    while last > 0 and len(columns) * values.shape[last - 1] <= _COLUMNS:
        last -= 1
        columns = np.multiply.outer(weights(last, *box[last]), columns).reshape(-1)
    return values.reshape(*values.shape[:last], len(columns)), columns


def total(parts: list[int] | tuple[int, ...]) -> int:
    """The digest of the union of disjoint boxes, from their digests."""
    return sum(parts) & _MASK


# --- Manifest of a snapshot: small, canonical, and checked before buffers are allocated

DTYPES: Mapping[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{name: np.dtype(name) for name in ("float16", "float32", "int8", "uint8", "int32", "uint32")},
}


# Limits of a manifest, checked while it is decoded, because it comes from the network.
MAX_LEAVES, MAX_BOXES, MAX_DIMS, MAX_HOSTS = 1 << 17, 1 << 14, 32, 1 << 12
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
_Address = Annotated[str, msgspec.Meta(max_length=1000)]


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: `digests[i]` belongs to `boxes[i]`; the boxes are disjoint and cover `shape`.

    `hosts[i]` is the number of the learner's host that serves `boxes[i]`; without `hosts` there is only one.
    """

    name: Annotated[str, msgspec.Meta(max_length=1000)]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMS)]
    dtype: Annotated[str, msgspec.Meta(max_length=20)]
    boxes: Annotated[
        tuple[Annotated[tuple[tuple[_Count, _Count], ...], msgspec.Meta(max_length=MAX_DIMS)], ...],
        msgspec.Meta(max_length=MAX_BOXES),
    ]
    digests: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_BOXES)]
    hosts: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_BOXES)] = ()

    @property
    def total(self) -> int:
        """The digest of the whole leaf, which does not depend on its partition."""
        return total(self.digests)

    @property
    def size_bytes(self) -> int:
        return size_of(whole(self.shape)) * DTYPES[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True):
    """The leaves of one version, sorted by name. `addresses`: of the learner's other hosts, from number 1."""

    version: Version
    leaves: Annotated[tuple[Leaf, ...], msgspec.Meta(max_length=MAX_LEAVES)]
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=MAX_HOSTS)] = ()


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes, whose `wire.digest` is the snapshot's `manifest_digest`."""
    return wire.encode(manifest)


def decode(data: bytes, snapshot: records.VersionRef) -> Manifest:
    """The manifest in `data`, after checking that it is the one that `snapshot` names and is consistent.

    Raises VersionMixed when it belongs to another version, DigestMismatch when its bytes differ from those announced,
    TransferError when it is inconsistent.
    """
    try:
        manifest = wire.decode(data, Manifest)
    except msgspec.MsgspecError as error:
        raise DigestMismatch(f"the manifest of {snapshot.version} is not a manifest: {error}") from error
    if manifest.version != snapshot.version:
        raise VersionMixed(f"the manifest is of version {manifest.version}, requested {snapshot.version}")
    if not wire.is_digest(snapshot.manifest_digest, data):
        raise DigestMismatch(f"the manifest of {snapshot.version} is not the one that was announced")
    for leaf in manifest.leaves:
        _check_leaf(leaf, len(manifest.addresses))
    return manifest


@functools.lru_cache(maxsize=4096)  # every version has the same partition
def _covers_once(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> bool:
    return covers_once(boxes, shape)


def _check_leaf(leaf: Leaf, others: int) -> None:
    if leaf.dtype not in DTYPES:
        raise TransferError(f"leaf {leaf.name!r}: dtype {leaf.dtype!r} is unsupported (known: {', '.join(DTYPES)})")
    if len(leaf.boxes) != len(leaf.digests) or any(n < 0 for n in leaf.shape):
        raise TransferError(f"leaf {leaf.name!r}: {len(leaf.boxes)} boxes, {len(leaf.digests)} digests, {leaf.shape}")
    if len(leaf.hosts) != (len(leaf.boxes) if others else 0) or any(host > others for host in leaf.hosts):
        raise TransferError(f"leaf {leaf.name!r}: {len(leaf.boxes)} boxes of hosts {set(leaf.hosts)}, of {1 + others}")
    if not _covers_once(leaf.boxes, leaf.shape):
        raise TransferError(f"leaf {leaf.name!r}: its {len(leaf.boxes)} boxes do not cover {leaf.shape} exactly once")


def check(manifest: Manifest, shapes: Mapping[str, Any]) -> None:
    """Raise TransferError for the first leaf that is missing, unknown, or of another shape.

    `shapes` maps names to objects with a `.shape`. Call this before allocating buffers: then a wrong or hostile
    manifest cannot make the receiver allocate more memory than its own parameters need.
    """
    published = {leaf.name: leaf for leaf in manifest.leaves}
    if len(published) != len(manifest.leaves):
        raise TransferError(f"version {manifest.version} names a leaf twice")
    for name in sorted(published.keys() ^ shapes.keys()):
        side = "published but not in this model" if name in published else "in this model but not published"
        raise TransferError(f"leaf {name!r} is {side}: do learner and sampler have the same model config?")
    for name, leaf in published.items():
        if leaf.shape != tuple(shapes[name].shape):
            raise TransferError(
                f"leaf {name!r}: published with shape {leaf.shape}, this model has {tuple(shapes[name].shape)}; "
                "do learner and sampler have the same model config?"
            )


# --- Host snapshots: the bytes of one version, with their manifest

Hold = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
Pieces = Mapping[str, tuple[tuple[int, ...], list[tuple[Box, np.ndarray]]]]


@dataclass(frozen=True)
class HostSnapshot:
    """A version's parameters on the host.

    `pieces[leaf][source]` holds box `manifest.leaves[leaf].boxes[source]`, read-only and C-contiguous; `encoded` is the
    encoded manifest.
    """

    manifest: Manifest
    encoded: bytes
    pieces: tuple[tuple[np.ndarray, ...], ...]

    @property
    def version(self) -> Version:
        return self.manifest.version

    @property
    def manifest_digest(self) -> str:
        return wire.digest(self.encoded)

    @property
    def size_bytes(self) -> int:
        return sum(piece.nbytes for leaf in self.pieces for piece in leaf)


def joined(own: HostSnapshot, frozen: HostSnapshot) -> HostSnapshot:
    """A snapshot of `own`'s version with the leaves of both, which must have different names; nothing is copied."""
    both = (pair for part in (own, frozen) for pair in zip(part.manifest.leaves, part.pieces, strict=True))
    held = sorted(both, key=lambda pair: pair[0].name)
    whole = Manifest(own.version, tuple(leaf for leaf, _ in held))
    return HostSnapshot(whole, encode(whole), tuple(pieces for _, pieces in held))


def from_pieces(version: Version, pieces: Pieces, hold: Hold | None = None) -> HostSnapshot:
    """A snapshot of host arrays, which it owns from now on. `pieces`: leaf name → (shape, [(box, array)]).

    `hold` moves the arrays to the memory from which they are served; the digests are of that memory.
    """
    leaves, arrays = [], []
    every = [_frozen(array) for name in sorted(pieces) for _, array in pieces[name][1]]
    held = iter(every if hold is None else hold(every))
    for name in sorted(pieces):
        shape, parts = pieces[name]
        frozen = tuple(next(held) for _ in parts)
        leaves.append(
            Leaf(
                name=name,
                shape=tuple(shape),
                dtype=frozen[0].dtype.name,
                boxes=tuple(box for box, _ in parts),
                digests=tuple(of_box(array, box) for (box, _), array in zip(parts, frozen, strict=True)),
            )
        )
        arrays.append(frozen)
    whole = Manifest(version, tuple(leaves))
    return HostSnapshot(whole, encode(whole), tuple(arrays))


def _frozen(array: np.ndarray) -> np.ndarray:
    view = np.ascontiguousarray(array).reshape(array.shape).view()
    view.flags.writeable = False
    return view


# --- dtypes: published parameters in the dtype of the transfer, received ones in those of the engine

Params = dict[str, jax.Array]


def keeps_float32(name: str) -> bool:
    """True for the routers of mixtures of experts: rounded ones would choose other experts than the learner's."""
    return name.endswith((".router", ".router_bias"))


def cast(arrays: Params, dtypes: Mapping[str, np.dtype]) -> Params:
    """`arrays` in the dtypes of `dtypes`, cast on their devices; arrays that need no cast are not copied."""
    names = tuple(name for name, array in arrays.items() if array.dtype != dtypes[name])
    if not names:
        return arrays
    caster = _caster(tuple(arrays[n].sharding for n in names), tuple(str(dtypes[n]) for n in names))
    return arrays | dict(zip(names, caster([arrays[n] for n in names]), strict=True))


@functools.lru_cache(maxsize=8)
def _caster(shardings: tuple[jax.sharding.Sharding, ...], dtypes: tuple[str, ...]) -> Any:
    """The jitted cast of a list of arrays; cached, so that later versions do not compile again."""
    return jax.jit(
        lambda arrays: [array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True)],
        out_shardings=list(shardings),
    )


@functools.partial(jax.jit, static_argnames="dtype")
def cast_and_copy(params: dict[str, jax.Array], dtype: str) -> dict[str, jax.Array]:
    """Copies in new buffers: floating-point leaves in `dtype`, routers and others unchanged."""

    def one(name: str, leaf: jax.Array) -> jax.Array:
        rounds = jnp.issubdtype(leaf.dtype, jnp.floating) and not keeps_float32(name)
        # An explicit copy: JAX does not guarantee that a jitted identity returns new buffers, although 0.10.2 does.
        return jnp.copy(leaf.astype(dtype) if rounds else leaf)

    return {name: one(name, leaf) for name, leaf in params.items()}


def copied(params: Mapping[str, jax.Array], dtype: str) -> dict[str, jax.Array]:
    """Copies on the devices, in `dtype`. On return the caller may donate `params`: the copy is queued before."""
    return cast_and_copy(dict(params), dtype)
