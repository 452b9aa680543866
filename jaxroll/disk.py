"""Errors of a disk that takes no more: full, over its quota, read-only or broken; and what the user can do."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BROKEN = frozenset({errno.EROFS, errno.EIO})
# As SQLite and tensorstore say it, which raise no OSError.
_FULL_WORDS = ("disk is full", "no space left", "quota exceeded")
_BROKEN_WORDS = ("read-only file system", "readonly database", "i/o error", "input/output error")


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
