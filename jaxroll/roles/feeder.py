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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from jaxroll import lifeline, wire
from jaxroll.config import RoleArgs
from jaxroll.errors import ConfigError, InfraError, JaxRollError
from jaxroll.records import Task
from jaxroll.text import tokenizers

_HEADER = struct.Struct("<I")
PROGRESS_EVERY_S = 1.0


class FeedRequest(msgspec.Struct, frozen=True):
    """Ask for `count` tasks; with `restore`, first go (back) to `state` (None is the beginning)."""

    count: int
    restore: bool = False
    state: bytes | None = None


class FeedReply(msgspec.Struct, frozen=True):
    """The tasks in order, each with the pipeline's state after it; or why there are none; or a sign of progress."""

    tasks: tuple[tuple[Task, bytes], ...] = ()
    error: str = ""
    progress: str = ""  # what has begun: the answer itself is still to come


def main(args: RoleArgs) -> None:
    """Answer feed requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what datasets print must not reach the frames

    def send(reply: FeedReply) -> None:
        data = wire.encode(reply)
        answers.write(_HEADER.pack(len(data)) + data)
        answers.flush()

    send(FeedReply(progress="it imports jax and grain"))
    from jaxroll.data.prompts import PromptPipeline

    pipeline: PromptPipeline | None = None
    while True:
        frame = _read_frame(sys.stdin.buffer)
        if frame is None:
            return
        try:
            if pipeline is None:
                send(FeedReply(progress="it opens the task's data"))
                pipeline = PromptPipeline(args.config)
                tokenizers.note(args.run_dir, pipeline.tokenizer)
            reply = _answer(pipeline, wire.decode(frame, FeedRequest), send)
        except JaxRollError as error:
            reply = FeedReply(error=str(error))
        send(reply)


def _answer(pipeline, request: FeedRequest, send: Callable[[FeedReply], None]) -> FeedReply:
    sent_s = time.monotonic()
    if request.restore and request.state is not None:
        pipeline.restore(request.state)
    tasks = []
    for _ in range(request.count):
        try:
            task = next(pipeline)
        except StopIteration:
            break
        tasks.append((task, pipeline.state()))
        if time.monotonic() - sent_s >= PROGRESS_EVERY_S:
            sent_s = time.monotonic()
            send(FeedReply(progress=f"it makes prompt {len(tasks) + 1} of {request.count}"))
    return FeedReply(tuple(tasks))


def _read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    return stream.read(size)


class FeederProcess:
    """The store's side: a feeder child that is started again, at the same place, when it dies or makes no progress.

    `deadline_s` is how long it may go without a sign of progress; of the second child in a row it is twice, of the
    third four times that, for a machine may be busy. Used from one event loop. `next` raises ConfigError when the task
    gives no prompts, InfraError when three children in a row could not answer.
    """

    def __init__(self, run_dir: Path, *, deadline_s: float = 120.0, command: Sequence[str] = ()) -> None:
        self._run_dir, self._deadline_s = run_dir, deadline_s
        self._command = [*command] or [sys.executable, "-m", "jaxroll", "feeder", f"--run={run_dir}"]
        self._doing = ""
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
            failures: list[str] = []
            for patience_s in (self._deadline_s, 2 * self._deadline_s, 4 * self._deadline_s):
                try:
                    reply = await self._ask(count, patience_s)
                except TimeoutError:
                    failures.append(f"no progress for {patience_s:g} s, the last sign of it: {self._doing}")
                    await self._stop()
                    continue
                except (OSError, asyncio.IncompleteReadError) as error:
                    failures.append(f"it ended ({type(error).__name__}), the last sign of it: {self._doing}")
                    await self._stop()
                    continue
                if reply.error:
                    raise ConfigError("task", self._run_dir.name, f"gives no prompts: {reply.error}")
                if reply.tasks:
                    self._state = reply.tasks[-1][1]
                return list(reply.tasks)
            raise InfraError(
                f"the prompt feeder gave no prompts, three times in a row ({'; '.join(failures)}); "
                "what it printed is in the store's log"
            )

    async def close(self) -> None:
        """End the child."""
        await self._stop()

    async def _ask(self, count: int, patience_s: float) -> FeedReply:
        """The answer; TimeoutError when nothing is heard of the child for so long."""
        process, fresh = self._process, False
        if process is None or process.returncode is not None:
            process, fresh = await self._start(), True
        assert process.stdin is not None and process.stdout is not None
        request = wire.encode(FeedRequest(count, restore=fresh, state=self._state if fresh else None))
        process.stdin.write(_HEADER.pack(len(request)) + request)
        await asyncio.wait_for(process.stdin.drain(), patience_s)
        while True:
            (size,) = _HEADER.unpack(await asyncio.wait_for(process.stdout.readexactly(_HEADER.size), patience_s))
            data = await asyncio.wait_for(process.stdout.readexactly(size), patience_s)
            if not (reply := wire.decode(data, FeedReply)).progress:
                return reply
            self._doing = reply.progress

    async def _start(self) -> asyncio.subprocess.Process:
        self._doing = "its start"
        self._process = await lifeline.child(
            *self._command,
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
