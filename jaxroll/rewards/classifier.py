"""A reward model in a folder, scored by a process of its own (`jaxroll.tools.classifier`), which has JAX. None here.

Questions wait in the process, which answers all that are there in batches of bounded size. A question that is not
answered within its time kills the process; the next one starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxroll.lifeline import PARENT_ENV
from jaxroll.records import Message
from jaxroll.rewards.http import HttpError
from jaxroll.rewards.processes import environment

READY = -1  # the id of the first line of the process
START_S = 600.0  # to load JAX and the weights
_LINE_BYTES = 1 << 20
_PASSED_ON = ("NPROC", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
              "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES")  # fmt: skip


class Served(msgspec.Struct, frozen=True):
    """Settings of the process: the folder, the data type of its parameters, and limits in tokens."""

    path: str
    dtype: str
    max_tokens: int
    batch_tokens: int


class Question(msgspec.Struct, frozen=True):
    """A conversation to score."""

    id: int
    messages: tuple[Message, ...]


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The score of a question, or the reason why there is none."""

    id: int
    score: float | None = None
    error: str = ""


class Classifier:
    """The process and its unanswered questions. Everything runs on one event loop."""

    def __init__(self, settings: Served, start_s: float = START_S) -> None:
        self._settings, self._start_s = settings, start_s
        self._ids = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._starting = asyncio.Lock()

    async def score(self, messages: Sequence[Mapping[str, str]], timeout_s: float) -> dict[str, Any]:
        """The response of a reward model to a conversation: `score`.

        HttpError if the process gives none in time, ValueError if it cannot score the conversation.
        """
        process = await self._running()
        number = next(self._ids)
        shown = tuple(Message(message["role"], message["content"]) for message in messages)
        verdict = await self._answer(process, number, msgspec.json.encode(Question(number, shown)) + b"\n", timeout_s)
        if verdict.error:
            raise ValueError(verdict.error)
        return {"score": verdict.score}

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is not None:
                return self._process
            command = ("-P", "-m", "jaxroll.tools.classifier", msgspec.json.encode(self._settings).decode())
            passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            env = environment() | passed_on | {"JAX_PLATFORMS": "cpu", PARENT_ENV: str(os.getpid())}
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *command, env=env, limit=_LINE_BYTES, start_new_session=True,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
            except OSError as error:
                raise HttpError("start", str(error)) from error
            self._process = process
            self._reading = asyncio.ensure_future(self._read(process))
            await self._answer(process, READY, b"", self._start_s)
            return process

    async def _answer(self, process: asyncio.subprocess.Process, number: int, line: bytes, limit_s: float) -> Verdict:
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                assert process.stdin is not None
                process.stdin.write(line)
                with contextlib.suppress(OSError):  # it has ended, which `_read` reports
                    await process.stdin.drain()
                return await future
        except TimeoutError as error:
            self.close()
            raise HttpError("timeout", f"after {limit_s:g} s") from error
        finally:
            self._waiting.pop(number, None)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                verdict = msgspec.json.decode(line, type=Verdict)
                if (future := self._waiting.get(verdict.id)) and not future.done():
                    future.set_result(verdict)
        except (ValueError, msgspec.MsgspecError) as error:
            self._lose(process, f"malformed output: {error}")
        else:
            self._lose(process, f"it ended with {await process.wait()}; its log has the reason")

    def _lose(self, process: asyncio.subprocess.Process, why: str) -> None:
        """Fail the questions of a process that is gone, or is killed here."""
        if process is not self._process:
            return
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(HttpError("process", why))

    def close(self) -> None:
        """Kill the process; questions that wait fail. May be called twice."""
        if self._process is not None:
            self._lose(self._process, "it was killed")
