"""Rules for the path of a run folder, checked before anything is written there.

Orbax finds the parts of a checkpoint by a glob pattern that contains the whole path. TensorStore takes a backslash for
a separator of folders, and takes every path for UTF-8. With such a character in the path a checkpoint is incomplete, or
lies in another folder, and no error is raised. All other paths work (tests/control/test_run_path.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxroll.errors import ConfigError

PATTERN_CHARACTERS = "*?[]\\"
NAME_BYTES = 255  # of one folder's name: the limit of every common file system
PATH_BYTES = 480  # SQLite opens no database whose path, links resolved, is longer than 512 with its suffixes


def checked(path: str | Path, key: str = "--run") -> Path:
    """The absolute path of a run folder; ConfigError for one in which a run cannot work."""
    found = Path(os.path.abspath(path))
    reason, remedy = _problem(str(found))
    if reason:
        raise ConfigError(key, str(found), reason, remedy)
    return found


def _problem(path: str) -> tuple[str, str]:
    """Reason and remedy; both empty for a path that works."""
    for character in path:
        if character in PATTERN_CHARACTERS:
            return (f"{character!r} in the path of a run breaks its checkpoints: libraries read it as a pattern",
                    f"Use a path without {' '.join(PATTERN_CHARACTERS)}.")  # fmt: skip
        if character < " " or character == "\x7f":
            return f"the path of a run contains the control character {character!r}", "Use a path without it."
    if "gs:/" in f"{path}/":  # Orbax makes gs:// of it
        return (
            "a folder of the path ends with 'gs:', which the checkpoint library takes for a URL",
            "Rename that folder.",
        )
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "the path of a run is not valid UTF-8", "Rename the folder, or set a UTF-8 locale (LC_ALL=C.UTF-8)."
    if encoded != os.fsencode(path):
        return "the locale encodes this path other than as UTF-8", "Set a UTF-8 locale (LC_ALL=C.UTF-8)."
    longest = max(len(os.fsencode(name)) for name in path.split("/"))
    size_bytes = max(len(encoded), len(os.fsencode(os.path.realpath(path))))
    if longest > NAME_BYTES or size_bytes > PATH_BYTES:
        return (f"the path is too long (a name of {longest} bytes, {size_bytes} bytes in all)",
                f"Use names of at most {NAME_BYTES} bytes and a path of at most {PATH_BYTES}.")  # fmt: skip
    return "", ""
