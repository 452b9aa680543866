"""Sokoban on a 3 x 4 board with one box, one word per move; levels of any size and number of boxes have the same form.

Command   jaxroll train --config=configs/sokoban.py
Hardware  any; one device per role
Setting   warm start on a teacher that moves at random in 6 of 10 moves, then GRPO at alpha = 1 with reward 1 for a
          solved level. No held-out level is trained on
Result    docs/results/environment_curves.md
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """At most nine moves: 16 tokens for the first view, and 24 for each answer with the view after it."""
    config = defaults()
    config.run.name = "sokoban"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "sokoban"
    config.task.env = "sokoban"
    config.task.args = {"rows": 3, "columns": 4, "boxes": 1, "pulls": 2, "max_turns": 9, "noise": 0.6}
    config.task.max_prompt_tokens = 20
    config.task.max_episode_tokens = 256
    config.task.heldout_items = 64
    config.sft.steps = 60
    config.sft.batch = 32
    config.schedule.steps = 80
    config.schedule.groups_per_step = 16
    config.schedule.group_size = 8
    config.sampling.max_tokens = 7
    config.sampler.slots = 32
    config.sampler.concurrent_episodes = 64
    config.sampler.prefill_buckets = (20, 48)
    config.sampler.decode_chunk = 4
    config.sampler.page_tokens = 16
    config.sampler.cache_pages = 1200
    config.learner.row_tokens = 256
    config.learner.micro_batch_rows = 8
    config.evaluator.every = 20
    return config
