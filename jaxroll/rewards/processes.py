"""One scoring process seen from its parent: started, fed and read without blocking, killed."""

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
# All that a scorer needs of the environment; tokens and keys stay here. JAXROLL_TEST_ID lets tests find what is left.
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "JAXROLL_TEST_ID")


class ScoringProcess:
    """A worker process. Its kernel-side death signal is tied to the thread that creates this object."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process, closed in kill()
        command = [sys.executable, "-P", "-m", "jaxroll.rewards.worker", msgspec.json.encode(settings).decode()]
        # Popen starts by vfork and exec, so threads of this process (JAX's, gRPC's) are never copied.
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=_environment(),
                start_new_session=True,  # so that Ctrl-C reaches it through its parent only, and it can be killed whole
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
        """To be watched for room while `flush` returns False."""
        return self._in

    @property
    def output_descriptor(self) -> int:
        """To be watched for replies."""
        return self._out

    def send(self, items: Iterable[ScoreItem]) -> bool:
        """Queues the items and flushes; see `flush`."""
        self._to_send += frame(Work(tuple(items)))
        return self.flush()

    def flush(self) -> bool:
        """True if everything queued is with the kernel. A dead reader counts as done: `receive` will tell."""
        try:
            while self._to_send:
                del self._to_send[: os.write(self._in, self._to_send)]
        except BlockingIOError:
            return False
        except OSError:  # a broken pipe, or it was killed
            self._to_send.clear()
        return True

    def receive(self) -> tuple[list[Reply], bool]:
        """The replies that have arrived, and whether the process can still send more."""
        alive = True
        try:
            while data := os.read(self._out, _READ_BYTES):
                self._received += data
            alive = False
        except BlockingIOError:
            pass
        except OSError:  # it was killed
            alive = False
        try:
            return list(take_replies(self._received)), alive
        except msgspec.DecodeError:  # no worker of ours writes that
            return [], False

    def kill(self, grace_s: float = 0.0) -> int:
        """The exit status (minus the signal that ended it), after ending the process and all in its session.

        With `grace_s` a process that is ending by itself may do so, for the sake of its true status.
        """
        if self._process.returncode is not None:  # again
            return self._process.returncode
        deadline = time.monotonic() + grace_s
        # Not reaped yet (WNOWAIT), so the id stays its own until the session is killed.
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.002)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it has not reached its session yet
        status = self._process.wait(_KILL_WAIT_S)
        self._stdin.close()
        self._stdout.close()
        self._in = self._out = _NO_DESCRIPTOR  # their numbers may belong to others from here on
        return status

    def last_words(self) -> str:
        """The end of what it wrote to stderr while starting; closes that file."""
        with self._stderr as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _STDERR_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()


def _environment() -> dict[str, str]:
    """The worker's environment: what is importable here is importable there, and one thread is enough for it."""
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
