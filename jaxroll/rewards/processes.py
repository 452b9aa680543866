"""A scoring process: its messages, its program, and the parent's side (start, non-blocking writes and reads, kill)."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import msgspec

import jaxroll
from jaxroll import lifeline
from jaxroll.errors import described
from jaxroll.rewards import sandbox, scorers
from jaxroll.rewards import scorers as grading
from jaxroll.rewards.code import CodeScorer
from jaxroll.rewards.programs import SandboxedPrograms, ServerLost
from jaxroll.rewards.sandbox import Restrictions

# --- Messages between a scoring process and the pool: length-prefixed MessagePack over pipes

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class ScoreItem(msgspec.Struct, frozen=True, array_like=True):
    """One answer to score; with `grading` (JSON of `grading.Grading`), one completion to grade."""

    id: int
    env_args: str
    answer: str
    grading: str = ""


class ScoringWork(msgspec.Struct, frozen=True, tag="work"):
    """Pool to worker: score these items, in order."""

    items: tuple[ScoreItem, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to pool: it has started, set its limits, loaded its libraries and imposed `restrictions`."""

    restrictions: Restrictions = Restrictions()


class Scored(msgspec.Struct, frozen=True, tag="scored", omit_defaults=True):
    """Worker to pool: the score or grades of one item, or the error or rejections."""

    id: int
    score: float = 0.0
    error: str = ""
    cause: str = ""  # of the error, for counts
    rejected: tuple[str, ...] = ()  # the reasons of the scorers' guards
    answer: str = ""
    values: dict[str, float] = {}


class Working(msgspec.Struct, frozen=True, tag="working"):
    """Worker to pool: it waits for programs, which have time limits of their own."""


Reply = Ready | Scored | Working

_ENCODER = msgspec.msgpack.Encoder()
_WORK = msgspec.msgpack.Decoder(ScoringWork)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: ScoringWork | Reply) -> bytes:
    """The encoded message, with its length as prefix."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_work(stream) -> ScoringWork | None:  # stream: a buffered binary reader
    """The next message from the pool; None at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(header)
    body = stream.read(size)
    return _WORK.decode(body) if len(body) == size else None


def take_replies(buffer: bytearray) -> Iterator[Reply]:
    """Remove complete replies from the front of `buffer` and yield them. msgspec.DecodeError for malformed data."""
    position = 0
    try:
        while len(buffer) - position >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, position)
            if size > MAX_FRAME_BYTES:
                raise msgspec.DecodeError(f"a reply of {size} bytes")
            end = position + _LENGTH.size + size
            if len(buffer) < end:
                return
            body = bytes(buffer[position + _LENGTH.size : end])
            position = end
            yield _REPLY.decode(body)
    finally:
        del buffer[:position]


# --- One scoring process: `python -m jaxroll.rewards.processes '{…limits…}'`, work on stdin, replies on stdout
#
# It scores untrusted text, so it limits itself: memory and core dumps before it loads anything, then processor time per
# item, no files, no new processes, and the restrictions of `jaxroll.rewards.sandbox` (network, signals). It dies with
# its parent, by a signal even if a scorer never returns, otherwise at the end of stdin. If a scorer leaves a thread
# running, the worker sends the score and ends, so that the thread cannot affect later items.
#
# It can still read files and send malformed replies to its pool, so answers must not be executed here. The scorer
# `code` runs them in processes of the fork server (`jaxroll.rewards.fork_server`).

_MAX_ERROR_CHARS = 500
_HEARTBEAT_S = 0.25


class WorkerSettings(msgspec.Struct, frozen=True):
    """Arguments of a worker on its command line."""

    parent_pid: int
    time_limit_s: float
    memory_bytes: int
    libraries: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    max_answer_chars: int = scorers.MIN_ANSWER_CHARS
    programs: bool = False  # provide the scorer `code`


def main(argument: str) -> int:
    """Score items until stdin ends; return the exit status."""
    settings = msgspec.json.decode(argument, type=WorkerSettings)
    lifeline.bind(settings.parent_pid)
    lifeline.lower_session()
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_AS, settings.memory_bytes)
    work, replies = _private_pipes()
    code = _code_scorer(replies) if settings.programs else None
    _load(settings)
    # After the imports, which may write caches and start library threads.
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_NPROC, 0)  # without effect for root
    _silence(2)
    replies.write(frame(Ready(sandbox.restrict())))
    try:
        return _serve(work, replies, settings, code)
    except ServerLost:  # the pool starts another worker, with a fork server of its own
        return 1


def _code_scorer(replies: BinaryIO) -> CodeScorer:
    """Start the fork server, before this process may start no other, and register the scorer `code`."""
    sent_s = time.monotonic()

    def on_wait() -> None:
        nonlocal sent_s
        if time.monotonic() - sent_s > _HEARTBEAT_S:
            sent_s = time.monotonic()
            replies.write(frame(Working()))

    scorer = CodeScorer(SandboxedPrograms(), on_wait)
    scorers.register("code")(scorer.score)
    return scorer


def _serve(work: BinaryIO, replies: BinaryIO, settings: WorkerSettings, code: CodeScorer | None) -> int:
    threads = _threads()
    while (message := read_work(work)) is not None:
        ahead = _programs_in(message) if code is not None else {}
        if code is not None:
            code.run_ahead([call for calls in ahead.values() for call in calls])
        held = bytearray()  # replies to items that were scored ahead: one write for all of them wakes the pool once
        for item in message.items:
            is_known = item.id in ahead and not item.grading
            if not is_known:  # its scorer may end this process, so earlier replies leave first
                replies.write(held)
                held.clear()
                _allow_processor_time(settings.time_limit_s)
            try:
                reply = _scored(item, settings.max_answer_chars)
            except MemoryError as error:
                # The heap may be in a bad state for the next item, so this worker ends.
                reply = Scored(item.id, error=described(error, _MAX_ERROR_CHARS), cause="MemoryError")
                replies.write(held + frame(reply))
                return 1
            except ServerLost:
                raise
            except Exception as error:  # noqa: BLE001 - user code may raise anything; the item has no score then
                cause = error.cause if isinstance(error, grading.PartFailed) else type(error).__name__
                reply = Scored(item.id, error=described(error, _MAX_ERROR_CHARS), cause=cause)
            held += frame(reply)
            if not is_known:
                replies.write(held)
                held.clear()
                if _threads() > threads:
                    return 1
        replies.write(held)
        if ahead and _threads() > threads:
            return 1
    return 0


def _programs_in(message: ScoringWork) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """By id, the arguments and answers of the items that the scorer `code` judges."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for item in message.items:
        if item.grading:
            found[item.id] = grading.programs(grading.decoded(item.grading), item.env_args, item.answer)
        elif '"code"' in item.env_args and (args := msgspec.json.decode(item.env_args)).get("scorer") == "code":
            found[item.id] = [(args, item.answer)]
    return found


def _scored(item: ScoreItem, max_answer_chars: int) -> Scored:
    if item.grading:
        found = grading.grade(grading.decoded(item.grading), item.env_args, item.answer, max_answer_chars)
        return Scored(item.id, rejected=found.rejected, answer=found.answer, values=found.values)
    judged = scorers.judge(item.env_args, item.answer, max_answer_chars)
    return Scored(item.id, score=judged.score, rejected=(judged.rejected,) if judged.rejected else ())


def _threads() -> int:
    """The number of threads of this process, including native ones if the kernel lists them."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def resident_bytes(pid: int | str = "self") -> int:
    """The memory that a process holds; 0 where the system does not report it."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _lower(limit: int, value: int) -> None:
    """Lower a resource limit permanently; never raise an existing limit."""
    _, hard = resource.getrlimit(limit)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (bound, bound))


def _allow_processor_time(time_limit_s: float) -> None:
    """Raise the soft limit of processor time to allow one more item; the kernel ends the process beyond it.

    The pool's time limit is stricter; this limit also works when the pool's process is gone or blocked.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + time_limit_s) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout under other descriptors; 0 and 1 become /dev/null, so that a scorer cannot disturb the
    protocol by printing or reading."""
    work = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    _silence(0)
    _silence(1)
    return work, replies


def _silence(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def _load(settings: WorkerSettings) -> None:
    """Import the modules that scorers need, so that imports do not count towards an item's time limit.

    Libraries are optional (a task that needs a missing one fails later), modules and functions are required.
    """
    for library in settings.libraries:
        if importlib.util.find_spec(library) is not None:
            scorers.import_library(library)
    for module in settings.modules:
        importlib.import_module(module)
    for function in settings.functions:
        grading.load(function)


# --- A scoring process from the parent's side

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
        command = [sys.executable, "-P", "-m", "jaxroll.rewards.processes", msgspec.json.encode(settings).decode()]
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
        self._to_send += frame(ScoringWork(tuple(items)))
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
