"""TextWorld: a household text game with a quest of two commands in two rooms.

Command   jaxroll train --config=configs/textworld_home.py
Hardware  any Linux machine; one device per role; pip install 'jaxroll[textworld]'
Setting   warm start on a player who takes a random admissible command in 5 of 10 turns, then GRPO at alpha = 1 with
          reward 1 for a quest that is done. Each game is compiled once, in some seconds. The texts are long, so this
          config is for a model with a Hugging Face tokenizer; characters only show that it runs
Result    not measured; docs/results/environment_curves.md has games of one command, chosen by its number
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """The first view has up to 1,200 characters; at most six commands."""
    config = defaults()
    config.run.name = "textworld_home"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "textworld"
    config.task.env = "textworld"
    config.task.args = {"rooms": 2, "objects": 3, "quest_length": 2, "max_turns": 6, "noise": 0.5}
    config.task.max_prompt_tokens = 1600
    config.task.max_episode_tokens = 4096
    config.task.heldout_items = 8
    config.sft.steps = 10
    config.sft.batch = 4
    config.schedule.steps = 10
    config.schedule.groups_per_step = 2
    config.schedule.group_size = 8
    config.sampling.max_tokens = 48
    config.sampler.slots = 8
    config.sampler.concurrent_episodes = 16
    config.sampler.prefill_buckets = (1600,)
    config.sampler.decode_chunk = 8
    config.sampler.page_tokens = 64
    config.sampler.cache_pages = 1024
    config.learner.row_tokens = 4096
    config.learner.micro_batch_rows = 1
    config.evaluator.every = 10
    return config
