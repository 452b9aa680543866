"""GSM8K with Llama-3.2-1B-Instruct: learner on four devices, sampler on four.

Command   jaxroll train --config=configs/gsm8k_llama3p2_1b.py
Needs     models/Llama-3.2-1B-Instruct, otherwise as gsm8k_qwen3_0p6b
State     a starting point: it has never run on the hardware, and no result is known
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """gsm8k_qwen3_0p6b with a model that has no thinking mode."""
    config = read(Path(__file__).with_name("gsm8k_qwen3_0p6b.py"))
    config.run.name = "gsm8k_llama3p2_1b"
    config.model.size = "llama3p2_1b"
    config.model.path = config.tokenizer.path = "../models/Llama-3.2-1B-Instruct"
    config.tokenizer.template_args = {}
    return config
