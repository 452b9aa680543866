"""The synchronous baseline of rlvr_tiny: with alpha = 0 every token is trained at the version that sampled it.

Command   jaxroll train --config=configs/rlvr_sync.py
Expected  all ages are 0; sampler and learner wait for each other, so a step takes as long as both together
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """rlvr_tiny without asynchrony."""
    config = read(Path(__file__).with_name("rlvr_tiny.py"))
    config.run.name = "rlvr_sync"
    config.schedule.mode = "sync"
    return config
