"""What an evaluation says for a person."""

import json

import pytest

from jaxroll.records import Message, Task
from jaxroll.rollout import evaluation


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ({"scorer": "exact", "answer": "4"}, "4"),
        ({"scorer": "reasoning_gym", "entry": {"answer": "olleH", "metadata": {}}}, "olleH"),
        ({"scorer": "exact", "answer": 0}, "0"),
        ({"entry": {"answer": None}}, ""),
        ({"entry": ["x"]}, ""),
        ({}, ""),
    ],
)
def test_the_expected_answer_is_the_one_that_the_environment_is_given(args: dict, shown: str) -> None:
    task = Task(0, (Message("user", "?"),), "single_turn", json.dumps(args), 0, "h")
    assert evaluation.expected(task) == shown
