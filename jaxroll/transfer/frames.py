"""The words of the tcp channel and how they stand on the wire.

A frame is a 4-byte little-endian length, that many bytes of MessagePack, and for `ManifestReply` and `Chunk` then
`size_bytes` raw bytes. The reader asks for a manifest, then for slices (all in one request); the answers to an
`AskSlices` come in its order. Element bytes are little-endian, as every platform of JAX has them.
"""

from __future__ import annotations

import struct

import msgspec

from jaxroll import wire
from jaxroll.records import Version
from jaxroll.transfer.plan import Box

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
