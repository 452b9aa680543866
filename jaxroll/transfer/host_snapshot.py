"""Host snapshots: immutable host copies of the parameters at one version.

A snapshot is taken in two steps on two threads: `begin` runs on the JAX thread and only dispatches (one jitted cast and
copy, then the device-to-host copies of all unique shards); `finish` waits for the bytes and may run on any thread.

When parameters are sharded over several processes, `begin` also waits: each leaf is gathered and copied to the host of
process 0, a few leaves at a time, so that no device ever holds two whole copies.
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

GATHERED_LEAVES = 2  # gathered leaves that the devices hold at once

Params = Mapping[str, jax.Array]
Pieces = Mapping[str, tuple[tuple[int, ...], list[tuple[Box, np.ndarray]]]]


@dataclass(frozen=True)
class HostSnapshot:
    """A version's parameters on the host.

    `pieces[leaf][source]` holds box `manifest.leaves[leaf].boxes[source]`, read-only and C-contiguous; `encoded` is the
    encoded manifest.
    """

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
    """Device copies during their transfer to the host: per leaf its shape and the arrays of its unique local boxes.

    `finish` removes them one by one, so that the device memory of each is freed as soon as it is on the host. Gathered
    leaves are on the host already. On processes other than 0 there are no leaves.
    """

    leaves: dict[str, tuple[tuple[int, ...], dict[Box, jax.Array | np.ndarray]]]


@functools.partial(jax.jit, static_argnames="dtype")
def _cast_and_copy(params: dict[str, jax.Array], dtype: str) -> dict[str, jax.Array]:
    """Copies in new buffers: floating-point leaves in `dtype`, routers and others unchanged."""

    def one(name: str, leaf: jax.Array) -> jax.Array:
        rounds = jnp.issubdtype(leaf.dtype, jnp.floating) and not keeps_float32(name)
        # An explicit copy: JAX does not guarantee that a jitted identity returns new buffers, although 0.10.2 does.
        return jnp.copy(leaf.astype(dtype) if rounds else leaf)

    return {name: one(name, leaf) for name, leaf in params.items()}


def keeps_float32(name: str) -> bool:
    """True for the routers of mixtures of experts: rounded ones would choose other experts than the learner's."""
    return name.endswith((".router", ".router_bias"))


def copied(params: Params, dtype: str) -> dict[str, jax.Array]:
    """Copies on the devices, in `dtype`. On return the caller may donate `params`: the copy is queued before."""
    return _cast_and_copy(dict(params), dtype)


def begin(params: Params, dtype: str) -> PendingCopy:
    """Dispatch the copies. On return the caller may donate `params`, because the device executes the copy first.

    All processes of a mesh must call this in the same order; process 0 gets all leaves, the others get none.
    """
    copies = copied(params, dtype)
    leaves, gathering = {}, deque()
    for name in sorted(copies):
        copy = copies.pop(name)
        whole = placing.gathered(copy)
        leaves[name] = (whole.shape, _start_copy(name, whole))
        if whole is not copy:
            gathering.append(name)
            if len(gathering) > GATHERED_LEAVES:
                _finish_copy(leaves[gathering.popleft()][1])
    for name in gathering:
        _finish_copy(leaves[name][1])
    return PendingCopy(leaves if jax.process_index() == 0 else {})


def _start_copy(name: str, whole: jax.Array) -> dict[Box, jax.Array | np.ndarray]:
    """The unique boxes of `whole` on this process; on process 0 their copies to the host are started."""
    shards = {plan.box_of(shard.index, whole.shape): shard.data for shard in whole.addressable_shards}
    if not whole.is_fully_addressable and not plan.covers_once(tuple(shards), whole.shape):
        raise TransferError(f"leaf {name!r}: the {len(shards)} boxes of this process do not cover {whole.shape}")
    if jax.process_index() == 0:
        for data in shards.values():
            data.copy_to_host_async()
    return dict(shards)


def _finish_copy(shards: dict[Box, jax.Array | np.ndarray]) -> None:
    """Wait until the shards are on the host of process 0, and free their device memory."""
    first = jax.process_index() == 0
    for box, data in shards.items():
        shards[box] = np.asarray(data) if first else np.empty(0, jax.block_until_ready(data).dtype)


def finish(version: Version, pending: PendingCopy) -> HostSnapshot:
    """Wait until every byte is on the host and return the snapshot."""
    # On CPU `np.asarray` is a view of the device copy's memory. That is safe: the copy is private to this snapshot, is
    # never donated, and the numpy array keeps it alive.
    pieces = {}
    while pending.leaves:
        name, (shape, shards) = pending.leaves.popitem()
        pieces[name] = (shape, [(box, np.asarray(shards.pop(box))) for box in sorted(shards)])
    return from_pieces(version, pieces)


def take(version: Version, params: Params, dtype: str) -> HostSnapshot:
    """The snapshot of `params` in `dtype` (float32 or bfloat16). Blocks until it is on the host."""
    return finish(version, begin(params, dtype))


def joined(own: HostSnapshot, frozen: HostSnapshot) -> HostSnapshot:
    """A snapshot of `own`'s version with the leaves of both, which must have different names; nothing is copied."""
    both = (pair for part in (own, frozen) for pair in zip(part.manifest.leaves, part.pieces, strict=True))
    held = sorted(both, key=lambda pair: pair[0].name)
    whole = manifest.Manifest(own.version, tuple(leaf for leaf, _ in held))
    return HostSnapshot(whole, manifest.encode(whole), tuple(pieces for _, pieces in held))


def from_pieces(version: Version, pieces: Pieces) -> HostSnapshot:
    """A snapshot of host arrays, which it owns from now on. `pieces`: leaf name → (shape, [(box, array)])."""
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
