"""The source of items that a config names, and the characters that its items are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from jaxroll.config import TaskConfig
from jaxroll.errors import ConfigError
from jaxroll.records import Message


class Item(msgspec.Struct, frozen=True):
    """One question with its answer.

    `question` is the full text, `compact` the short form for small models (the same text where a source has none).
    `answer` is None where the source knows no answer; `env_args` is what the environment needs to judge one. `worked`
    is a conversation that a teacher would have had, its own messages and the environment's in turn, where an answer
    alone does not tell.
    """

    question: str
    compact: str
    answer: str | None
    env_args: dict[str, Any]
    worked: tuple[Message, ...] = ()


class Source(Protocol):
    """Items by index. Nothing is materialised: an endless source computes an item when it is asked for."""

    identity: str  # two sources with the same identity hold the same items

    @property
    def size(self) -> int | None:
        """How many items there are; None: endless."""
        ...

    def item(self, index: int) -> Item:
        """Item `index`, always the same. Raises DataError where the source cannot make one."""
        ...

    def alphabet(self) -> str:
        """All characters of the prompts and answers, sorted."""
        ...


def open_source(cfg: TaskConfig) -> Source:
    """The source that `cfg` names, checked; raises ConfigError that says what is missing or refused."""
    opener = _OPENERS.get(cfg.source)
    if opener is None:
        raise ConfigError("task.source", cfg.source, "there is no such source", f"Use one of {sorted(_OPENERS)}.")
    return opener(cfg)


def alphabet(cfg: TaskConfig) -> str:
    """Every character that prompts and answers of the task can hold, sorted: what a character tokenizer must know."""
    return open_source(cfg).alphabet()


def _open_reasoning_gym(cfg: TaskConfig) -> Source:
    from jaxroll.data.gym import GymSource

    return GymSource(cfg)


def _open_jsonl(cfg: TaskConfig) -> Source:
    from jaxroll.data.files import JsonlSource

    return JsonlSource(cfg)


def _open_parquet(cfg: TaskConfig) -> Source:
    from jaxroll.data.files import ParquetSource

    return ParquetSource(cfg)


def _open_game(cfg: TaskConfig) -> Source:
    from jaxroll.data.games import open_game

    return open_game(cfg)


# Opened by name so that a config pays only for the library it uses.
_OPENERS: dict[str, Callable[[TaskConfig], Source]] = {
    "reasoning_gym": _open_reasoning_gym,
    "jsonl": _open_jsonl,
    "parquet": _open_parquet,
    "game": _open_game,
}
