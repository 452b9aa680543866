"""Ties a process to the life of its parent: when the parent dies, however it dies, so does the child. Requests to stop.

Every role binds itself to its supervisor as its first act, and every worker a role starts binds itself to the role, so
that `kill -9` of the supervisor leaves nothing behind. Where the kernel has no parent-death signal, a thread watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxroll.errors import EXIT_FAILURE

PARENT_ENV = "JAXROLL_PARENT"
POLL_S = 0.5
ENDING_S = 10.0  # longer than threads take that end by themselves
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def bind(parent_pid: int) -> None:
    """Make this process die (SIGKILL) with process `parent_pid`, which must be its parent; at once if that is gone.

    On Linux the signal follows the *thread* that started this process: start children from a thread that lives as
    long as the parent means to.
    """
    if not _kernel_signal():
        threading.Thread(target=_watch, args=(parent_pid,), name="lifeline", daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the signal was armed
        os._exit(1)


def bind_from_env() -> bool:
    """Bind to the parent named in the environment and take the name out for our own children; whether one was named."""
    parent = os.environ.pop(PARENT_ENV, "")
    if parent:
        bind(int(parent))
    return bool(parent)


def _kernel_signal() -> bool:
    """Ask the kernel for SIGKILL when the parent dies; whether it has such a thing."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0


async def child(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a process, with the options of `asyncio.create_subprocess_exec`. OSError where the machine refuses it.

    Before Python 3.12 asyncio waits for a child in a thread, and where that is refused the child is there and lost.
    Here no thread waits for it, if the kernel has descriptors of processes.
    """
    if sys.version_info < (3, 12):
        _wait_without_threads()
    try:
        return await asyncio.create_subprocess_exec(*command, **options)
    except RuntimeError as error:  # the thread
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
        """Waits for children on the loop that starts them, as Python 3.12 does; that of 3.11 knows one loop."""

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
                os.kill(pid, signal.SIGKILL)  # no descriptor is free: nothing would wait for it
                raise

            def over() -> None:
                loop.remove_reader(descriptor)
                os.close(descriptor)
                try:
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                except ChildProcessError:  # another waited for it
                    status = EXIT_FAILURE
                callback(pid, status, *args)

            loop.add_reader(descriptor, over)


def _watch(parent_pid: int) -> None:
    never = threading.Event()
    while not never.wait(POLL_S):
        if os.getppid() != parent_pid:
            os._exit(1)


@contextlib.contextmanager
def ending(patience_s: float = ENDING_S) -> Iterator[None]:
    """End the process within `patience_s` of the end of this block, with its exit code, whatever threads still wait.

    The interpreter waits for every thread that is no daemon. One of a library that failed may wait for many minutes,
    and a supervisor that sees a live process starts no other.
    """
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
        except RuntimeError:  # the machine refuses a thread; the exit code of this process stays its own
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it
            signal.setitimer(signal.ITIMER_REAL, max(patience_s, 1e-3))


def _end(code: int) -> None:
    left = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    with contextlib.suppress(OSError, ValueError):
        print(f"ended without waiting for the threads {', '.join(left)}", file=sys.stderr, flush=True)
    os._exit(code)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop in order.

    SIGHUP (the terminal is gone) is one of them, unless it is ignored: then the process was started by `nohup`.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def on_stop(stop: Callable[[], object]) -> None:
    """Call `stop` at every signal that asks this process to stop. To be called by the main thread."""
    for signum in stop_signals():
        signal.signal(signum, lambda *_: stop())
