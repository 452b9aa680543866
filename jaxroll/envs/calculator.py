"""A calculator as a tool: the model may ask for the value of expressions before it answers."""

from __future__ import annotations

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.envs.scoring import ScoringPool
from jaxroll.errors import DataError
from jaxroll.games import calculator
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task

_QUEUE_ALLOWANCE_S = 120.0  # scores of others that are ahead in the pool, and a worker that is starting


@register("calculator")
class Calculator:
    """An answer that holds a call is answered with the result (or "error"); any other is final and is scored.

    Reward 1 when its raw score is exactly 1.0, else 0. `tool_used_ok` says whether some call had a result.
    """

    max_turns = 6

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self.step_limit_s = pool.time_limit_s + _QUEUE_ALLOWANCE_S
        self._pool = pool
        self._env_args: str | None = None
        self._calls = self._results = 0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; there is no chance in them."""
        self._env_args, self._calls, self._results = task.env_args, 0, 0
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The tool's reply to a call, or the end; DataError when the final answer cannot be scored."""
        if self._env_args is None:
            raise DataError("step() before reset(): there is no question to answer")
        expression = calculator.called(answer)
        if expression is not None:
            reply, right = calculator.replied(expression)
            self._calls, self._results = self._calls + 1, self._results + right
            return StepResult(done=False, messages=(Message("tool", reply),))
        raw = await self._pool.score(self._env_args, answer)
        parts = {"raw_score": raw, "tool_used_ok": float(self._results > 0), "tool_calls": float(self._calls)}
        return StepResult(done=True, reward=1.0 if raw == 1.0 else 0.0, reward_parts=parts)

    async def close(self) -> None:
        """Nothing to end: the pool outlives the episode."""
        self._env_args = None
