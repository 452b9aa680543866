"""A run's checkpoints as files: which there are, what each says about itself, whether it is what was written. No JAX.

What a checkpoint is and how it is written says `checkpoint`; this is what can be known of one without loading it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes  # noqa: F401 (gives numpy the names of its dtypes)
import msgspec
import numpy as np

from jaxroll import foreign
from jaxroll.errors import CheckpointDamaged, DataError, one_line
from jaxroll.learner import checkpoint_state, checksums
from jaxroll.records import Version

NAME = re.compile(r"(\d{4,})\.(\d{8,})")
STATE, ABOUT = "state", "about"
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class _About(msgspec.Struct):
    """What every checkpoint says of itself, as far as it must be right to be read at all."""

    position: Annotated[int, msgspec.Meta(ge=0)]
    arrays: dict[str, Annotated[list[str | _Size], msgspec.Meta(min_length=1)]]


_ABOUT_FILE = "metadata"  # as orbax names the file of a JSON item
PARAMS = re.compile(r"params\['(.+)'\]")


@dataclass(frozen=True)
class Entry:
    """One whole checkpoint. `position` is that of the store's log when it was written; `problem` is empty if none."""

    version: Version
    path: Path
    position: int
    size_bytes: int
    written_s: float  # since the epoch
    summed: bool  # its files were summed up and have reached the disk
    problem: str


def versions(folder: Path) -> tuple[Version, ...]:
    """Every whole checkpoint in `folder`, oldest first."""
    if not folder.is_dir():
        return ()
    names = (NAME.fullmatch(path.name) for path in folder.iterdir() if (path / ABOUT).is_dir())
    return tuple(sorted(Version(int(match[1]), int(match[2])) for match in names if match))


def path_of(folder: Path, version: Version) -> Path:
    """Where `version` is or would be."""
    return folder / f"{version.lineage:04d}.{version.step:08d}"


def entries(folder: Path, *, verify: bool) -> list[Entry]:
    """Every whole checkpoint, oldest first. With `verify` all bytes are compared with their sums, all arrays opened.

    One that the run removes meanwhile is left out.
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
    """What a checkpoint says about itself: format, lineage, step, position, arrays. CheckpointDamaged if unreadable."""
    file = path / ABOUT / _ABOUT_FILE
    try:
        said = foreign.read_json(file)
        msgspec.convert(said, _About)
        for dtype, *shape in said["arrays"].values():
            msgspec.convert(shape, tuple[_Size, ...])
            if np.dtype(dtype).hasobject:
                raise DataError(f"an array of {dtype}")
    except (OSError, DataError, ValueError, TypeError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointDamaged(one_line(f"{file} cannot be read ({error})")) from error
    return said


def params(about: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every parameter by its flat name, of what a checkpoint says about itself."""
    named = ((PARAMS.fullmatch(name), described) for name, described in about["arrays"].items())
    return {match[1]: (dtype, tuple(shape)) for match, (dtype, *shape) in named if match}


def unreadable(path: Path, *, every_byte: bool = False) -> str:
    """Why the arrays of a checkpoint cannot be opened; empty when they can. With `every_byte` all are read."""
    try:
        arrays = about(path)["arrays"]
    except CheckpointDamaged as error:
        return str(error)
    return checkpoint_state.problem(path / STATE, arrays, every_byte=every_byte)


def _entry(version: Version, path: Path, *, verify: bool) -> Entry:
    problem, position = "", -1
    try:
        position = int(about(path)["position"])
    except CheckpointDamaged as error:
        problem = str(error)
    if verify:
        problem = checksums.damage(path) or unreadable(path, every_byte=True)
    summed = (path / checksums.SUMS).exists()  # first: of one that is removed meanwhile it would be gone
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    return Entry(version, path, position, sum(sizes), path.stat().st_mtime, summed, problem)
