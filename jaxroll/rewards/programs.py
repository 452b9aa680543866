"""Runs of programs that a model wrote, from a scoring worker's side.

`Programs` starts the fork server (see `fork_server`), sends it batches of runs and collects their outputs. The worker
creates the pipes of each run and passes on their other ends, so that programs and inputs reach only their own process.
"""

from __future__ import annotations

import array
import contextlib
import functools
import itertools
import marshal
import os
import re
import select
import socket
import stat
import subprocess
import sys
import sysconfig
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxroll.errors import DataError
from jaxroll.rewards import fork_server, plain, sandbox

MAX_OUTPUT_BYTES = 1 << 20
PROGRAM_MEMORY_BYTES = 1 << 30
_HEARTBEAT_S = 0.5
_ALLOWANCE_S = 30.0  # of the fork server, for starting and ending a program on a loaded machine
_READ_BYTES = 1 << 16
_SILENT = "the fork server does not answer"

# Programs without imports run in a bare interpreter, the others with these modules loaded: the larger process needs
# twice the time for a fork, an import of these modules ten times. Batches of plain programs run in "shared".
_BARE, _STANDARD, _SHARED = "bare", "standard", "shared"
_BATCH_LIMIT_S = 0.5  # a batch ends by itself after `plain.BATCH_S` and its last program
# Text that no plain program has, outside of comments and strings.
_NOT_PLAIN = re.compile(r"\b(?:import|class|try|with|yield|raise|async|exec|eval|open|type|getattr|__(?!name__))")
_PRELOADED = (
    "collections",
    "collections.abc",
    "heapq",
    "math",
    "itertools",
    "functools",
    "bisect",
    "re",
    "string",
    "random",
    "json",
    "typing",
    "operator",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "statistics",
    "threading",
    "atexit",
)


# The server gets its code through stdin: compiling it, or a long command line, would make its forks slower.
_START = "import marshal\ncode, settings = marshal.loads(open(0, 'rb', 0, closefd=False).readall())\nexec(code)"


class ServerLost(RuntimeError):
    """The fork server has ended or does not answer."""


class Run(NamedTuple):
    """A program with its stdin, or with lines of calls (see `fork_server`)."""

    program: str
    input: bytes = b""
    calls: bool = False
    time_limit_s: float = 5.0


class _Request(NamedTuple):
    """A run as the fork server gets it: the kind of server, and the input of the run (see `fork_server`)."""

    kind: str
    data: bytes
    time_limit_s: float


class Outcome(NamedTuple):
    """The output of a run, cut at `MAX_OUTPUT_BYTES`, and the reason why it did not end well ("" if it did)."""

    output: bytes
    failure: str = ""


class _Open:
    """A run whose process has not ended."""

    def __init__(self, request: _Request) -> None:
        self.child_in, self.write = os.pipe()
        self.read, self.child_out = os.pipe()
        os.set_blocking(self.write, False)
        os.set_blocking(self.read, False)
        self.to_send = memoryview(request.data)
        self.kind = request.kind
        self.output = bytearray()
        self.failure = ""

    def send(self) -> bool:
        """Write as much as the pipe takes; return True once everything is written."""
        try:
            while self.to_send:
                self.to_send = self.to_send[os.write(self.write, self.to_send) :]
        except BlockingIOError:
            return False
        except OSError:  # the program has closed its input or ended
            self.to_send = memoryview(b"")
        return True

    def receive(self) -> bool:
        """Read what has arrived; return False at the end of the output or beyond its limit."""
        try:
            while len(self.output) <= MAX_OUTPUT_BYTES:
                data = os.read(self.read, _READ_BYTES)
                if not data:
                    return False
                self.output += data
                if len(data) < _READ_BYTES:
                    return True
        except BlockingIOError:
            return True
        self.failure = "too much output"
        return False

    def close(self) -> None:
        for name in ("child_in", "child_out", "write", "read"):
            self.close_one(name)

    def close_one(self, name: str) -> None:
        if (descriptor := getattr(self, name)) >= 0:
            os.close(descriptor)
            setattr(self, name, -1)


class SandboxedPrograms:
    """Programs in the sandbox. Create it before the calling process restricts itself.

    Raises DataError where the system cannot confine programs. The server dies with the thread that creates it.
    """

    def __init__(self, memory_bytes: int = PROGRAM_MEMORY_BYTES) -> None:
        restrictions = sandbox.for_programs()
        if restrictions is None:
            raise DataError(
                "programs of a model cannot be confined here: the reward `code` needs Linux with seccomp, "
                f"and this is {sys.platform} (see `jaxroll doctor`)"
            )
        pairs = {kind: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for kind in (_BARE, _STANDARD, _SHARED)}
        self._sockets = {kind: pair[0] for kind, pair in pairs.items()}
        passed = {kind: pair[1].fileno() for kind, pair in pairs.items()}
        packages = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
        settings = {
            "parent": os.getpid(),
            "sockets": passed,
            "preload": {_BARE: (), _STANDARD: _PRELOADED, _SHARED: ()},
            "plain": _code(plain.__file__),
            "path": packages,
            "memory_bytes": memory_bytes,
            "readable_by_all": all(_readable_by_all(path) for path in (os.__file__, *packages)),
            **restrictions._asdict(),
        }
        command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START]
        inherited = [*passed.values(), *([restrictions.ruleset] if restrictions.ruleset >= 0 else [])]
        environment = {name: os.environ[name] for name in ("JAXROLL_TEST_ID", "LD_LIBRARY_PATH") if name in os.environ}
        environment["LD_BIND_NOW"] = "1"  # so that programs do not look up symbols of the C library, each for itself
        # Pipes for stdin and stdout, because Python looks at the kind of file when it opens them.
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=inherited,
        )
        self.pid = server.pid
        self._server = server
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError), server.stdin:  # the first run tells that it has ended
            server.stdin.write(marshal.dumps((_code(fork_server.__file__), settings)))
        for pair in pairs.values():
            pair[1].close()
        if restrictions.ruleset >= 0:
            os.close(restrictions.ruleset)
        self._ids = itertools.count()

    @property
    def alive(self) -> bool:
        """True while the fork server has not ended."""
        return self._server.poll() is None

    def run(self, runs: Sequence[Run], on_wait: Callable[[], object] = lambda: None) -> list[Outcome]:
        """The outcomes of `runs`, in their order; `on_wait` is called twice a second at least meanwhile.

        Programs that may be plain (see `plain`) run in batches first, each other program in a process of its own.
        ServerLost if the fork server fails.
        """
        found: dict[int, Outcome] = {}
        candidates = [nth for nth, run in enumerate(runs) if _may_be_plain(run)]
        batches = list(_batches(candidates)) if len(candidates) > 1 else []
        batched = {nth for batch in batches for nth in batch}
        alone = [nth for nth in range(len(runs)) if nth not in batched]
        requests = [_batch_request([runs[nth] for nth in batch]) for batch in batches]
        outcomes = self._run(requests + [_request(runs[nth]) for nth in alone], on_wait)
        found.update(zip(alone, outcomes[len(batches) :], strict=True))
        for batch, outcome in zip(batches, outcomes, strict=False):
            found.update((nth, each) for nth, each in zip(batch, _of_batch(outcome), strict=False) if each is not None)
        left = [nth for nth in range(len(runs)) if nth not in found]
        found.update(zip(left, self._run([_request(runs[nth]) for nth in left], on_wait), strict=True))
        return [found[nth] for nth in range(len(runs))]

    def _run(self, requests: Sequence[_Request], on_wait: Callable[[], object]) -> list[Outcome]:
        """The outcomes of `requests`, in their order."""
        ids = [next(self._ids) & 0xFFFFFFFF for _ in requests]
        waiting = {kind: deque[tuple[int, _Request]]() for kind in self._sockets}
        for ident, request in zip(ids, requests, strict=True):
            waiting[request.kind].append((ident, request))
        found: dict[int, Outcome] = {}
        held: dict[int, _Open] = {}
        epoll = select.epoll()
        try:
            self._collect(waiting, held, found, epoll, on_wait)
        finally:
            epoll.close()
            for each in held.values():
                each.close()
        return [found[ident] for ident in ids]

    @contextlib.contextmanager
    def open(self, run: Run, on_wait: Callable[[], object] = lambda: None) -> Iterator[Callable[[bytes], bytes]]:
        """A program that serves calls: a function from the line of a call to the line of its result.

        It raises TimeoutError once the program has ended, by itself or at its time limit. ServerLost as in `run`.
        """
        opened = _Open(_request(run))
        kind, ident = opened.kind, next(self._ids) & 0xFFFFFFFF
        deadline = time.monotonic() + _ALLOWANCE_S + run.time_limit_s
        try:
            _forget_ended(self._sockets[kind])
            _send(self._sockets[kind], [(ident, run.time_limit_s, opened)])
            opened.close_one("child_in")
            opened.close_one("child_out")
            yield functools.partial(_exchange, opened, on_wait, deadline)
        finally:
            opened.close()
            self._kill(kind, ident)
            if opened.failure == _SILENT:  # the caller may have taken the exception for one of the program's
                raise ServerLost(_SILENT)

    def close(self) -> None:
        """End the fork server and its programs."""
        for control in self._sockets.values():
            control.close()
        self._server.kill()
        self._server.wait()
        if self._server.stdout is not None:
            self._server.stdout.close()

    def _collect(
        self,
        waiting: dict[str, deque[tuple[int, _Request]]],
        held: dict[int, _Open],
        found: dict[int, Outcome],
        epoll: select.epoll,
        on_wait: Callable[[], object],
    ) -> None:
        """Start the runs, a few at a time, and exchange input and output until every run has an outcome."""
        kinds = {control.fileno(): kind for kind, control in self._sockets.items()}
        for descriptor in kinds:
            epoll.register(descriptor, select.EPOLLIN)
        by_descriptor: dict[int, tuple[int, _Open]] = {}
        limit_s = sum(run.time_limit_s for queue in waiting.values() for _, run in queue)
        deadline = time.monotonic() + _ALLOWANCE_S + limit_s
        for kind in waiting:
            self._start(kind, waiting[kind], fork_server.MAX_HELD, held, by_descriptor, epoll)
        while held:
            events = epoll.poll(_HEARTBEAT_S)
            on_wait()
            if not events and time.monotonic() > deadline:
                raise ServerLost(_SILENT)
            for descriptor, _ in events:
                if descriptor in kinds:
                    kind = kinds[descriptor]
                    ended = 0
                    for ident, status in _statuses(self._sockets[kind]):
                        if (run := held.pop(ident, None)) is not None:
                            found[ident] = _outcome(run, status)
                            by_descriptor.pop(run.read, None)
                            by_descriptor.pop(run.write, None)
                            run.close()
                            ended += 1
                    self._start(kind, waiting[kind], ended, held, by_descriptor, epoll)
                    continue
                ident, run = by_descriptor.get(descriptor, (0, None))
                if run is None:  # it has ended in this round
                    continue
                if descriptor == run.write:
                    if run.send():
                        epoll.unregister(descriptor)
                        del by_descriptor[descriptor]
                        run.close_one("write")
                elif not run.receive():
                    epoll.unregister(descriptor)
                    if run.failure:
                        self._kill(run.kind, ident)
                        del by_descriptor[descriptor]
                        run.close_one("read")

    def _start(
        self,
        kind: str,
        waiting: deque[tuple[int, _Request]],
        most: int,
        held: dict[int, _Open],
        by_descriptor: dict[int, tuple[int, _Open]],
        epoll: select.epoll,
    ) -> None:
        """Send up to `most` of the waiting runs to the server."""
        batch: list[tuple[int, float, _Open]] = []
        while waiting and len(batch) < most:
            ident, request = waiting.popleft()
            held[ident] = opened = _Open(request)
            batch.append((ident, request.time_limit_s, opened))
        if not batch:
            return
        _send(self._sockets[kind], batch)
        for ident, _, opened in batch:
            opened.close_one("child_in")
            opened.close_one("child_out")
            if opened.send():
                opened.close_one("write")
            else:
                by_descriptor[opened.write] = (ident, opened)
                epoll.register(opened.write, select.EPOLLOUT)
            by_descriptor[opened.read] = (ident, opened)
            epoll.register(opened.read, select.EPOLLIN)

    def _kill(self, kind: str, ident: int) -> None:
        try:
            self._sockets[kind].send(ident.to_bytes(4, "little") + bytes(4))
        except OSError as error:
            raise ServerLost(f"the fork server has ended: {error}") from error


@functools.cache
def _code(path: str) -> types.CodeType:
    return compile(Path(path).read_bytes(), path, "exec", optimize=2)


def _request(run: Run) -> _Request:
    """`run` in a process of its own."""
    kind = _STANDARD if "import" in run.program else _BARE
    source = run.program.encode("utf-8", "surrogatepass")
    data = (b"C" if run.calls else b"S") + len(source).to_bytes(4, "little") + source + run.input
    return _Request(kind, data, run.time_limit_s)


# --- batches of plain programs


def _may_be_plain(run: Run) -> bool:
    """False for most programs that are not plain, so that they do not take part in a batch for nothing."""
    fits = len(run.program) <= plain.MAX_SOURCE_CHARS and len(run.input) <= plain.MAX_INPUT_BYTES
    return fits and not run.calls and _NOT_PLAIN.search(run.program) is None


def _batches(candidates: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(candidates), plain.MAX_PROGRAMS):
        yield candidates[first : first + plain.MAX_PROGRAMS]


def _batch_request(runs: Sequence[Run]) -> _Request:
    """`runs` in one process."""
    batch = b""
    for run in runs:
        source = run.program.encode("utf-8", "surrogatepass")
        batch += len(source).to_bytes(4, "little") + len(run.input).to_bytes(4, "little") + source + run.input
    return _Request(_SHARED, b"B" + len(batch).to_bytes(4, "little") + batch, _BATCH_LIMIT_S)


def _of_batch(outcome: Outcome) -> Iterator[Outcome | None]:
    """The outcomes of a batch's programs; None for those that have to run alone. None at all if the batch failed."""
    data = b"" if outcome.failure else outcome.output
    while data:
        status, end = data[0], 5 + int.from_bytes(data[1:5], "little")
        yield None if status == plain.ALONE else Outcome(data[5:end], "exit status 1" if status == plain.FAILED else "")
        data = data[end:]


def _forget_ended(control: socket.socket) -> None:
    """Take the statuses of runs that nothing waits for: once the socket has no room for them, the server stops."""
    with contextlib.suppress(BlockingIOError):
        while control.recv(1 << 16, socket.MSG_DONTWAIT):
            pass


def _exchange(opened: _Open, on_wait: Callable[[], object], deadline: float, line: bytes) -> bytes:
    """Send the line of a call and return the line of its result."""
    if opened.failure == _SILENT:
        raise ServerLost(_SILENT)
    opened.output.clear()
    opened.to_send = memoryview(bytes(opened.to_send) + line)
    while not opened.output.endswith(b"\n"):
        writing = [] if opened.send() else [opened.write]
        ready = select.select([opened.read], writing, [], _HEARTBEAT_S)
        on_wait()
        if ready[0] and not opened.receive():
            raise TimeoutError(opened.failure or "the program has ended")
        if not ready[0] and time.monotonic() > deadline:
            opened.failure = _SILENT
            raise ServerLost(_SILENT)
    return bytes(opened.output)


def _send(control: socket.socket, batch: list[tuple[int, float, _Open]]) -> None:
    records = b"".join(
        ident.to_bytes(4, "little") + max(1, round(limit_s * 1000)).to_bytes(4, "little") for ident, limit_s, _ in batch
    )
    descriptors = array.array("i", [each for *_, run in batch for each in (run.child_in, run.child_out)])
    try:
        control.sendmsg([records], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    except OSError as error:
        raise ServerLost(f"the fork server has ended: {error}") from error


def _statuses(control: socket.socket) -> Iterator[tuple[int, int]]:
    """The ids and statuses of runs that have ended."""
    data = control.recv(1 << 16)
    if not data:
        raise ServerLost("the fork server has ended")
    for place in range(0, len(data), 8):
        ident, status = data[place : place + 4], data[place + 4 : place + 8]
        yield int.from_bytes(ident, "little"), int.from_bytes(status, "little", signed=True)


def _outcome(run: _Open, status: int) -> Outcome:
    while run.read >= 0 and run.receive():  # the process has ended: the rest of its output is in the pipe
        select.select([run.read], [], [], _HEARTBEAT_S)  # a process that just started may hold a copy of the pipe
    failure = run.failure
    if not failure and status:
        ended = f"signal {status - 256}" if status > 256 else f"exit status {status}"
        failure = "time limit" if status == fork_server.TIMED_OUT else ended
    return Outcome(bytes(run.output[:MAX_OUTPUT_BYTES]), failure)


def _readable_by_all(path: str) -> bool:
    """True if every user may read `path` and search the folders above it."""
    place = Path(path).resolve()
    folders = [place, *place.parents] if place.is_dir() else place.parents
    bits = stat.S_IROTH | stat.S_IXOTH
    return all(folder.stat().st_mode & bits == bits for folder in folders)
