"""A taskset of verifiers with several turns and a tool: multiply two numbers. It does not import JaxRoll."""

import json
from random import Random

import verifiers.v1 as vf

__all__ = ["ProductsTaskset"]


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    """One tool, served by a process of its own."""

    TOOL_PREFIX = None

    @vf.tool
    def mul(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)


class ProductsData(vf.TaskData):
    """A product, its value, and the play of a teacher."""

    answer: str
    worked: list[dict[str, str]]


class ProductsTask(vf.Task[ProductsData]):
    """Graded by equality of the last answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right number."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        """Results of the tool."""
        return float(len(trace.tool_messages))


class ProductsConfig(vf.TasksetConfig):
    """Size of the taskset, and the share of the teacher's answers without the tool."""

    tasks: int = 4096
    direct: float = 0.67
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ProductsTaskset(vf.Taskset[ProductsTask, ProductsConfig]):
    """Products of numbers with two digits."""

    def load(self) -> list[ProductsTask]:
        """The tasks, always the same."""
        random, made = Random(0), []
        for _ in range(self.config.tasks):
            a, b = random.randint(10, 99), random.randint(10, 99)
            call = json.dumps({"name": "mul", "arguments": {"a": a, "b": b}})
            answer = {"role": "assistant", "content": str(a * b)}
            worked = [
                {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
                {"role": "tool", "content": str(a * b)},
                answer,
            ]
            if random.random() < self.config.direct:
                worked = [answer]
            made.append(
                ProductsTask(ProductsData(prompt=f"{a}*{b}", answer=str(a * b), worked=worked), self.config.task)
            )
        return made

    @classmethod
    def toolsets(cls, config: ProductsConfig) -> list[vf.Toolset]:
        """The calculator, shared by all rollouts."""
        return [Calculator(config.tools)]


if __name__ == "__main__":
    Calculator.run()
