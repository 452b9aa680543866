"""What a process of environments and its parent say to each other: length-prefixed MessagePack over pipes."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from jaxroll.config import TaskConfig
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class Settings(msgspec.Struct, frozen=True):
    """What the parent says on the command line: who it is, and the task that environments are made for."""

    parent_pid: int
    task: TaskConfig


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Make the environment `name` and reset it."""

    name: str
    task: Task
    seed: int


class Again(msgspec.Struct, frozen=True, tag="again"):
    """Reset the environment at hand once more: the first attempt raised InfraError."""

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
    """The consequence of an answer."""

    result: StepResult


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The environment is gone."""


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """A call raised; `infra` when it was an InfraError, after which the same may be asked again."""

    error: str
    infra: bool = False


Order = Reset | Again | Step | Close
Answer = Ready | Shown | Stepped | Closed | Raised

_ENCODER = msgspec.msgpack.Encoder()
_ORDER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Any) -> bytes:
    """The message with its length in front."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def order(body: bytes) -> Order:
    """What the parent asks for."""
    return _ORDER.decode(body)


def answer(body: bytes) -> Answer:
    """What the process says. Raises msgspec.DecodeError on nonsense."""
    return _ANSWER.decode(body)
