"""Qwen3-8B on longer arithmetic: learner on eight devices (fsdp), sampler on eight (tensor); for TPU and GPU.

Command   launch/tpu_vm.sh --config=configs/rlvr_qwen3_8b.py --on store=a --on learner=a --on sampler=b …
          (launch/README.md), launch/gpu.sh with the same arguments, or on one machine with eight GPUs that both roles share:
          jaxroll train --config=configs/rlvr_qwen3_8b.py --config.schedule.mode=sync
Needs     models/Qwen3-8B with the weights and tokenizer.json, and pip install 'jaxroll[hf]' for its chat template, on
          both machines; parameters, gradients and AdamW's moments take 131 GB in float32, so 16.4 GB on each of the
          learner's devices before activations: v6e, v5p, or 80 GB GPUs
State     a starting point: it has never run on the hardware
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """rlvr_qwen3_0p6b with the 8B model, longer problems and larger meshes."""
    config = read(Path(__file__).with_name("rlvr_qwen3_0p6b.py"))
    config.run.name = "rlvr_qwen3_8b"
    config.model.size = "qwen3_8b"
    config.model.path = config.tokenizer.path = "../models/Qwen3-8B"
    config.task.args = {"min_terms": 6, "max_terms": 12}
    config.sampling.max_tokens = 2048
    config.sampler.mesh.tensor = 8
    config.learner.mesh.fsdp = 8
    config.learner.micro_batch_rows = 8
    config.learner.row_tokens = 4096
    config.placement.learner_memory_fraction = 0.5
    return config
