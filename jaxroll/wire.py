"""Bytes between processes and on disk: msgspec MessagePack with a fixed schema, arrays as raw little-endian buffers.

Nothing here can run code on decoding. Sizes are checked against the declared dtype and shape before an array is made.
"""

from __future__ import annotations

import hashlib
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec
import numpy as np

PROTOCOL_VERSION = 1
ARRAY_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "uint32", "float32", "float64", "float16", "bool"})

T = TypeVar("T")


def _array_to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.name not in ARRAY_DTYPES:
            raise NotImplementedError(f"arrays of {value.dtype} do not travel")
        array = np.ascontiguousarray(value)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return (array.dtype.name, list(value.shape), array.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _array_from_wire(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind} does not travel")
    try:
        name, shape, data = value
        shape = tuple(int(n) for n in shape)
    except (TypeError, ValueError) as error:
        raise msgspec.ValidationError("an array travels as [dtype, shape, bytes]") from error
    if name not in ARRAY_DTYPES or any(n < 0 for n in shape) or not isinstance(data, bytes):
        raise msgspec.ValidationError(f"not an array: dtype {name!r}, shape {shape}")
    dtype = np.dtype(name).newbyteorder("<")
    size = dtype.itemsize
    for n in shape:
        size *= n
    if size != len(data):
        raise msgspec.ValidationError(f"array of {name} {shape} needs {size} bytes, {len(data)} came")
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)
_DECODERS: dict[Any, msgspec.msgpack.Decoder] = {}


def encode(value: Any) -> bytes:
    """The MessagePack bytes of a record or message."""
    return _ENCODER.encode(value)


@overload
def decode(data: bytes, kind: type[T]) -> T: ...


@overload
def decode(data: bytes, kind: UnionType) -> Any: ...


def decode(data: bytes, kind: Any) -> Any:
    """The record of type `kind` in `data`; raises msgspec.ValidationError or DecodeError when it is anything else."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_array_from_wire)
    return decoder.decode(data)


def digest(data: bytes) -> str:
    """The 32 hex digits that identify `data` (blake2b)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
