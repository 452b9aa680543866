"""Interfaces of a transfer channel (Sender for the learner, Reader for the sampler), deadlines, tcp messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.clock import Clock, MonotonicClock
from jaxroll.errors import TransferError
from jaxroll.records import Version
from jaxroll.transfer.host_snapshot import HostSnapshot
from jaxroll.transfer.manifest import Manifest
from jaxroll.transfer.plan import Box


class SlicePart(NamedTuple):
    """One slice to fetch: `box` of leaf number `leaf`, contained in its source box `source`.

    `into` is the destination: a writable view of shape `box` in the dtype of the leaf's bits. With `checked` the
    channel must verify the bytes itself, because the receiver does not hold the whole leaf to compare its digest.
    """

    leaf: int
    source: int
    box: Box
    into: np.ndarray
    checked: bool


class Sender(Protocol):
    """The publishing end. `offer` returns the address for Readers; newer versions replace old ones."""

    name: str

    def offer(self, snapshot: HostSnapshot) -> str: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """One transfer of one version; used by one thread, closed at the end."""

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked. Raises VersionGone when the version is not available."""
        ...

    def read(self, manifest: Manifest, parts: Sequence[SlicePart]) -> None:
        """Fill every part. Raises TransferError and its subclasses."""
        ...

    def close(self) -> None: ...


class Deadline:
    """The time limit of a transfer."""

    def __init__(self, limit_s: float, doing: str, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._limit_s, self._doing = limit_s, doing
        self._end_s = self._clock.now_s() + limit_s

    def left_s(self) -> float:
        """Seconds left, more than 0; raises TransferError when there are none."""
        left_s = self._end_s - self._clock.now_s()
        if left_s <= 0:
            raise self.passed()
        return left_s

    def passed(self) -> TransferError:
        """The error of a wait that exceeded this deadline."""
        return TransferError(f"{self._doing}: not done within {self._limit_s:g} s")


# --- Messages of the tcp channel
#
# A frame is a 4-byte little-endian length, that many bytes of MessagePack, and after `ManifestReply` and `Chunk`
# `size_bytes` raw bytes. The reader asks for a manifest, then for slices (many in one request); the slices are sent in
# the order of the request. Element bytes are little-endian, as on every platform of JAX.

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20  # a request for 10⁵ slices is about 4 MB
MAX_MANIFEST_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20  # small enough to stay in the L2 cache between copy and send


class AskManifest(msgspec.Struct, frozen=True, tag="manifest"):
    """A request for the manifest of `version`; the connection keeps that version alive from then on."""

    protocol: int
    token: str
    version: Version


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A slice: `box` (in coordinates of the whole leaf) within source box `source` of leaf number `leaf`."""

    leaf: int
    source: int
    box: Box
    checked: bool  # the answer must contain the digest of these bytes


class AskSlices(msgspec.Struct, frozen=True, tag="slices"):
    """A request for slices of `version`."""

    protocol: int
    token: str
    version: Version
    slices: tuple[Slice, ...]


class ManifestReply(msgspec.Struct, frozen=True, tag="manifest_reply"):
    """The header of a manifest of `size_bytes`, which follow."""

    version: Version
    size_bytes: int


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """The header of the next slice: `size_bytes` follow; `digest` is their digest if it was requested."""

    version: Version
    size_bytes: int
    digest: int | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A refusal. `kind` is gone, unauthorized or bad_request."""

    kind: str
    reason: str


Question = AskManifest | AskSlices
Answer = ManifestReply | Chunk | Refused


def frame(message: Question | Answer) -> bytes:
    """The frame of `message`, without the raw bytes that may follow it."""
    body = wire.encode(message)
    return LENGTH.pack(len(body)) + body
