"""Manifest of a snapshot: small, canonical, and checked before a byte is allocated."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import ml_dtypes
import msgspec
import numpy as np

from jaxroll import records, wire
from jaxroll.errors import DigestMismatch, TransferError, VersionMixed
from jaxroll.records import Version
from jaxroll.transfer import digest, plan
from jaxroll.transfer.plan import Box

DTYPES: Mapping[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{name: np.dtype(name) for name in ("float16", "float32", "int8", "uint8", "int32", "uint32")},
}


# What a manifest may say at most: it comes over the wire, and is decoded before anything in it is known to be true.
MAX_LEAVES, MAX_BOXES, MAX_DIMS = 1 << 17, 1 << 14, 32
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: `digests[i]` belongs to `boxes[i]`; the boxes are disjoint and cover `shape`."""

    name: Annotated[str, msgspec.Meta(max_length=1000)]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMS)]
    dtype: Annotated[str, msgspec.Meta(max_length=20)]
    boxes: Annotated[
        tuple[Annotated[tuple[tuple[_Count, _Count], ...], msgspec.Meta(max_length=MAX_DIMS)], ...],
        msgspec.Meta(max_length=MAX_BOXES),
    ]
    digests: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_BOXES)]

    @property
    def total(self) -> int:
        """The digest of the whole leaf, whatever its partition."""
        return digest.total(self.digests)

    @property
    def size_bytes(self) -> int:
        return plan.size_of(plan.whole(self.shape)) * DTYPES[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True):
    """The leaves of one version, sorted by name."""

    version: Version
    leaves: Annotated[tuple[Leaf, ...], msgspec.Meta(max_length=MAX_LEAVES)]


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes; `wire.digest` of them is the snapshot's `manifest_digest`."""
    return wire.encode(manifest)


def decode(data: bytes, snapshot: records.Snapshot) -> Manifest:
    """The manifest in `data`, which must be the one that `snapshot` names and consistent in itself.

    Raises VersionMixed when it belongs to another version, DigestMismatch when its bytes are not those announced,
    TransferError when it contradicts itself.
    """
    try:
        manifest = wire.decode(data, Manifest)
    except msgspec.MsgspecError as error:
        raise DigestMismatch(f"the manifest of {snapshot.version} is not a manifest: {error}") from error
    if manifest.version != snapshot.version:
        raise VersionMixed(f"the manifest is of version {manifest.version}, {snapshot.version} was asked for")
    if not wire.is_digest(snapshot.manifest_digest, data):
        raise DigestMismatch(f"the manifest of {snapshot.version} is not the one that was announced")
    for leaf in manifest.leaves:
        _check_leaf(leaf)
    return manifest


@functools.lru_cache(maxsize=4096)  # the same partition comes with every version
def _covers_once(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> bool:
    return plan.covers_once(boxes, shape)


def _check_leaf(leaf: Leaf) -> None:
    if leaf.dtype not in DTYPES:
        raise TransferError(f"leaf {leaf.name!r}: dtype {leaf.dtype!r} does not travel (known: {', '.join(DTYPES)})")
    if len(leaf.boxes) != len(leaf.digests) or any(n < 0 for n in leaf.shape):
        raise TransferError(f"leaf {leaf.name!r}: {len(leaf.boxes)} boxes, {len(leaf.digests)} digests, {leaf.shape}")
    if not _covers_once(leaf.boxes, leaf.shape):
        raise TransferError(f"leaf {leaf.name!r}: its {len(leaf.boxes)} boxes do not cover {leaf.shape} exactly once")


def check(manifest: Manifest, shapes: Mapping[str, Any]) -> None:
    """Nothing; raises TransferError naming the first leaf that is missing, unknown, or of another shape.

    `shapes` maps names to anything with a `.shape`. It runs before any buffer is allocated, so a wrong or hostile
    manifest cannot make the receiver take more memory than its own parameters need.
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


# --- dtypes: received parameters in the dtypes of the engine

Params = dict[str, jax.Array]


def cast(arrays: Params, dtypes: Mapping[str, np.dtype]) -> Params:
    """`arrays` with those in another dtype than `dtypes` names cast on their devices, the others as they are."""
    names = tuple(name for name, array in arrays.items() if array.dtype != dtypes[name])
    if not names:
        return arrays
    caster = _caster(tuple(arrays[n].sharding for n in names), tuple(str(dtypes[n]) for n in names))
    return arrays | dict(zip(names, caster([arrays[n] for n in names]), strict=True))


@functools.lru_cache(maxsize=8)
def _caster(shardings: tuple[jax.sharding.Sharding, ...], dtypes: tuple[str, ...]) -> Any:
    """The jitted cast of a list of arrays; kept, so that later versions do not compile again."""
    return jax.jit(
        lambda arrays: [array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True)],
        out_shardings=list(shardings),
    )
