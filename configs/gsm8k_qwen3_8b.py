"""GSM8K with Qwen3-8B: learner on eight devices, sampler on eight.

Command   jaxroll train --config=configs/gsm8k_qwen3_8b.py
Needs     models/Qwen3-8B, otherwise as gsm8k_qwen3_0p6b;
          parameters, gradients and AdamW's moments take 131 GB in float32, 16.4 GB per device of the learner
State     a starting point: it has never run on the hardware, and no result is known
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """gsm8k_qwen3_0p6b with the 8B model and larger meshes."""
    config = read(Path(__file__).with_name("gsm8k_qwen3_0p6b.py"))
    config.run.name = "gsm8k_qwen3_8b"
    config.model.size = "qwen3_8b"
    config.model.path = config.tokenizer.path = "../models/Qwen3-8B"
    config.sampler.mesh.tensor = 8
    config.learner.mesh.fsdp = 8
    config.placement.learner_memory_fraction = 0.5
    return config
