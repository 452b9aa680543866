"""Qwen3-0.6B on GSM8K: grade-school math, answers in a box; learner on four devices, sampler on four; TPU or GPU.

Command   jaxroll train --config=configs/gsm8k_qwen3_0p6b.py
Needs     models/Qwen3-0.6B: config.json, weights, tokenizer.json and chat template of the model on the Hugging Face
          hub; data/gsm8k_train.jsonl: one object per line with `question` and `answer` (the number after "####");
          pip install 'jaxroll[hf,math]'; eight devices (on four, both roles share all of them)
State     a starting point: it has never run on the hardware, and no result is known
"""

from ml_collections import ConfigDict

from jaxroll.config import defaults

PROMPT = "Reason step by step, and put the final answer within \\boxed{}."


def get_config() -> ConfigDict:
    """GRPO on an instruction-tuned model without a warm start; thinking is off, so that answers stay short."""
    config = defaults()
    config.run.name = "gsm8k_qwen3_0p6b"
    config.model.size = "qwen3_0p6b"
    config.model.path = config.tokenizer.path = "../models/Qwen3-0.6B"
    config.model.dtype = config.transfer.dtype = "bfloat16"
    config.tokenizer.kind = "hf"
    config.tokenizer.template_args = {"enable_thinking": False}
    config.task.source = "jsonl"
    config.task.path = "../data/gsm8k_train.jsonl"
    config.task.prompt_column, config.task.answer_column = "question", "answer"
    config.task.answer_after = "####"
    config.task.system_prompt = PROMPT
    config.task.extract = "boxed"
    config.task.reward = "math"
    config.task.args = {}
    config.task.prompt_style = "full"
    config.task.max_prompt_tokens = 512
    config.task.heldout_items = 512
    config.sft.steps = 0
    config.schedule.groups_per_step = 32
    config.schedule.group_size = 8
    config.sampling.max_tokens = 1024
    config.sampler.mesh.tensor = 4
    config.sampler.slots = 128
    config.sampler.prefill_buckets = (256, 512)
    config.sampler.decode_chunk = 8
    config.learner.mesh.fsdp = 4
    config.learner.micro_batch_rows = 8
    config.learner.row_tokens = 2048
    config.learner.learning_rate = 1e-6
    config.evaluator.every = 0  # an evaluator would need its own devices
    return config
