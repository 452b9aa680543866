"""An environment process, and the messages between it and its parent: length-prefixed MessagePack over pipes."""

from __future__ import annotations

import asyncio
import inspect
import os
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from jaxroll import env_checks, lifeline
from jaxroll.config import TaskConfig
from jaxroll.env_checks import described
from jaxroll.envs import registry
from jaxroll.errors import DataError, InfraError
from jaxroll.protocols import Environment, StepResult
from jaxroll.records import Message, Task

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class Settings(msgspec.Struct, frozen=True):
    """Arguments on the command line: the parent's process id and the task config of the environments."""

    parent_pid: int
    task: TaskConfig


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Make the environment `name` and reset it."""

    name: str
    task: Task
    seed: int


class NextTask(msgspec.Struct, frozen=True, tag="again"):
    """Reset the current environment again, after an attempt that raised InfraError."""

    task: Task
    seed: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One answer."""

    answer: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The episode is over."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process has started."""


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """The first messages."""

    messages: tuple[Message, ...]


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """The result of an answer."""

    result: StepResult


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The environment is closed."""


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """A call raised; `infra` is True for an InfraError, after which the call may be repeated."""

    error: str
    infra: bool = False


Order = Reset | NextTask | Step | Close
Answer = Ready | Shown | Stepped | Closed | Raised

_ENCODER = msgspec.msgpack.Encoder()
_ORDER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Any) -> bytes:
    """The encoded message, with its length as prefix."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def order(body: bytes) -> Order:
    """The order in `body`. Raises msgspec.DecodeError for malformed data."""
    return _ORDER.decode(body)


def answer(body: bytes) -> Answer:
    """The answer in `body`. Raises msgspec.DecodeError for malformed data."""
    return _ANSWER.decode(body)


# --- An environment process: `python -m jaxroll.envs.executors.worker '{…}'`, orders on stdin, answers on stdout
#
# It plays one episode at a time and creates a new environment for each. It dies with its parent. Output of an
# environment goes to stderr, which is the role's log.

_SHOWN = "the value of reset()"


class NoPool:
    """A placeholder for the scoring pool, which does not exist in an environment process."""

    time_limit_s = 5.0

    async def score(self, env_args: str, answer: str) -> float:
        """Raise DataError."""
        raise DataError("an environment with place = 'process' has no scoring pool: score the answer in its step()")


class Player:
    """The environment of the current episode. All its methods run on one event loop of this process."""

    def __init__(self, task: TaskConfig, runner: asyncio.Runner) -> None:
        self._task, self._runner, self._env = task, runner, None

    def answer(self, order: Order) -> Answer:
        """Execute one order and return its answer; an exception is answered as Raised."""
        try:
            return self._execute(order)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; it fails only this episode
            return Raised(described(error), isinstance(error, InfraError))

    def _execute(self, order: Order) -> Answer:
        match order:
            case Reset(name, task, seed):
                self._env = registry.create(name, NoPool(), self._task)  # type: ignore[arg-type]
                return Shown(env_checks.messages(self._done(self._env.reset(task, seed)), _SHOWN))
            case NextTask(task, seed):
                return Shown(env_checks.messages(self._done(self._current.reset(task, seed)), _SHOWN))
            case Step(text):
                return Stepped(env_checks.step_result(self._done(self._current.step(text))))
            case Close():
                env, self._env = self._env, None
                if env is not None:
                    self._done(env.close())
                return Closed()

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
    """Answer orders until stdin ends; return the exit status."""
    settings = msgspec.json.decode(argument, type=Settings)
    lifeline.bind(settings.parent_pid)
    lifeline.lower_session()
    orders, answers = _private_pipes()
    answers.write(frame(Ready()))
    with asyncio.Runner() as runner:
        player = Player(settings.task, runner)
        while (body := _read(orders)) is not None:
            answers.write(frame(player.answer(order(body))))
    return 0


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout under other descriptors; for environments stdin is then empty and stdout goes to stderr."""
    orders = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return orders, answers


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
