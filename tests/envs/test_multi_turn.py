"""The two environments of several turns: what is shown, what is paid, what is counted."""

from __future__ import annotations

import asyncio
import json

import pytest

from jaxroll.config import TaskConfig
from jaxroll.envs.calculator import Calculator
from jaxroll.envs.frozen_lake import FrozenLake
from jaxroll.errors import DataError
from jaxroll.protocols import Environment, StepResult, traits
from jaxroll.records import Message, Task

LAKE = {"cells": "...O....G", "slippery": False, "max_turns": 5}
VIEW = (Message("user", "@..\nO..\n..G"),)


def lake(**changes: object) -> FrozenLake:
    env = FrozenLake(None, TaskConfig())  # type: ignore[arg-type]
    assert isinstance(env, Environment) and traits(env).place == "loop"
    assert env.reset(Task(0, VIEW, "frozen_lake", json.dumps(LAKE | changes), 7, "h"), 7) == VIEW
    return env


def test_the_goal_is_paid() -> None:
    env = lake()
    seen = [env.step(answer) for answer in ("right", "down", "down", "right")]
    assert [result.done for result in seen] == [False, False, False, True]
    assert seen[0].messages == (Message("user", ".@.\nO..\n..G"),)
    assert (seen[-1].reward, seen[-1].messages) == (1.0, ())
    assert seen[-1].reward_parts == {"success": 1.0, "fell": 0.0, "turns": 4.0, "misread": 0.0}


def test_a_hole_ends_the_game_unpaid() -> None:
    result = lake().step("down")
    assert (result.done, result.reward) == (True, 0.0)
    assert result.reward_parts == {"success": 0.0, "fell": 1.0, "turns": 1.0, "misread": 0.0}


def test_an_answer_without_a_direction_costs_a_turn() -> None:
    env = lake()
    seen = [env.step(answer) for answer in ("", "east", "\ufffd" * 50, "right", "right")]
    assert [result.done for result in seen] == [False, False, False, False, True]
    assert seen[0].messages == (Message("user", "?\n" + VIEW[0].content),)
    assert seen[-1].reward_parts == {"success": 0.0, "fell": 0.0, "turns": 5.0, "misread": 3.0}


def test_slippery_ice_is_the_same_for_all_members_of_a_group() -> None:
    cells = "." * 24 + "G"
    walks = [[lake(cells=cells, slippery=True, max_turns=9).step("down") for _ in range(1)] for _ in range(3)]
    long = []
    for _ in range(2):
        env = lake(cells=cells, slippery=True, max_turns=20)
        long.append([env.step("right").messages for _ in range(12)])
    assert walks[0] == walks[1] == walks[2] and long[0] == long[1]
    straight = lake(cells=cells, max_turns=20)
    assert long[0] != [straight.step("right").messages for _ in range(12)], "it is slippery"


def test_a_restored_game_goes_on_as_the_first_does() -> None:
    moves = ["right", "down", "?", "left", "down", "right", "up", "right", "down"]
    options = {"cells": "." * 24 + "G", "slippery": True, "max_turns": 9}
    first = lake(**options)
    results = [first.step(move) for move in moves]
    assert results[-1].done and len({result.state for result in results}) == 9
    for turn in range(8):
        other = lake(**options)
        other.restore(results[turn].state or b"")
        assert [other.step(move) for move in moves[turn + 1 :]] == results[turn + 1 :]
    for state in (b"", b"?", b"[1, 2]", b"[99, 1, 0]", b"[1, 1, 2]", b"[1, 9, 0]", b'["1", 1, 0]'):
        with pytest.raises((DataError, ValueError, TypeError)):
            lake(**options).restore(state)


class FixedScores:
    """A pool that knows the right answer."""

    time_limit_s = 5.0

    async def score(self, env_args: str, answer: str) -> float:
        return 1.0 if answer == json.loads(env_args)["answer"] else 0.25


def conversation(*answers: str) -> list[StepResult]:
    async def play() -> list[StepResult]:
        env = Calculator(FixedScores(), TaskConfig())  # type: ignore[arg-type]
        await env.reset(Task(0, (Message("user", "12*7"),), "calculator", '{"answer": "84"}', 0, "h"), 0)
        return [await env.step(answer) for answer in answers]

    return asyncio.run(play())


def test_a_restored_calculator_has_counted_the_earlier_calls() -> None:
    async def play() -> StepResult:
        env = Calculator(FixedScores(), TaskConfig())  # type: ignore[arg-type]
        await env.reset(Task(0, (Message("user", "12*7"),), "calculator", '{"answer": "84"}', 0, "h"), 0)
        env.restore(second.state or b"")
        return await env.step("84")

    _, second, third = conversation("<calc>(</calc>", "<calc>1</calc>", "84")
    assert asyncio.run(play()) == third and third.reward_parts["tool_calls"] == 2.0


@pytest.mark.parametrize(
    ("answers", "reward", "parts"),
    [
        (["84"], 1.0, {"raw_score": 1.0, "tool_used_ok": 0.0, "tool_calls": 0.0}),
        (["83"], 0.0, {"raw_score": 0.25, "tool_used_ok": 0.0, "tool_calls": 0.0}),
        (["<calc>12*7</calc>", "84"], 1.0, {"raw_score": 1.0, "tool_used_ok": 1.0, "tool_calls": 1.0}),
        (["<calc>12*</calc>", "84"], 1.0, {"raw_score": 1.0, "tool_used_ok": 0.0, "tool_calls": 1.0}),
        (["<calc>(</calc>", "<calc>1</calc>", "1"], 0.0, {"raw_score": 0.25, "tool_used_ok": 1.0, "tool_calls": 2.0}),
    ],
)
def test_answers_are_scored_and_tools_counted(answers: list[str], reward: float, parts: dict[str, float]) -> None:
    *calls, last = conversation(*answers)
    assert (last.done, last.reward, last.reward_parts) == (True, reward, parts)
    assert all(not result.done and result.messages[0].role == "tool" for result in calls)


def test_the_tool_replies_with_a_result_or_an_error() -> None:
    seen = conversation("<calc>12*7</calc>", "<calc>__import__('os')</calc>")
    assert [result.messages for result in seen] == [(Message("tool", "84"),), (Message("tool", "error"),)]


def test_a_step_before_the_reset_is_refused() -> None:
    with pytest.raises(DataError, match="before reset"):
        FrozenLake(None, TaskConfig()).step("left")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="before reset"):
        asyncio.run(Calculator(FixedScores(), TaskConfig()).step("84"))  # type: ignore[arg-type]
