"""Texts of an evaluation for the reader: reference answers and marks."""

import json

import pytest

from jaxroll.records import Finished, Member, Message, Task, Version
from jaxroll.rewards.parts import truth_or_empty
from jaxroll.roles import evaluator
from jaxroll.rollout import episode
from jaxroll.text.tokenizers import CharTokenizer


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
    assert truth_or_empty(task.args()) == shown


def test_reward_parts_are_means_over_the_items_that_count() -> None:
    task = Task(0, (Message("user", "?"),), "x", "{}", 0, "h")
    scores = [
        episode.Score(task, "", right=True, pinned=True, parts={"tool_used_ok": 1.0, "turns": 3.0}),
        episode.Score(task, "", right=False, pinned=True, parts={"turns": 1.0}),
        episode.Score(task, "", right=False, pinned=False, parts={"tool_used_ok": 1.0, "other": 9.0}),
    ]
    assert evaluator.mean_parts([scores]) == {"tool_used_ok": 0.5, "turns": 2.0}
    assert evaluator.mean_parts([[]]) == {}


def test_several_answers_to_an_item_count_as_their_share_of_right_ones() -> None:
    task = Task(0, (Message("user", "?"),), "x", "{}", 0, "h")
    yes, no = (episode.Score(task, "", right=right, pinned=True) for right in (True, False))
    lost = episode.Score(task, "", right=True, pinned=False)
    results = [[yes, no, lost, yes], [no, no, lost, lost]]
    assert evaluator.figures(results) == {"accuracy": 0.5, "n": 3, "samples": 2, "solved": 2 / 3}
    assert evaluator.marks(results) == "1000--1-"
    assert evaluator.figures(results[:1]) == {"accuracy": 2 / 3, "n": 3}
    assert evaluator.figures([[lost], [lost]]) == {"accuracy": None, "n": 0, "samples": 2, "solved": None}


@pytest.mark.parametrize(
    ("reward", "parts", "right"),
    [(1.0, {}, True), (0.5, {}, False), (1.1, {"correct": 1.0}, True), (1.0, {"correct": 0.0}, False)],
)
def test_an_answer_is_right_if_the_reward_or_its_part_for_that_is_one(reward, parts, right) -> None:
    outcome = Finished((), "stop", reward, parts, (), "7")
    task = Task(0, (), "x", "{}", 0, "h")
    score = episode._score(task, Member(0, 0, 0, outcome), CharTokenizer("a"), Version(0, 0))
    assert (score.right, score.extracted) == (right, "7")
