"""Buffer of prompts, requested from the feeder in advance so that a lease never waits for the prompt pipeline."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from jaxroll.records import Task

_CHUNK = 64


class Feeder(Protocol):
    """Source of prompts. `next(count)` returns (task, pipeline state after it) pairs; fewer only at the data's end."""

    async def next(self, count: int) -> list[tuple[Task, bytes]]: ...

    def restore(self, state: bytes | None) -> Any:
        """Continue after the prompt with this pipeline state; None is the beginning. May be a coroutine."""
        ...


class PromptBuffer:
    """Prompts that no group has used yet. Not durable: after a restart the feeder provides them again."""

    def __init__(self, feeder: Feeder, ahead: int, on_change: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._feeder, self._target = feeder, max(1, ahead)
        self._on_change, self._on_end = on_change, on_end
        self.ready: deque[tuple[Task, bytes]] = deque()
        self._low = asyncio.Event()
        self._low.set()
        self._restart_from: tuple[bytes | None] | None = None  # (pipeline state,) at which a fork continues

    def take(self, count: int) -> None:
        """Drop the first `count` prompts, which became groups."""
        for _ in range(count):
            self.ready.popleft()
        if len(self.ready) < self._target:
            self._low.set()

    def want(self, count: int) -> None:
        """Keep at least `count` prompts ready from now on."""
        self._target = max(self._target, count)
        if len(self.ready) < self._target:
            self._low.set()

    def restart(self, state: bytes | None) -> None:
        """Drop the buffer and continue after the prompt with this pipeline state, even if the data had ended."""
        self.ready.clear()
        self._restart_from = (state,)
        self._low.set()

    async def fill(self, state: bytes | None, *, ended: bool = False) -> None:
        """Restore the feeder and keep the buffer full, without end; the feeder's errors pass through.

        At the end of the data (or if it has `ended` already), wait for a restart.
        """
        while True:
            if not ended:
                await self._fill_from(state)
            while self._restart_from is None:
                await self._until_low()
            (state,), self._restart_from, ended = self._restart_from, None, False

    async def _fill_from(self, state: bytes | None) -> None:
        """Keep the buffer full until the data ends or a restart is requested."""
        restored = self._feeder.restore(state)
        if inspect.isawaitable(restored):
            await restored
        while self._restart_from is None:
            await self._until_low()
            while self._restart_from is None and len(self.ready) < self._target:
                wanted = min(_CHUNK, self._target - len(self.ready))
                prompts = await self._feeder.next(wanted)
                if self._restart_from is not None:
                    return  # they belong to the stream before the restart
                self.ready.extend(prompts)
                self._on_change()
                if len(prompts) < wanted:
                    return await self._end()

    async def _end(self) -> None:
        """Report the end of the data once its last prompt is used."""
        while self.ready:
            await self._until_low()
        if self._restart_from is None:
            self._on_end()

    async def _until_low(self) -> None:
        await self._low.wait()
        self._low.clear()
