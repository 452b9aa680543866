"""Checkpoints as files: versions, metadata, checksums, readability. No JAX.

`checkpoint` describes the layout and writes it; this module inspects a checkpoint without loading its arrays.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes  # noqa: F401 (gives numpy the names of its dtypes)
import msgspec
import numpy as np

from jaxroll import disk, metrics
from jaxroll.errors import CheckpointDamaged, DataError, one_line
from jaxroll.policy import selection
from jaxroll.records import Version
from jaxroll.run_paths import RunPaths

NAME = re.compile(r"(\d{4,})\.(\d{8,})")
STATE, ABOUT = "state", "about"
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class _About(msgspec.Struct):
    """The part of a checkpoint's metadata without which it cannot be read."""

    position: Annotated[int, msgspec.Meta(ge=0)]
    arrays: dict[str, Annotated[list[str | _Size], msgspec.Meta(min_length=1)]]


_ABOUT_FILE = "metadata"  # as orbax names the file of a JSON item
PARAMS = re.compile(r"params\['(.+)'\]")


@dataclass(frozen=True)
class Entry:
    """One whole checkpoint. `position` is the store's log position at the time of writing; `problem` may be empty."""

    version: Version
    path: Path
    position: int
    size_bytes: int
    written_s: float  # since the epoch
    summed: bool  # it has checksums and was synced to disk
    problem: str


def versions(folder: Path) -> tuple[Version, ...]:
    """Every whole checkpoint in `folder`, oldest first."""
    if not folder.is_dir():
        return ()
    names = (NAME.fullmatch(path.name) for path in folder.iterdir() if (path / ABOUT).is_dir())
    return tuple(sorted(Version(int(match[1]), int(match[2])) for match in names if match))


def path_of(folder: Path, version: Version) -> Path:
    """The path of `version`, which need not exist."""
    return folder / f"{version.lineage:04d}.{version.step:08d}"


def best_of(run_dir: Path, metric: str) -> tuple[Version, float] | None:
    """The checkpoint of a run with the highest `metric`, over all lineages, and its value; None if none is measured."""
    paths = RunPaths(run_dir)
    values = selection.measured(metrics.read(paths.metrics) if metric else (), metric)
    found = selection.best(values, versions(paths.checkpoints))
    return None if found is None else (found, values[found])


def entries(folder: Path, *, verify: bool) -> list[Entry]:
    """Every whole checkpoint, oldest first. With `verify`, check the checksum of every file and open every array.

    A checkpoint that the run removes meanwhile is left out.
    """
    found = []
    for version in versions(folder):
        path = path_of(folder, version)
        try:
            found.append(_entry(version, path, verify=verify))
        except FileNotFoundError:
            continue
    return found


def about(path: Path) -> dict[str, Any]:
    """A checkpoint's metadata: format, lineage, step, position, arrays. CheckpointDamaged if unreadable."""
    file = path / ABOUT / _ABOUT_FILE
    try:
        found = disk.read_json(file)
        msgspec.convert(found, _About)
        for dtype, *shape in found["arrays"].values():
            msgspec.convert(shape, tuple[_Size, ...])
            if np.dtype(dtype).hasobject:
                raise DataError(f"an array of {dtype}")
    except (OSError, DataError, ValueError, TypeError) as error:  # msgspec's errors are ValueErrors
        _raise_if_transient(error)
        raise CheckpointDamaged(one_line(f"{file} cannot be read ({error})")) from error
    return found


def params(about: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every parameter by its flat name, from a checkpoint's metadata."""
    named = ((PARAMS.fullmatch(name), described) for name, described in about["arrays"].items())
    return {match[1]: (dtype, tuple(shape)) for match, (dtype, *shape) in named if match}


def unreadable(path: Path, *, every_byte: bool = False) -> str:
    """The reason why a checkpoint's arrays cannot be opened; empty when they can. With `every_byte` read all values."""
    try:
        arrays = about(path)["arrays"]
    except CheckpointDamaged as error:
        return str(error)
    return problem(path / STATE, arrays, every_byte=every_byte)


def _entry(version: Version, path: Path, *, verify: bool) -> Entry:
    problem, position = "", -1
    try:
        position = int(about(path)["position"])
    except CheckpointDamaged as error:
        problem = str(error)
    if verify:
        problem = _verified(path)
    summed = (path / SUMS).exists()  # before the walk below, which fails if the run removes the checkpoint meanwhile
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    return Entry(version, path, position, sum(sizes), path.stat().st_mtime, summed, problem)


def _verified(path: Path) -> str:
    try:
        return damage(path) or unreadable(path, every_byte=True)
    except PermissionError as error:
        return one_line(str(error))


# --- readability: every array can be opened, without JAX and without loading it
#
# Orbax writes the arrays of each process into a separate database and then merges these into one. When it finds no
# process's database (as under a path that its glob pattern does not match) it skips the merge and reports success.

_MANIFEST, _SHAPE = "manifest.ocdbt", ".zarray"


def problem(state: Path, arrays: Mapping[str, Iterable[Any]], *, every_byte: bool = False) -> str:
    """The reason why the arrays in the folder `state` cannot be opened; empty when they can.

    `arrays` holds dtype and shape by name, from the checkpoint's metadata. With `every_byte` all values are read.
    """
    import tensorstore  # 0.2 s, and only where a checkpoint is written or verified

    if not (state / _MANIFEST).is_file():
        return f"{state.name}/{_MANIFEST} is missing: the arrays cannot be opened"
    try:
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}
        database = tensorstore.KvStore.open(spec).result()
        keys = {key.decode() for key in database.list().result()}
        found = Counter(key.rpartition("/")[0] for key in keys if not key.endswith(f"/{_SHAPE}"))
        for name, (_, *shape) in arrays.items():
            if f"{name}/{_SHAPE}" not in keys:
                return f"{state.name} does not hold {name}"
            described = json.loads(database[f"{name}/{_SHAPE}"])
            chunks = math.prod(math.ceil(size / part) for size, part in zip(shape, described["chunks"], strict=True))
            if list(shape) != described["shape"] or found[name] != chunks:
                return f"{state.name} does not hold all of {name}: {found[name]} of {chunks} parts of {shape}"
        for key in keys if every_byte else ():
            if not database.read(key).result().value:  # TensorStore reads a file that is gone as empty
                return f"{state.name} has lost the bytes of {key}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{state.name} cannot be opened ({type(error).__name__}: {error})"
    return ""


# --- checksums: a damaged file is found and named before training continues from it
#
# They are written once the folder is complete and before the store records the checkpoint as durable, so every durable
# checkpoint has them. A whole folder without checksums is one whose writer was killed in between: it is not durable,
# and a learner that resumes from it writes them before it reports the checkpoint. Orbax detects damage in its own
# metadata, but the bytes of arrays carry no checksum: a flipped bit in them would go unnoticed.

SUMS = "sums.json"
_DIGEST, _LIMIT_BYTES = "blake2b", 64 << 20


class _Sums(msgspec.Struct):
    files: dict[str, str]


def write(folder: Path) -> None:
    """Write the checksums of all files of `folder` into it, in one rename; do nothing if they exist."""
    if (folder / SUMS).exists():
        return
    disk.replace_text(folder / SUMS, json.dumps({"digest": _DIGEST, "files": _sums(folder)}))


def damage(folder: Path, *, durable: bool = False) -> str:
    """The first difference between the files of `folder` and their checksums, as a message; empty when there is none.

    Missing checksums count as damage only for a checkpoint that is known to be `durable`. OSError if a file or folder
    cannot be read now, by its permissions or for lack of descriptors: a learner must not resume from an older
    checkpoint because of it.
    """
    try:
        expected = msgspec.convert(disk.read_json(folder / SUMS, _LIMIT_BYTES), _Sums).files
    except FileNotFoundError:
        return f"{SUMS} is gone: it was written before the checkpoint was durable" if durable else ""
    except (OSError, DataError, msgspec.ValidationError) as error:  # not JSON, or JSON that `write` does not write
        _raise_if_transient(error)
        return one_line(f"{SUMS} is damaged: {error}")
    found = _sums(folder)
    for name, digest in sorted(expected.items()):
        if found.get(name) != digest:
            return one_line(f"{one_line(name, 300)} is {'not what was written' if name in found else 'gone'}")
    return ""


def _sums(folder: Path) -> dict[str, str]:
    walked = os.walk(folder, onerror=_raise)  # `rglob` leaves out a folder that it may not read
    files = (path for at, _, names in walked for name in names if (path := Path(at, name)).is_file())
    return {str(path.relative_to(folder)): _sum(path) for path in sorted(files) if not _is_of_sums(path.name)}


def _raise(error: OSError) -> None:
    raise error


def _raise_if_transient(error: Exception) -> None:
    """Raise `error` if it is about this process and not about the file."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error


def _is_of_sums(name: str) -> bool:
    """True for the file of checksums, and for the draft that a killed process left of it."""
    return name == SUMS or name.startswith(f".{SUMS}")


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _DIGEST).hexdigest()
