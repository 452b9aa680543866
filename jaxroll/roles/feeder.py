"""Prompts for the store, from a process of their own.

grain imports jax, and the store must stay free of it, so the pipeline runs in a child (`jaxroll feeder`) that answers
length-prefixed MessagePack frames on its standard input and output. The child holds no history: the store keeps the
pipeline's state bytes with every prompt it issues and gives them back after a restart.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from jaxroll import lifeline, wire
from jaxroll.config import RoleArgs
from jaxroll.errors import ConfigError, InfraError, JaxRollError
from jaxroll.records import Task
from jaxroll.text import tokenizers

_HEADER = struct.Struct("<I")


class FeedRequest(msgspec.Struct, frozen=True):
    """Ask for `count` tasks; with `restore`, first go (back) to `state` (None is the beginning)."""

    count: int
    restore: bool = False
    state: bytes | None = None


class FeedReply(msgspec.Struct, frozen=True):
    """The tasks in order, each with the pipeline's state after it; or why there are none."""

    tasks: tuple[tuple[Task, bytes], ...] = ()
    error: str = ""


def main(args: RoleArgs) -> None:
    """Answer feed requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what datasets print must not reach the frames
    from jaxroll.data.prompts import PromptPipeline

    pipeline: PromptPipeline | None = None
    while True:
        frame = _read_frame(sys.stdin.buffer)
        if frame is None:
            return
        try:
            if pipeline is None:
                pipeline = PromptPipeline(args.config)
                tokenizers.note(args.run_dir, pipeline.tokenizer)
            reply = _answer(pipeline, wire.decode(frame, FeedRequest))
        except JaxRollError as error:
            reply = FeedReply(error=str(error))
        data = wire.encode(reply)
        answers.write(_HEADER.pack(len(data)) + data)
        answers.flush()


def _answer(pipeline, request: FeedRequest) -> FeedReply:
    if request.restore and request.state is not None:
        pipeline.restore(request.state)
    tasks = []
    for _ in range(request.count):
        try:
            task = next(pipeline)
        except StopIteration:
            break
        tasks.append((task, pipeline.state()))
    return FeedReply(tuple(tasks))


def _read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    return stream.read(size)


class FeederProcess:
    """The store's side: a feeder child that is started again, at the same place, when it dies.

    Used from one event loop. `next` raises ConfigError when the task gives no prompts,
    InfraError when three children in a row could not answer.
    """

    def __init__(self, run_dir: Path, *, deadline_s: float = 120.0) -> None:
        self._run_dir, self._deadline_s = run_dir, deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._state: bytes | None = None
        self._lock = asyncio.Lock()

    async def restore(self, state: bytes | None) -> None:
        """Continue after the prompt that `state` belongs to; None is the beginning."""
        self._state = state
        await self._stop()

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        """The next `count` tasks, each with the state after it; fewer only at the end of the data."""
        async with self._lock:
            failure = ""
            for _ in range(3):
                try:
                    reply = await asyncio.wait_for(self._ask(count), self._deadline_s)
                except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                    failure = f"{type(error).__name__}: {error}"
                    await self._stop()
                    continue
                if reply.error:
                    raise ConfigError("task", self._run_dir.name, f"gives no prompts: {reply.error}")
                if reply.tasks:
                    self._state = reply.tasks[-1][1]
                return list(reply.tasks)
            raise InfraError(f"the prompt feeder died three times ({failure}); its log is the store's")

    async def close(self) -> None:
        """End the child."""
        await self._stop()

    async def _ask(self, count: int) -> FeedReply:
        process, fresh = self._process, False
        if process is None or process.returncode is not None:
            process, fresh = await self._start(), True
        assert process.stdin is not None and process.stdout is not None
        request = wire.encode(FeedRequest(count, restore=fresh, state=self._state if fresh else None))
        process.stdin.write(_HEADER.pack(len(request)) + request)
        await process.stdin.drain()
        (size,) = _HEADER.unpack(await process.stdout.readexactly(_HEADER.size))
        return wire.decode(await process.stdout.readexactly(size), FeedReply)

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "jaxroll",
            "feeder",
            f"--run={self._run_dir}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", lifeline.PARENT_ENV: str(os.getpid())},
            start_new_session=True,  # what the terminal sends reaches it through the store only
        )
        return self._process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
