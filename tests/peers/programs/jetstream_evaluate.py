"""For .venv-jetstream: JetStream's own test engine answers a held-out evaluation of ours, through our proxy.

With weight 2 the answer to a prompt of sum s is 2s, 3s, 4.5s, … (see jetstream_generate.py), so the items can be chosen
to be right or wrong, and to stop or run into the limit. The last line has the rewards, the accuracy and the texts.
"""

import asyncio
import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jetstream.engine import mock_engine

from jaxroll.protocols import SamplingParams, StepResult
from jaxroll.records import Message, Task, Version
from jaxroll.roles.evaluator import figures, marks
from jaxroll.rollout import episode as rollouts
from jaxroll.rollout.episode import RolloutManager
from jaxroll.serving.jetstream_proxy import JetStreamProxy

VERSION = Version(0, 3)
STOPS = (30, 33, 21)  # 3s of the items that end; the third goes on to the limit
ITEMS = [("n4 n6", "n20"), ("n11", "n22"), ("n12 n1", "n26"), ("n5 n2", "n15"), ("n1 n2 n3 n4", "n20")]


class Words:
    """A tokenizer in which token 7 is the word n7."""

    vocab_size, pad_id, eos_id = 2**16, 0, 1

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"n{i}" for i in ids)

    def render(self, messages, *, first: bool = True, tools=()) -> list[int]:
        return self.encode(" ".join(message.content for message in messages))


class Exact:
    """An environment with reward 1 for the task's answer."""

    step_limit_s = 30.0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        self._answer = task.args()["answer"]
        return task.messages

    async def step(self, answer: str) -> StepResult:
        return StepResult(done=True, reward=float(answer == self._answer))

    async def close(self) -> None:
        pass


async def evaluated(proxy: JetStreamProxy) -> list[list[rollouts.Score]]:
    words = Words()
    sampling = SamplingParams(max_tokens=4, temperature=0.0, stop_tokens=STOPS)
    manager = RolloutManager(proxy, lambda name: Exact(), words, sampling)
    tasks = [
        Task(index, (Message("user", prompt),), "exact", json.dumps({"answer": answer}), 0, f"h{index}")
        for index, (prompt, answer) in enumerate(ITEMS)
    ]
    return await rollouts.scores(manager, tasks, words, VERSION, permits=4)


def main() -> None:
    """Evaluate five items on two slots, four items at a time."""
    engine = mock_engine.TestEngine(batch_size=2, cache_length=16, weight=2.0)
    proxy = JetStreamProxy(engine, engine.load_params(), VERSION, trained_by=None)
    try:
        results = asyncio.run(evaluated(proxy))
    finally:
        proxy.close()
    said = {"marks": marks(results), "accuracy": figures(results)["accuracy"]}
    print(json.dumps(said | {"texts": [score.text for score in results[0]]}))


if __name__ == "__main__":
    main()
