"""GSM8K with Qwen3-1.7B: learner on four devices, sampler on four.

Command   jaxroll train --config=configs/gsm8k_qwen3_1p7b.py
Needs     models/Qwen3-1.7B, otherwise as gsm8k_qwen3_0p6b
State     a starting point: it has never run on the hardware, and no result is known
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """gsm8k_qwen3_0p6b with the 1.7B model."""
    config = read(Path(__file__).with_name("gsm8k_qwen3_0p6b.py"))
    config.run.name = "gsm8k_qwen3_1p7b"
    config.model.size = "qwen3_1p7b"
    config.model.path = config.tokenizer.path = "../models/Qwen3-1.7B"
    return config
