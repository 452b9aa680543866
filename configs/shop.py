"""A small shop: search a kind of item, look at items, buy the one whose color and price fit.

Command   jaxroll train --config=configs/shop.py
Hardware  any; one device per role
Setting   warm start on a shopper who acts at random in 4 of 10 turns, then GRPO at alpha = 1 with reward 1 for an item
          that fits
Result    docs/results/environment_curves.md
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """A wish has 10 tokens, an answer up to 11, a view up to 20; at most ten answers."""
    config = defaults()
    config.run.name = "shop"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "shop"
    config.task.env = "shop"
    config.task.args = {"items": 3, "max_turns": 10, "noise": 0.4}
    config.task.max_prompt_tokens = 14
    config.task.max_episode_tokens = 320
    config.task.heldout_items = 128
    config.sft.steps = 100
    config.sft.batch = 32
    config.schedule.steps = 60
    config.schedule.groups_per_step = 12
    config.schedule.group_size = 8
    config.sampling.max_tokens = 12
    config.sampler.slots = 32
    config.sampler.concurrent_episodes = 64
    config.sampler.prefill_buckets = (14, 48)
    config.sampler.decode_chunk = 4
    config.sampler.page_tokens = 16
    config.sampler.cache_pages = 1200
    config.learner.row_tokens = 320
    config.learner.micro_batch_rows = 8
    config.evaluator.every = 20
    return config
