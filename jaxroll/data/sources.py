"""The source of items that a config names, and the characters that its items are made of."""

from __future__ import annotations

from collections.abc import Callable

from jaxroll.config import TaskConfig
from jaxroll.errors import ConfigError
from jaxroll.protocols import Source


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
