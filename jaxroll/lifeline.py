"""Ties a process to the life of its parent: when the parent dies, however it dies, so does the child.

Every role binds itself to its supervisor as its first act, and every worker a role starts binds itself to the role, so
that `kill -9` of the supervisor leaves nothing behind. Where the kernel has no parent-death signal, a thread watches.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PARENT_ENV = "JAXROLL_PARENT"
POLL_S = 0.5
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


def _watch(parent_pid: int) -> None:
    never = threading.Event()
    while not never.wait(POLL_S):
        if os.getppid() != parent_pid:
            os._exit(1)
