"""Reward parts: values, weights, functions of users, causes of failure; and the same in scoring processes."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import TaskConfig
from jaxroll.config.rewards import LengthSettings
from jaxroll.envs import registry
from jaxroll.envs.registry import Grade, Grader, SingleTurn
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Task
from jaxroll.rewards import parts, scorers
from jaxroll.rewards.scoring_pool import ScoringPool
from tests.harness.rollout_proxy import LocalPool

FUNCTIONS = '''
"""Functions of a user."""
import dataclasses, time
from jaxroll_test_sibling import HALF

@dataclasses.dataclass
class Kept: answer: str

def half(answer, row): return HALF * (answer == row["answer"])
def by_level(answer, row, *, scale=1.0): return scale * row["level"]
def whole(answer, row, completion): return float(len(completion))
def nan(answer, row): return float("nan")
def nothing(answer, row): return None
def boom(answer, row): raise KeyError("of mine")
def hang(answer, row): time.sleep(3600)
def first_letter(completion): return completion[:1]
def no_letter(completion): return None
def number(completion): return 7
'''
ROW = json.dumps({"scorer": "exact", "answer": "7", "row": {"answer": "7", "level": 3}})


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "jaxroll_test_sibling.py").write_text("HALF = 0.5\n")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return f"file:{tmp_path}/functions.py"


def graded(reward: str, completion: str, args: str = ROW, tokens: int = 0, extract: str = "none", **more: Any) -> Grade:
    task = TaskConfig(extract=extract, reward=reward, reward_args=more)
    return asyncio.run(Grader(LocalPool(), task).grade(args, completion, tokens))  # type: ignore[arg-type]


def test_a_sum_records_every_part_and_whether_the_answer_is_right() -> None:
    right = graded(
        "exact + 0.5*format + -2*length",
        "<think>a</think><answer>7</answer>",
        tokens=5,
        extract="answer_tag",
        length={"shape": "linear", "max_tokens": 10},
    )
    assert right == Grade(1.0 + 0.5 + 1.0, {"exact": 1.0, "format": 1.0, "length": -0.5, "correct": 1.0}, "7")
    wrong = graded("0.25*format + exact", "<answer>8</answer>", extract="answer_tag")
    assert wrong == Grade(0.0, {"exact": 0.0, "format": 0.0, "correct": 0.0}, "8")


def test_extraction_comes_before_the_scorer_of_the_task() -> None:
    assert graded("auto", "<think>…</think>7", extract="after_think") == Grade(1.0, {"raw_score": 1.0}, "7")
    assert graded("auto", "<think>…</think>7") == Grade(0.0, {"raw_score": 0.0})
    gym = json.dumps({"scorer": "reasoning_gym", "dataset": "chain_sum", "entry": {"answer": "7", "metadata": {}}})
    assert graded("reasoning_gym", r"So \boxed{7}", gym, extract="boxed").reward == 1.0
    partial = graded("reasoning_gym", "77", gym, reasoning_gym={"partial": True})
    assert 0 < partial.reward < 1 and partial.parts["correct"] == 0.0
    assert graded("reasoning_gym", "77", gym).reward == 0.0
    assert graded("exact", "7", gym).reward == 1.0


@pytest.mark.parametrize(
    ("wanted", "answer", "value"),
    [
        ("7", "7", 1.0),
        ("7", "7.0", 1.0),
        ("7", "8", 0.0),
        ("1/2", r"\frac{1}{2}", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        ("0.5", "the answer is $\\frac12$", 1.0),
        ("x^2+1", "1+x^2", 1.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        ("1,234", "1234", 1.0),
        ("[1,2)", "[1,2]", 0.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        ("yes", "yes", 1.0),
        ("yes", "no", 0.0),
        ("7", "", 0.0),
        ("7", "one or two words", 0.0),
        # The relation is not symmetric: the truth is the first argument of math-verify.
        ("3", "x = 3", 1.0),
        ("x = 3", "3", 1.0),
        ("1 < x < 2", "(1,2)", 1.0),
        ("(1,2)", "1 < x < 2", 0.0),
    ],
)
def test_answers_that_are_mathematically_equal(wanted: str, answer: str, value: float) -> None:
    pytest.importorskip("math_verify")
    assert parts.mathematical(wanted, answer) == value


SEVERAL_VALUES = [
    "7 or 8", "The answer is 7 or 8", "The answer is 1 or 2 or 7 or 8", "7, 8", "7|8", "7..8", "1|2|7|8", "$1$ $7$",
    "$7$ or $8$", "$1$ $2$ $7$ $8$", "8 = 7", "1 = 2 = 7 = 8", r"7 \approx 8", r"\boxed{7} \boxed{8}", r"\pm 7",
    "x = 7 or x = 8", r"x \in \{7, 8\}", "6 < x < 9", "final answer is 7. final answer is 8.",
]  # fmt: skip


def test_an_answer_that_lists_values_is_not_paid_for_several() -> None:
    pytest.importorskip("math_verify")
    paid = {answer: [n for n in ("1", "2", "7", "8") if parts.mathematical(n, answer)] for answer in SEVERAL_VALUES}
    assert {answer: found for answer, found in paid.items() if len(found) > 1} == {}
    assert any(paid.values())


@pytest.mark.parametrize(
    ("style", "completion", "value"),
    [
        ("think_answer", "<think>a</think>\n<answer>7</answer>", 1.0),
        ("think_answer", "a</think><answer>7</answer>", 1.0),
        ("think_answer", "<think>a</think> so <answer>7</answer>", 0.0),
        ("think_answer", "<think>a</think><answer>7</answer> done", 0.0),
        ("think_answer", "<think>a</think><answer>7</answer><answer>7</answer>", 0.0),
        ("think_answer", "<think><answer>1</answer></think><answer>7</answer>", 0.0),
        ("think_answer", "<answer>7</answer>", 0.0),
        ("think", "<think>a</think>7", 1.0),
        ("think", "<think>a</think>", 0.0),
        ("think", "<think>a</think><think>b</think>7", 0.0),
        ("think", "7", 0.0),
        ("answer", "So <answer>7</answer>", 1.0),
        ("answer", "</answer>7<answer>", 0.0),
        ("answer", "7", 0.0),
    ],
)
def test_the_form_of_a_completion(style: Any, completion: str, value: float) -> None:
    assert parts.well_formed(completion, style=style) == value


def test_a_pattern_must_match_the_whole_completion() -> None:
    assert parts.well_formed("a\nb", pattern="a.b") == 1.0
    assert parts.well_formed("a\nbc", pattern="a.b") == 0.0


def test_length_shaping_equals_its_formulas() -> None:
    dapo = LengthSettings(max_tokens=20, buffer_tokens=5)
    assert [parts.length(n, True, dapo) for n in (0, 15, 16, 20, 99)] == [0.0, 0.0, -0.2, -1.0, -1.0]
    linear = LengthSettings("linear", max_tokens=20)
    assert [parts.length(n, False, linear) for n in (0, 5, 20, 40)] == [0.0, -0.25, -1.0, -1.0]
    cosine = LengthSettings("cosine", 20, 0, 2.0, 1.0, -10.0, 0.0)  # the paper's values
    assert [parts.length(n, True, cosine) for n in (0, 10, 20)] == pytest.approx([2.0, 1.5, 1.0])
    assert [parts.length(n, False, cosine) for n in (0, 10, 20)] == pytest.approx([-10.0, -5.0, 0.0])


def test_functions_of_users_get_the_answer_and_the_row(file: str) -> None:
    assert graded(f"{file}:half", "7") == Grade(0.5, {"half": 0.5, "correct": 0.0})
    assert graded(f"exact + 0.5*{file}:by_level", "7", by_level={"scale": 2.0}).reward == 4.0
    assert graded(f"{file}:whole", "<answer>7</answer>", extract="answer_tag").reward == 18.0
    assert graded("exact", "7 apples", extract=f"{file}:first_letter") == Grade(
        1.0, {"exact": 1.0, "correct": 1.0}, "7"
    )
    assert graded("exact", "7 apples", extract=f"{file}:no_letter").extracted == ""
    gym = json.dumps({"scorer": "x", "entry": {"answer": "7"}})
    assert graded(f"{file}:half", "7", gym).reward == 0.5


@pytest.mark.parametrize(
    ("reward", "extract", "cause", "message"),
    [
        ("nan", "none", "nan: not a finite number", "nan"),
        ("nothing", "none", "nothing: not a finite number", "None"),
        ("boom", "none", "boom: KeyError", "of mine"),
        ("half", "number", "extract: not a str", "int"),
    ],
)
def test_a_part_without_a_value_fails_the_member_with_its_cause(
    file: str, reward: str, extract: str, cause: str, message: str
) -> None:
    with pytest.raises(scorers.PartFailed, match=message) as caught:
        graded(f"exact + {file}:{reward}", "7", extract=extract if extract == "none" else f"{file}:{extract}")
    assert caught.value.cause == cause


def test_functions_and_libraries_are_loaded_before_the_run(file: str, tmp_path: Path) -> None:
    registry.check(TaskConfig(reward=f"{file}:half"))
    for reward in (f"{file}:absent", f"file:{tmp_path}/absent.py:half", "no_such_module_anywhere:f"):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            registry.check(TaskConfig(reward=reward))
    with pytest.raises(ConfigError, match=r"task\.extract.*cannot be loaded"):
        registry.check(TaskConfig(extract=f"{file}:absent"))


def test_a_missing_math_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MATH_LIBRARY", "no_such_module_anywhere")
    with pytest.raises(ConfigError, match=r"pip install 'jaxroll\[math\]'"):
        registry.check(TaskConfig(reward="math"))


@pytest.mark.process
def test_scoring_processes_grade_and_count_failures(file: str) -> None:
    """A chain of thought of 30,000 characters, functions of a user, a hang and an error, in a real worker."""
    names = ("boom", "hang", "half")
    pool = ScoringPool(
        1,
        time_limit_s=2.0,
        programs=True,
        libraries=("reasoning_gym", "math_verify"),
        functions=tuple(f"{file}:{name}" for name in names),
    )
    pool.start()
    thought = f"<think>{'Hmm, é. ' * 3750}</think>7"
    gym = json.dumps({"scorer": "reasoning_gym", "dataset": "chain_sum", "entry": {"answer": "7", "metadata": {}}})

    async def step(reward: str, args: str, answer: str) -> Any:
        env = SingleTurn(pool, TaskConfig(extract="after_think", reward=reward))
        await env.reset(Task(0, (), "single_turn", args, 0, "h"), 0)
        try:
            return await env.step(answer)
        except DataError as error:
            return str(error)

    async def all_of_them() -> list[Any]:
        first = await step("auto", gym, thought)
        others = (step("math", ROW, thought), *(step(f"math + {file}:{name}", ROW, thought) for name in names))
        tests = json.dumps({"row": {"tests": [{"input": "3", "output": "7"}]}})
        program = "print(int(input()) + 4)"
        codes = [step("code + format", tests, f"<think>?</think>{text}") for text in (program, program + "9")]
        return [first, *await asyncio.gather(*others, *codes)]

    try:
        assert len(thought) > 30_000
        auto, exact, boom, hang, half, program, wrong = asyncio.run(all_of_them())
        assert (auto.reward, auto.extracted) == (1.0, "7")
        assert (exact.reward, half.reward) == (1.0, 1.5)
        assert "KeyError" in boom and "longer than 2 s" in hang
        assert pool.failed == {"boom: KeyError": 1, "timeout": 1} and not pool.rejected
        assert (program.reward_parts["code"], wrong.reward_parts["code"]) == (1.0, 0.0)
        assert math.isclose(half.reward_parts["half"], 0.5)
    finally:
        pool.close()
