"""Repair of a file: edit one line until the tests pass. Every edit runs the tests in the sandbox.

Command   jaxroll train --config=configs/code_repair.py
Hardware  any Linux machine with user namespaces or landlock (`jaxroll doctor`); one device per role
Setting   functions of two lines with one wrong operator; warm start on edits of which 6 of 10 are random, then GRPO at
          alpha = 1 with reward 1 once all tests pass
Result    docs/results/environment_curves.md
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """A file with its tests has up to 85 tokens, an edit 8, the failing tests 40; at most four edits."""
    config = defaults()
    config.run.name = "code_repair"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "code_repair"
    config.task.env = "code_repair"
    config.task.args = {"lines": 2, "tests": 2, "max_turns": 4, "noise": 0.6}
    config.task.max_prompt_tokens = 96
    config.task.max_episode_tokens = 288
    config.task.heldout_items = 128
    config.sft.steps = 200
    config.sft.batch = 32
    config.schedule.steps = 60
    config.schedule.groups_per_step = 12
    config.schedule.group_size = 8
    config.sampling.max_tokens = 12
    config.sampler.slots = 32
    config.sampler.concurrent_episodes = 64
    config.sampler.prefill_buckets = (96,)
    config.sampler.decode_chunk = 4
    config.sampler.page_tokens = 16
    config.sampler.cache_pages = 1600
    config.learner.row_tokens = 288
    config.learner.micro_batch_rows = 8
    config.evaluator.every = 20
    return config
