"""A scripted engine behind the HTTP front end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from starlette.routing import Route

from jaxroll.engine.sequence import EngineStats
from jaxroll.errors import DataError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun
from jaxroll.rpc import http
from jaxroll.serving import http_server
from jaxroll.serving.http_answers import Served
from jaxroll.serving.http_requests import EngineLimits
from jaxroll.text.tokenizers import CharTokenizer

TOKEN = "a-token"
V1, V2 = Version(0, 1), Version(0, 2)
TEXT = CharTokenizer("".join(map(chr, range(32, 127))) + "\n")


class Engine:
    """Answers with `script`, one token after the other, in `slots` slots; each token needs `go`.

    The first token is of version 0.1, the later ones of 0.2.
    """

    def __init__(self, script: str = "abc", slots: int = 4) -> None:
        self.script, self.slots = script, asyncio.Semaphore(slots)
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[tuple[list[int], GenerationKey, SamplingParams]] = []
        self.running = self.most = 0
        self.changed = asyncio.Condition()
        self.paused = None

    async def generate(self, prompt, key, params, *, keep=False, allowed=None, on_tokens=None) -> Completion:
        if 99 in params.stop_tokens:
            raise DataError("this engine was not made with that")
        self.asked.append((prompt.tolist(), key, params))
        async with self.slots:
            await self._count(1)
            try:
                return await self._sample(params, on_tokens)
            finally:
                self.running -= 1

    async def _count(self, by: int) -> None:
        self.running += by
        self.most = max(self.most, self.running)
        async with self.changed:
            self.changed.notify_all()

    async def _sample(self, params: SamplingParams, on_tokens) -> Completion:
        ids = [*TEXT.encode(self.script), TEXT.eos_id]
        finish = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        for n, stop in ((n, stop) for n in range(len(ids)) for stop in params.stop_strings):
            if stop in TEXT.decode(ids[:n]):
                ids, finish = ids[:n], "stop"
                break
        done = self.completion(ids, finish)
        for at in range(len(ids) - 1):
            await self._step()
            if on_tokens is not None:
                version = V1 if at == 0 else V2
                on_tokens(
                    Completion(done.tokens[at : at + 1], done.logprobs[at : at + 1], (VersionRun(version, 1),), "")
                )
        await self._step()
        return done

    async def _step(self) -> None:
        await self.go.wait()
        for _ in range(4):
            await asyncio.sleep(0)  # a stream gets its turn before the next token

    @staticmethod
    def completion(ids: list[int], finish: str) -> Completion:
        runs = (VersionRun(V1, 1), *([VersionRun(V2, len(ids) - 1)] if len(ids) > 1 else []))
        return Completion(np.array(ids, np.int32), -0.25 * np.arange(1, len(ids) + 1, dtype=np.float32), runs, finish)

    async def pause(self, mode) -> None:
        self.paused = mode

    def resume(self) -> None:
        self.paused = None


@asynccontextmanager
async def served(
    engine: Engine, routes: Sequence[Route] = (), **more
) -> AsyncIterator[tuple[str, http_server.FrontEnd]]:
    model = Served("m", engine, EngineLimits(200, TEXT), lambda: V2, EngineStats, **more)
    front = http_server.FrontEnd(model, TOKEN, routes)
    listening = http.listen("127.0.0.1", 0)
    serving = asyncio.create_task(http.serve(front.app, listening))
    try:
        yield http.address("127.0.0.1", listening), front
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
