"""Table of reasoning-gym's tasks: what scorers read, and guards against answers that cheat.

reasoning-gym's scorers (read in version 0.1.25) execute answers, raise, hang, or pay for wrong answers. Here no scorer
sees an answer that it would execute, unless the answer is a literal or arithmetic; exceptions and endless computations
score 0; and the guard of a task scores the hacks of its scorer 0. `score` applies all of it, in a scoring worker.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import signal
import string
import threading
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec

Guard = Callable[[str, Mapping[str, Any], Any], bool]  # (answer, entry, dataset) -> may the scorer see it?

PRINTABLE = string.printable[:95] + "\n"
_TIME_LIMIT_S = 2.0  # of one score; sympy may simplify for minutes
_MOST = 1.0 + 1e-6  # partial credit may add up to slightly more than 1; a score above this is an error of the scorer


class GymTask(msgspec.Struct, frozen=True):
    """A task.

    `scorer_metadata` are the fields that the scorer reads in addition to the answer; None for all fields and the task's
    settings. `characters` are those of full prompts and answers beyond printable ASCII, None if they are unknown.

    `guard` returns False for an answer that the scorer must not see: it scores 0. `any_script`: answers may have
    characters outside ASCII although the item has no answer that does. `tuples` are fields that JSON turned into lists
    and the scorer compares with tuples. `needs` are packages without wheels that the generator uses. `size`: the number
    of items, for generators that prepare all of them at once; None for an endless task.
    """

    scorer_metadata: tuple[str, ...] | None = None
    characters: str | None = ""
    guard: Guard | None = None
    any_script: bool = False
    tuples: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    size: int | None = None


# --- guards: each docstring names the hack


def _arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression of +, -, *, /, parentheses and integers, and its integers. ValueError for others."""
    if not re.fullmatch(r"[\d\s+\-*/()]{1,400}", text):
        raise ValueError("not arithmetic")
    numbers: list[int] = []

    def value(node: ast.AST) -> Fraction:
        match node:
            case ast.Constant(value=int() as number) if type(number) is int and number < 10**12:
                numbers.append(number)
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                return value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return value(left) - value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return value(left) / value(right)
        raise ValueError("not arithmetic")

    return value(ast.parse(text.strip(), mode="eval").body), numbers


def _countdown(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer executes the answer, reads 3.7 as the numbers 3 and 7, and rounds."""
    found, numbers = _arithmetic(answer)
    metadata = entry["metadata"]
    return found == Fraction(metadata["target"]) and sorted(numbers) == sorted(metadata["numbers"])


def _puzzle24(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer executes the answer, accepts any four numbers, and cuts 24.5 to 24."""
    found, numbers = _arithmetic(answer)
    return found == 24 and sorted(numbers) == sorted(entry["metadata"]["numbers"])


_FUNCTIONS = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "log",
        "ln",
        "sqrt",
        "Abs",
        "erf",
    )
)

_MAX_SIZE = 4096  # a bound of the digits and terms of an expanded expression


def _formula(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """sympy's parser executes the answer; `Integral(f, x)` and `integrate(f, x)` would restate the question."""
    return (
        len(answer) <= 1000
        and "#" not in answer
        and _formula_size(ast.parse(answer.strip(), mode="eval").body) <= _MAX_SIZE
    )


def _formula_size(node: ast.AST) -> float:
    """A bound of the size of a formula; ValueError for anything but numbers, one-letter names, operators, functions."""
    match node:
        case ast.Constant(value=int() | float() as number) if type(number) is not bool:
            return len(str(number))
        case ast.Name(id=name) if len(name) == 1 or name == "pi":
            return 1
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _formula_size(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _formula_size(left) + _formula_size(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _formula_size(right)
            with contextlib.suppress(ValueError, SyntaxError, ZeroDivisionError):
                exponent = abs(_arithmetic(ast.unparse(right))[0]) + 1
            return _formula_size(left) * float(exponent)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _formula_size(argument) + 1
    raise ValueError("not a formula")


def _literal(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer executes an answer that is not the expected text."""
    rights = entry["metadata"].get("valid_answers", [entry["answer"]])
    if answer in rights or answer.strip() == str(entry["answer"]).strip():
        return True
    ast.literal_eval(answer)
    return True


def _same_text(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer pays for any text when the answer is False, or for the right text with garbage behind it."""
    return "".join(answer.split()).lower() == "".join(entry["answer"].split()).lower()


def _same_words(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer pays for the right words with others behind them."""
    return answer.split() == entry["answer"].split() or answer.strip().lower() == entry["answer"].strip().lower()


def _finite(answer: str, _entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer pays for nan."""
    return re.fullmatch(r"[\d\s.+\-ijeE()]*", answer) is not None


def _solutions(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer pays for any text without numbers when there is no solution."""
    return re.search(r"\d", entry["answer"]) is not None or answer.strip() == entry["answer"].strip()


def _same_numbers(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer pays for numbers that are off by one."""
    given, right = (json.loads(text.replace("'", '"')) for text in (answer, entry["answer"]))
    return [Decimal(str(each)) for each in given] == [Decimal(str(each)) for each in right]


def _same_decimal(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer pays for answers that are off in the last digit of the default settings."""
    return len(answer) < 100 and Decimal(answer.strip()) == Decimal(entry["answer"])


def _probability(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer pays for 0 and for a first digit (0 of 0.375), and overflows."""
    if not re.fullmatch(r"\s*\d{0,20}\.?\d{1,40}(e-?\d{1,2}|/\d{1,40})?\s*", answer):
        return False
    right = Fraction(entry["answer"])
    return abs(Fraction(answer.strip()) - right) <= min(Fraction(1, 10_000), right / 1000)


def _buttons(answer: str, _entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer takes every A, B and C of any text for a button."""
    return re.fullmatch(r"[A-Ca-c\s,>→-]*", answer) is not None


def _moves(answer: str, _entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer skips letters that are not moves, so that long texts are random walks."""
    return re.fullmatch(r"[UDLRudlr\s]*", answer) is not None


def _json_object(answer: str, entry: Mapping[str, Any], _: Any) -> bool:
    """The scorer compares trees of texts, in which different values may look the same."""
    right = entry["answer"].strip()
    return answer.strip() == right or json.loads(answer) == json.loads(right)


def _conclusion(answer: str, entry: Mapping[str, Any], dataset: Any) -> bool:
    """The scorer pays for a premise, also if it is written in another way."""
    from reasoning_gym.logic.propositional_logic import Expression

    given = Expression.from_string(answer)
    premises = [Expression.from_string(each) for each in entry["metadata"]["premises"]]
    follows = dataset._is_valid_conclusion
    return not any(follows([premise], given) and follows([given], premise) for premise in premises)


# --- the table

_TEXT = "àâäçèéêëîïôöùûüœ‘’“”™—"

TASKS: Mapping[str, GymTask] = {
    **dict.fromkeys((
        "spell_backward", "basic_arithmetic", "chain_sum", "decimal_chain_sum", "products", "letter_counting",
        "count_bits", "gcd", "lcm", "simple_equations", "binary_alternation", "base_conversion", "caesar_cipher",
        "largest_island", "count_primes", "isomorphic_strings", "leg_counting", "ransom_note", "string_splitting",
        "string_synthesis",
    ), GymTask(scorer_metadata=())),
    "mini_sudoku": GymTask(scorer_metadata=("solution",)),
    "word_sorting": GymTask(scorer_metadata=("sorted_words",), characters=_TEXT),
    "acre": GymTask(characters="→", size=5_000),
    "advanced_geometry": GymTask(characters="°"),
    "composite": GymTask(characters=None),
    "arc_agi": GymTask(tuples=("output",)),
    "binary_matrix": GymTask(guard=_literal),
    "circuit_logic": GymTask(characters="↑↓⊕─│┌┐└┘├"),
    "codeio": GymTask(characters=None, guard=_json_object),
    "coin_flip": GymTask(guard=_probability),
    "complex_arithmetic": GymTask(characters="×÷", guard=_finite),
    "countdown": GymTask(guard=_countdown),
    "decimal_arithmetic": GymTask(guard=_same_decimal),
    "emoji_mystery": GymTask(characters=None),
    "figlet_font": GymTask(characters="·•▀▄█▌▐░▪", guard=_same_text),
    "futoshiki": GymTask(characters="∧∨"),
    "game_of_life": GymTask(needs=("cellpylib",)),
    "game_of_life_halting": GymTask(guard=_same_text, needs=("cellpylib",)),
    "gsm_symbolic": GymTask(characters="£€", size=200_000),
    "intermediate_integration": GymTask(characters="∫", guard=_formula),
    "knight_swap": GymTask(characters="→↔"),
    "letter_jumble": GymTask(guard=_same_words),
    "list_functions": GymTask(size=200_000),
    "maze": GymTask(characters=None),
    "modulo_grid": GymTask(characters="✅❌❔"),
    "n_queens": GymTask(guard=_literal),
    "needle_haystack": GymTask(characters=_TEXT),
    "number_sorting": GymTask(guard=_same_numbers),
    "polynomial_equations": GymTask(guard=_solutions),
    "polynomial_multiplication": GymTask(guard=_formula),
    "prime_factorization": GymTask(characters="×"),
    "propositional_logic": GymTask(characters="¬→↔∧∨", guard=_conclusion, any_script=True),
    "puzzle24": GymTask(guard=_puzzle24),
    "quantum_lock": GymTask(characters="→≥", guard=_buttons),
    "rearc": GymTask(tuples=("output",)),
    "simple_integration": GymTask(characters="∫", guard=_formula),
    "rectangle_count": GymTask(characters="█"),
    "sentence_reordering": GymTask(characters=_TEXT),
    "simple_geometry": GymTask(characters="°"),
    "word_sequence_reversal": GymTask(characters=_TEXT),
    "sokoban": GymTask(guard=_moves),
    "spiral_matrix": GymTask(guard=_literal),
    "string_insertion": GymTask(guard=_literal),
    "word_ladder": GymTask(size=20_000),
    "zebra_puzzles": GymTask(needs=("pycosat",)),
    **dict.fromkeys((
        "ab", "aiw", "arc_1d", "bf", "bitwise_arithmetic", "boxnet", "calendar_arithmetic", "color_cube_rotation",
        "course_schedule", "cryptarithm", "dice", "family_relationships", "fraction_simplification", "graph_color",
        "group_anagrams", "jugs", "kakurasu", "knights_knaves", "mahjong_puzzle", "manipulate_matrix",
        "number_filtering", "number_format", "number_sequence", "palindrome_generation", "palindrome_partitioning",
        "path_star", "pool_matrix", "power_function", "rotate_matrix", "rotten_oranges", "rubiks_cube", "rush_hour",
        "self_reference", "shortest_path", "string_manipulation", "sudoku", "survo", "syllogism", "time_intervals",
        "tower_of_hanoi", "tsumego",
    ), GymTask()),
}  # fmt: skip

UNSOLVED = "Integral("  # in an answer: the generator could not solve its own item, so that it has no answer
MIXTURE = "composite"  # reasoning-gym's own mixture: its items belong to the tasks that its settings name


# --- scores


def score(name: str, dataset: Any, entry: Mapping[str, Any], answer: str) -> float:
    """The score of `answer` by the scorer of task `name`; 0 if its guard refuses the answer, or if the scorer raises.

    `dataset` is any dataset of the task with the item's settings, `entry` an item after a trip through JSON.
    """
    task = TASKS[name]
    try:
        with _time_limit():
            if not _admitted(task, answer, entry, dataset):
                return 0.0
            raw = float(dataset.score_answer(answer, _restored(task, entry)))
    except MemoryError:
        raise
    except (Exception, _TooSlow):  # noqa: BLE001 - the answer made a guard or the scorer raise
        return 0.0
    return raw if raw <= _MOST else 0.0


def _admitted(task: GymTask, answer: str, entry: Mapping[str, Any], dataset: Any) -> bool:
    try:
        return task.guard is None or task.guard(answer, entry, dataset)
    except MemoryError:  # Python's parser raises it for deep nesting
        return False


def _restored(task: GymTask, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry with tuples where JSON made lists."""
    if not task.tuples:
        return entry
    metadata = dict(entry["metadata"])
    return {**entry, "metadata": metadata | {field: _tupled(metadata[field]) for field in task.tuples}}


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value


class _TooSlow(BaseException):
    """The time limit of a score; no scorer catches it by `except Exception`."""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _TooSlow after the time limit, in the main thread only; elsewhere the scoring pool's limit holds alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise_too_slow)
    signal.setitimer(signal.ITIMER_REAL, _TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _raise_too_slow(_signal: int, _frame: Any) -> None:
    raise _TooSlow
