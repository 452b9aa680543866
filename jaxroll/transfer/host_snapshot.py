"""An immutable host copy of the parameters at one version.

Two halves, because they belong to two threads: `begin` runs on the JAX thread and only dispatches (one jitted
cast-and-copy, then device-to-host of every unique shard at once); `finish` waits for the bytes and may run anywhere.

Where parameters lie in parts on several processes `begin` also waits: for each leaf to be gathered and to reach the
host of process 0, a few at a time, so that no device ever holds two whole copies.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import wire
from jaxroll.errors import TransferError
from jaxroll.records import Version
from jaxroll.sharding import placing
from jaxroll.transfer import manifest, plan
from jaxroll.transfer import manifest as digest
from jaxroll.transfer.plan import Box

GATHERED_LEAVES = 2  # that the devices hold at once, of those that lie on several processes

Params = Mapping[str, jax.Array]
Pieces = Mapping[str, tuple[tuple[int, ...], list[tuple[Box, np.ndarray]]]]


@dataclass(frozen=True)
class HostSnapshot:
    """`pieces[leaf][source]` holds box `manifest.leaves[leaf].boxes[source]`; read-only, C-contiguous."""

    manifest: manifest.Manifest
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


@dataclass(frozen=True)
class PendingCopy:
    """Device copies on their way to the host: per leaf its shape and the arrays of its unique local boxes.

    `finish` takes them out one by one, so that the device has their memory back as soon as each is on the host. What
    was gathered is on the host already. On any process but the first there are none.
    """

    leaves: dict[str, tuple[tuple[int, ...], dict[Box, jax.Array | np.ndarray]]]


@functools.partial(jax.jit, static_argnames="dtype")
def _cast_and_copy(params: dict[str, jax.Array], dtype: str) -> dict[str, jax.Array]:
    """Floating leaves in `dtype`, others as they are, all in buffers of their own.

    `jnp.copy` says what is meant: jax does not promise that a jitted identity returns new buffers, though 0.10.2 does.
    """

    def one(leaf: jax.Array) -> jax.Array:
        return jnp.copy(leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf)

    return {name: one(leaf) for name, leaf in params.items()}


def copied(params: Params, dtype: str) -> dict[str, jax.Array]:
    """Copies on the devices, in `dtype`, queued behind what made `params`, which may be donated on return."""
    return _cast_and_copy(dict(params), dtype)


def begin(params: Params, dtype: str) -> PendingCopy:
    """The copies under way. On return the caller may donate `params`: the copy is ordered before it on the device.

    All processes of a mesh call it in the same order; what comes back on the first is the whole, on the others nothing.
    """
    copies = copied(params, dtype)
    leaves, gathering = {}, deque()
    for name in sorted(copies):
        copy = copies.pop(name)
        whole = placing.gathered(copy)
        leaves[name] = (whole.shape, _on_the_way(name, whole))
        if whole is not copy:
            gathering.append(name)
            if len(gathering) > GATHERED_LEAVES:
                _land(leaves[gathering.popleft()][1])
    for name in gathering:
        _land(leaves[name][1])
    return PendingCopy(leaves if jax.process_index() == 0 else {})


def _on_the_way(name: str, whole: jax.Array) -> dict[Box, jax.Array | np.ndarray]:
    """The unique boxes of `whole` on this process; on the first they are sent to the host."""
    shards = {plan.box_of(shard.index, whole.shape): shard.data for shard in whole.addressable_shards}
    if not whole.is_fully_addressable and not plan.covers_once(tuple(shards), whole.shape):
        raise TransferError(f"leaf {name!r}: the {len(shards)} boxes of this process do not cover {whole.shape}")
    if jax.process_index() == 0:
        for data in shards.values():
            data.copy_to_host_async()
    return dict(shards)


def _land(shards: dict[Box, jax.Array | np.ndarray]) -> None:
    """Wait until they are on the host of process 0, and let the devices have their memory back."""
    first = jax.process_index() == 0
    for box, data in shards.items():
        shards[box] = np.asarray(data) if first else np.empty(0, jax.block_until_ready(data).dtype)


def finish(version: Version, pending: PendingCopy) -> HostSnapshot:
    """The snapshot, once every byte is on the host.

    On CPU `np.asarray` shows the device copy's own memory instead of copying again. That is safe here: the copy is
    private to this snapshot, nobody donates it, and the numpy array keeps it alive.
    """
    pieces = {}
    while pending.leaves:
        name, (shape, shards) = pending.leaves.popitem()
        pieces[name] = (shape, [(box, np.asarray(shards.pop(box))) for box in sorted(shards)])
    return from_pieces(version, pieces)


def take(version: Version, params: Params, dtype: str) -> HostSnapshot:
    """The snapshot of `params` in `dtype` (float32 or bfloat16); blocks until it is on the host."""
    return finish(version, begin(params, dtype))


def joined(own: HostSnapshot, frozen: HostSnapshot) -> HostSnapshot:
    """The snapshot of `own`'s version with the leaves of both, whose names differ; arrays and digests are theirs."""
    both = (pair for part in (own, frozen) for pair in zip(part.manifest.leaves, part.pieces, strict=True))
    held = sorted(both, key=lambda pair: pair[0].name)
    whole = manifest.Manifest(own.version, tuple(leaf for leaf, _ in held))
    return HostSnapshot(whole, manifest.encode(whole), tuple(pieces for _, pieces in held))


def from_pieces(version: Version, pieces: Pieces) -> HostSnapshot:
    """The snapshot made of these host arrays, which it owns from now on: leaf name → (shape, [(box, array)])."""
    leaves, arrays = [], []
    for name in sorted(pieces):
        shape, parts = pieces[name]
        frozen = tuple(_frozen(array) for _, array in parts)
        leaves.append(
            manifest.Leaf(
                name=name,
                shape=tuple(shape),
                dtype=frozen[0].dtype.name,
                boxes=tuple(box for box, _ in parts),
                digests=tuple(digest.of_box(array, box) for (box, _), array in zip(parts, frozen, strict=True)),
            )
        )
        arrays.append(frozen)
    whole = manifest.Manifest(version, tuple(leaves))
    return HostSnapshot(whole, manifest.encode(whole), tuple(arrays))


def _frozen(array: np.ndarray) -> np.ndarray:
    view = np.ascontiguousarray(array).reshape(array.shape).view()
    view.flags.writeable = False
    return view
