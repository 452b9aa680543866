"""Environments in processes: the executor, the program of a process, and the messages between them.

The executor runs on one event loop. It reuses processes; those that hang or die are killed and replaced. A process
plays one episode at a time, so a crash fails only one member. An episode waits while no process is free; the time limit
of a call begins when it is sent to a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import re
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

import jaxroll
from jaxroll import lifeline, protocols
from jaxroll.config import TaskConfig
from jaxroll.envs import registry
from jaxroll.errors import DataError, InfraError, described
from jaxroll.protocols import Environment, StepResult, Traits
from jaxroll.records import Message, Task
from jaxroll.rewards.processes import resident_bytes

# --- Messages between an environment process and its parent: length-prefixed MessagePack over pipes

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class Settings(msgspec.Struct, frozen=True):
    """The first message: the section `task` of each environment.

    It is not on the command line, where an argument may have 128 KiB: the messages before the question are part of it.
    """

    tasks: dict[str, TaskConfig]


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Make the environment `name` and reset it."""

    name: str
    task: Task
    seed: int


class NextTask(msgspec.Struct, frozen=True, tag="again"):
    """Reset the current environment again, after an attempt that raised InfraError."""

    task: Task
    seed: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One answer."""

    answer: str


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Continue after the step whose result had this state."""

    state: bytes


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The episode is over."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process has started."""


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """The first messages."""

    messages: tuple[Message, ...]


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """The result of an answer."""

    result: StepResult


class Restored(msgspec.Struct, frozen=True, tag="restored"):
    """The environment continues after an earlier step."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The environment is closed; its process has grown by these threads and bytes since the first close of its kind."""

    threads: int = 0
    grown_bytes: int = 0


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """A call raised; `infra` is True for an InfraError, after which the call may be repeated."""

    error: str
    infra: bool = False


Order = Reset | NextTask | Step | Restore | Close
Answer = Ready | Shown | Stepped | Restored | Closed | Raised

_ENCODER = msgspec.msgpack.Encoder()
_ORDER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Any) -> bytes:
    """The encoded message, with its length as prefix."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def order(body: bytes) -> Order:
    """The order in `body`. Raises msgspec.DecodeError for malformed data."""
    return _ORDER.decode(body)


def answer(body: bytes) -> Answer:
    """The answer in `body`. Raises msgspec.DecodeError for malformed data."""
    return _ANSWER.decode(body)


# --- An environment process: `python -m jaxroll.envs.processes PARENT`, settings and orders on stdin, answers on stdout
#
# It plays one episode at a time and creates a new environment for each. It dies with its parent. Output of an
# environment goes to stderr, which is the role's log.


class NoPool:
    """A placeholder for the scoring pool, which does not exist in an environment process."""

    time_limit_s = 5.0

    async def score(self, env_args: str, answer: str) -> float:
        """Raise DataError."""
        raise DataError("an environment with place = 'process' has no scoring pool: score the answer in its step()")


class Player:
    """The environment of the current episode. All its methods run on one event loop of this process."""

    def __init__(self, tasks: Mapping[str, TaskConfig], runner: asyncio.Runner) -> None:
        self._tasks, self._runner, self._env, self._name = tasks, runner, None, ""
        self._first: dict[str, list[int]] = {}  # by kind, after its first episode: threads, bytes; then threads left

    def answer(self, order: Order) -> Answer:
        """Execute one order and return its answer; an exception is answered as Raised."""
        try:
            return self._execute(order)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; it fails only this episode
            return Raised(described(error), isinstance(error, InfraError))

    def _execute(self, order: Order) -> Answer:
        match order:
            case Reset(name, task, seed):
                section, self._name = registry.section(self._tasks, name), name
                kind = section.env if "@" in name else name
                self._env = registry.create(kind, NoPool(), section)  # type: ignore[arg-type]
                return Shown(protocols.messages(self._done(self._env.reset(task, seed)), "the value of reset()"))
            case NextTask(task, seed):
                return Shown(protocols.messages(self._done(self._current.reset(task, seed)), "the value of reset()"))
            case Step(text):
                return Stepped(protocols.step_result(self._done(self._current.step(text))))
            case Restore(state):
                self._done(getattr(self._current, "restore")(state))  # noqa: B009 - optional in the protocol
                return Restored()
            case Close():
                env, self._env = self._env, None
                if env is not None:
                    self._done(env.close())
                return self._closed()

    def _closed(self) -> Closed:
        first = self._first.setdefault(self._name, [_threads(), resident_bytes(), 0])
        if _threads() - first[0] > first[2]:
            time.sleep(_THREADS_END_S)
        first[2] = max(0, _threads() - first[0])
        return Closed(first[2], max(0, resident_bytes() - first[1]))

    @property
    def _current(self) -> Environment:
        if self._env is None:
            raise DataError("step() before reset(): there is no environment")
        return self._env

    def _done(self, found: Any) -> Any:
        async def waited() -> Any:
            try:
                return await found
            except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # these would end the event loop
                raise DataError(f"the environment raised {described(error)}") from error

        return self._runner.run(waited()) if inspect.isawaitable(found) else found


def _threads() -> int:
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())  # those are the runner's


def main(argument: str) -> int:
    """Answer orders until stdin ends; return the exit status. `argument` is the process id of the parent."""
    lifeline.bind(int(argument))
    lifeline.lower_session()
    orders, answers = _private_pipes()
    settings = msgspec.msgpack.decode(_read(orders) or b"", type=Settings)
    answers.write(frame(Ready()))
    with asyncio.Runner() as runner:
        player = Player(settings.tasks, runner)
        while (body := _read(orders)) is not None:
            answers.write(frame(player.answer(order(body))))
    return 0


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout under other descriptors; for environments stdin is then empty and stdout goes to stderr."""
    orders = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return orders, answers


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None


# --- Executor that runs environments in processes, which are reused, and killed and replaced when they hang or die

_START_LIMIT_S, _CLOSE_LIMIT_S = 120.0, 10.0
TRIES, PAUSE_FIRST_S = 4, 0.25  # attempts to start a process for one episode
GROWTH_BYTES, MOST_LEFT_THREADS, _THREADS_END_S = 512 << 20, 16, 0.2  # what a process may keep; seconds for a close
GIVE_UP_AFTER = 12  # failed starts in a row, over all episodes


class EnvProcess:
    """One environment process. The kernel kills it when the thread of the event loop that started it ends."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.left_threads = 0  # at the last close

    @classmethod
    async def start(cls, tasks: Mapping[str, TaskConfig]) -> EnvProcess:
        """Start a process and wait until it is ready. InfraError when it does not start."""
        settings = frame(Settings(dict(tasks)))
        try:
            process = await lifeline.child(
                sys.executable,
                "-P",
                "-m",
                "jaxroll.envs.processes",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:  # the machine is out of processes, descriptors or memory
            raise InfraError(f"an environment process cannot be started: {error}") from error
        made = cls(process)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await made._send(settings)
                await made._read()
        except (asyncio.IncompleteReadError, OSError) as error:  # a TimeoutError is one, too
            await made.kill()
            raise InfraError(f"an environment process does not start ({error or 'it took too long'})") from error
        except BaseException:
            await made.kill()
            raise
        return made

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True if the event loop has not seen the process end."""
        return self._process.returncode is None

    async def ask(self, order: Order, limit_s: float, what: str) -> Answer:
        """The answer to `order`. DataError when it takes too long, InfraError when the process is gone.

        After an error or a cancellation the caller must kill the process.
        """
        limit = asyncio.timeout(None if math.isinf(limit_s) else limit_s)
        try:
            async with limit:
                await self._send(frame(order))
                return await self._read()
        except TimeoutError as error:
            raise DataError(f"the environment's {what} took longer than {limit_s:g} s; it was killed") from error
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            raise InfraError(f"the environment's process died in {what}: {type(error).__name__}") from error

    async def _send(self, message: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(message)
        await stdin.drain()

    async def _read(self) -> Answer:
        stdout = self._process.stdout
        assert stdout is not None
        (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        if size > MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"an answer of {size} bytes")
        return answer(await stdout.readexactly(size))

    async def kill(self) -> None:
        """Kill the process and all others in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Processes:
    """A pool of up to `most` processes, started on demand. `replaced` counts those that hung or died.

    A failed start is repeated after a pause that doubles (`failed_starts` counts them). After `GIVE_UP_AFTER` failures
    in a row, `broken` holds the reason and `gave_up` is set, so that the role can end and be restarted.
    """

    def __init__(self, most: int, tasks: Mapping[str, TaskConfig]) -> None:
        self.replaced = self.failed_starts = self._failed_in_row = 0
        self.broken, self.gave_up = "", asyncio.Event()
        self._tasks, self._room = tasks, asyncio.Semaphore(most)
        self._idle: list[EnvProcess] = []
        self._busy: set[EnvProcess] = set()
        self.faults: Counter[str] = Counter()  # threads and memory that closed environments kept, by cause

    def note_kept(self, name: str, process: EnvProcess, found: Closed) -> bool:
        """Count what the environment `name` kept; True if it is too much for another episode of the process."""
        if found.threads > process.left_threads:
            self.faults[f"{name} left threads running"] += 1
        process.left_threads = found.threads
        if grown := found.grown_bytes >= GROWTH_BYTES:
            self.faults[f"{name} let its process grow by {GROWTH_BYTES >> 20} MiB"] += 1
        return grown or found.threads >= MOST_LEFT_THREADS

    @property
    def pids(self) -> list[int]:
        """The ids of the live processes."""
        return [process.pid for process in (*self._idle, *self._busy)]

    async def take(self) -> EnvProcess:
        """Take a process for one episode; wait while all are in use. InfraError when none can be started."""
        await self._room.acquire()
        try:
            process = await self._idle_one() or await self._start()
        except BaseException:
            self._room.release()
            raise
        self._busy.add(process)
        return process

    async def _idle_one(self) -> EnvProcess | None:
        """Take a live idle process, or None; idle processes that have died count as replaced."""
        while self._idle:
            if (process := self._idle.pop()).is_alive:
                return process
            self.replaced += 1
            await process.kill()  # other processes of its session may still live
        return None

    async def _start(self) -> EnvProcess:
        """Start a new process; InfraError after `TRIES` failures."""
        for left in reversed(range(TRIES)):
            if self.broken:
                raise InfraError(f"environment processes do not start: {self.broken}")
            try:
                process = await EnvProcess.start(self._tasks)
            except InfraError as error:
                self.failed_starts, self._failed_in_row = self.failed_starts + 1, self._failed_in_row + 1
                if self._failed_in_row >= GIVE_UP_AFTER:
                    self.broken = str(error)
                    self.gave_up.set()
                if not left:
                    raise
                await asyncio.sleep(PAUSE_FIRST_S * 2 ** (TRIES - 1 - left))
            else:
                self._failed_in_row = 0
                return process
        raise AssertionError("unreachable")

    async def give_back(self, process: EnvProcess, *, whole: bool) -> None:
        """Return a process after an episode. One that is not `whole` is killed; another starts on demand."""
        self._busy.discard(process)
        self._room.release()
        if whole:
            self._idle.append(process)
        else:
            self.replaced += 1
            await process.kill()

    async def close(self) -> None:
        """Kill all of them."""
        processes, self._idle, self._busy = [*self._idle, *self._busy], [], set()
        for process in processes:
            await process.kill()


class InProcess:
    """The environment `name` in a process, as an environment of the event loop; holds it from reset to close."""

    def __init__(self, name: str, declared: Traits, processes: Processes) -> None:
        self._name, self._declared, self._processes = name, declared, processes
        self._process: EnvProcess | None = None
        self._whole = True
        self.step_limit_s = self.reset_limit_s = math.inf  # `_asked` enforces the limits, from the call to a process
        self.reset_retries, self.step_retries = declared.reset_retries, declared.step_retries
        self.max_turns = declared.max_turns
        if declared.restores:
            self.restore = self._restore

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The first messages."""
        again = self._process is not None and self._whole
        if not again:
            await self.close()
            self._process, self._whole = await self._processes.take(), True
        order = NextTask(task, seed) if again else Reset(self._name, task, seed)
        found = await self._asked(self._process, order, self._declared.reset_limit_s, "reset")
        assert isinstance(found, Shown)
        return found.messages

    async def step(self, answer: str) -> StepResult:
        """The result of `answer`."""
        found = await self._asked(self._process, Step(answer), self._declared.step_limit_s, "step")
        assert isinstance(found, Stepped)
        return found.result

    async def _restore(self, state: bytes) -> None:
        await self._asked(self._process, Restore(state), self._declared.reset_limit_s, "restore")

    async def close(self) -> None:
        """Return the process to the pool; it is reused if its environment closed properly. Raises what that raised."""
        process, self._process = self._process, None
        if process is None:
            return
        whole = False
        try:
            if self._whole:
                found = await self._asked(process, Close(), _CLOSE_LIMIT_S, "close")
                whole = isinstance(found, Closed) and not self._processes.note_kept(self._name, process, found)
        finally:
            await self._processes.give_back(process, whole=whole)

    async def _asked(self, process: EnvProcess | None, order: Order, limit_s: float, what: str) -> Answer:
        if process is None or not self._whole:
            raise InfraError("the environment's process is gone")
        self._whole = False  # until it has answered
        found = await process.ask(order, limit_s, what)
        self._whole = True
        if isinstance(found, Raised):
            raise InfraError(found.error) if found.infra else DataError(found.error)
        return found


def _environment() -> dict[str, str]:
    """The worker's environment variables: the same import path, without JaxRoll's variables, which hold secrets."""
    root = str(Path(jaxroll.__file__).resolve().parent.parent)
    path = os.pathsep.join(dict.fromkeys([root, *(str(Path(entry).resolve()) for entry in sys.path)]))
    kept = {name: value for name, value in os.environ.items() if not re.match("JAXROLL_(?!TEST_ID$)", name)}
    fixed = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    return {**kept, **fixed, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
