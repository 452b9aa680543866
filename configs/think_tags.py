"""A chat model that thinks: a system prompt, reasoning in think tags, and a reward for the text after them.

Command   jaxroll train --config=configs/think_tags.py
Control   the same with --config.task.extract=none --config.task.reward=exact: no completion equals its answer
Hardware  any
Setting   reverse a number of 4 to 9 digits; the warm start teaches <think>NUMBER</think>REVERSED and ends once 30 % of
          unseen answers are exact, after 105 to 145 steps; then GRPO at alpha = 1
Result    held-out accuracy 54.3 → 77.7, 35.9 → 90.6 and 46.9 → 94.9 % for seeds 0, 1, 2; control 0 → 0 %. With 120
          steps seed 0 gained less than the aim of 15 points in two of three runs. In 189 to 643 s each on two shared
          CPU cores (docs/results/thinking.md)
"""

from random import Random

from ml_collections import ConfigDict

from jaxroll.config import defaults
from jaxroll.records import Item, Message


class Reversed:
    """Numbers without end, each with a worked completion that thinks first."""

    size, identity = None, "think_tags/1"

    def __init__(self, task: object) -> None:
        pass

    def item(self, index: int) -> Item:
        """The number `index`; always the same for one index."""
        random = Random(index)
        number = "".join(random.choices("123456789", k=random.randint(4, 9)))
        answer = number[::-1]
        worked = (Message("assistant", f"<think>{number}</think>{answer}"),)
        return Item(number, number, answer, {"scorer": "exact", "answer": answer}, worked)

    def alphabet(self) -> str:
        """The characters of numbers and tags; those of the system prompt are added."""
        return "".join(sorted(set("123456789<think></think>")))


def get_config() -> ConfigDict:
    """Room for a system prompt, a number, and both again in the completion."""
    config = defaults()
    config.run.name = "think_tags"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "configs.think_tags:Reversed"
    config.task.args = {}
    config.task.system_prompt = "think, then reverse:"
    config.task.extract = "after_think"
    config.task.reward = "math"
    config.task.max_prompt_tokens = 32
    config.task.heldout_items = 256
    config.sft.steps = 400
    config.sft.enough_exact = 0.3
    config.schedule.steps = 240
    config.sampling.max_tokens = 36
    config.sampler.slots = 64
    config.sampler.prefill_rows = 16
    config.sampler.prefill_buckets = (32,)
    config.sampler.decode_chunk = 8
    config.learner.row_tokens = 72
    config.learner.micro_batch_rows = 16
    config.evaluator.every = 40
    return config
