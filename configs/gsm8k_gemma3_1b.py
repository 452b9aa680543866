"""GSM8K with Gemma-3-1B (instruction-tuned): learner on four devices, sampler on four.

Command   jaxroll train --config=configs/gsm8k_gemma3_1b.py
Needs     models/gemma-3-1b-it, otherwise as gsm8k_qwen3_0p6b
State     a starting point: it has never run on the hardware, and no result is known
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """gsm8k_qwen3_0p6b with sliding windows of 512 tokens and a template without a system role of its own."""
    config = read(Path(__file__).with_name("gsm8k_qwen3_0p6b.py"))
    config.run.name = "gsm8k_gemma3_1b"
    config.model.size = "gemma3_1b"
    config.model.path = config.tokenizer.path = "../models/gemma-3-1b-it"
    config.tokenizer.template_args = {}
    config.sampler.mesh.data, config.sampler.mesh.tensor = 4, 1  # one key-value head
    return config
