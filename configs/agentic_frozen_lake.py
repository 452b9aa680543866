"""An agent with several turns: cross a random frozen lake, shown as text, with one word per move.

Command   jaxroll train --config=configs/agentic_frozen_lake.py
Hardware  any; measured on two CPU cores, one device per role
Setting   4 x 4 lakes; no held-out lake is trained on; warm start on episodes of a player that moves at random in 3 of
          10 moves, then GRPO at alpha = 1 with reward 1 at the goal
Result    on two loaded cores, success on 256 held-out lakes after the warm start and at the end: seed 0 34.8 % and
          62.9 % (216 s with warm start and evaluations), seed 1 33.2 % and 70.7 % (234 s), seed 2 33.6 % and 74.6 %
          (236 s). With twice the learning rate and eight groups per step, success rose to 56 % and fell back to 11 %
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """At most ten moves: 21 tokens for the first view, and 27 for each answer with the view after it."""
    config = defaults()
    config.run.name = "agentic_frozen_lake"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "frozen_lake"
    config.task.env = "frozen_lake"
    config.task.args = {"size": 4, "ice": 0.7, "max_turns": 10, "noise": 0.3}
    config.task.max_prompt_tokens = 24
    config.task.max_episode_tokens = 288
    config.task.heldout_items = 256
    config.sft.steps = 80
    config.sft.batch = 16
    config.schedule.steps = 240
    config.schedule.groups_per_step = 12
    config.schedule.group_size = 8
    config.sampling.max_tokens = 7
    config.sampler.slots = 32
    config.sampler.concurrent_episodes = 64
    config.sampler.prefill_buckets = (24, 96)
    config.sampler.decode_chunk = 4
    config.sampler.page_tokens = 16
    config.sampler.cache_pages = 1600
    config.learner.row_tokens = 288
    config.learner.micro_batch_rows = 8
    config.evaluator.every = 60
    return config
