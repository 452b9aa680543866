"""Self-play: one policy plays both players of PettingZoo's tictactoe, and each turn earns the reward of its player.

Command   jaxroll train --config=configs/pettingzoo_tictactoe.py
Hardware  any; one device per role; pip install 'jaxroll[envs-more]'
Setting   warm start on random legal moves, then GRPO per turn at alpha = 1. The reward is that of the first player, so
          its mean shows which player wins, not how well both play; reward parts have both players
Result    after 160 steps 40 and 32 % of games against random moves are won, before 22 and 26 % (two seeds)
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """At most nine moves, each with a view of up to 18 tokens and an answer of 2."""
    config = defaults()
    config.run.name = "pettingzoo_tictactoe"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "pettingzoo"
    config.task.env = "pettingzoo"
    config.task.args = {"env": "pettingzoo.classic.tictactoe_v3:env", "max_turns": 9, "noise": 1.0, "forfeit": True}
    config.task.max_prompt_tokens = 20
    config.task.max_episode_tokens = 320
    config.task.heldout_items = 64
    config.sft.steps = 60
    config.sft.batch = 32
    config.schedule.steps = 60
    config.schedule.groups_per_step = 12
    config.schedule.group_size = 8
    config.sampling.max_tokens = 4
    config.sampler.slots = 32
    config.sampler.concurrent_episodes = 64
    config.sampler.prefill_buckets = (20, 48)
    config.sampler.decode_chunk = 2
    config.sampler.page_tokens = 16
    config.sampler.cache_pages = 1200
    config.learner.advantage = "segment_return"
    config.learner.turn_discount = 0.0
    config.learner.row_tokens = 320
    config.learner.micro_batch_rows = 8
    config.evaluator.every = 20
    return config
