"""Binding of a process to its parent, so that both die together; stop signals; standard streams that cannot end it.

Every role binds itself to its supervisor first of all, and every worker that a role starts binds itself to the role, so
that `kill -9` of the supervisor leaves no process behind. Without a parent-death signal of the kernel, a thread polls.
`python -m jaxroll.lifeline COMMAND…` binds a program that does not do it by itself, such as ssh (on Linux). A role at
the other end of ssh is bound to the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import faulthandler
import io
import locale
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from jaxroll.clock import unix_s
from jaxroll.errors import EXIT_FAILURE, ConfigError

PARENT_ENV = "JAXROLL_PARENT"
ENDED_ENV = "JAXROLL_ENDED"  # how the process before this one ended: its exit code, or words
CONNECTION = "connection"  # value of PARENT_ENV: the process lives as long as the connection at its standard input
POLL_S = 0.5
DISCONNECTED_S = 20.0  # after its connection broke a process may work on this long, to stop in order
ENDING_S = 10.0  # longer than well-behaved threads take to end
CLOSING_S = 300.0  # after a failure; a checkpoint that is still being written then is given up
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def bind(parent_pid: int) -> None:
    """Make this process die (SIGKILL) with its parent, process `parent_pid`; exit at once if the parent is gone.

    On Linux the signal is sent when the *thread* that started this process ends: start children from a thread that
    lives as long as the parent.
    """
    if not _kernel_signal():
        threading.Thread(target=_watch, args=(parent_pid,), name="lifeline", daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the signal was armed
        os._exit(1)


def bind_from_env() -> bool:
    """Bind to the parent named in the environment variable, and remove the variable. Return True if it names a process.

    For `CONNECTION` the process is asked to stop when its standard input hangs up, and ends `DISCONNECTED_S` later.
    """
    parent = os.environ.pop(PARENT_ENV, "")
    if parent == CONNECTION:
        threading.Thread(target=_watch_connection, name="lifeline", daemon=True).start()
        return False
    if parent:
        bind(int(parent))
    return bool(parent)


def _kernel_signal() -> bool:
    """Ask the kernel for SIGKILL when the parent dies. Return False if the kernel has no such signal."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0


async def child(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a process, with the options of `asyncio.create_subprocess_exec`. OSError when the machine refuses it."""
    if sys.version_info < (3, 12):
        # That asyncio waits for a child in a thread; if no thread can be started, the child runs without a handle.
        _wait_without_threads()
    try:
        return await asyncio.create_subprocess_exec(*command, **options)
    except RuntimeError as error:  # no thread could be started
        raise OSError(errno.EAGAIN, str(error)) from error


def _wait_without_threads() -> None:
    if isinstance(asyncio.get_child_watcher(), _Waits):
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return
    asyncio.set_child_watcher(_Waits())


if sys.version_info < (3, 12):

    class _Waits(asyncio.AbstractChildWatcher):
        """A child watcher on the loop that starts the child, as in Python 3.12; that of 3.11 supports one loop."""

        def __enter__(self) -> _Waits:
            return self

        def __exit__(self, *exc: object) -> None: ...

        def attach_loop(self, loop: object) -> None: ...

        def close(self) -> None: ...

        def is_active(self) -> bool:
            return True

        def remove_child_handler(self, pid: int) -> bool:
            return False

        def add_child_handler(self, pid: int, callback: Callable[..., object], *args: Any) -> None:
            loop = asyncio.get_running_loop()
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)  # no descriptor is free, so nothing would reap it
                raise

            def over() -> None:
                loop.remove_reader(descriptor)
                os.close(descriptor)
                try:
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                except ChildProcessError:  # already reaped elsewhere
                    status = EXIT_FAILURE
                callback(pid, status, *args)

            loop.add_reader(descriptor, over)


def _watch(parent_pid: int) -> None:
    never = threading.Event()
    while not never.wait(POLL_S):
        if os.getppid() != parent_pid:
            os._exit(1)


def _watch_connection() -> None:
    connection = select.poll()
    connection.register(0, 0)  # only its end counts: a terminal and a pipe hang up, /dev/null never does
    if not connection.poll()[0][1] & select.POLLHUP:
        return  # there is no standard input
    os.kill(os.getpid(), signal.SIGTERM)  # the kernel sends SIGHUP for a terminal only, and to its leader
    time.sleep(DISCONNECTED_S)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def ending(patience_s: float = ENDING_S) -> Iterator[None]:
    """End the process within `patience_s` of the end of this block, with its exit code, even if threads still run."""
    # The interpreter waits for every thread that is not a daemon. A library's thread may wait for many minutes after a
    # failure, and the supervisor does not restart a role whose process still lives.
    code: object = None
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else EXIT_FAILURE
        raise
    finally:
        number = code if isinstance(code, int) else EXIT_FAILURE if code else 0
        timer = threading.Timer(patience_s, _end, (number,))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no thread can be started: a signal ends the process, unless it exits by itself before
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(patience_s, 1e-3))


class ClosingLimit:
    """Ends the process with `code` if it has not closed what it uses `limit_s` after a failure; a context manager.

    `failed` starts the time, the end of the block stops it. The failure and the stacks of all threads are printed.
    """

    def __init__(self, limit_s: float = CLOSING_S) -> None:
        self._limit_s, self._timer = limit_s, threading.Timer(0.0, lambda: None)

    def __enter__(self) -> ClosingLimit:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def failed(self, text: str, code: int) -> None:
        """Start the time; `text` describes the failure."""
        self._timer = threading.Timer(self._limit_s, self._give_up, (text, code))
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started
            self._timer.start()

    def _give_up(self, text: str, code: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.stderr)
            why = f"ended, as closing took longer than {self._limit_s:g} s"
            print(f"error: {text} ({why})", file=sys.stderr, flush=True)
        os._exit(code)


def _end(code: int) -> None:
    left = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    with contextlib.suppress(OSError, ValueError):
        print(f"ended without waiting for the threads {', '.join(left)}", file=sys.stderr, flush=True)
    os._exit(code)


def restarts(role: str, environ: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """The `restart` row of a role that a script or Kubernetes has started again; empty at its first start.

    Where a supervisor starts it again, that reports the row.
    """
    ended = environ.get(ENDED_ENV, "")
    if not ended:
        return []
    row: dict[str, Any] = {"t": unix_s(), "role": role, "kind": "restart", "process": role}
    if not ended.isdecimal():
        return [row | {"cause": ended[:200]}]
    code = int(ended)  # a shell reports signal n as 128 + n
    return [row | {"code": 128 - code if 128 < code <= 192 else code}]


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to shut down cleanly.

    SIGHUP (the terminal is gone) is one of them, unless it is ignored: then `nohup` started the process.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def on_stop(stop: Callable[[], object]) -> None:
    """Call `stop` at every signal that asks this process to shut down. Call this from the main thread."""
    for signum in stop_signals():
        signal.signal(signum, lambda *_: stop())


def on_stop_set(stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Set `stop`, an event of `loop`, at the signals of `on_stop`. Those after the end of the loop do nothing."""
    on_stop(lambda: None if loop.is_closed() else loop.call_soon_threadsafe(stop.set))


# --- scheduling priority: on a CPU every process gives way to the learner
#
# The learner is the critical path: samplers run as far ahead of it as the age limit allows. On Linux the scheduler may
# treat each session as one group (sched(7), autogroup), and then the priority of a process counts only within its
# session. So a process that leads a session lowers the priority of its group too, as do workers in their own sessions.

NICE_ENV = "JAXROLL_NICE"
NICE = 10
LOWEST = 19
_AUTOGROUP = Path("/proc/self/autogroup")
_LIMIT_S, _PAUSE_S = 5.0, 0.2  # the kernel accepts one change per 0.1 s from users other than root


def give_way(environ: Mapping[str, str] = os.environ, autogroup: Path = _AUTOGROUP) -> bool:
    """Lower the priority of this process and of its session to `environ[NICE_ENV]`; do nothing where it is unset.

    Call it before threads start: existing threads keep their priority. False when the session could not be lowered
    because too many processes asked for that at once. ConfigError for a value that is not a priority.
    """
    given = environ.get(NICE_ENV) or "0"
    if not given.isdecimal() or (wanted := int(given)) > LOWEST:
        raise ConfigError(NICE_ENV, given, f"a priority is a number from 0 to {LOWEST}", "Unset it, or use 10.")
    if wanted == 0:
        return True
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(wanted, os.getpriority(os.PRIO_PROCESS, 0)))
    return lower_session(autogroup)


def lower_session(autogroup: Path = _AUTOGROUP) -> bool:
    """Lower the session that this process leads, if any, to the priority of the process; False as in `give_way`."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if own <= 0 or os.getsid(0) != os.getpid():
        return True  # nothing to lower, or another process leads the session
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            autogroup.write_text(str(own), encoding="utf-8")
        except BlockingIOError:
            time.sleep(_PAUSE_S * random.random())
        except OSError:
            return True  # no such kernel: the priority alone counts
        else:
            return True
    return False


# --- Standard streams that cannot end a command: UTF-8 mode, closed pipes, terminals that are gone, readers that stop
#
# `stdout` and `stderr` are replaced by streams that keep their first error instead of raising it and discard all
# further output. A command that exists to print (`list`, `report --json > FILE`) then fails with that error; a run goes
# on.

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
        io.BufferedWriter(outlet),
        encoding=shown,
        errors="backslashreplace",
        newline="\n",
        line_buffering=outlet.isatty() or bool(getattr(old, "line_buffering", False)),
        write_through=unbuffered,
    )


class _Session(Protocol):
    loop: asyncio.AbstractEventLoop

    def soon(self, callback: Callable[..., object], *args: object) -> None: ...


def print_stacks_on_signal(*sessions: _Session) -> None:
    """On SIGUSR1 print the stack of every task of the `sessions` and of every thread."""

    def show(*_: object) -> None:
        for session in sessions:
            session.soon(print_stacks, session.loop)

    signal.signal(signal.SIGUSR1, show)
    # in C, so that it prints the threads also while one hangs in XLA
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, chain=True)


def print_stacks(loop: asyncio.AbstractEventLoop) -> None:
    """Print the stack of every task of `loop` (on `kill -USR1` of a role)."""
    for task in asyncio.all_tasks(loop):
        with contextlib.suppress(TypeError):  # Python 3.11, for a frame without a line
            task.print_stack(file=sys.stderr)


if __name__ == "__main__":
    bind(int(os.environ[PARENT_ENV]))  # the signal stays armed, and the program has the variable
    os.execvp(sys.argv[1], sys.argv[1:])
