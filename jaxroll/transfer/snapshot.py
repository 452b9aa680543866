"""An immutable host copy of the parameters at one version.

Two halves, because they belong to two threads: `begin` runs on the JAX thread and only dispatches (one jitted
cast-and-copy, then device-to-host of every unique shard at once); `finish` waits for the bytes and may run anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import wire
from jaxroll.errors import TransferError
from jaxroll.records import Version
from jaxroll.transfer import digest, manifest, plan
from jaxroll.transfer.plan import Box

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
class Pending:
    """Device copies on their way to the host: per leaf its shape and the arrays of its unique local boxes."""

    leaves: dict[str, tuple[tuple[int, ...], dict[Box, jax.Array]]]


@functools.partial(jax.jit, static_argnames="dtype")
def _cast_and_copy(params: dict[str, jax.Array], dtype: str) -> dict[str, jax.Array]:
    """Floating leaves in `dtype`, others as they are, all in buffers of their own.

    `jnp.copy` says what is meant: jax does not promise that a jitted identity returns new buffers, though 0.10.2 does.
    """

    def one(leaf: jax.Array) -> jax.Array:
        return jnp.copy(leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf)

    return {name: one(leaf) for name, leaf in params.items()}


def begin(params: Params, dtype: str) -> Pending:
    """The copies under way. On return the caller may donate `params`: the copy is ordered before it on the device."""
    copies = _cast_and_copy(dict(params), dtype)
    leaves = {}
    for name in sorted(copies):
        copied = copies[name]
        shards = {plan.box_of(shard.index, copied.shape): shard.data for shard in copied.addressable_shards}
        if not copied.is_fully_addressable and not plan.covers_once(tuple(shards), copied.shape):
            raise TransferError(
                f"leaf {name!r}: this process holds {len(shards)} of its boxes and they do not cover {copied.shape}; "
                "a learner of several processes must keep a full copy of its parameters on process 0 to publish"
            )
        for data in shards.values():
            data.copy_to_host_async()
        leaves[name] = (copied.shape, shards)
    return Pending(leaves)


def finish(version: Version, pending: Pending) -> HostSnapshot:
    """The snapshot, once every byte is on the host.

    On CPU `np.asarray` shows the device copy's own memory instead of copying again. That is safe here: the copy is
    private to this snapshot, nobody donates it, and the numpy array keeps it alive.
    """
    return from_pieces(
        version,
        {
            name: (shape, [(box, np.asarray(data)) for box, data in sorted(shards.items())])
            for name, (shape, shards) in pending.leaves.items()
        },
    )


def take(version: Version, params: Params, dtype: str) -> HostSnapshot:
    """The snapshot of `params` in `dtype` (float32 or bfloat16); blocks until it is on the host."""
    return finish(version, begin(params, dtype))


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
