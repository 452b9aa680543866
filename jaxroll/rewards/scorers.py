"""Registry of scorers by name. They run in scoring workers.

A scorer is a function `score(args, answer) -> float`, where `args` are the task's `env_args`. A module given to the
pool (see `ScoringPool(modules=…)`) may register its own with `@register("name")`. A scorer that cannot read every text
has a guard: an answer that the guard rejects scores 0 and is counted by reason.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from jaxroll import protocols
from jaxroll.errors import DataError
from jaxroll.rewards import gym_tasks

ScoreFunction = Callable[[Mapping[str, Any], str], float]

Guard = Callable[[str, int], str]  # (answer, max_chars) -> the reason to reject it, or ""

MIN_ANSWER_CHARS = 8192
_CHARS_OF_TOKEN = 64  # longer than the tokens of common vocabularies, except runs of spaces
TOO_LONG, NOT_ASCII = "too long", "not ASCII"

# reasoning-gym imports these for the generators of a few tasks. They have no wheels, and pycosat needs a C compiler.
_NOT_NEEDED = {"reasoning_gym": ("cellpylib", "pycosat", "zss")}


class Scorer(NamedTuple):
    """A scorer with its guard."""

    function: ScoreFunction
    guard: Guard | None = None


_SCORERS: dict[str, Scorer] = {}


def register(name: str, guard: Guard | None = None) -> Callable[[ScoreFunction], ScoreFunction]:
    """A decorator that registers a function as the scorer `name`; without a guard it receives every answer."""

    def add(function: ScoreFunction) -> ScoreFunction:
        if name in _SCORERS and _SCORERS[name].function is not function:
            raise ValueError(f"the scorer {name!r} is registered already")
        _SCORERS[name] = Scorer(function, guard)
        return function

    return add


def max_answer_chars(max_tokens: int) -> int:
    """The longest answer, in characters, that a guarded scorer reads when an episode generates `max_tokens`."""
    return max(MIN_ANSWER_CHARS, _CHARS_OF_TOKEN * max_tokens)


def plain_text(answer: str, max_chars: int) -> str:
    """A guard that rejects long answers and characters outside ASCII."""
    # `Decimal` and `int` accept the digits of every script and skip exotic spaces, which no correct answer contains.
    if len(answer) > max_chars:
        return TOO_LONG
    return "" if answer.isascii() and "\0" not in answer else NOT_ASCII


class Judgement(NamedTuple):
    """A raw score, and the guard's reason when the scorer did not see the answer."""

    score: float
    rejected: str = ""


def judge(env_args: str, answer: str, max_chars: int = MIN_ANSWER_CHARS) -> Judgement:
    """Score `answer` under `env_args` (JSON with the name `scorer` and its arguments).

    Raises DataError for an unknown scorer or a score that is not a finite number; errors of the scorer pass through.
    """
    return judge_args(msgspec.json.decode(env_args), answer, max_chars)


def judge_args(args: Mapping[str, Any], answer: str, max_chars: int = MIN_ANSWER_CHARS) -> Judgement:
    """Score `answer` under decoded `env_args`; see `judge`."""
    scorer = _SCORERS.get(str(args.get("scorer")))
    if scorer is None:
        raise DataError(f"there is no scorer {args.get('scorer')!r}; known are {', '.join(sorted(_SCORERS))}")
    if scorer.guard is not None and (reason := scorer.guard(answer, max_chars)):
        return Judgement(0.0, reason)
    try:
        raw = scorer.function(args, answer)
    except Rejected as rejection:
        return Judgement(0.0, rejection.reason)
    return Judgement(protocols.number(raw, f"the score of scorer {args['scorer']!r}"))


def score(env_args: str, answer: str) -> float:
    """The raw score of `answer`; see `judge`."""
    return judge(env_args, answer).score


@register("exact")
def exact(args: Mapping[str, Any], answer: str) -> float:
    """1 if the answer equals the expected text exactly, else 0."""
    return 1.0 if answer == args["answer"] else 0.0


def readable(answer: str, max_chars: int) -> str:
    """A guard that rejects long answers and null characters."""
    return TOO_LONG if len(answer) > max_chars else NOT_ASCII if "\0" in answer else ""


class Rejected(Exception):
    """Raised by a scorer that rejects an answer for `reason`; the answer scores 0."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@register("reasoning_gym", guard=readable)
def reasoning_gym(args: Mapping[str, Any], answer: str) -> float:
    """The score of the answer to `args["entry"]` (see `gym_tasks.score`); DataError for an unknown task.

    Characters outside ASCII are rejected where no right answer has them.
    """
    name, entry = args["dataset"], args["entry"]
    if name not in gym_tasks.TASKS:
        raise DataError(f"reasoning-gym's {name!r} is not in the table of tasks")
    plain = not gym_tasks.TASKS[name].any_script and (entry["answer"] or "").isascii()
    if plain and not answer.isascii():
        raise Rejected(NOT_ASCII)
    return gym_tasks.score(name, _dataset(name, msgspec.json.encode(args.get("settings", {}))), entry, answer)


@cache
def _dataset(name: str, settings: bytes) -> Any:
    """The dataset whose scorer is used. The scorer reads only the entry and the settings, not the dataset's items."""
    return import_library("reasoning_gym").create_dataset(name, seed=0, size=10, **msgspec.json.decode(settings))


def import_library(name: str) -> ModuleType:
    """Import a library, with empty modules in place of missing packages that only a few tasks use.

    reasoning-gym imports all its tasks at once. Raises ImportError where the library itself is not installed.
    """
    absent = [] if name in sys.modules else [each for each in _NOT_NEEDED.get(name, ()) if not importable(each)]
    sys.modules.update((each, ModuleType(each)) for each in absent)
    try:
        return importlib.import_module(name)
    finally:
        for each in absent:
            sys.modules.pop(each, None)


def importable(name: str) -> bool:
    """True if the module `name` can be imported here."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
