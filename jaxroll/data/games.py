"""Games of `jaxroll.envs` as a source: endless, by number, with worked play for the warm start."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxroll.config import TaskConfig
from jaxroll.config.parsing import nearest
from jaxroll.data.gym import PRINTABLE, GymSource
from jaxroll.envs import calculator, frozen_lake
from jaxroll.errors import ConfigError
from jaxroll.protocols import Source
from jaxroll.records import Item

_BROKEN_MODULE = (
    ArithmeticError, AttributeError, ImportError, LookupError, NameError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
_PROBLEMS = ("basic_arithmetic", "chain_sum", "decimal_chain_sum", "products")  # their compact form is an expression


class FrozenLakeSource:
    """Lakes by number: the question is the map, so a held-out map is never trained on, whatever its number.

    `task.args`: `size` `ice` `slippery` `max_turns` of the game, and `noise`, the share of random moves in worked play.
    """

    size = None

    def __init__(self, cfg: TaskConfig) -> None:
        args = dict(cfg.args)
        self._noise = _share(args, "noise")
        self._settings = _settings(frozen_lake.Settings, args)
        self._as_compact = cfg.prompt == "compact"
        self.identity = f"frozen_lake/{json.dumps(dataclasses.asdict(self._settings))}"

    def item(self, index: int) -> Item:
        """Lake `index`."""
        lake = frozen_lake.lake(index, self._settings)
        return Item(
            question=frozen_lake.RULES + lake.shown(0),
            compact=lake.shown(0),
            answer=None,
            env_args=frozen_lake.arguments(lake, self._settings),
            worked=frozen_lake.worked(lake, self._settings, index, self._noise),
        )

    def alphabet(self) -> str:
        """The characters of maps and actions; printable ASCII for full prompts."""
        signs = frozen_lake.ICE + frozen_lake.HOLE + frozen_lake.GOAL + frozen_lake.PLAYER + frozen_lake.NOT_AN_ACTION
        extra = "" if self._as_compact else PRINTABLE
        return "".join(sorted(set(signs + "\n" + "".join(frozen_lake.ACTIONS) + extra)))


class CalculatorSource:
    """Arithmetic of reasoning-gym with a calculator at hand.

    `task.args`: `problem`, a task of reasoning-gym, its settings as `problem_args`; of worked play, `direct`, the share
    of answers without the tool, and `slips`, the share of calls with a wrong digit.
    """

    size = None

    def __init__(self, cfg: TaskConfig) -> None:
        args = dict(cfg.args)
        self._direct, self._slips = _share(args, "direct"), _share(args, "slips")
        problem, settings = args.pop("problem", "products"), args.pop("problem_args", {})
        _refuse_unknown(args, ("problem", "problem_args", "direct", "slips"))
        if problem not in _PROBLEMS:
            raise ConfigError("task.args.problem", problem, "it is not arithmetic", nearest(str(problem), _PROBLEMS))
        self._as_compact = cfg.prompt == "compact"
        self._gym = GymSource(dataclasses.replace(cfg, source="reasoning_gym", name=problem, args=settings))
        self.identity = f"calculator/{self._gym.identity}"

    def item(self, index: int) -> Item:
        """Problem `index`."""
        found = self._gym.item(index)
        assert found.answer is not None
        dialogue = calculator.worked(self._expression(index), found.answer, index, self._direct, self._slips)
        return Item(calculator.RULES + found.question, found.compact, found.answer, found.env_args, dialogue)

    def alphabet(self) -> str:
        """The characters of problems, calls and results; printable ASCII for full prompts."""
        return "".join(sorted(set(self._gym.alphabet() + calculator.ALPHABET)))

    def _expression(self, index: int) -> str:
        return self._gym.item(index).compact


GAMES: Mapping[str, Callable[[TaskConfig], Source]] = {
    "frozen_lake": FrozenLakeSource,
    "calculator": CalculatorSource,
}


def open_game(cfg: TaskConfig) -> Source:
    """The source that `task.name` names: one of `GAMES`, or `package.module:Class`, which is made of the TaskConfig.

    ConfigError for one that there is not, and for an environment of another game.
    """
    check(cfg)
    return _loaded(cfg.name)(cfg) if ":" in cfg.name else GAMES[cfg.name](cfg)


def check(cfg: TaskConfig) -> None:
    """ConfigError for a game that there is not, or an environment that does not play it. Imports nothing."""
    if ":" in cfg.name:
        return
    if cfg.name not in GAMES:
        raise ConfigError("task.name", cfg.name, "there is no such game", nearest(cfg.name, tuple(GAMES)))
    if cfg.env != cfg.name and ":" not in cfg.env:
        raise ConfigError("task.env", cfg.env, f"it does not play {cfg.name}", f"Set task.env to {cfg.name!r}.")


def _loaded(name: str) -> Callable[[TaskConfig], Source]:
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except _BROKEN_MODULE as e:
        reason = f"it cannot be imported: {type(e).__name__}: {e}"
        raise ConfigError("task.name", name, reason, "Install or mend it, or run where it can be found.") from e


def _share(args: dict[str, Any], name: str) -> float:
    """The share `name`, taken out of `args`."""
    share = args.pop(name, 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"task.args.{name}", share, "it is a share", "Give a number between 0 and 1.")
    return float(share)


def _settings(kind: type, args: Mapping[str, Any]) -> Any:
    """The dataclass `kind` of `args`."""
    _refuse_unknown(args, tuple(field.name for field in dataclasses.fields(kind)))
    try:
        return kind(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError("task.args", dict(args), str(error), "See docs/add_an_environment.md.") from error


def _refuse_unknown(args: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in args:
        if name not in known:
            raise ConfigError(f"task.args.{name}", args[name], "nothing reads it", nearest(name, known))
