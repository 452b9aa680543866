"""Environment with one turn for verifiable rewards: question, answer, score."""

from __future__ import annotations

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.errors import DataError
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards.grader import Grader
from jaxroll.rewards.scoring_pool import ScoringPool


@register("single_turn")
class SingleTurn:
    """Environment that shows the task's messages and grades the answer as `task.extract` and `task.reward` say."""

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._grader = Grader(pool, config)
        self.step_limit_s = self._grader.limit_s
        self.answer_tokens = 0
        self._env_args: str | None = None
        self._messages: tuple[Message, ...] = ()

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; `seed` has no effect."""
        self._env_args, self._messages = task.env_args, task.messages
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The end of the episode with its reward; DataError when the answer cannot be scored."""
        if self._env_args is None:
            raise DataError("step() before reset(): there is no question to answer")
        grade = await self._grader.grade(self._env_args, answer, self.answer_tokens, self._messages)
        return StepResult(done=True, reward=grade.reward, reward_parts=grade.parts, extracted=grade.extracted)

    async def close(self) -> None:
        """Forget the task; the pool is shared and stays open."""
        self._env_args = None
