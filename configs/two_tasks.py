"""Two tasks in one run, each with its own environment, reward and limits: a question of arithmetic and a frozen lake.

Command   jaxroll train --config=configs/two_tasks.py
Hardware  any; made for two CPU cores, one device per role
Setting   of four prompts one is a greatest common divisor (one turn, scored by reasoning-gym, half a point if it is
          right) and three are 4 x 4 lakes (several turns, reward 1 at the goal); warm start on worked answers of both,
          then GRPO at alpha = 1
Result    no learning curve has been measured; a process test (soak) trains some steps on it
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """The longest episode is a lake: 21 tokens for the first view, and 27 for each of eight moves with the view after it."""
    config = defaults()
    config.run.name = "two_tasks"
    config.placement.platform = "cpu"
    config.task.mixture = [
        {
            "label": "gcd",
            "source": "reasoning_gym",
            "name": "gcd",
            "args": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 60},
            "reward": "0.5*reasoning_gym",
            "max_prompt_tokens": 12,
            "max_episode_tokens": 0,
            "weight": 1,
        },
        {
            "label": "lake",
            "source": "game",
            "name": "frozen_lake",
            "env": "frozen_lake",
            "args": {"size": 4, "ice": 0.7, "max_turns": 8, "noise": 0.3},
            "weight": 3,
        },
    ]
    config.task.max_prompt_tokens = 24
    config.task.max_episode_tokens = 256
    config.task.heldout_items = 128
    config.sft.steps = 80
    config.sft.batch = 16
    config.schedule.steps = 120
    config.schedule.groups_per_step = 12
    config.schedule.group_size = 8
    config.sampling.max_tokens = 7
    config.sampler.slots = 32
    config.sampler.concurrent_episodes = 64
    config.sampler.prefill_buckets = (24, 96)
    config.sampler.decode_chunk = 4
    config.sampler.page_tokens = 16
    config.sampler.cache_pages = 1400
    config.learner.row_tokens = 256
    config.learner.micro_batch_rows = 8
    config.evaluator.every = 40
    return config
