"""What every channel offers: a Sender on the learner's side, a Reader on the sampler's, and a deadline for both."""

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
    """One slice to fetch: `box` of leaf number `leaf`, which lies in its source box `source`.

    `into` is where it goes: a writable view of shape `box` in the dtype of the leaf's bits. `checked` asks the
    channel to vouch for the bytes itself, because the receiver holds too little of the leaf to compare its digest.
    """

    leaf: int
    source: int
    box: Box
    into: np.ndarray
    checked: bool


class Sender(Protocol):
    """The publishing end. `offer` returns the address that Readers open; old versions go when newer ones come."""

    name: str

    def offer(self, snapshot: HostSnapshot) -> str: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """One transfer of one version; used by one thread, closed at the end."""

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked. Raises VersionGone when the version is not kept."""
        ...

    def read(self, manifest: Manifest, parts: Sequence[SlicePart]) -> None:
        """Nothing, after filling every part. Raises TransferError and its kinds."""
        ...

    def close(self) -> None: ...


class Deadline:
    """The moment a transfer gives up."""

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
        """The error of a wait that outlived this deadline."""
        return TransferError(f"{self._doing}: not done within {self._limit_s:g} s")


# --- The words of the tcp channel and how they stand on the wire
#
# A frame is a 4-byte little-endian length, that many bytes of MessagePack, and for `ManifestReply` and `Chunk` then
# `size_bytes` raw bytes. The reader asks for a manifest, then for slices (all in one request); the answers to an
# `AskSlices` come in its order. Element bytes are little-endian, as every platform of JAX has them.

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20  # a request for 10⁵ slices is about 4 MB
MAX_MANIFEST_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20  # stays in the second-level cache between copy and send


class AskManifest(msgspec.Struct, frozen=True, tag="manifest"):
    """The manifest of `version`, please; the connection keeps that version alive from here on."""

    protocol: int
    token: str
    version: Version


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """`box` (in coordinates of the whole leaf) out of source box `source` of leaf number `leaf`."""

    leaf: int
    source: int
    box: Box
    checked: bool  # send the digest of these bytes along


class AskSlices(msgspec.Struct, frozen=True, tag="slices"):
    """These slices of `version`, please."""

    protocol: int
    token: str
    version: Version
    slices: tuple[Slice, ...]


class ManifestReply(msgspec.Struct, frozen=True, tag="manifest_reply"):
    """`size_bytes` of manifest follow."""

    version: Version
    size_bytes: int


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """`size_bytes` of the next slice follow; `digest` is over them where it was asked for."""

    version: Version
    size_bytes: int
    digest: int | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No. `kind` is gone, unauthorized or bad_request."""

    kind: str
    reason: str


Question = AskManifest | AskSlices
Answer = ManifestReply | Chunk | Refused


def frame(message: Question | Answer) -> bytes:
    """The frame of `message`, without the raw bytes that may follow it."""
    body = wire.encode(message)
    return LENGTH.pack(len(body)) + body
