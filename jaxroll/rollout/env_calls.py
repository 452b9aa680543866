"""Calls of environment code, with time limits and retries, isolated from each other.

Each call is a task of its own: environment code that cancels its task, raises CancelledError, or ignores a cancellation
affects only its own member. SystemExit, KeyboardInterrupt and GeneratorExit become DataError, because the environment
raised them and the process goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxroll import protocols
from jaxroll.env_checks import described
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Environment, StepResult, Traits
from jaxroll.records import Message, Task

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[object]]
PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 10.0
CLOSE_LIMIT_S = 10.0
CANCEL_GRACE_S = 5.0  # for a cancelled call to end; after that it is abandoned


@dataclass
class EnvCallCounts:
    """Environment calls since the start: all, repeated, over their time limit, deaf to cancellation (abandoned)."""

    calls: int = 0
    retries: int = 0
    overdue: int = 0
    abandoned: int = 0


class EnvironmentCalls:
    """Calls environments on the event loop. `sleep` waits between two attempts."""

    def __init__(self, sleep: Sleep = asyncio.sleep) -> None:
        self.counts, self._sleep = EnvCallCounts(), sleep
        self._stuck: dict[int, asyncio.Task[Any]] = {}  # id of an environment → its call that ignores its cancellation

    def traits(self, env: Environment) -> Traits:
        """The traits that `env` declares; DataError if they are invalid."""
        try:
            return protocols.traits(env)
        except ValueError as error:
            raise DataError(str(error)) from error

    def make(self, make: Callable[[str], Environment], name: str) -> Environment:
        """The environment `name`, made by `make`."""
        try:
            return make(name)
        except Exception:
            raise
        except BaseException as error:
            raise DataError(f"making the environment raised {described(error)}") from error

    async def reset(self, env: Environment, task: Task) -> tuple[Message, ...]:
        """The first messages. DataError after the time limit, InfraError after the last retry."""
        declared = self.traits(env)
        call = lambda: env.reset(task, task.seed)  # noqa: E731
        return await self._with_retries(env, call, declared.reset_limit_s, declared.reset_retries, "reset")

    async def step(self, env: Environment, answer: str) -> StepResult:
        """The result of `answer`; raises as `reset` does."""
        declared = self.traits(env)
        call = lambda: env.step(answer)  # noqa: E731
        return await self._with_retries(env, call, declared.step_limit_s, declared.step_retries, "step")

    async def close(self, env: Environment) -> None:
        """Close `env`, unless one of its calls is still running. Raises the error of its close."""
        if id(env) not in self._stuck:
            await self._within_limit(env, env.close, CLOSE_LIMIT_S, "close")

    async def _with_retries(
        self, env: Environment, call: Callable[[], Any], limit_s: float, retries: int, what: str
    ) -> Any:
        for attempt in range(retries + 1):
            self.counts.calls += 1
            try:
                return await self._within_limit(env, call, limit_s, what)
            except InfraError:
                if attempt == retries:
                    raise
                self.counts.retries += 1
                await self._sleep(min(PAUSE_FIRST_S * 2**attempt, PAUSE_MAX_S))
        raise AssertionError("unreachable")

    async def _within_limit(self, env: Environment, call: Callable[[], Any], limit_s: float, what: str) -> Any:
        """The result of the call. A timeout is a DataError: the same item and answer would time out again."""
        name = f"{type(env).__name__}.{what}"
        task = asyncio.get_running_loop().create_task(_answered(call, what), name=name)
        try:
            await asyncio.wait([task], timeout=None if math.isinf(limit_s) else limit_s)
        except asyncio.CancelledError:
            await self._cancelled(env, task)
            raise
        if not task.done():
            self.counts.overdue += 1
            await self._cancelled(env, task)
            raise DataError(f"the environment's {what} took longer than {limit_s:g} s")
        if task.cancelled():
            raise DataError(f"the environment's {what} cancelled itself")
        error = task.exception()
        if error is not None and not isinstance(error, Exception):  # GeneratorExit, or a panic of compiled code
            raise DataError(f"the environment's {what} raised {described(error)}") from error
        return task.result()

    async def _cancelled(self, env: Environment, task: asyncio.Task[Any]) -> None:
        """Cancel the call and wait for it to end; abandon it if it ignores the cancellation."""
        task.cancel()
        task.add_done_callback(_noticed)
        try:
            await asyncio.wait([task], timeout=CANCEL_GRACE_S)
        finally:
            if not task.done():
                self.counts.abandoned += 1
                self._stuck[id(env)] = task
                task.add_done_callback(
                    lambda _: self._stuck.pop(id(env), None)
                )  # keeps `env` alive, so that its id is not reused


async def _answered(call: Callable[[], Any], what: str) -> Any:
    """The result of `call`; DataError for exceptions that would end the event loop or look like our cancellation."""
    try:
        found = call()
        return await found if inspect.isawaitable(found) else found
    except TimeoutError as error:
        raise DataError(f"the environment's {what} timed out: {described(error)}") from error
    except Exception:
        raise
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        if is_cancellation(error):
            raise
        raise DataError(f"the environment's {what} raised {described(error)}") from error


def is_cancellation(error: BaseException) -> bool:
    """True if `error` comes from a cancellation of the current task; False if foreign code raised it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _noticed(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of an abandoned task, because asyncio warns about unretrieved ones."""
    if not task.cancelled():
        task.exception()
