"""Recorder of walks: the files of `jaxroll` whose functions run while one lease, put, claim, … is carried out.

It uses the profiler hook of the interpreter, so it sees every Python function of every thread that starts while it is
installed. Code that runs at import, and methods that C code generates (structs, dataclasses), do not count.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jaxroll

ROOT = Path(jaxroll.__file__).parent


class Recorder:
    """Files in the order in which a function of theirs was first entered, as paths below `jaxroll/`."""

    def __init__(self) -> None:
        self._is_on = False
        self._walk: dict[str, list[str]] = {}

    @contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Install the profiler hook; threads that started before are not seen."""
        sys.setprofile(self._entered)
        threading.setprofile(self._entered)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def walk(self) -> Iterator[dict[str, list[str]]]:
        """Record file → functions entered, until the block ends."""
        try:
            yield self.start()
        finally:
            self.stop()

    def start(self) -> dict[str, list[str]]:
        """Begin a new record of file → functions entered; it grows until `stop`."""
        self._walk = {}
        self._is_on = True
        return self._walk

    def stop(self) -> None:
        """End the record."""
        self._is_on = False

    def _entered(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._is_on or event != "call":
            return
        code = frame.f_code
        if code.co_name == "<module>" or not code.co_filename.startswith(str(ROOT)):
            return
        file = Path(code.co_filename).relative_to(ROOT)
        if file.parts[0] == "sim":  # replaces the network, and is no part of a run
            return
        functions = self._walk.setdefault(str(file), [])
        if code.co_qualname not in functions:
            functions.append(code.co_qualname)
