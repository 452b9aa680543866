"""The end of a process: with its parent, and with its own main thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jaxroll import lifeline

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


@pytest.mark.process
@pytest.mark.parametrize(("limit_s", "close_s", "code"), [(0.2, 2 * LIMIT_S, 7), (LIMIT_S, 0.1, 0)])
def test_a_process_that_failed_has_limited_time_to_close_what_it_uses(
    limit_s: float, close_s: float, code: int
) -> None:
    last = f"""
    with lifeline.ClosingLimit({limit_s}) as limit:
        limit.failed("InfraError: a write failed", 7)
        threading.Event().wait({close_s})"""
    done = _ended(thread=False, patience=LIMIT_S / 2, last=last)
    assert done.returncode == code
    assert ("InfraError: a write failed" in done.stderr) == ("in wait" in done.stderr) == (code == 7), done.stderr


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


@pytest.mark.process
def test_a_program_that_knows_no_lifeline_dies_with_its_parent() -> None:
    start = "import os, subprocess, sys, time; env = {**os.environ, 'JAXROLL_PARENT': str(os.getpid())}; print("
    start += "subprocess.Popen([sys.executable, '-m', 'jaxroll.lifeline', 'sleep', '600'], env=env).pid, flush=True); "
    parent = subprocess.Popen([sys.executable, "-c", f"{start}time.sleep(600)"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + LIMIT_S
    while child.cmdline() != ["sleep", "600"] and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=LIMIT_S)
    assert not child.is_running()


ROLE = """
import signal, sys, time
from jaxroll import lifeline
lifeline.DISCONNECTED_S = 0.2
for signum in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(signum, lambda *_: print("asked to stop", flush=True))
bound = lifeline.bind_from_env()
print("bound" if bound else "ready", flush=True)
{then}
"""


@pytest.mark.process
def test_a_role_behind_a_connection_is_asked_to_stop_when_it_breaks_and_then_killed() -> None:
    env = {**os.environ, lifeline.PARENT_ENV: lifeline.CONNECTION}
    command = [sys.executable, "-c", ROLE.format(then="while True: time.sleep(0.05)")]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as role:
        assert role.stdout is not None and role.stdin is not None and role.stdout.readline() == "ready\n"
        role.stdin.close()
        assert role.stdout.readline() == "asked to stop\n"
        assert role.wait(timeout=LIMIT_S) == -signal.SIGKILL


@pytest.mark.process
def test_a_role_without_a_connection_lives_on() -> None:
    env = {**os.environ, lifeline.PARENT_ENV: lifeline.CONNECTION}
    command = [sys.executable, "-c", ROLE.format(then="time.sleep(1)")]
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout) == (0, "ready\n")


AFTER_THE_LOOP = """
import asyncio, os, signal
from jaxroll import lifeline

async def until_stopped():
    stop = asyncio.Event()
    lifeline.on_stop_set(stop, asyncio.get_running_loop())
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stop.wait(), 60)

asyncio.run(until_stopped())
os.kill(os.getpid(), signal.SIGTERM)
print("ended in order")
"""


@pytest.mark.process
def test_a_second_signal_while_a_server_ends_changes_nothing() -> None:
    """Its event loop is closed by then."""
    command = [sys.executable, "-c", AFTER_THE_LOOP]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended in order\n", "")
