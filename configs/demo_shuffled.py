"""The demo's control: rewards are permuted inside each group, so nothing can be learned from them.

Command   jaxroll demo --config=configs/demo_shuffled.py --seed=0
Expected  held-out accuracy does not rise; it collapses, because Adam takes full steps along noise
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
