"""Safetensors files, read and written one tensor at a time. No JAX; tensors are memory-mapped, not copied.

A file is the length of its header (8 bytes), the header (JSON: name → dtype, shape, offsets), and the bytes of all
tensors without gaps. A folder holds one file, or several with an index from tensors to files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np

from jaxroll import disk
from jaxroll.errors import DataError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_LIMIT = 32 << 20  # about 300,000 tensors; a third of the reference implementation's limit
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "U8": np.dtype(np.uint8),
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_DIMS = 32  # numpy supports 64
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


@dataclass(frozen=True)
class Leaf:
    """Dtype and shape of one tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the tensor."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Placed:
    """The position of one tensor: byte `start` of `file`."""

    leaf: Leaf
    file: Path
    start: int


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A header's entry of one tensor."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA, _ENTRY = msgspec.json.Decoder(dict[str, str]), msgspec.json.Decoder(_Entry)


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of some files by name; each is memory-mapped on access, read-only."""

    def __init__(self, placed: Mapping[str, Placed]) -> None:
        self._placed = dict(placed)

    def __getitem__(self, name: str) -> np.ndarray:
        placed = self._placed[name]
        if not placed.leaf.size_bytes:
            return np.zeros(placed.leaf.shape, placed.leaf.dtype)
        return np.memmap(placed.file, placed.leaf.dtype, "r", placed.start, placed.leaf.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._placed)

    def __len__(self) -> int:
        return len(self._placed)

    def renamed(self, names: Mapping[str, str]) -> Tensors:
        """Some of the tensors, by new name: `names` maps it to the old one."""
        return Tensors({new: self._placed[old] for new, old in names.items()})

    def leaf(self, name: str) -> Leaf:
        """Dtype and shape of a tensor, without reading it."""
        return self._placed[name].leaf

    @property
    def elements(self) -> int:
        """The total number of elements of all tensors."""
        return sum(math.prod(placed.leaf.shape) for placed in self._placed.values())


Index = tuple[slice, ...]  # one per axis


class Converted(Mapping[str, np.ndarray]):
    """Arrays by name, computed on access and not kept.

    `make` computes a whole array, `slice_of` a slice of it without reading the rest.
    """

    def __init__(
        self,
        names: Mapping[str, Any],
        make: Callable[[str], np.ndarray],
        slice_of: Callable[[str, Index], np.ndarray] | None = None,
    ) -> None:
        self._names, self._make, self._slice_of = tuple(names), make, slice_of

    def slice_of(self, name: str, index: Index) -> np.ndarray:
        """`self[name][index]`, without reading the rest if the arrays were created so."""
        return self._slice_of(name, index) if self._slice_of else self[name][index]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def opened(path: Path) -> Tensors:
    """The tensors of one file. DataError for an invalid file; OSError when it cannot be opened.

    It needs memory in proportion to the header. Sizes in the header are checked against the file before they are used.
    """
    with disk.opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise DataError(f"{path.name} is not a safetensors file")
        text = file.read(length)
    try:
        placed = {name: _placed(path, 8 + length, entry) for name, entry in _entries(text).items()}
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise DataError(f"the header of {path.name} cannot be read ({error})") from error
    disk.parse_json(text, f"the header of {path.name}", unique=True)
    _check_contiguous(path, placed, 8 + length, size)
    return Tensors(placed)


def _entries(text: bytes) -> dict[str, _Entry]:
    header = _HEADER.decode(text)
    if (metadata := header.pop("__metadata__", None)) is not None:
        _METADATA.decode(metadata)
    return {name: _ENTRY.decode(entry) for name, entry in header.items()}


def _check_contiguous(path: Path, placed: Mapping[str, Placed], data: int, size: int) -> None:
    """Raise DataError when tensors overlap, leave gaps, or extend beyond the file."""
    end = data
    for name, one in sorted(placed.items(), key=lambda item: (item[1].start, item[1].leaf.size_bytes)):
        if one.start != end:
            raise DataError(f"{path.name}: {name!r} begins at byte {one.start}, but the previous tensor ends at {end}")
        end += one.leaf.size_bytes
    if end != size:
        raise DataError(f"{path.name} has {size} bytes and its header needs {end}: it was not copied whole")


def opened_folder(folder: Path) -> Tensors | None:
    """All tensors of a folder, from one file or by its index; None when it has neither. DataError as `opened`."""
    if not (folder / INDEX).exists():
        return opened(folder / SINGLE) if (folder / SINGLE).exists() else None
    index = disk.read_json(folder / INDEX, HEADER_LIMIT)
    files: Any = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise DataError(f"its {INDEX} has no weight_map")
    held = {file: opened(_beside(folder, file)) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in held[file]:
            raise DataError(f"its {INDEX} puts {name!r} in {file}, which does not hold it")
    return Tensors({name: placed for tensors in held.values() for name, placed in tensors._placed.items()})


def write(path: Path, leaves: Mapping[str, Leaf], value: Callable[[str], np.ndarray]) -> None:
    """Write a file of `leaves` in their order; call `value` for one tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, leaf in leaves.items():
        start, end = end, end + leaf.size_bytes
        header[name] = {"dtype": code(leaf.dtype), "shape": list(leaf.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, leaf in leaves.items():
            array = np.ascontiguousarray(value(name), leaf.dtype)
            if array.shape != leaf.shape:
                raise ValueError(f"{name} has shape {array.shape}, declared was {leaf.shape}")
            file.write(array.reshape(-1).view(np.uint8).data)


def write_folder(folder: Path, leaves: Mapping[str, Leaf], value: Callable[[str], np.ndarray], shard_bytes: int) -> int:
    """Write `leaves` into one file, or into several with an index if they exceed `shard_bytes`; return their number."""
    shards = _shards(leaves, shard_bytes)
    if len(shards) == 1:
        write(folder / SINGLE, leaves, value)
        return 1
    files = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / file, {name: leaves[name] for name in names}, value)
        files |= dict.fromkeys(names, file)
    total = sum(leaf.size_bytes for leaf in leaves.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(shards)


def code(dtype: np.dtype) -> str:
    """The header's code of this dtype."""
    return _CODES[np.dtype(dtype)]


def _shards(leaves: Mapping[str, Leaf], shard_bytes: int) -> list[list[str]]:
    """The names in order, divided into shards of at most `shard_bytes`; a larger tensor gets its own shard."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, leaf in leaves.items():
        if shards[-1] and held + leaf.size_bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += leaf.size_bytes
    return shards


def _placed(path: Path, data: int, entry: _Entry) -> Placed:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"dtype {entry.dtype[:20]!r} is not supported; known: {', '.join(DTYPES)}")
    leaf = Leaf(dtype, entry.shape)
    start, end = entry.data_offsets
    if end - start != leaf.size_bytes:
        raise ValueError(f"{end - start} bytes for a tensor of {leaf.size_bytes}")
    if leaf.size_bytes == 0 and math.prod(size or 1 for size in leaf.shape) >= 2**48:
        raise ValueError(f"an empty tensor of shape {leaf.shape}")
    return Placed(leaf, path, data + start)


def _beside(folder: Path, file: str) -> Path:
    """The path of `file` in `folder`; DataError when an index names a file outside of it."""
    if Path(file).name != file or file in ("", ".", ".."):
        raise DataError(f"its {INDEX} names {file!r}, which is not a file of the folder")
    return folder / file
