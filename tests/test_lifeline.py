"""The end of a process: with its parent, and with its own main thread."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

WAITING = """
import sys, threading
from jaxroll import lifeline
if {thread}:
    threading.Thread(target=threading.Event().wait, name="a-library").start()
with lifeline.ending({patience}):
    {last}
"""
LIMIT_S = 60.0


@pytest.mark.process
@pytest.mark.parametrize(
    ("last", "code"),
    [("sys.exit(7)", 7), ("sys.exit()", 0), ("pass", 0), ("raise ValueError('as it happens')", 1)],
)
def test_a_process_ends_with_its_main_thread(last: str, code: int) -> None:
    """A thread that waits forever, as one of a library whose checkpoint failed, keeps no process alive."""
    done = _ended(thread=True, patience=0.2, last=last)
    assert done.returncode == code and "a-library" in done.stderr
    assert "as it happens" in done.stderr or code != 1


@pytest.mark.process
def test_a_process_without_such_threads_ends_at_once() -> None:
    began = time.monotonic()
    done = _ended(thread=False, patience=LIMIT_S / 2, last="sys.exit(7)")
    assert (done.returncode, done.stderr) == (7, "") and time.monotonic() - began < LIMIT_S / 2


def _ended(*, thread: bool, patience: float, last: str) -> subprocess.CompletedProcess[str]:
    code = WAITING.format(thread=thread, patience=patience, last=last)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.process
@pytest.mark.parametrize(("thread", "code"), [(False, 7), (True, -signal.SIGALRM)])
def test_a_process_ends_without_a_thread_that_sees_to_it(thread: bool, code: int) -> None:
    """A machine that refuses this thread, too: the exit code was lost, and other threads were waited for."""
    last = """
    def refused(thread): raise RuntimeError("can't start new thread")
    threading.Thread.start = refused
    sys.exit(7)"""
    done = _ended(thread=thread, patience=0.2 if thread else LIMIT_S / 2, last=last)
    assert (done.returncode, done.stderr) == (code, "")
