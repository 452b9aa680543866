"""An agent by base_url: the program `configs/agents/calculator.py` sees an OpenAI endpoint and a calculator of its own.

Command   jaxroll train --config=configs/agent_calculator.py
Hardware  any; one device per role; up to eight processes for the program
Setting   products from reasoning-gym; the program asks, computes what the model writes between <calc> and </calc>, and
          asks again, twice at most; the task grades the last answer. Warm start as in agentic_calculator, then GRPO at
          alpha = 1 with reward 1 for the right answer
Result    40 RL steps in 416 to 603 s on two cores under a load of 10 to 20. Accuracy on 128 held-out problems before
          and after RL: seed 0 56.2 % and 85.2 %, seed 1 37.5 % and 84.4 %, seed 2 27.3 % and 85.9 %;
          docs/results/agents.md
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """agentic_calculator with a program instead of the environment, and smaller steps: its processes share the cores."""
    config = read(Path(__file__).with_name("agentic_calculator.py"))
    config.run.name = "agent_calculator"
    config.task.env = "agent"
    config.task.agent = "file:agents/calculator.py:answer"
    config.task.agent_limit_s = 60.0
    config.task.heldout_items = 128
    config.schedule.steps = 40
    config.schedule.groups_per_step = 8
    config.sampler.slots = 16
    config.sampler.concurrent_episodes = 24
    config.sampler.env_processes = 8
    return config
