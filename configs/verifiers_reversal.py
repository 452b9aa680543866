"""An environment of the package verifiers, unmodified: `configs/verifiers/reversal.py`, one turn.

Command   make venv-verifiers && jaxroll train --config=configs/verifiers_reversal.py
Hardware  any; one device per role; four processes of verifiers
Setting   verifiers renders the prompt, asks /inference/v1/generate of the member's URL and grades the answer. In the
          warm start two of three answers are wrong (the word itself); then GRPO at alpha = 1 with verifiers' reward
Result    40 RL steps in 411 and 600 s on two cores under a load of 8 to 20. Accuracy on 128 held-out words before and
          after RL: seed 0 29.7 % and 94.5 %, seed 1 13.3 % and 81.2 %; docs/results/agents.md
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import defaults

HERE = Path(__file__).resolve().parent


def get_config() -> ConfigDict:
    """A prompt of 6 tokens and an answer of 5."""
    config = defaults()
    config.run.name = "verifiers_reversal"
    config.placement.platform = "cpu"
    config.tokenizer.kind = "hf"
    config.tokenizer.path = "verifiers/tokenizer"
    config.task.source = "game"
    config.task.name = "verifiers"
    config.task.env = "agent"
    config.task.agent = "jaxroll.envs.adapters.verifiers_env:play"
    config.task.agent_limit_s = 120.0
    config.task.args = {
        "python": str(HERE.parent / ".venv-verifiers" / "bin" / "python"),
        "path": [str(HERE / "verifiers")],
        "env": {"taskset": {"id": "reversal"}},
        "tokenizer": str(HERE / "verifiers" / "tokenizer"),
        "renderer": {"name": "default"},
    }
    config.task.max_prompt_tokens = 8
    config.task.max_episode_tokens = 32
    config.task.heldout_items = 128
    config.sft.steps = 150
    config.sft.batch = 64
    config.schedule.steps = 40
    config.schedule.groups_per_step = 8
    config.schedule.group_size = 8
    config.sampling.max_tokens = 12
    config.sampler.slots = 16
    config.sampler.concurrent_episodes = 16
    config.sampler.env_processes = 4
    config.sampler.prefill_buckets = (8,)
    config.sampler.decode_chunk = 4
    config.learner.row_tokens = 32
    config.learner.micro_batch_rows = 16
    config.evaluator.every = 10
    return config
