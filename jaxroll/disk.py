"""Durable files, errors of full or broken disks, and bounded reading of files from strangers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO

from jaxroll.errors import DataError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BROKEN = frozenset({errno.EROFS, errno.EIO})
# As SQLite and tensorstore say it, which raise no OSError.
_FULL_WORDS = ("disk is full", "no space left", "quota exceeded")
_BROKEN_WORDS = ("read-only file system", "readonly database", "i/o error", "input/output error")


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns.

    A draft that takes another file's name before its content has reached the disk is empty after a power failure.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make `folder`, all it holds and its own name survive a power cut."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        sync(path)


def sync(path: Path) -> None:
    """Make the content of one file, or the names in one folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remedy(error: BaseException, folder: Path) -> str:
    """A sentence that names the disk of `folder` and the way out; '' when the error is not one of a disk."""
    number, text = error.errno if isinstance(error, OSError) else None, str(error).lower()
    is_full = number in _FULL or any(words in text for words in _FULL_WORDS)
    if not is_full and number not in _BROKEN and not any(words in text for words in _BROKEN_WORDS):
        return ""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = f"{shutil.disk_usage(folder).free // 2**20} MB are free at {folder}: make room"
    except OSError:
        free = f"Make room at {folder}"
    also = "" if is_full else ", or repair or remount that disk (the kernel's messages say what is wrong: dmesg)"
    return f"{free}{also}, then start it again; everything it acknowledged is there."


# --- files from strangers: regular files of bounded size, parsed to a bounded depth
#
# Opening a named pipe waits for a writer and a device never ends, so neither is opened for reading here. What is
# wrong with a content is a DataError in one line; an OSError stays one.

JSON_LIMIT_BYTES = 16 << 20


def opened(path: Path) -> BinaryIO:
    """The regular file at `path`, open for reading. DataError for anything else and for what cannot be a name."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise DataError(f"{str(path)!r} is not the name of a file") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{path.name} is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file; DataError when it has more than `limit_bytes`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise DataError(f"{path.name} has {size:,} bytes; at most {limit_bytes:,} are read")
        return file.read(size)  # a reader allocates what it is asked for, so this is not the limit


def read_text(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> str:
    """The UTF-8 text of a regular file, as `read_bytes`."""
    try:
        return read_bytes(path, limit_bytes).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name} is not UTF-8 ({error.reason} at byte {error.start})") from error


def read_json(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> Any:
    """The JSON value in a regular file, as `read_text` and `parse_json`."""
    return parse_json(read_text(path, limit_bytes), path.name)


def parse_json(text: str | bytes, name: str, *, unique: bool = False) -> Any:
    """The JSON value in `text`; DataError with `name` when it is none, nests too deep, or (`unique`) repeats a key."""
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise DataError(f"{name} nests too deep") from error
    except ValueError as error:  # a UnicodeDecodeError and a number with thousands of digits, too
        raise DataError(f"{name} is not JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return found
