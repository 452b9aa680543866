"""Standard streams that cannot end a command: UTF-8 mode, closed pipes, terminals that are gone, readers that stop.

`stdout` and `stderr` are replaced by streams that keep their first error instead of raising it and discard all further
output. A command that exists to print (`list`, `report --json > FILE`) then fails with that error; a run goes on.
"""

from __future__ import annotations

import errno
import io
import locale
import os
import select
import sys
from typing import TextIO

UTF8_ENV = "PYTHONUTF8"
NOT_SHOWN_S = 1.0  # a run waits this long for a reader that does not read, and then discards what it would show
_PIECE = 4096  # poll() promises room for this much in a pipe (PIPE_BUF)
_READER_LEFT = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed


def ensure_utf8() -> None:
    """Start the program again in Python's UTF-8 mode where the locale has another encoding.

    Files, child processes and libraries then use UTF-8 on every machine. Returns without effect in UTF-8 mode, which
    is what children inherit, and where the locale's encoding is UTF-8.
    """
    if sys.flags.utf8_mode or locale.getencoding().lower().replace("-", "") == "utf8":
        os.environ.setdefault(UTF8_ENV, "1")
        return
    if os.environ.get(UTF8_ENV) == "1":
        return  # the interpreter was started with -E or -X utf8=0, and would be again
    os.environ[UTF8_ENV] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Outlet(io.RawIOBase):
    """A file descriptor that takes everything: after the first error, and for a reader that stalls, it discards."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.patience_s: float | None = None  # None: wait for the reader as long as it takes
        self.error: OSError | None = None
        self._stalled = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data) -> int:  # type: ignore[override]
        """Write some bytes, or discard them; their number."""
        piece = memoryview(data).cast("B")[:_PIECE]
        if self.error is not None:
            return len(piece)
        try:
            if not self._has_room():
                return len(piece)
            return os.write(self._fd, piece)
        except BlockingIOError:  # somebody made the pipe non-blocking, and the room is gone
            return 0
        except OSError as error:
            self.error = error
            return len(piece)

    def _has_room(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        wait_ms = None if self.patience_s is None else 0 if self._stalled else 1000 * self.patience_s
        self._stalled = not poll.poll(wait_ms)
        return not self._stalled

    @property
    def lost(self) -> OSError | None:
        """The error that output was lost to; None while there is none, or where the reader only stopped reading."""
        return None if self.error is None or self.error.errno in _READER_LEFT else self.error


def harden() -> Outlet:
    """Replace stdout and stderr; the outlet of stdout."""
    _open_missing()
    sys.stderr = _stream(sys.stderr, Outlet(2))
    outlet = Outlet(1)
    sys.stdout = _stream(sys.stdout, outlet)
    return outlet


def _open_missing() -> None:
    """Give descriptors 0 to 2 to /dev/null where they are closed, or the next files opened would be taken for them."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _stream(old: TextIO | None, outlet: Outlet) -> io.TextIOWrapper:
    shown = locale.getencoding() if outlet.isatty() else "utf-8"  # a terminal reads its locale's encoding
    unbuffered = bool(getattr(old, "write_through", False))
    return io.TextIOWrapper(
        io.BufferedWriter(outlet), encoding=shown, errors="backslashreplace", newline="\n",
        line_buffering=outlet.isatty() or bool(getattr(old, "line_buffering", False)), write_through=unbuffered,
    )  # fmt: skip
