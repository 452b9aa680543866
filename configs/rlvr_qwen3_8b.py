"""Qwen3-8B on longer arithmetic, learner on eight devices by fsdp, sampler on eight by tensor; the same file for TPU and GPU.

Command   launch/tpu_vm.sh --config=configs/rlvr_qwen3_8b.py --on store=a --on learner=a --on sampler=b … (launch/README.md),
          launch/gpu.sh with the same words, or on one machine of eight GPUs, which both share:
          jaxroll train --config=configs/rlvr_qwen3_8b.py --config.schedule.mode=sync
Needs     models/Qwen3-8B with the weights and tokenizer.json on both; parameters, gradients and AdamW's moments take 131 GB
          in float32, so 16.4 GB of each of the learner's devices before activations: v6e or v5p, or GPUs of 80 GB
State     a starting point: it never ran on the hardware
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """rlvr_qwen3_0p6b, larger."""
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
