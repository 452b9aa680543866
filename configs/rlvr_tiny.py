"""Asynchronous RL with verifiable rewards, one device per role: the smallest real run and a template for your own.

Command   jaxroll train --config=configs/rlvr_tiny.py
          jaxroll train --config=configs/rlvr_tiny.py --config.task.name=chain_sum --config.task.args={}
Hardware  any: CPU, one GPU shared by memory fractions, a TPU host with three chips or more; with
          --config.placement.colocated=True all roles share one chip or GPU in one process
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """The defaults with a name."""
    config = defaults()
    config.run.name = "rlvr_tiny"
    return config
