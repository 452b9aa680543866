"""Sources of items: files of rows, games, reasoning-gym; selected by the config."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxroll.config import TaskConfig
from jaxroll.config.derived import is_compact
from jaxroll.config.parsing import UNGRADED_ENVS, nearest, opening_messages, task_parts
from jaxroll.data.files import DatasetSource, JsonlSource, ParquetSource
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Source
from jaxroll.records import Item
from jaxroll.rewards.gym_tasks import MIXTURE, PRINTABLE, TASKS, UNSOLVED, GymTask
from jaxroll.rewards.scorers import import_library, importable

# --- Source of reasoning-gym tasks: procedural, offline, endless

# Exceptions of third-party generators for seeds that they do not support.
_GENERATOR_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Item i of seed s is Random(s + i), so neighboring seeds share items. JaxRoll uses one seed and disjoint index ranges.
_SEED = 0
_VIRTUAL_SIZE = 2**62
_SPEC = {"name", "weight", "config"}  # keys of a task in a mixture


class GymSource:
    """Items of the reasoning-gym task `cfg.name` with the settings `cfg.args`."""

    def __init__(self, cfg: TaskConfig) -> None:
        self._task = allowed(cfg.name)
        self.size = self._task.size
        self._compact = COMPACT.get(cfg.name)
        if is_compact(cfg) and self._compact is None:
            raise ConfigError(
                "task.prompt_style",
                cfg.prompt_style,
                f"{cfg.name} has no compact prompt",
                f"Use task.prompt_style='full' (compact: {', '.join(sorted(COMPACT))}).",
            )
        self._name = cfg.name
        self._as_compact = is_compact(cfg)
        args = dict(cfg.args)
        self._settings_by_task = {cfg.name: args}
        if cfg.name == MIXTURE:
            self._settings_by_task = _settings_in_mixture(args)
            args = {"datasets": _specs(args["datasets"])}
        self._dataset = _create_dataset(cfg.name, args, self.size or _VIRTUAL_SIZE)
        self.identity = f"reasoning_gym/{cfg.name}/{json.dumps(dict(cfg.args), sort_keys=True, default=list)}"

    def item(self, index: int) -> Item:
        """Item `index`; DataError when the generator fails for that index."""
        try:
            entry = self._dataset[index]
        except _GENERATOR_ERRORS as error:
            raise DataError(f"{self._name}[{index}] cannot be generated: {error!r}") from error
        metadata, answer = entry["metadata"], entry["answer"]
        name = metadata["source_dataset"] if self._name == MIXTURE else self._name
        task, settings = TASKS[name], self._settings_by_task[name]
        if task.scorer_metadata is None:
            fields = json.loads(json.dumps(metadata, default=str))  # numpy's subclasses of float and str become plain
        else:
            fields = {field: metadata[field] for field in task.scorer_metadata}
        compact = COMPACT.get(name)
        lower = self._as_compact and compact is not None and compact.lower_case
        return Item(
            question=entry["question"],
            compact=entry["question"] if compact is None else compact.prompt(metadata),
            answer=None if answer is None or UNSOLVED in answer else answer.lower() if lower else answer,
            env_args={
                "scorer": "reasoning_gym",
                "dataset": name,
                "entry": {"answer": answer, "metadata": fields},
                **({"settings": settings} if settings and task.scorer_metadata is None else {}),
            },
        )

    def alphabet(self) -> str:
        """The characters of prompts and answers: declared for compact prompts, printable ASCII for full ones."""
        known = "" if self._compact is None else self._compact.prompt_alphabet + self._compact.answer_alphabet
        if not self._as_compact:
            return _sorted_characters(PRINTABLE + known + (self._task.characters or ""))
        if self._name == "spell_backward":  # its words are known, and most ranges of lengths contain no digit
            return _sorted_characters("".join(self._dataset.words).lower())
        return _sorted_characters(known)


def _sorted_characters(text: str) -> str:
    return "".join(sorted(set(text)))


def _create_dataset(name: str, args: dict[str, Any], size: int) -> Any:
    """The dataset object; its output on stdout is dropped."""
    for key in ("seed", "size"):
        if key in args:
            raise ConfigError(
                f"task.args.{key}",
                args[key],
                "JaxRoll chooses the ranges of items",
                "Use task.train_start, task.heldout_start and sft.start.",
            )
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            reasoning_gym = import_library("reasoning_gym", whole=False)
    except ImportError as error:
        raise ConfigError(
            "task.source",
            "reasoning_gym",
            f"reasoning-gym cannot be imported ({error})",
            "pip install 'jaxroll[envs]'.",
        ) from error
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return reasoning_gym.create_dataset(name, seed=_SEED, size=size, **args)
    except (AssertionError, TypeError, ValueError) as error:
        reason, remedy = _unknown_setting(name, args)
        raise ConfigError("task.args", args, reason or f"{name} refuses them: {error}", remedy) from error


def _settings_in_mixture(args: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each task in `datasets`. ConfigError for one that is not an endless task."""
    given = args.get("datasets")
    if set(args) != {"datasets"} or not given or not all({"name"} <= set(each) <= _SPEC for each in given):
        remedy = "Set datasets=[{'name': 'chain_sum', 'weight': 1.0, 'config': {}}, …]."
        raise ConfigError("task.args", args, f"{MIXTURE} needs the list `datasets` and nothing else", remedy)
    for each in given:
        if allowed(each["name"]).size is not None or each["name"] == MIXTURE:
            raise ConfigError("task.args.datasets", each["name"], "it has a limited number of items", "Leave it out.")
    return {each["name"]: dict(each.get("config", {})) for each in given}


def _specs(given: list[dict[str, Any]]) -> list[Any]:
    from reasoning_gym.composite import DatasetSpec

    return [DatasetSpec(**{"weight": 1.0, "config": {}, **each}) for each in given]


def _unknown_setting(name: str, args: dict[str, Any]) -> tuple[str, str]:
    """The first unknown setting as a reason, empty if there is none; and a remedy."""
    from reasoning_gym.factory import DATASETS

    known = tuple(field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size"))
    unknown = [key for key in args if key not in known]
    if unknown:
        return f"{name} has no setting {unknown[0]}", nearest(unknown[0], known)
    return "", f"Its settings: {', '.join(sorted(known))}."


# --- compact prompts of reasoning-gym's tasks


def _word(metadata: Mapping[str, Any]) -> str:
    return metadata["word"].lower()


def _expression(metadata: Mapping[str, Any]) -> str:
    return metadata["expression"].replace(" ", "")


def _board(metadata: Mapping[str, Any]) -> str:
    return "\n".join("".join(str(cell or "_") for cell in row) for row in metadata["puzzle"])


def _letter_and_text(metadata: Mapping[str, Any]) -> str:
    return f"{metadata['target_letter']}:{' '.join(metadata['span'])}"


def _number(metadata: Mapping[str, Any]) -> str:
    return str(metadata["number"])


def _numbers(metadata: Mapping[str, Any]) -> str:
    return ",".join(str(number) for number in metadata["numbers"])


def _equation(metadata: Mapping[str, Any]) -> str:
    return metadata["equation"].replace(" ", "")


def _binary(metadata: Mapping[str, Any]) -> str:
    return metadata["string"]


def _bases(metadata: Mapping[str, Any]) -> str:
    return f"{metadata['source_repr']}:{metadata['source_base']}:{metadata['target_base']}"


def _cipher(metadata: Mapping[str, Any]) -> str:
    return metadata["cipher_text"]


def _grid(metadata: Mapping[str, Any]) -> str:
    return "\n".join("".join(str(cell) for cell in row) for row in metadata["grid"])


@dataclass(frozen=True)
class Compact:
    """The compact prompts of a task: made from an item's metadata by `prompt`, with the characters of the alphabets.

    `lower_case`: prompts and answers are in lower case, because the scorer ignores case; this halves the alphabet.
    """

    prompt: Callable[[Mapping[str, Any]], str]
    prompt_alphabet: str
    answer_alphabet: str
    lower_case: bool = False


_DIGITS = string.digits
_EXPRESSION = _DIGITS + "+-*/()"
_LETTERS = string.ascii_letters + "àë" + _DIGITS  # the characters of the text from which the word tasks are made

COMPACT: Mapping[str, Compact] = {
    "spell_backward": Compact(_word, string.ascii_lowercase + _DIGITS, string.ascii_lowercase + _DIGITS, True),
    "basic_arithmetic": Compact(_expression, _EXPRESSION, _DIGITS + "-"),
    "chain_sum": Compact(_expression, _DIGITS + "+-", _DIGITS + "-"),
    "decimal_chain_sum": Compact(_expression, _DIGITS + "+-.", _DIGITS + "-."),
    "products": Compact(_expression, _DIGITS + "*-", _DIGITS + "-"),
    "mini_sudoku": Compact(_board, "1234_\n", "1234 \n"),
    "letter_counting": Compact(_letter_and_text, _LETTERS + ": ", _DIGITS),
    "count_bits": Compact(_number, _DIGITS, _DIGITS),
    "gcd": Compact(_numbers, _DIGITS + ",", _DIGITS),
    "lcm": Compact(_numbers, _DIGITS + ",", _DIGITS),
    "simple_equations": Compact(_equation, string.ascii_lowercase + _DIGITS + "+-*=", _DIGITS + "-"),
    "binary_alternation": Compact(_binary, "01", _DIGITS + "-"),
    "base_conversion": Compact(_bases, string.ascii_lowercase + _DIGITS + ":", string.ascii_lowercase + _DIGITS),
    "caesar_cipher": Compact(_cipher, string.ascii_uppercase + " ", string.ascii_uppercase + " "),
    "largest_island": Compact(_grid, "01\n", _DIGITS),
}

# --- known tasks


def allowed(name: str) -> GymTask:
    """The task `name`; ConfigError if there is none, or if a package that its generator needs is missing."""
    if name not in TASKS:
        raise ConfigError("task.name", name, "reasoning-gym has no such task", nearest(name, tuple(TASKS)))
    missing = [package for package in TASKS[name].needs if not importable(package)]
    if missing:
        reason = f"its generator needs {', '.join(missing)}, without wheels on PyPI"
        raise ConfigError("task.name", name, reason, f"pip install {' '.join(missing)} (with a C compiler).")
    return TASKS[name]


# --- Sources of items


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
    opening = (message.content for part in task_parts(cfg) for message in opening_messages(part.task))
    return "".join(sorted(set().union(*alphabets, *opening)))


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
    "sokoban": "jaxroll.envs.adapters.text_games:SokobanSource",
    "tool_calls": "jaxroll.envs.adapters.tool_calls:ToolCallSource",
    "code_repair": "jaxroll.envs.adapters.code_repair:CodeRepairSource",
    "shop": "jaxroll.envs.adapters.games:ShopSource",
    "textarena": "jaxroll.envs.adapters.text_games:TextArenaSource",
    "pettingzoo": "jaxroll.envs.adapters.gymnasium_env:PettingZooSource",
    "textworld": "jaxroll.envs.adapters.text_games:TextWorldSource",
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
    """Raise ConfigError for an unknown game, or an environment of another source. Imports nothing."""
    if cfg.source != "game":
        if cfg.env in UNGRADED_ENVS:
            remedy = f"Set task.source to 'game' and task.name to {cfg.env!r}."
            raise ConfigError("task.env", cfg.env, f"it plays games, and task.source is {cfg.source!r}", remedy)
        return
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
    return GymSource(cfg)


_OPENERS: dict[str, Callable[[TaskConfig], Source]] = {
    "reasoning_gym": _open_reasoning_gym,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "hf_dataset": DatasetSource,
    "game": open_game,
}
