"""How an environment is asked: within its limits, again where it may be, and with a count of what went wrong."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from jaxroll import protocols
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Environment, StepResult, Traits
from jaxroll.records import Message, Task

Sleep = Callable[[float], Awaitable[object]]
PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 10.0


@dataclass
class Asked:
    """What was asked of environments since the start: calls, those made again, those that took too long."""

    calls: int = 0
    retries: int = 0
    overdue: int = 0


class Asking:
    """Asks environments on the event loop. `sleep` waits between two attempts."""

    def __init__(self, sleep: Sleep = asyncio.sleep) -> None:
        self.asked, self._sleep = Asked(), sleep

    def traits(self, env: Environment) -> Traits:
        """What `env` declares; DataError where that makes no sense."""
        try:
            return protocols.traits(env)
        except ValueError as error:
            raise DataError(str(error)) from error

    async def reset(self, env: Environment, task: Task) -> tuple[Message, ...]:
        """The first messages. DataError when that takes too long, InfraError after the last retry."""
        declared = self.traits(env)
        call = lambda: env.reset(task, task.seed)  # noqa: E731
        return await self._patiently(call, declared.reset_limit_s, declared.reset_retries, "reset")

    async def step(self, env: Environment, answer: str) -> StepResult:
        """The consequence of `answer`; raises as `reset` does."""
        declared = self.traits(env)
        return await self._patiently(lambda: env.step(answer), declared.step_limit_s, declared.step_retries, "step")

    async def _patiently(self, call: Callable[[], Any], limit_s: float, retries: int, what: str) -> Any:
        for attempt in range(retries + 1):
            self.asked.calls += 1
            try:
                return await self._in_time(call, limit_s, what)
            except InfraError:
                if attempt == retries:
                    raise
                self.asked.retries += 1
                await self._sleep(min(PAUSE_FIRST_S * 2**attempt, PAUSE_MAX_S))
        raise AssertionError("unreachable")

    async def _in_time(self, call: Callable[[], Any], limit_s: float, what: str) -> Any:
        """The environment's answer. A hang is the item's fault: the same answer would hang again."""
        limit = asyncio.timeout(None if math.isinf(limit_s) else limit_s)
        try:
            async with limit:
                found = call()
                return await found if inspect.isawaitable(found) else found
        except TimeoutError as error:
            if limit.expired():
                self.asked.overdue += 1
                raise DataError(f"the environment's {what} took longer than {limit_s:g} s") from error
            raise DataError(f"the environment's {what} timed out: {error}") from error
