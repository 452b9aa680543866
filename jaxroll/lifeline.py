"""Process control: death with the parent process, stop signals, scheduling priority.

A role binds itself to its supervisor first, and a worker to the role that started it, so that `kill -9` of the
supervisor leaves no process behind. On kernels without a parent-death signal a thread polls for the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxroll.errors import EXIT_FAILURE, ConfigError

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
    because too many processes asked for that at once. ConfigError for a value that is no priority.
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
