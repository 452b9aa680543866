"""Source of reasoning-gym tasks: procedural, offline, endless."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import string
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxroll.config import TaskConfig
from jaxroll.config.parsing import nearest
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Item
from jaxroll.rewards.scorers import import_library

# Exceptions of third-party generators for seeds that they do not support.
_GENERATOR_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Item i of seed s is Random(s + i), so neighbouring seeds share items. JaxRoll uses one seed and disjoint index ranges.
_SEED = 0
_VIRTUAL_SIZE = 2**62


class GymSource:
    """Items of the reasoning-gym task `cfg.name` with the settings `cfg.args`."""

    size = None

    def __init__(self, cfg: TaskConfig) -> None:
        self._task = allowed(cfg.name)
        if cfg.prompt_style == "compact" and self._task.compact is None:
            raise ConfigError(
                "task.prompt_style",
                cfg.prompt_style,
                f"{cfg.name} has no compact prompt",
                f"Use task.prompt_style='full' (compact: {', '.join(_with_compact())}).",
            )
        self._name = cfg.name
        self._as_compact = cfg.prompt_style == "compact"
        self._dataset = _create_dataset(cfg.name, dict(cfg.args))
        self.identity = f"reasoning_gym/{cfg.name}/{json.dumps(dict(cfg.args), sort_keys=True, default=list)}"

    def item(self, index: int) -> Item:
        """Item `index`; DataError when the generator fails for that index."""
        try:
            entry = self._dataset[index]
        except _GENERATOR_ERRORS as error:
            raise DataError(f"{self._name}[{index}] cannot be generated: {error!r}") from error
        metadata, answer, task = entry["metadata"], entry["answer"], self._task
        lower = task.lower_case and self._as_compact
        return Item(
            question=entry["question"],
            compact=entry["question"] if task.compact is None else task.compact(metadata),
            answer=answer.lower() if lower and answer is not None else answer,
            env_args={
                "scorer": "reasoning_gym",
                "dataset": self._name,
                "entry": {"answer": answer, "metadata": {field: metadata[field] for field in task.scorer_metadata}},
            },
        )

    def alphabet(self) -> str:
        """The characters of prompts and answers: declared for compact prompts, printable ASCII for full ones."""
        if not self._as_compact:
            return _sorted_characters(PRINTABLE + self._task.prompt_alphabet + self._task.answer_alphabet)
        if self._name == "spell_backward":  # its words are known, and most ranges of lengths contain no digit
            return _sorted_characters("".join(self._dataset.words).lower())
        return _sorted_characters(self._task.prompt_alphabet + self._task.answer_alphabet)


def _sorted_characters(text: str) -> str:
    return "".join(sorted(set(text)))


def _with_compact() -> list[str]:
    return sorted(name for name, task in TASKS.items() if task.compact is not None)


def _create_dataset(name: str, args: dict[str, Any]) -> Any:
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
            reasoning_gym = import_library("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "task.source",
            "reasoning_gym",
            f"reasoning-gym cannot be imported ({error})",
            "pip install 'jaxroll[envs]'.",
        ) from error
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return reasoning_gym.create_dataset(name, seed=_SEED, size=_VIRTUAL_SIZE, **args)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError("task.args", args, f"{name} refuses them: {error}", _settings_of(name, args)) from error


def _settings_of(name: str, args: dict[str, Any]) -> str:
    """A remedy: the known setting nearest to the first unknown one, or a list of all settings."""
    from reasoning_gym.factory import DATASETS

    known = tuple(field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size"))
    unknown = [key for key in args if key not in known]
    return nearest(unknown[0], known) if unknown else f"Its settings: {', '.join(sorted(known))}."


# --- known tasks: allowed ones with their compact form, refused ones with the reason
#
# A task is allowed if its scorer only compares text or numbers (reviewed in reasoning-gym 0.1.25). Several others
# execute the model's answer, hang on it, raise, or can be gamed; `rewards.scorers` has its own list and also refuses
# them.

Metadata = Mapping[str, Any]

PRINTABLE = string.printable[:95] + "\n"
_DIGITS = string.digits
_EXPRESSION = _DIGITS + "+-*/()"


class GymTask(msgspec.Struct, frozen=True):
    """An allowed task.

    `compact` makes the short prompt from an item's metadata; None if there is no short form. `prompt_alphabet` and
    `answer_alphabet` are the characters of compact prompts and of answers. `scorer_metadata` are the fields that the
    scorer reads in addition to the answer. `lower_case`: prompts and answers are in lower case, because the scorer
    ignores case; this halves the alphabet.
    """

    compact: Callable[[Metadata], str] | None = None
    prompt_alphabet: str = PRINTABLE
    answer_alphabet: str = PRINTABLE
    scorer_metadata: tuple[str, ...] = ()
    lower_case: bool = False


def _word(metadata: Metadata) -> str:
    return metadata["word"].lower()


def _expression(metadata: Metadata) -> str:
    return metadata["expression"].replace(" ", "")


def _board(metadata: Metadata) -> str:
    return "\n".join("".join(str(cell or "_") for cell in row) for row in metadata["puzzle"])


def _letter_and_text(metadata: Metadata) -> str:
    return f"{metadata['target_letter']}:{' '.join(metadata['span'])}"


def _number(metadata: Metadata) -> str:
    return str(metadata["number"])


def _numbers(metadata: Metadata) -> str:
    return ",".join(str(number) for number in metadata["numbers"])


def _equation(metadata: Metadata) -> str:
    return metadata["equation"].replace(" ", "")


def _binary(metadata: Metadata) -> str:
    return metadata["string"]


def _bases(metadata: Metadata) -> str:
    return f"{metadata['source_repr']}:{metadata['source_base']}:{metadata['target_base']}"


def _cipher(metadata: Metadata) -> str:
    return metadata["cipher_text"]


def _grid(metadata: Metadata) -> str:
    return "\n".join("".join(str(cell) for cell in row) for row in metadata["grid"])


_LETTERS = string.ascii_letters + "àë" + _DIGITS  # the characters of the text from which the word tasks are made

TASKS: Mapping[str, GymTask] = {
    "spell_backward": GymTask(_word, string.ascii_lowercase + _DIGITS, string.ascii_lowercase + _DIGITS, (), True),
    "basic_arithmetic": GymTask(_expression, _EXPRESSION, _DIGITS + "-"),
    "chain_sum": GymTask(_expression, _DIGITS + "+-", _DIGITS + "-"),
    "decimal_chain_sum": GymTask(_expression, _DIGITS + "+-.", _DIGITS + "-."),
    "products": GymTask(_expression, _DIGITS + "*-", _DIGITS + "-"),
    "mini_sudoku": GymTask(_board, "1234_\n", "1234 \n", ("solution",)),
    "letter_counting": GymTask(_letter_and_text, _LETTERS + ": ", _DIGITS),
    "count_bits": GymTask(_number, _DIGITS, _DIGITS),
    "gcd": GymTask(_numbers, _DIGITS + ",", _DIGITS),
    "lcm": GymTask(_numbers, _DIGITS + ",", _DIGITS),
    "simple_equations": GymTask(_equation, string.ascii_lowercase + _DIGITS + "+-*=", _DIGITS + "-"),
    "binary_alternation": GymTask(_binary, "01", _DIGITS + "-"),
    "base_conversion": GymTask(_bases, string.ascii_lowercase + _DIGITS + ":", string.ascii_lowercase + _DIGITS),
    "caesar_cipher": GymTask(_cipher, string.ascii_uppercase + " ", string.ascii_uppercase + " "),
    "largest_island": GymTask(_grid, "01\n", _DIGITS),
    "count_primes": GymTask(),
    "isomorphic_strings": GymTask(),
    "leg_counting": GymTask(),
    "ransom_note": GymTask(),
    "string_splitting": GymTask(),
    "string_synthesis": GymTask(),
    "word_sorting": GymTask(scorer_metadata=("sorted_words",)),
}

_EXECUTES = "its scorer executes the model's answer"
_RAISES = "its scorer raises on malformed answers"
_NO_ANSWER = "it has no answer to warm up on and its scorer has not been read"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "binary_matrix",
            "countdown",
            "intermediate_integration",
            "n_queens",
            "polynomial_multiplication",
            "puzzle24",
            "simple_integration",
            "spiral_matrix",
            "string_insertion",
        ),
        _EXECUTES,
    ),
    **dict.fromkeys(("prime_factorization", "boxnet", "coin_flip", "game_of_life"), _RAISES),
    **dict.fromkeys(("graph_color", "rush_hour", "rubiks_cube", "propositional_logic"), _NO_ANSWER),
    "game_of_life_halting": "its scorer pays any text when the true answer is False",
    "complex_arithmetic": "its scorer pays half for nan",
    "decimal_arithmetic": "its scorer accepts answers off in the last digit, by a setting the item does not hold",
    "power_function": "its scorer accepts answers that agree in three digits only",
    "number_sorting": "its scorer accepts numbers that are off by one",
    "number_sequence": "its generator takes many seconds for some items",
    "arc_agi": "its score changes when the item travels as JSON",
    "rearc": "its score changes when the item travels as JSON",
    "maze": "its generator fails for some seeds and its alphabet changes with every item",
}


def allowed(name: str) -> GymTask:
    """The task `name`; ConfigError with the reason if it is refused."""
    if name in TASKS:
        return TASKS[name]
    if name in REFUSED:
        raise ConfigError("task.name", name, REFUSED[name], f"Choose one of {', '.join(sorted(TASKS))}.")
    reason = "it is not on the list of tasks whose scorers were reviewed and only compare"
    raise ConfigError("task.name", name, reason, nearest(name, tuple(TASKS)))
