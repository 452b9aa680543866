"""Scorers by name: how an answer is judged. They run in scoring workers; only the guard runs elsewhere.

A scorer is `score(args, answer) -> float`, args being the task's `env_args`. A module given to the pool (see
`ScoringPool(modules=…)`) may add its own with `@register("name")`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from jaxroll import env_checks
from jaxroll.errors import DataError

ScoreFunction = Callable[[Mapping[str, Any], str], float]

MAX_ANSWER_CHARS = 8192
_PLAIN = frozenset(string.printable[:95] + "\n\t")

# reasoning-gym tasks whose scorers were read (0.1.25) and only compare text or numbers. The others execute the answer,
# hang on it, raise, or can be gamed: they need a sandbox. `data` offers a subset of these; this list is the boundary.
COMPARE_ONLY = frozenset({
    "base_conversion", "basic_arithmetic", "binary_alternation", "caesar_cipher", "chain_sum", "count_bits",
    "count_primes", "decimal_chain_sum", "gcd", "isomorphic_strings", "largest_island", "lcm", "leg_counting",
    "letter_counting", "mini_sudoku", "products", "ransom_note", "simple_equations",
    "spell_backward", "string_splitting", "string_synthesis", "word_sorting",
})  # fmt: skip

_SCORERS: dict[str, ScoreFunction] = {}


def register(name: str) -> Callable[[ScoreFunction], ScoreFunction]:
    """A decorator that makes a function the scorer `name`."""

    def add(function: ScoreFunction) -> ScoreFunction:
        if _SCORERS.get(name, function) is not function:
            raise ValueError(f"there is a scorer {name!r} already")
        _SCORERS[name] = function
        return function

    return add


def admissible(answer: str) -> bool:
    """Whether a scorer may see this text: short, and printable ASCII, or letters of any script without controls.

    Anything else is a wrong answer without asking.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    return _PLAIN.issuperset(answer) or all(char.isprintable() or char in "\n\t" for char in answer)


def score(env_args: str, answer: str) -> float:
    """The raw score of `answer` under `env_args` (JSON with `scorer` and what it needs).

    Text that fails the guard scores 0. Raises DataError for arguments or a score that make no sense; whatever the
    scorer raises passes through.
    """
    if not admissible(answer):
        return 0.0
    args = msgspec.json.decode(env_args)
    function = _SCORERS.get(args.get("scorer"))
    if function is None:
        raise DataError(f"there is no scorer {args.get('scorer')!r}; known are {', '.join(sorted(_SCORERS))}")
    raw = function(args, answer)
    return env_checks.number(raw, f"the score of scorer {args['scorer']!r}")


@register("exact")
def exact(args: Mapping[str, Any], answer: str) -> float:
    """1 when the answer is the expected text, letter by letter; else 0."""
    return 1.0 if answer == args["answer"] else 0.0


@register("reasoning_gym")
def reasoning_gym(args: Mapping[str, Any], answer: str) -> float:
    """reasoning-gym's own score of the answer to `args["entry"]`, for tasks that only compare."""
    name = args["dataset"]
    if name not in COMPARE_ONLY:
        raise DataError(f"reasoning-gym's {name!r} is not on the list of scorers that only compare; it is not run here")
    if not _PLAIN.issuperset(answer):  # Decimal and int read digits of every script; a gold answer never holds them
        return 0.0
    return _dataset(name).score_answer(answer, args["entry"])


@cache
def _dataset(name: str) -> Any:
    """The dataset whose scorer is used; it reads the entry only, so its own settings do not matter."""
    import reasoning_gym as library

    return library.create_dataset(name, seed=0, size=1)
