"""The demo: a 0.5M-parameter model learns to spell words backward, by asynchronous RL on the CPU.

Command   make demo   (or: jaxroll demo --seed=0)
Hardware  two CPU cores; learner and sampler have two forced devices each, on different mesh axes
Setting   warm start on worked answers, then GRPO with decoupled correction at alpha = 1
Result    docs/results/demo.md; the report of the run
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """The demo's settings."""
    config = defaults()
    config.run.name = "demo"
    config.placement.platform = "cpu"
    config.schedule.alpha = 1.0
    config.schedule.steps = 100
    config.sft.steps = 140
    config.learner.mesh.fsdp = 2
    config.learner.micro_batch_rows = 16
    config.learner.row_tokens = 64
    config.sampler.mesh.tensor = 2
    config.sampler.slots = 64
    config.sampler.prefill_rows = 16
    config.sampler.decode_chunk = 8
    config.evaluator.mesh.tensor = 2  # the programs are then those of the sampler, and each is compiled once
    return config
