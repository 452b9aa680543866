"""An environment of verifiers with one turn: write a word backward. It does not import JaxRoll.

Its harness asks once, from the process of verifiers: a harness with a program of its own takes seconds to start it.
"""

from random import Random

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["ReversalHarness", "ReversalTaskset"]


class ReversalHarnessConfig(vf.HarnessConfig):
    """No settings."""


class ReversalHarness(vf.Harness[ReversalHarnessConfig]):
    """Asks the model for one answer."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        """Send the prompt; verifiers records the answer."""
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=100.0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


class ReversalData(vf.TaskData):
    """A word to reverse, the answer, and the play of a teacher for a warm start."""

    answer: str
    worked: list[dict[str, str]]


class ReversalTask(vf.Task[ReversalData]):
    """Graded by equality."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the whole word backward."""
        return float(trace.last_reply.strip() == self.data.answer)


class ReversalConfig(vf.TasksetConfig):
    """Size of the taskset, length of its words, and the share of the teacher's answers that are the word itself."""

    tasks: int = 4096
    letters: int = 4
    slips: float = 0.67


class ReversalTaskset(vf.Taskset[ReversalTask, ReversalConfig]):
    """Words of random letters."""

    def load(self) -> list[ReversalTask]:
        """The tasks, always the same."""
        random, made = Random(0), []
        for _ in range(self.config.tasks):
            word = "".join(random.choices("abcdefgh", k=self.config.letters))
            shown = word if random.random() < self.config.slips else word[::-1]
            worked = [{"role": "assistant", "content": shown}]
            made.append(ReversalTask(ReversalData(prompt=word, answer=word[::-1], worked=worked), self.config.task))
        return made
