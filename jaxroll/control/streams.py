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
import time
from typing import TextIO

UTF8_ENV = "PYTHONUTF8"
NOT_SHOWN_S = 1.0  # a run waits this long for a reader that does not read, and then discards what it would show
_FULL_PAUSE_S = 0.01
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
        self._fd, self._out = fd, _reopened_terminal(fd)
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
            return self._written(piece)
        except OSError as error:
            self.error = error
            return len(piece)

    def _written(self, piece: memoryview) -> int:
        until_s = None if self.patience_s is None else time.monotonic() + (0 if self._stalled else self.patience_s)
        while self._has_room(until_s):
            try:
                return os.write(self._out, piece)
            except BlockingIOError:  # room for less than a line's end, or another process took it
                if until_s is not None and time.monotonic() >= until_s:
                    self._stalled = True
                    break
                time.sleep(_FULL_PAUSE_S)
        return len(piece)

    def _has_room(self, until_s: float | None) -> bool:
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        poll = select.poll()
        poll.register(self._out, select.POLLOUT)
        self._stalled = not poll.poll(None if left_s is None else 1000 * left_s)
        return not self._stalled

    def close(self) -> None:
        """Close what this object opened, which the descriptor itself is not."""
        if not self.closed and self._out != self._fd:
            os.close(self._out)
        super().close()

    @property
    def lost(self) -> OSError | None:
        """The error that output was lost to; None while there is none, or where the reader only stopped reading."""
        return None if self.error is None or self.error.errno in _READER_LEFT else self.error


def _reopened_terminal(fd: int) -> int:
    """A non-blocking descriptor of the terminal at `fd`; `fd` itself where it is no terminal or cannot be opened.

    poll() promises a terminal's room for one byte only, so a blocking write may wait for a terminal that is stopped or
    not read. O_NONBLOCK on `fd` would also hold for the shell, which shares its open file description.
    """
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return fd


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
