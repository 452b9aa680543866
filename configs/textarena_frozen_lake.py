"""A game of textarena: FrozenLake, with its own texts and reward 1 at the goal, or the progress towards it.

Command   jaxroll train --config=configs/textarena_frozen_lake.py
Hardware  any; one device per role; pip install 'jaxroll[envs-more]'
Setting   warm start on random moves, then GRPO at alpha = 1 with the reward of the game. Its texts have hundreds of
          characters, so this config is for a model with a Hugging Face tokenizer; characters only show that it runs
Result    not measured; docs/results/environment_curves.md has another game of textarena, Secretary-v0
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """The first view has 760 characters, each later one 290; at most eight moves."""
    config = defaults()
    config.run.name = "textarena_frozen_lake"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "textarena"
    config.task.env = "textarena"
    moves = ("[up]", "[down]", "[left]", "[right]")
    config.task.args = {"id": "FrozenLake-v0-random", "moves": moves, "max_turns": 8, "noise": 1.0, "hidden": True}
    config.task.max_prompt_tokens = 832
    config.task.max_episode_tokens = 4096
    config.task.heldout_items = 32
    config.sft.steps = 20
    config.sft.batch = 8
    config.schedule.steps = 20
    config.schedule.groups_per_step = 4
    config.schedule.group_size = 8
    config.sampling.max_tokens = 10
    config.sampler.slots = 8
    config.sampler.concurrent_episodes = 32
    config.sampler.prefill_buckets = (832,)
    config.sampler.decode_chunk = 4
    config.sampler.page_tokens = 64
    config.sampler.cache_pages = 1024
    config.learner.row_tokens = 4096
    config.learner.micro_batch_rows = 1
    config.evaluator.every = 10
    return config
