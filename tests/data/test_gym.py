"""reasoning-gym as a source: what is allowed, how it is asked, and the traps around it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from jaxroll.config import TaskConfig
from jaxroll.data import sources
from jaxroll.data.sources import TASKS
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Item
from jaxroll.rewards import scorers
from jaxroll.rewards.scorers import importable
from jaxroll.text.tokenizers import CharTokenizer

REVIEWED = sorted(name for name, task in TASKS.items() if task.scorer_metadata is not None)
COMPACT = sorted(sources.COMPACT)
SPELL = TaskConfig()


def cfg(name: str, prompt: Any = "compact", **args: Any) -> TaskConfig:
    return TaskConfig(name=name, args=args, prompt_style=prompt)


@pytest.mark.parametrize("name", COMPACT)
def test_the_declared_alphabet_covers_prompts_and_answers(name: str) -> None:
    source = sources.open_source(cfg(name))
    alphabet = set(source.alphabet())
    for index in range(200):
        item = source.item(index)
        assert set(item.compact) | set(item.answer or "") <= alphabet, item
        assert len(item.compact) < len(item.question)


@pytest.mark.parametrize("name", REVIEWED)
def test_full_prompts_are_covered_too(name: str) -> None:
    source = sources.open_source(cfg(name, "full"))
    alphabet = set(source.alphabet())
    for index in range(50):
        item = source.item(index)
        assert set(item.question) | set(item.answer or "") <= alphabet, item


# Their scorers read the first number, fraction or grid of an answer and nothing behind it.
READ_A_PART = (
    "fraction_simplification",
    "gsm_symbolic",
    "kakurasu",
    "knights_knaves",
    "survo",
    "time_intervals",
    "tower_of_hanoi",
)
SEVERAL_RIGHT = ("polynomial_equations", "puzzle24", "simple_integration", "intermediate_integration", *READ_A_PART)
NO_ANSWERS = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
WRONG = [
    "", "?", "0", "1", "-1", "nan", "inf", "True", "False", "None", "yes", "[]", "{}", "[[0]]", "null", "x", "(1,2)",
    "1e999", "the answer", "a b", "1,2", "6*4*1*1", "9**9**9**9", "Integral(x, x)", "'A'*10**10", "(" * 5000,
    "__import__('os').abort()", "[" * 5000 + "]" * 5000, '{"a": [NaN]}', "0.", "UDLR" * 1000, "R1 " * 2000,
]  # fmt: skip


def accepted(item: Item, answer: str) -> bool:
    """True for texts that are right in another notation: numbers in three digits, several solutions, case."""
    name, gold = item.env_args["dataset"], str(item.env_args["entry"]["answer"])
    if name == "power_function":
        return f"{float(answer):.2e}" == f"{float(gold):.2e}"
    return name in SEVERAL_RIGHT


def scored(item: Item, answer: str) -> float:
    return scorers.score(msgspec.json.encode(item.env_args).decode(), answer)


@pytest.mark.parametrize("name", REVIEWED)
def test_the_worked_answer_scores_exactly_one_after_a_trip_through_json(name: str) -> None:
    for prompt in ("compact", "full") if name in COMPACT else ("full",):
        source = sources.open_source(cfg(name, prompt))
        for index in range(20):
            item = source.item(index)
            assert scored(item, item.answer) == 1.0, item


@pytest.mark.parametrize("name", REVIEWED)
def test_garbage_around_the_worked_answer_never_scores_exactly_one(name: str) -> None:
    source = sources.open_source(cfg(name, "full"))
    for index in range(20):
        item = source.item(index)
        for answer in ("", "?", f"{item.answer}x", f"x{item.answer}", f"{item.answer} or not"):
            assert scored(item, answer) != 1.0, (item, answer)


def test_the_table_is_complete() -> None:
    scorers.import_library("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    assert set(TASKS) == set(DATASETS) and len(TASKS) == 106


MIXED = {"datasets": [{"name": "chain_sum"}, {"name": "gcd", "weight": 2.0, "config": {"max_value": 9}}]}
WITH_SETTINGS = {
    "composite": MIXED,
    "word_ladder": {"min_word_length": 3, "max_word_length": 5},
    "decimal_arithmetic": {"max_num_decimal_places": 6},
}


def check_task(name: str, args: dict[str, Any], items: int, seconds: float) -> int:
    """Check up to `items` items of a task; return how many had an answer."""
    source = sources.open_source(cfg(name, "full", **args))
    alphabet, answered, last = set(source.alphabet()), 0, time.monotonic() + seconds
    for index in range(items):
        try:
            item = source.item(index)
        except DataError:
            continue
        if TASKS[name].characters is not None:
            assert set(item.question) | set(item.answer or "") <= alphabet, item
        right = item.answer
        if right is not None:
            answered += 1
            assert scored(item, right) == 1.0, item
        gold = item.env_args["entry"]["answer"]
        for answer in WRONG:
            same = right is not None and answer.lower().strip() == right.lower().strip()
            assert same or scored(item, answer) < 1.0 or accepted(item, answer), (item, answer)
        for garbage in (f"{gold} or not", f"{gold}\nx", f"x{gold}"):
            assert gold is None or scored(item, garbage) < 1.0 or accepted(item, garbage), (item, garbage)
        if time.monotonic() > last:
            break
    return answered


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")  # theirs
@pytest.mark.parametrize("name", sorted(set(TASKS) - set(REVIEWED)))
def test_every_task_pays_its_own_answer_and_no_wrong_one(name: str) -> None:
    if missing := [package for package in TASKS[name].needs if not importable(package)]:
        pytest.skip(f"its generator needs {', '.join(missing)}, without wheels on PyPI")
    answered = check_task(name, WITH_SETTINGS.get(name, {}), items=40, seconds=8.0)
    assert answered > 0 or name in NO_ANSWERS


def test_mixtures_and_settings_reach_the_scorer() -> None:
    for name, args in WITH_SETTINGS.items():
        assert check_task(name, args, items=6, seconds=2.0) > 0


def test_spell_backward_compact_is_the_word_alone_in_lower_case() -> None:
    source = sources.open_source(SPELL)
    full = sources.open_source(dataclasses.replace(SPELL, prompt_style="full"))
    words = set()
    for index in range(2000):
        item, long = source.item(index), full.item(index)
        assert item.compact == item.compact.lower() == item.answer[::-1]
        assert item.question.endswith(long.answer[::-1]) and item.compact == long.answer[::-1].lower()
        assert 3 <= len(item.compact) <= 10
        words.add(item.compact)
    assert len(words) > 1900
    assert source.alphabet() == "abcdefghijklmnopqrstuvwxyz"
    assert CharTokenizer(source.alphabet()).vocab_size == 32


@pytest.mark.parametrize(
    ("name", "args", "prompt", "answer"),
    [
        ("basic_arithmetic", {"min_terms": 2, "max_terms": 2}, r"^[-+*/()\d]+$", r"^-?\d+$"),
        ("chain_sum", {}, r"^\d+([-+]\d+)+$", r"^-?\d+$"),
        ("mini_sudoku", {}, r"^([1-4_]{4}\n){3}[1-4_]{4}$", r"^([1-4 ]{7}\n){3}[1-4 ]{7}$"),
        ("count_bits", {}, r"^\d+$", r"^\d+$"),
        ("gcd", {}, r"^\d+,\d+$", r"^\d+$"),
        ("letter_counting", {}, r"^\w:[\w ]+$", r"^\d+$"),
    ],
)
def test_compact_prompts_hold_the_bare_problem(name: str, args: dict, prompt: str, answer: str) -> None:
    item = sources.open_source(cfg(name, **args)).item(7)
    assert re.match(prompt, item.compact)
    assert re.match(answer, item.answer)


def test_items_are_virtual_and_always_the_same() -> None:
    source, again = sources.open_source(SPELL), sources.open_source(SPELL)
    assert source.size is None
    assert source.item(10**12) == again.item(10**12)


def test_a_typo_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'spell_backward'"):
        sources.open_source(cfg("spell_backwards"))


@pytest.mark.parametrize(
    ("name", "package"),
    [("game_of_life", "cellpylib"), ("zebra_puzzles", "pycosat"), ("game_of_life_halting", "cellpylib")],
)
def test_a_task_whose_package_is_missing_names_the_command(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        sources.open_source(cfg(name, "full"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "datasets"),
        ({"datasets": [{"name": "acre"}]}, "limited number"),
        ({"datasets": [{"name": "gcds"}]}, "'gcd'"),
    ],
)
def test_a_mixture_that_cannot_be_made_is_a_config_error(args: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sources.open_source(cfg("composite", "full", **args))


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"seed": 3}, r"task\.args\.seed"),
        ({"size": 3}, r"task\.args\.size"),
        ({"min_wrd_len": 3}, "spell_backward has no setting min_wrd_len"),
        ({"min_word_len": 5, "max_word_len": 3}, r"task\.args "),
    ],
)
def test_settings_that_the_task_does_not_know_are_config_errors(args: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        sources.open_source(cfg("spell_backward", **args))


def test_a_task_without_a_compact_form_says_so() -> None:
    with pytest.raises(ConfigError, match=r"task\.prompt.*'full'"):
        sources.open_source(cfg("leg_counting"))
    assert sources.open_source(cfg("leg_counting", "full")).item(0).answer


def test_an_item_that_cannot_be_generated_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources.open_source(SPELL)

    def fails(_self: object, _index: int) -> dict:
        raise RuntimeError("no such maze")

    monkeypatch.setattr(type(source._dataset), "__getitem__", fails)
    with pytest.raises(DataError, match="no such maze"):
        source.item(3)


def test_output_of_a_dataset_does_not_reach_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning_gym = scorers.import_library("reasoning_gym")
    original = reasoning_gym.create_dataset

    def talks(*args: Any, **kwargs: Any) -> Any:
        print("Loading…")
        return original(*args, **kwargs)

    monkeypatch.setattr(reasoning_gym, "create_dataset", talks)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        sources.open_source(SPELL)
    assert printed.getvalue() == ""


def test_without_reasoning_gym_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"jaxroll\[envs\]"):
        sources.open_source(SPELL)


NO_WHEELS = ("cellpylib", "pycosat", "zss")
PLAYED_WITHOUT = """
import json, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
from jaxroll.config import TaskConfig
from jaxroll.data import sources
from jaxroll.data.sources import TASKS
from jaxroll.rewards import scorers
word = sources.open_source(TaskConfig()).item(7)
assert word.answer and "sympy" not in sys.modules, "its task needs no algebra"
import reasoning_gym
assert reasoning_gym.algebra.PolynomialEquationsDataset and "sympy" in sys.modules
for name, task in TASKS.items():
    if task.scorer_metadata is None and name not in ("codeio", "countdown"):
        continue
    item = sources.open_source(TaskConfig(name=name, args={}, prompt_style="full")).item(7)
    assert scorers.score(json.dumps(item.env_args), item.answer) == 1.0, name
assert all(sys.modules.get(name) is None for name in sys.argv[1:])
scorers.import_library("reasoning_gym")
assert {*reasoning_gym.factory.DATASETS} == {*TASKS} and "nothing" not in reasoning_gym.factory.DATASETS
print("all")
"""


def test_tasks_play_without_the_packages_that_have_no_wheels() -> None:
    command = [sys.executable, "-c", PLAYED_WITHOUT, *NO_WHEELS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.returncode) == ("all\n", 0), done.stderr


def test_neighbouring_seeds_share_items_which_is_why_ranges_are_indices() -> None:
    """The trap: item i of seed s is Random(s + i). If this stops being so, the ranges may be simplified."""
    reasoning_gym = scorers.import_library("reasoning_gym")
    zero = reasoning_gym.create_dataset("spell_backward", seed=0, size=100)
    one = reasoning_gym.create_dataset("spell_backward", seed=1, size=100)
    assert [zero[i]["question"] for i in range(1, 100)] == [one[i]["question"] for i in range(99)]
