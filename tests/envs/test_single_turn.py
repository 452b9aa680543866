"""The one-turn environment: what is paid, and what is only recorded."""

from __future__ import annotations

import asyncio
import math

import pytest

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import SingleTurn
from jaxroll.errors import DataError
from jaxroll.protocols import Environment, StepResult
from jaxroll.records import Message, Task

TASK = Task(3, (Message("user", "sun"),), "single_turn", '{"scorer": "exact", "answer": "nus"}', 3, "h")


class FixedScores:
    """A pool that gives the same raw score to everything."""

    time_limit_s = 5.0

    def __init__(self, raw: float) -> None:
        self.raw = raw
        self.asked: list[tuple[str, str]] = []

    async def score(self, env_args: str, answer: str) -> float:
        self.asked.append((env_args, answer))
        return self.raw


async def one_turn(pool: FixedScores) -> StepResult:
    env = SingleTurn(pool, TaskConfig())  # type: ignore[arg-type]
    assert isinstance(env, Environment)
    assert await env.reset(TASK, seed=3) == TASK.messages
    result = await env.step("nus")
    await env.close()
    return result


@pytest.mark.parametrize(
    ("raw", "reward"),
    [
        (1.0, 1.0),
        (0.9999999999999999, 0.0),
        (1.0000000000000002, 0.0),
        (0.999, 0.0),
        (0.0, 0.0),
        (2.0, 0.0),
        (-1.0, 0.0),
    ],
)
def test_only_a_score_of_exactly_one_is_paid(raw: float, reward: float) -> None:
    pool = FixedScores(raw)
    result = asyncio.run(one_turn(pool))
    assert result == StepResult(done=True, reward=reward, reward_parts={"raw_score": raw})
    assert pool.asked == [(TASK.env_args, "nus")]


def test_neighbours_of_one_are_not_one() -> None:
    for raw in (math.nextafter(1.0, 0.0), math.nextafter(1.0, 2.0)):
        assert asyncio.run(one_turn(FixedScores(raw))).reward == 0.0


def test_a_step_before_reset_is_an_error() -> None:
    with pytest.raises(DataError, match="before reset"):
        asyncio.run(SingleTurn(FixedScores(1.0), TaskConfig()).step("nus"))  # type: ignore[arg-type]
