"""GSM8K with Qwen2.5-0.5B-Instruct: learner on four devices, sampler on four.

Command   jaxroll train --config=configs/gsm8k_qwen2p5_0p5b.py
Needs     models/Qwen2.5-0.5B-Instruct, otherwise as gsm8k_qwen3_0p6b
State     a starting point: it has never run on the hardware, and no result is known
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """gsm8k_qwen3_0p6b with a model that has no thinking mode."""
    config = read(Path(__file__).with_name("gsm8k_qwen3_0p6b.py"))
    config.run.name = "gsm8k_qwen2p5_0p5b"
    config.model.size = "qwen2p5_0p5b"
    config.model.path = config.tokenizer.path = "../models/Qwen2.5-0.5B-Instruct"
    config.tokenizer.template_args = {}
    config.sampler.mesh.data, config.sampler.mesh.tensor = 2, 2  # 14 query heads
    return config
