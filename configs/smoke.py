"""A run of a few seconds on the smallest model, for the process tests and to check an installation.

Command   jaxroll train --config=configs/smoke.py
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """Three steps of four groups."""
    config = defaults()
    config.run.name = "smoke"
    config.model.size = "nano"
    config.placement.platform = "cpu"
    config.task.heldout_items = 16
    config.sft.steps = 5
    config.sft.batch = 8
    config.schedule.steps = 3
    config.schedule.groups_per_step = 4
    config.schedule.group_size = 4
    config.sampler.slots = 8
    config.evaluator.every = 2
    config.evaluator.slots = 8
    config.learner.checkpoint_every = 2
    return config
