"""Tool calls with JSON schemas: ask one of two tools for a number, then answer with it.

Command   jaxroll train --config=configs/tool_calls.py
Hardware  any; one device per role
Setting   warm start on calls of which 7 of 10 are drawn from wrong and right ones, then GRPO at alpha = 1 with reward
          1 for the right number. With a tokenizer of kind hf and task.prompt_style = full the chat template shows the
          schemas
Result    docs/results/environment_curves.md
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """A question of 10 tokens, calls of 70, results of up to 60 after a wrong one, an answer of 3."""
    config = defaults()
    config.run.name = "tool_calls"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "tool_calls"
    config.task.env = "tool_calls"
    config.task.args = {"max_turns": 3, "noise": 0.7}
    config.task.max_prompt_tokens = 12
    config.task.max_episode_tokens = 256
    config.task.heldout_items = 128
    config.sft.steps = 200
    config.sft.batch = 32
    config.sft.learning_rate = 1e-3  # with 3e-3 the loss of one seed of four leapt in the last steps
    config.schedule.steps = 40
    config.schedule.groups_per_step = 12
    config.schedule.group_size = 8
    config.sampling.max_tokens = 80
    config.sampler.slots = 32
    config.sampler.concurrent_episodes = 64
    config.sampler.prefill_buckets = (12, 96)
    config.sampler.decode_chunk = 8
    config.sampler.page_tokens = 16
    config.sampler.cache_pages = 1200
    config.learner.row_tokens = 256
    config.learner.micro_batch_rows = 8
    config.evaluator.every = 20
    return config
