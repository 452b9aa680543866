"""The demo's control: rewards are permuted inside each group, so nothing can be learned from them.

Command   jaxroll demo --config=configs/demo_shuffled.py --seed=0
Expected  held-out accuracy moves by less than 4 points; what moves more is not learning from rewards
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """The demo with shuffled rewards."""
    config = read(Path(__file__).with_name("demo.py"))
    config.run.name = "demo_shuffled"
    config.learner.shuffle_rewards = True
    return config
