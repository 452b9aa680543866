"""An agent by base_url: the program `configs/agents/calculator.py` sees an OpenAI endpoint and a calculator of its own.

Command   jaxroll train --config=configs/agent_calculator.py
Hardware  any; one device per role; up to eight processes for the program
Setting   products from reasoning-gym; the program asks, computes what the model writes between <calc> and </calc>, and
          asks again, twice at most; the task grades the last answer. Warm start as in agentic_calculator, then GRPO at
          alpha = 1 with reward 1 for the right answer
Result    40 RL steps in 416 to 603 s on two cores under a load of 10 to 20. Accuracy on 128 held-out problems before and
          after RL: seed 0 56.2 % and 85.2 %, seed 1 37.5 % and 84.4 %, seed 2 27.3 % and 85.9 %; docs/results/agents.md
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """Room for a problem (7 tokens), a call (19), its result (6), an answer (5), and another call."""
    config = defaults()
    config.run.name = "agent_calculator"
    config.placement.platform = "cpu"
    config.task.source = "game"
    config.task.name = "calculator"
    config.task.env = "agent"
    config.task.agent = "file:agents/calculator.py:answer"
    config.task.agent_limit_s = 60.0
    config.task.args = {
        "problem": "products", "problem_args": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        "direct": 0.67, "slips": 0.2,
    }  # fmt: skip
    config.task.max_prompt_tokens = 8
    config.task.max_episode_tokens = 96
    config.task.heldout_items = 128
    config.sft.steps = 150
    config.sft.batch = 64
    config.schedule.steps = 40
    config.schedule.groups_per_step = 8
    config.schedule.group_size = 8
    config.sampling.max_tokens = 24
    config.sampler.slots = 16
    config.sampler.concurrent_episodes = 24
    config.sampler.env_processes = 8
    config.sampler.prefill_buckets = (8, 32)
    config.sampler.decode_chunk = 4
    config.sampler.page_tokens = 8
    config.sampler.cache_pages = 1200
    config.learner.row_tokens = 96
    config.learner.micro_batch_rows = 16
    config.evaluator.every = 20
    return config
