"""Prompts at hand: asked of the feeder ahead of need, so that a lease never waits for the pipeline."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from jaxroll.records import Task

_CHUNK = 64


class Feeder(Protocol):
    """Where prompts come from: `next(count)` gives (task, pipeline state after it), fewer only at the data's end."""

    async def next(self, count: int) -> list[tuple[Task, bytes]]: ...

    def restore(self, state: bytes | None) -> Any:
        """Continue after the prompt whose state this is; may be a coroutine. None is the beginning."""
        ...


class PromptBuffer:
    """What the feeder gave and no group has used. Nothing in it is durable: a restart asks the feeder again."""

    def __init__(self, feeder: Feeder, ahead: int, on_change: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._feeder, self._target = feeder, max(1, ahead)
        self._on_change, self._on_end = on_change, on_end
        self.ready: deque[tuple[Task, bytes]] = deque()
        self._low = asyncio.Event()
        self._low.set()
        self._again: tuple[bytes | None] | None = None  # the state that a fork went back to

    def take(self, count: int) -> None:
        """Drop the first `count`, which became groups."""
        for _ in range(count):
            self.ready.popleft()
        if len(self.ready) < self._target:
            self._low.set()

    def want(self, count: int) -> None:
        """Keep at least `count` ready from now on."""
        self._target = max(self._target, count)
        if len(self.ready) < self._target:
            self._low.set()

    def restart(self, state: bytes | None) -> None:
        """Drop what is ready and go on after the prompt whose state this is, even when the data had ended."""
        self.ready.clear()
        self._again = (state,)
        self._low.set()

    async def fill(self, state: bytes | None, *, ended: bool = False) -> None:
        """For ever: restore the feeder, then keep the buffer full; at the data's end (or when it has `ended`) wait for
        a restart. The feeder's errors pass through.
        """
        while True:
            if not ended:
                await self._fill_from(state)
            while self._again is None:
                await self._until_low()
            (state,), self._again, ended = self._again, None, False

    async def _fill_from(self, state: bytes | None) -> None:
        """Until the data ends or a restart is asked for."""
        restored = self._feeder.restore(state)
        if inspect.isawaitable(restored):
            await restored
        while self._again is None:
            await self._until_low()
            while self._again is None and len(self.ready) < self._target:
                wanted = min(_CHUNK, self._target - len(self.ready))
                prompts = await self._feeder.next(wanted)
                if self._again is not None:
                    return  # these belong to the stream before it
                self.ready.extend(prompts)
                self._on_change()
                if len(prompts) < wanted:
                    return await self._end()

    async def _end(self) -> None:
        """The data has ended once its last prompt is used, not when the feeder says so."""
        while self.ready:
            await self._until_low()
        if self._again is None:
            self._on_end()

    async def _until_low(self) -> None:
        await self._low.wait()
        self._low.clear()
