"""What a scoring pool and its workers say to each other: length-prefixed MessagePack over the worker's pipes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from jaxroll.rewards.sandbox import Doors

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class ScoreItem(msgspec.Struct, frozen=True, array_like=True):
    """One answer to be judged."""

    id: int
    env_args: str
    answer: str


class Work(msgspec.Struct, frozen=True, tag="work"):
    """Pool to worker: judge these, in order."""

    items: tuple[ScoreItem, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to pool: started, limits set, libraries loaded, and these doors closed."""

    doors: Doors = Doors()


class Scored(msgspec.Struct, frozen=True, tag="scored", omit_defaults=True):
    """Worker to pool: the score of one item, or why it has none."""

    id: int
    score: float = 0.0
    error: str = ""


Reply = Ready | Scored

_ENCODER = msgspec.msgpack.Encoder()
_WORK = msgspec.msgpack.Decoder(Work)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: Work | Reply) -> bytes:
    """The message with its length in front."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_work(stream) -> Work | None:  # stream: a buffered binary reader
    """The next message from the pool, None at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(header)
    body = stream.read(size)
    return _WORK.decode(body) if len(body) == size else None


def take_replies(buffer: bytearray) -> Iterator[Reply]:
    """The complete replies at the front of `buffer`, which loses them. Raises msgspec.DecodeError on nonsense."""
    position = 0
    try:
        while len(buffer) - position >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, position)
            if size > MAX_FRAME_BYTES:
                raise msgspec.DecodeError(f"a reply of {size} bytes")
            end = position + _LENGTH.size + size
            if len(buffer) < end:
                return
            body = bytes(buffer[position + _LENGTH.size : end])
            position = end
            yield _REPLY.decode(body)
    finally:
        del buffer[:position]
