"""Verifiable rewards as an environment of one turn: question, answer, score."""

from __future__ import annotations

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.errors import DataError
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool

_QUEUE_ALLOWANCE_S = 120.0  # scores of others that are ahead in the pool, and a worker that is starting


@register("single_turn")
class SingleTurn:
    """Shows the task's messages and rewards the answer with 1 when its raw score is exactly 1.0, else with 0.

    Exactly: some scorers pay partial credit that sums to 0.9999999999999999 or 1.0000000000000002 for wrong answers.
    """

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self.step_limit_s = pool.time_limit_s + _QUEUE_ALLOWANCE_S
        self._pool = pool
        self._env_args: str | None = None

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; there is no chance in them, so `seed` changes nothing."""
        self._env_args = task.env_args
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The end of the episode with its reward; raises DataError when the answer cannot be scored."""
        if self._env_args is None:
            raise DataError("step() before reset(): there is no question to answer")
        raw = await self._pool.score(self._env_args, answer)
        return StepResult(done=True, reward=1.0 if raw == 1.0 else 0.0, reward_parts={"raw_score": raw})

    async def close(self) -> None:
        """Nothing to end: the pool outlives the episode."""
        self._env_args = None
