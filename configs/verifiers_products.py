"""An environment of the package verifiers with turns and a tool: `configs/verifiers/products.py`.

Command   make venv-verifiers && jaxroll train --config=configs/verifiers_products.py
Hardware  any; one device per role; four processes of verifiers
Setting   verifiers' own harness `null` is the agent: a program for each rollout that asks, calls the tool over MCP,
          and asks again. It takes 3 to 4 s on two loaded cores, so that this config shows the way and is no benchmark
Result    not measured: the rollouts of 40 steps would take hours on two cores
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """verifiers_reversal with another taskset, a harness, and room for a call (55 tokens) and its result."""
    config = read(Path(__file__).with_name("verifiers_reversal.py"))
    config.run.name = "verifiers_products"
    config.task.args.env = {"taskset": {"id": "products"}, "agent": {"harness": {"id": "null"}}}
    config.task.args.renderer = {"name": "default", "tool_parser": "qwen3"}
    config.task.max_episode_tokens = 160
    config.sft.batch = 32
    config.sampling.max_tokens = 64
    config.sampler.prefill_buckets = (8, 32)
    config.learner.row_tokens = 160
    config.learner.micro_batch_rows = 8
    return config
