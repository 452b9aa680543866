"""Files that survive a failing machine, and the words for a disk that takes no more: full, read-only or broken."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

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
