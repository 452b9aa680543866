"""Environment with one turn for verifiable rewards: question, answer, score."""

from __future__ import annotations

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.errors import DataError
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool

_QUEUE_ALLOWANCE_S = 120.0  # for earlier requests in the pool's queue, and for a worker that is starting


@register("single_turn")
class SingleTurn:
    """Environment that shows the task's messages and gives reward 1 if the raw score is exactly 1.0, else 0."""

    # Exactly 1.0: some scorers give wrong answers partial credit of 0.9999999999999999 or 1.0000000000000002.

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self.step_limit_s = pool.time_limit_s + _QUEUE_ALLOWANCE_S
        self._pool = pool
        self._env_args: str | None = None

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; `seed` has no effect."""
        self._env_args = task.env_args
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The end of the episode with its reward; DataError when the answer cannot be scored."""
        if self._env_args is None:
            raise DataError("step() before reset(): there is no question to answer")
        raw = await self._pool.score(self._env_args, answer)
        return StepResult(done=True, reward=1.0 if raw == 1.0 else 0.0, reward_parts={"raw_score": raw})

    async def close(self) -> None:
        """Forget the task; the pool is shared and stays open."""
        self._env_args = None
