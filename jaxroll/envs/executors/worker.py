"""One process of environments: `python -m jaxroll.envs.executors.worker '{…}'`, orders on stdin, answers on stdout.

It plays one episode at a time and makes its environment anew for each. It dies with its parent. What an environment
prints goes to stderr, which is the log of the role.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from typing import Any, BinaryIO

import msgspec

from jaxroll import env_checks, lifeline, priority
from jaxroll.config import TaskConfig
from jaxroll.env_checks import described
from jaxroll.envs import registry
from jaxroll.envs.executors import messages as words
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Environment

_SHOWN = "what reset() returned"


class NoPool:
    """Stands where a scoring pool would: there is none in a process of environments."""

    time_limit_s = 5.0

    async def score(self, env_args: str, answer: str) -> float:
        """Never a score."""
        raise DataError("an environment in a process of its own has no scoring pool: judge the answer in the process")


class Player:
    """The environment of the episode at hand. All its methods run on one event loop of this process."""

    def __init__(self, task: TaskConfig, runner: asyncio.Runner) -> None:
        self._task, self._runner, self._env = task, runner, None

    def answer(self, order: words.Order) -> words.Answer:
        """What follows from one order."""
        try:
            return self._followed(order)
        except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; it is the episode's answer
            return words.Raised(described(error), isinstance(error, InfraError))

    def _followed(self, order: words.Order) -> words.Answer:
        match order:
            case words.Reset(name, task, seed):
                self._env = registry.create(name, NoPool(), self._task)  # type: ignore[arg-type]
                return words.Shown(env_checks.messages(self._done(self._env.reset(task, seed)), _SHOWN))
            case words.Again(task, seed):
                return words.Shown(env_checks.messages(self._done(self._current.reset(task, seed)), _SHOWN))
            case words.Step(text):
                return words.Stepped(env_checks.step_result(self._done(self._current.step(text))))
            case words.Close():
                env, self._env = self._env, None
                if env is not None:
                    self._done(env.close())
                return words.Closed()

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


def main(argument: str) -> int:
    """Answers orders until stdin ends; returns the exit status."""
    settings = msgspec.json.decode(argument, type=words.Settings)
    lifeline.bind(settings.parent_pid)
    priority.lower_session()
    orders, answers = _private_pipes()
    answers.write(words.frame(words.Ready()))
    with asyncio.Runner() as runner:
        player = Player(settings.task, runner)
        while (body := _read(orders)) is not None:
            answers.write(words.frame(player.answer(words.order(body))))
    return 0


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout under other numbers; what an environment reads is empty, what it prints goes to stderr."""
    orders = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return orders, answers


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(words.LENGTH.size)
    if len(header) < words.LENGTH.size:
        return None
    (size,) = words.LENGTH.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
