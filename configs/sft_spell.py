"""A longer warm start alone: the accuracy that supervised training reaches without RL.

Command   jaxroll sft --config=configs/sft_spell.py
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """rlvr_tiny with a warm start of 2,000 steps."""
    config = read(Path(__file__).with_name("rlvr_tiny.py"))
    config.run.name = "sft_spell"
    config.sft.steps = 2000
    return config
