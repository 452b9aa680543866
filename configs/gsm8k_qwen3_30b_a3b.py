"""GSM8K with Qwen3-30B-A3B, a mixture of experts: learner on 64 devices (16 hosts of four), sampler on eight.

Command   launch/tpu_vm.sh --config=configs/gsm8k_qwen3_30b_a3b.py --on store=a … (launch/README.md)
Needs     models/Qwen3-30B-A3B, otherwise as gsm8k_qwen3_0p6b;
          parameters, gradients and AdamW's moments take 489 GB in float32, 7.6 GB per device of the learner
State     a starting point: it has never run on the hardware, and no result is known
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """gsm8k_qwen3_0p6b with 128 experts per layer, which both meshes divide, and the sampler's choices of experts."""
    config = read(Path(__file__).with_name("gsm8k_qwen3_0p6b.py"))
    config.run.name = "gsm8k_qwen3_30b_a3b"
    config.model.size = "qwen3_30b_a3b"
    config.model.path = config.tokenizer.path = "../models/Qwen3-30B-A3B"
    config.sampler.mesh.tensor, config.sampler.mesh.expert = 4, 2
    config.learner.mesh.fsdp, config.learner.mesh.expert = 8, 8
    config.learner.micro_batch_rows = 64
    config.learner.routing_replay = True  # otherwise both sides choose experts at near-ties differently
    config.placement.learner_hosts = 16
    return config
