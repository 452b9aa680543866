"""A scoring process from the parent's side: start, non-blocking writes and reads, kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, cast

import msgspec

import jaxroll
from jaxroll.rewards.worker import Reply, ScoreItem, Work, WorkerSettings, frame, take_replies

_READ_BYTES = 1 << 18
_KILL_WAIT_S = 10.0
_STDERR_TAIL_BYTES = 2000
_NO_DESCRIPTOR = -1
# The environment variables that a scorer may need; tokens and keys are not passed on. JAXROLL_TEST_ID lets tests find
# processes that were left behind.
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "JAXROLL_TEST_ID")


class ScoringProcess:
    """A worker process. The kernel kills it when the thread that creates this object ends."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `last_words` closes it
        command = [sys.executable, "-P", "-m", "jaxroll.rewards.worker", msgspec.json.encode(settings).decode()]
        # Popen uses vfork and exec, so the threads of this process (JAX's, gRPC's) are not copied.
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment(),
                start_new_session=True,  # Ctrl-C then reaches only the parent, and kill() ends the whole session
                bufsize=0,
            )
        except OSError:
            self._stderr.close()
            raise
        self._stdin, self._stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        self._in, self._out = self._stdin.fileno(), self._stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._to_send = bytearray()
        self._received = bytearray()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def input_descriptor(self) -> int:
        """The descriptor to watch for writability while `flush` returns False."""
        return self._in

    @property
    def output_descriptor(self) -> int:
        """The descriptor to watch for replies."""
        return self._out

    def send(self, items: Iterable[ScoreItem]) -> bool:
        """Queue the items and flush; see `flush`."""
        self._to_send += frame(Work(tuple(items)))
        return self.flush()

    def flush(self) -> bool:
        """Write queued bytes; return True if all are written. A dead process counts as done: `receive` reports it."""
        try:
            while self._to_send:
                del self._to_send[: os.write(self._in, self._to_send)]
        except BlockingIOError:
            return False
        except OSError:  # a broken pipe, or the process was killed
            self._to_send.clear()
        return True

    def receive(self) -> tuple[list[Reply], bool]:
        """The replies that have arrived, and False if the process cannot send any more."""
        alive = True
        try:
            while data := os.read(self._out, _READ_BYTES):
                self._received += data
            alive = False
        except BlockingIOError:
            pass
        except OSError:  # the process was killed
            alive = False
        try:
            return list(take_replies(self._received)), alive
        except msgspec.DecodeError:  # only a corrupted worker writes malformed replies
            return [], False

    def kill(self, grace_s: float = 0.0) -> int:
        """Kill the process and its session; return the exit status (negative: the signal that ended it).

        A process that is about to end gets `grace_s` to do so, so that its own status is returned.
        """
        if self._process.returncode is not None:  # a second call
            return self._process.returncode
        deadline = time.monotonic() + grace_s
        # Not reaped (WNOWAIT), so that the process id is not reused before the session is killed.
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.002)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it has not created its session yet
        status = self._process.wait(_KILL_WAIT_S)
        self._stdin.close()
        self._stdout.close()
        self._in = self._out = _NO_DESCRIPTOR  # the numbers may be reused from here on
        return status

    def last_words(self) -> str:
        """The end of the process's stderr during its start; closes that file."""
        with self._stderr as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _STDERR_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()


def environment() -> dict[str, str]:
    """The worker's environment variables: the same import path, and one thread for numerical libraries."""
    package_root = str(Path(jaxroll.__file__).resolve().parent.parent)
    path = [package_root, *(str(Path(entry).resolve()) for entry in sys.path)]
    return {
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
    }
