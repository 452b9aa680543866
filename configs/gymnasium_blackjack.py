"""A gymnasium environment in text: Blackjack-v1, shown as three numbers, answered with 0 (stick) or 1 (hit).

Command   jaxroll train --config=configs/gymnasium_blackjack.py
Hardware  any; one device per role
Setting   warm start on random play, then GRPO at alpha = 1 with reward 1 for a game that is won. Chance follows the
          seed of the game, so the members of a group see the same cards
Result    docs/results/environment_curves.md
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """At most eight cards: 9 tokens of an observation and 2 of an answer each."""
    config = defaults()
    config.run.name = "gymnasium_blackjack"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "gymnasium"
    config.task.env = "gymnasium"
    config.task.args = {"id": "Blackjack-v1", "goal": 1.0, "max_turns": 8, "noise": 1.0, "hidden": True}
    config.task.max_prompt_tokens = 12
    config.task.max_episode_tokens = 112
    config.task.heldout_items = 512
    config.sft.steps = 60
    config.sft.batch = 32
    config.schedule.steps = 60
    config.schedule.groups_per_step = 24
    config.schedule.group_size = 8
    config.sampling.max_tokens = 4
    config.sampler.slots = 32
    config.sampler.concurrent_episodes = 64
    config.sampler.prefill_buckets = (12, 32)
    config.sampler.decode_chunk = 2
    config.sampler.page_tokens = 8
    config.sampler.cache_pages = 1200
    config.learner.row_tokens = 112
    config.learner.micro_batch_rows = 16
    config.evaluator.every = 20
    return config
