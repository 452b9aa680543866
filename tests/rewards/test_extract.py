"""Extraction of answers: each mode on its own form, on wrong answers, on malformed text, and on long text."""

from __future__ import annotations

import json
import time

import pytest

from jaxroll.rewards import parts
from jaxroll.rewards.scorers import Grading, LocalPart, grade

ARGS = json.dumps({"scorer": "exact", "answer": "7"})
FORMS = {
    "none": "{}",
    "answer_tag": "<answer>{}</answer>",
    "boxed": r"So \boxed{{{}}}.",
    "after_think": "<think>3 + 4, or 8?</think>\n{}",
    "last_number": "1. We add. The answer is {}.",
}


def score(mode: str, completion: str) -> float:
    return grade(Grading(mode, (LocalPart("exact", "exact"),)), ARGS, completion).values["exact"]


@pytest.mark.parametrize("mode", FORMS)
def test_each_mode_pays_its_own_form_and_no_wrong_answer(mode: str) -> None:
    assert set(FORMS) == set(parts.MODES)
    assert score(mode, FORMS[mode].format("7")) == 1.0
    assert score(mode, FORMS[mode].format("8")) == 0.0


@pytest.mark.parametrize("mode", [mode for mode in FORMS if mode != "none"])
def test_reasoning_before_the_answer_is_not_scored(mode: str) -> None:
    form = FORMS[mode].partition("\n")[2] or FORMS[mode]
    assert score(mode, f"<think>{form.format('8')}</think>{form.format('7')}") == 1.0
    assert score(mode, f"{form.format('8')}</think>{form.format('7')}") == 1.0  # the prompt opened the tag
    assert score(mode, f"<think>{form.format('7')}</think>") == 0.0
    assert score(mode, f"<think>I think that {form.format('7')}") == 0.0  # never closed


@pytest.mark.parametrize(
    ("mode", "completion", "answer"),
    [
        ("answer_tag", "<answer> a </answer> then <answer>\nb\n</answer>", "b"),
        ("answer_tag", "<answer>a<answer>b</answer> c</answer>", "b"),
        ("answer_tag", "<answer>a</answer><answer>b", "a"),
        ("answer_tag", "</answer>a<answer>", ""),
        ("answer_tag", "a", ""),
        ("boxed", r"\boxed{\frac{1}{2}} and \fbox{\sqrt{\frac{a}{b}}}", r"\sqrt{\frac{a}{b}}"),
        ("boxed", r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{a \boxed{b}}", "b"),
        ("boxed", r"}} \boxed{a} \boxed{b", "a"),
        ("boxed", r"\boxed{{a} b", ""),
        ("boxed", "boxed{a}", ""),
        ("after_think", "<think>a</think>b<think>c</think> d ", "d"),
        ("after_think", "<think>a</think>b<think>c", ""),
        ("after_think", " a ", "a"),
        ("last_number", "from 1,000 to -1,234.50 or so", "-1234.50"),
        ("last_number", "10-7", "7"),
        ("last_number", "5 - 7", "7"),
        ("last_number", "x = −7%", "-7"),
        ("last_number", "(-.5)", "-0.5"),
        ("last_number", "1,2,3", "3"),
        ("last_number", "costs -$3", "-3"),
        ("last_number", "2.5e-3", "2.5e-3"),
        ("last_number", "٧", ""),
        ("last_number", "none", ""),
        ("none", " a\n", " a\n"),
    ],
)
def test_the_answer_in_a_completion(mode: str, completion: str, answer: str) -> None:
    assert parts.MODES[mode](completion) == answer


@pytest.mark.parametrize("piece", ["1,", "1,234", "\\boxed{", "<answer>", "<think>", "-", "{", "$", "</think>"])
def test_extraction_takes_linear_time(piece: str) -> None:
    text = piece * 40_000
    began = time.process_time()
    for function in parts.MODES.values():
        function(text)
    assert time.process_time() - began < 5.0  # quadratic time would be minutes


def test_an_empty_answer_pays_nothing_even_if_the_truth_is_empty() -> None:
    args = json.dumps({"scorer": "exact", "answer": ""})
    for completion in ("<answer></answer>", "no tag"):
        graded = grade(Grading("answer_tag", (LocalPart("exact", "exact"), LocalPart("raw_score"))), args, completion)
        assert graded.values == {"exact": 0.0, "raw_score": 0.0}
