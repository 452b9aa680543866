"""Environments in processes of their own: killed when they hang, replaced when they die, used again when they end well.

Everything here runs on one event loop. A process plays one episode at a time: what it does to itself costs that one
member. An episode that finds no process free waits for one, and its limits begin when its call does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from pathlib import Path

import msgspec

import jaxroll
from jaxroll import lifeline
from jaxroll.config import TaskConfig
from jaxroll.envs.executors import worker as words
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import StepResult, Traits
from jaxroll.records import Message, Task

_START_LIMIT_S = 120.0
_CLOSE_LIMIT_S = 10.0
TRIES, PAUSE_FIRST_S = 4, 0.25  # to start one, for one episode
GIVE_UP_AFTER = 12  # failed starts in a row, of all episodes


class EnvProcess:
    """One process. Its kernel-side death signal is tied to the thread of the event loop that starts it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def started(cls, task: TaskConfig) -> EnvProcess:
        """A process that is ready. InfraError when it does not start."""
        settings = msgspec.json.encode(words.Settings(os.getpid(), task)).decode()
        try:
            process = await lifeline.child(
                sys.executable, "-P", "-m", "jaxroll.envs.executors.worker", settings,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # of this machine: no process, no descriptor, no memory
            raise InfraError(f"a process of environments cannot be started: {error}") from error
        made = cls(process)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await made._read()
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            await made.kill()
            raise InfraError(f"a process of environments does not start ({error or 'it took too long'})") from error
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
        """True if it has not ended, as far as the event loop knows."""
        return self._process.returncode is None

    async def ask(self, order: words.Order, limit_s: float, what: str) -> words.Answer:
        """The answer to `order`. DataError when it takes too long, InfraError when the process is gone: kill it then,
        and when this is cancelled."""
        stdin = self._process.stdin
        assert stdin is not None
        limit = asyncio.timeout(None if math.isinf(limit_s) else limit_s)
        try:
            async with limit:
                stdin.write(words.frame(order))
                await stdin.drain()
                return await self._read()
        except TimeoutError as error:
            raise DataError(f"the environment's {what} took longer than {limit_s:g} s; it was killed") from error
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            raise InfraError(f"the environment's process died in {what}: {type(error).__name__}") from error

    async def _read(self) -> words.Answer:
        stdout = self._process.stdout
        assert stdout is not None
        (size,) = words.LENGTH.unpack(await stdout.readexactly(words.LENGTH.size))
        if size > words.MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"an answer of {size} bytes")
        return words.answer(await stdout.readexactly(size))

    async def kill(self) -> None:
        """End it and all in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Processes:
    """Up to `most` processes, started when they are wanted. `replaced` counts those that hung or died.

    A start that fails is repeated after a pause that doubles (`failed_starts` counts them). After `GIVE_UP_AFTER`
    without a success in between, `broken` says why, and `gave_up` is set: another process may fare better.
    """

    def __init__(self, most: int, task: TaskConfig) -> None:
        self.replaced = self.failed_starts = self._failed_in_row = 0
        self.broken, self.gave_up = "", asyncio.Event()
        self._task, self._room = task, asyncio.Semaphore(most)
        self._idle: list[EnvProcess] = []
        self._busy: set[EnvProcess] = set()

    @property
    def pids(self) -> list[int]:
        """The process ids of those that live."""
        return [process.pid for process in (*self._idle, *self._busy)]

    async def take(self) -> EnvProcess:
        """A process for one episode; waits while all are taken."""
        await self._room.acquire()
        try:
            process = await self._idle_one() or await self._started()
        except BaseException:
            self._room.release()
            raise
        self._busy.add(process)
        return process

    async def _idle_one(self) -> EnvProcess | None:
        """One that waits for an episode; those that died meanwhile are replaced."""
        while self._idle:
            if (process := self._idle.pop()).is_alive:
                return process
            self.replaced += 1
            await process.kill()  # what it left of its session
        return None

    async def _started(self) -> EnvProcess:
        """A new one. InfraError when it does not start, after `TRIES`."""
        for left in reversed(range(TRIES)):
            if self.broken:
                raise InfraError(f"processes of environments do not start: {self.broken}")
            try:
                process = await EnvProcess.started(self._task)
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
        """The episode is over; a process that is not `whole` is killed, and another starts when it is wanted."""
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
    """The environment `name` in a process, from its reset to its close, as an environment of the event loop."""

    def __init__(self, name: str, declared: Traits, processes: Processes) -> None:
        self._name, self._declared, self._processes = name, declared, processes
        self._process: EnvProcess | None = None
        self._whole = True
        self.step_limit_s = self.reset_limit_s = math.inf  # enforced here, from when a call reaches its process
        self.reset_retries, self.step_retries = declared.reset_retries, declared.step_retries
        self.max_turns = declared.max_turns

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The first messages."""
        again = self._process is not None and self._whole
        if not again:
            await self.close()
            self._process, self._whole = await self._processes.take(), True
        order = words.NextTask(task, seed) if again else words.Reset(self._name, task, seed)
        found = await self._asked(order, self._declared.reset_limit_s, "reset")
        assert isinstance(found, words.Shown)
        return found.messages

    async def step(self, answer: str) -> StepResult:
        """The consequence of `answer`."""
        found = await self._asked(words.Step(answer), self._declared.step_limit_s, "step")
        assert isinstance(found, words.Stepped)
        return found.result

    async def close(self) -> None:
        """Give the process back, for the next episode if it is whole."""
        process, self._process = self._process, None
        if process is None:
            return
        whole = False
        try:
            if self._whole:
                whole = isinstance(await process.ask(words.Close(), _CLOSE_LIMIT_S, "close"), words.Closed)
        except (DataError, InfraError):
            whole = False
        finally:
            await self._processes.give_back(process, whole=whole)

    async def _asked(self, order: words.Order, limit_s: float, what: str) -> words.Answer:
        if self._process is None or not self._whole:
            raise InfraError("the environment's process is gone")
        self._whole = False  # until it has answered
        found = await self._process.ask(order, limit_s, what)
        self._whole = True
        if isinstance(found, words.Raised):
            raise InfraError(found.error) if found.infra else DataError(found.error)
        return found


def _environment() -> dict[str, str]:
    """The worker's environment: what is importable here is importable there; what the run has secret stays here."""
    root = str(Path(jaxroll.__file__).resolve().parent.parent)
    path = os.pathsep.join(dict.fromkeys([root, *(str(Path(entry).resolve()) for entry in sys.path)]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXROLL_")}
    mark = {name: os.environ[name] for name in ("JAXROLL_TEST_ID",) if name in os.environ}
    return {**kept, **mark, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
