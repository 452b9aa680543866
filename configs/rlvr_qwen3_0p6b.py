"""Qwen3-0.6B on arithmetic: learner on four devices (fsdp), sampler on four (tensor); for TPU and GPU.

Command   jaxroll train --config=configs/rlvr_qwen3_0p6b.py
Needs     models/Qwen3-0.6B with the weights and tokenizer.json, pip install 'jaxroll[hf]' for its chat template; a host
          with eight TPU chips (v5e or later) or eight GPUs, four per role; on four GPUs both roles share all of them
State     a starting point: its programs compile for a v5e slice (`make soak`); it has never run on the hardware
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults


def get_config() -> ConfigDict:
    """The experiment without a warm start: the imported model is trained already."""
    config = defaults()
    config.run.name = "rlvr_qwen3_0p6b"
    config.model.size = "qwen3_0p6b"
    config.model.path = "../models/Qwen3-0.6B"
    config.model.dtype = "bfloat16"
    config.tokenizer.kind = "hf"
    config.tokenizer.path = "../models/Qwen3-0.6B"
    config.task.name = "chain_sum"
    config.task.args = {"min_terms": 2, "max_terms": 4}
    config.task.prompt_style = "full"
    config.task.max_prompt_tokens = 256
    config.sft.steps = 0
    config.sampling.max_tokens = 512
    config.sampler.mesh.tensor = 4
    config.sampler.slots = 64
    config.sampler.prefill_buckets = (128, 256)
    config.sampler.decode_chunk = 8
    config.learner.mesh.fsdp = 4
    config.learner.row_tokens = 1024
    config.learner.learning_rate = 1e-6
    config.evaluator.every = 0  # an evaluator would need its own devices
    config.transfer.dtype = "bfloat16"
    return config
