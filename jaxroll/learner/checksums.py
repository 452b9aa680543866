"""Sums over the files of a checkpoint: what was written is what is read, or it is said which file is not.

They are taken once the folder is complete and before the store hears that it is durable, so one that counts has them.
A whole folder without them is one whose writer was killed in between: it counts for nobody, and a learner that goes on
from it takes them then, before it says so. Orbax finds damage in its own metadata, but the bytes of arrays carry no sum
of their own: a flipped bit in them would be trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import msgspec

from jaxroll import foreign
from jaxroll.errors import DataError, one_line

SUMS = "sums.json"
_DIGEST, _LIMIT_BYTES = "blake2b", 64 << 20


class _Sums(msgspec.Struct):
    files: dict[str, str]


def write(folder: Path) -> None:
    """Put the sums of all files of `folder` beside them, in one rename; again without effect."""
    if (folder / SUMS).exists():
        return
    draft = folder / f".{SUMS}"
    draft.write_text(json.dumps({"digest": _DIGEST, "files": _sums(folder)}), encoding="utf-8")
    os.replace(draft, folder / SUMS)


def damage(folder: Path, *, durable: bool = False) -> str:
    """What is wrong with the files of `folder`, in words; empty when nothing is.

    Without sums there is nothing to go by, and that is wrong only of one that is known to be `durable`.
    """
    try:
        said = msgspec.convert(foreign.read_json(folder / SUMS, _LIMIT_BYTES), _Sums).files
    except FileNotFoundError:
        return f"{SUMS} is gone: it was written before the checkpoint was durable" if durable else ""
    except (OSError, DataError, msgspec.ValidationError) as error:  # no JSON any more, or not what `write` makes
        return one_line(f"{SUMS} is damaged: {error}")
    found = _sums(folder)
    for name, digest in sorted(said.items()):
        if found.get(name) != digest:
            return one_line(f"{one_line(name, 300)} is {'not what was written' if name in found else 'gone'}")
    return ""


def _sums(folder: Path) -> dict[str, str]:
    names = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (SUMS, f".{SUMS}"))
    return {str(path.relative_to(folder)): _sum(path) for path in names}


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _DIGEST).hexdigest()
