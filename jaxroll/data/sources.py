"""Sources of items: files of rows, games, reasoning-gym; selected by the config."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping

from jaxroll.config import TaskConfig
from jaxroll.config.parsing import nearest
from jaxroll.config.prompt_rules import opening_messages, task_parts
from jaxroll.data.files import DatasetSource, JsonlSource, ParquetSource
from jaxroll.errors import ConfigError
from jaxroll.protocols import Source


def open_source(cfg: TaskConfig) -> Source:
    """The source that `cfg` names; ConfigError when it is missing or refused."""
    opener = _OPENERS.get(cfg.source)
    if opener is None:
        raise ConfigError("task.source", cfg.source, "there is no such source", f"Use one of {sorted(_OPENERS)}.")
    return opener(cfg)


def alphabet(cfg: TaskConfig) -> str:
    """All characters of the task's prompts and answers, sorted, for a character tokenizer."""
    return with_opening((open_source(part.task).alphabet() for part in task_parts(cfg)), cfg)


def with_opening(alphabets: Iterable[str], cfg: TaskConfig) -> str:
    """The characters of `alphabets` and of the messages that the config places before every question, sorted."""
    return "".join(sorted(set().union(*alphabets, *(message.content for message in opening_messages(cfg)))))


# --- games

_BROKEN_MODULE = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    SyntaxError,
    TypeError,
    ValueError,
)

# Built-in games are loaded by name, like a user's games.
GAMES: Mapping[str, str] = {
    "frozen_lake": "jaxroll.envs.frozen_lake:FrozenLakeSource",
    "calculator": "jaxroll.envs.calculator:CalculatorSource",
    "gymnasium": "jaxroll.envs.adapters.gymnasium_env:GymnasiumSource",
    "sokoban": "jaxroll.envs.adapters.sokoban:SokobanSource",
    "tool_calls": "jaxroll.envs.adapters.tool_calls:ToolCallSource",
    "code_repair": "jaxroll.envs.adapters.code_repair:CodeRepairSource",
    "shop": "jaxroll.envs.adapters.shop:ShopSource",
    "textarena": "jaxroll.envs.adapters.textarena_env:TextArenaSource",
    "pettingzoo": "jaxroll.envs.adapters.pettingzoo_env:PettingZooSource",
    "textworld": "jaxroll.envs.adapters.textworld_env:TextWorldSource",
    "openenv": "jaxroll.envs.adapters.openenv_env:OpenEnvSource",
    "verifiers": "jaxroll.envs.adapters.verifiers_env:VerifiersSource",
}


def open_game(cfg: TaskConfig) -> Source:
    """The source that `task.name` names: one of `GAMES`, or `package.module:Class`, called with the TaskConfig.

    ConfigError for an unknown game, and for an environment of another game.
    """
    check_game(cfg)
    return _loaded(GAMES.get(cfg.name, cfg.name))(cfg)


def check_game(cfg: TaskConfig) -> None:
    """Raise ConfigError for an unknown game, or an environment of another game. Imports nothing."""
    if ":" in cfg.name:
        return
    if cfg.name not in GAMES:
        raise ConfigError("task.name", cfg.name, "there is no such game", nearest(cfg.name, tuple(GAMES)))
    if cfg.env not in (cfg.name, "agent") and ":" not in cfg.env:
        raise ConfigError("task.env", cfg.env, f"it does not play {cfg.name}", f"Set task.env to {cfg.name!r}.")


def _loaded(name: str) -> Callable[[TaskConfig], Source]:
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except _BROKEN_MODULE as e:
        reason = f"it cannot be imported: {type(e).__name__}: {e}"
        remedy = "Install or fix it, or start the run in a folder from which it can be imported."
        raise ConfigError("task.name", name, reason, remedy) from e


# --- sources by the name in `task.source`


def _open_reasoning_gym(cfg: TaskConfig) -> Source:
    from jaxroll.data.gym import GymSource  # imports reasoning-gym, which other sources do not need

    return GymSource(cfg)


_OPENERS: dict[str, Callable[[TaskConfig], Source]] = {
    "reasoning_gym": _open_reasoning_gym,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "hf_dataset": DatasetSource,
    "game": open_game,
}
