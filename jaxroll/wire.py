"""Serialization between processes and on disk: msgspec MessagePack with a fixed schema, arrays as raw buffers.

Decoding runs no code and always needs a type. An array is first decoded as raw bytes, and created only if its dtype,
its shape and the number of received bytes agree, so a message costs memory in proportion to its length, regardless of
the shape that it declares. A message that nests deeper than Python's stack raises DecodeError.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import math
import os
import typing
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, overload

import msgspec
import numpy as np

PROTOCOL_VERSION = 3
ARRAY_DTYPES = frozenset(
    {"uint8", "uint16", "int8", "int32", "int64", "uint32", "float32", "float64", "float16", "bool"}
)
MAX_DIMS = 8
_DIGITS = 40  # hex digits of a digest
_LITTLE_ENDIAN = {name: np.dtype(name).newbyteorder("<") for name in ARRAY_DTYPES}
_BIG_ENDIAN = {name: np.dtype(name).newbyteorder(">") for name in ARRAY_DTYPES}
_NAMES = {dtype: name for table in (_LITTLE_ENDIAN, _BIG_ENDIAN) for name, dtype in table.items()}

T = TypeVar("T")


def _array_to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype)
        if name is None:
            raise NotImplementedError(f"arrays of {value.dtype} cannot be serialized")
        array = np.ascontiguousarray(value, _LITTLE_ENDIAN[name])
        return (name, value.shape, array.reshape(-1).view(np.uint8).data)  # a view, so that the data is copied once
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"values of type {type(value).__name__} cannot be serialized")


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    """A serialized array that is not validated yet. Fields beyond these limits are refused before they are read."""

    dtype: Annotated[str, msgspec.Meta(max_length=8)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**40)], ...], msgspec.Meta(max_length=MAX_DIMS)]
    data: bytes


_ARRAY = msgspec.msgpack.Decoder(_Sent)


def _array_from_wire(raw: msgspec.Raw | np.ndarray) -> np.ndarray:
    if isinstance(raw, np.ndarray):
        return raw  # the default of a field that was not sent
    sent = _ARRAY.decode(raw)
    dtype = _LITTLE_ENDIAN.get(sent.dtype)
    if dtype is None:
        raise msgspec.ValidationError(f"arrays of {sent.dtype!r} cannot be deserialized")
    size = dtype.itemsize * math.prod(sent.shape)
    if size != len(sent.data):
        found = f"{len(sent.data)} were received"
        raise msgspec.ValidationError(f"array of {sent.dtype} {sent.shape} needs {size} bytes, {found}")
    return np.frombuffer(sent.data, dtype).reshape(sent.shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)
_Build = Callable[[Any], Any]  # a decoded shadow → the requested type


def encode(value: Any) -> bytes:
    """The MessagePack bytes of a record or message."""
    return _ENCODER.encode(value)


@overload
def decode(data: bytes | memoryview, kind: type[T]) -> T: ...


@overload
def decode(data: bytes | memoryview, kind: UnionType) -> Any: ...


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """The record of type `kind` in `data`; raises msgspec.ValidationError or DecodeError when `data` has none."""
    decoder, build = _decoder(kind)
    try:
        decoded = decoder.decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deep") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"a text that is not UTF-8 ({error.reason})") from error
    return decoded if build is None else build(decoded)


def digest(data: bytes | memoryview) -> str:
    """The 40 hex digits that identify `data`: shortened SHA-256."""
    # Unlike blake2b, SHA-256 is computed by processor instructions.
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def is_digest(expected: str, data: bytes) -> bool:
    """True if `expected` is the digest of `data`, by `digest` or by blake2b (32 digits, in logs of old versions)."""
    return expected == (digest(data) if len(expected) == _DIGITS else hashlib.blake2b(data, digest_size=16).hexdigest())


# --- types that contain arrays are decoded as a shadow type, which has raw bytes in place of arrays


@functools.cache
def _decoder(kind: Any) -> tuple[msgspec.msgpack.Decoder, _Build | None]:
    shadow, build = _shadow(kind)
    return msgspec.msgpack.Decoder(shadow), build


@functools.cache
def _shadow(kind: Any) -> tuple[Any, _Build | None]:
    """The shadow type of `kind` and the function from its values to `kind`; (kind, None) if `kind` has no arrays."""
    if kind is np.ndarray:
        return msgspec.Raw, _array_from_wire
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _shadow_of_struct(kind)
    parts = typing.get_args(kind)
    shadows = [
        _shadow(part) if isinstance(part, (type, UnionType)) or typing.get_args(part) else (part, None)
        for part in parts
    ]
    if not any(build for _, build in shadows):
        return kind, None
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return Annotated[shadows[0][0], *parts[1:]], shadows[0][1]
    if origin in (UnionType, typing.Union):
        return typing.Union[*(shadow for shadow, _ in shadows)], _one_of(shadows)
    if origin is tuple and parts[1:] == (...,):
        build = shadows[0][1]
        assert build is not None
        return tuple[shadows[0][0], ...], lambda values: tuple(map(build, values))
    raise NotImplementedError(f"{kind} cannot be serialized: arrays may occur in structs, unions and tuples only")


def _one_of(shadows: list[tuple[Any, _Build | None]]) -> _Build:
    builds = {shadow: build for shadow, build in shadows if build is not None}

    def build(value: Any) -> Any:
        make = builds.get(type(value))
        return value if make is None else make(value)

    return build


def _shadow_of_struct(kind: type[msgspec.Struct]) -> tuple[Any, _Build | None]:
    fields = msgspec.structs.fields(kind)
    shadows = [_shadow(field.type) for field in fields]
    builds = [build for _, build in shadows]
    if not any(builds):
        return kind, None
    config = kind.__struct_config__
    declared = [(field.name, shadow, *_default(field)) for field, (shadow, _) in zip(fields, shadows, strict=True)]
    copy = msgspec.defstruct(
        kind.__name__, declared, frozen=True, array_like=config.array_like, tag=config.tag, tag_field=config.tag_field
    )
    makers = tuple((field.name, build) for field, build in zip(fields, builds, strict=True))

    def build(value: Any) -> Any:
        return kind(*[getattr(value, name) if make is None else make(getattr(value, name)) for name, make in makers])

    return copy, build


def _default(field: msgspec.structs.FieldInfo) -> tuple[Any, ...]:
    if field.default is not msgspec.NODEFAULT:
        return (field.default,)
    if field.default_factory is not msgspec.NODEFAULT:
        return (msgspec.field(default_factory=field.default_factory),)
    return ()


# --- Arrays as raw buffers: bytes that lie scattered in memory, to and from a socket

_RUNS_PER_CALL = 1024  # IOV_MAX of Linux
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Message(ctypes.Structure):
    """The system's `struct msghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("runs", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class Scattered:
    """A stream of bytes that lies in runs in memory, written or read without a copy (sendmsg, recvmsg).

    The table of the runs is the system's array of `struct iovec`, so their number costs no time of Python. `arrays`
    are kept alive, because the table has only their addresses.
    """

    def __init__(
        self,
        owners: np.ndarray,
        offsets: np.ndarray,
        lengths: np.ndarray,
        ends: np.ndarray,
        arrays: Sequence[np.ndarray],
    ) -> None:
        """Take int64 [runs] each: the number of a run's array, its offset in it, its length, their sums, in bytes."""
        addresses = np.array([array.__array_interface__["data"][0] for array in arrays])
        self._table, self._arrays = np.empty((len(ends), 2), np.int64), tuple(arrays)
        np.add(addresses[owners], offsets, out=self._table[:, 0])
        self._table[:, 1] = lengths
        self._ends, self._done, self._first = ends, 0, 0

    def __len__(self) -> int:
        """The number of bytes that are left."""
        return int(self._ends[-1]) - self._done

    def write(self, fd: int) -> int:
        """Write to a socket that does not block; the number of bytes written. Errors as of socket.sendmsg."""
        return self._call(_LIBC.sendmsg, fd, 0)

    def read(self, fd: int, flags: int = 0) -> int:
        """Read from a socket; the number of bytes read, 0 at its end. Flags and errors as of socket.recvmsg_into."""
        return self._call(_LIBC.recvmsg, fd, flags)

    def skip(self, count: int) -> None:
        """Remove the first `count` bytes."""
        self._done += count
        self._first = first = int(np.searchsorted(self._ends, self._done, side="right"))
        if first < len(self._ends):
            address, length = self._table[first].tolist()
            left = int(self._ends[first]) - self._done
            self._table[first] = address + length - left, left

    def _call(self, call: Any, fd: int, flags: int) -> int:
        count = min(_RUNS_PER_CALL, len(self._ends) - self._first)
        message = _Message(runs=self._table.ctypes.data + self._first * self._table.strides[0], count=count)
        while True:
            done = call(fd, ctypes.byref(message), flags)
            if done >= 0:
                return done
            if (error := ctypes.get_errno()) != errno.EINTR:
                raise OSError(error, os.strerror(error))  # BlockingIOError and so on, by the number


for _call in (_LIBC.sendmsg, _LIBC.recvmsg):
    _call.restype = ctypes.c_ssize_t
