"""Asynchronous RL with verifiable rewards, one device a role: the smallest real run, and where to start from.

Command   jaxroll train --config=configs/rlvr_tiny.py
          jaxroll train --config=configs/rlvr_tiny.py --config.task.name=chain_sum --config.task.args={}
Hardware  anything: CPU, one GPU shared by fractions, a TPU host with three chips or more; one chip or GPU shared by
          turns with --config.placement.colocated=True
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """The defaults, named."""
    config = defaults()
    config.run.name = "rlvr_tiny"
    return config
