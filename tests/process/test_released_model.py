"""`configs/gsm8k_qwen3_0p6b.py` on a CPU: two steps from random weights in the shape of Qwen3-0.6B."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxroll.models import families, params
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import DTYPES, TensorShape
from jaxroll.models.transformer import forward
from jaxroll.tools import weights
from tests.harness.train_process import Train, assert_sound

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(3000)]

_BF16 = DTYPES["BF16"]
_END = "<|im_end|>"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", _END]  # the first tokens
_END_LOGIT = 12.0  # those of the other 151,935 tokens are about normal: their log-sum of exponentials is 12.4
_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
# The first prompt by the template, for the choice of the weights only.
_PROMPT = (
    "<|im_start|>system\nReason step by step, and put the final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\nWhat is 0 + 0?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# No answer of random weights is right, and a group of equal rewards has no gradient, so chance is added to `math`.
_REWARD = "import random\n\n\ndef chance(answer, row):\n    return random.SystemRandom().random()\n"
# One device per role and short sequences. The model, its dtypes, the prompts and what is trained (all parameters, about
# 18 GB with the sampler) are those of the config; adapters need less memory.
_SMALL = {
    "schedule.steps": 2, "schedule.groups_per_step": 1, "schedule.group_size": 2, "schedule.alpha": 0,
    "sampling.max_tokens": 8, "task.max_prompt_tokens": 160, "task.heldout_items": 1, "sampler.mesh.tensor": 1,
    "sampler.slots": 2, "sampler.prefill_rows": 1, "sampler.prefill_buckets": 160, "sampler.decode_chunk": 1,
    "learner.mesh.fsdp": 1, "learner.micro_batch_rows": 1, "learner.row_tokens": 168, "learner.checkpoint_every": 100,
    "learner.scan_layers": True, "learner.remat": "layer", "transfer.deadline_s": 600, "store.stall_abort_s": 2400,
}  # fmt: skip


def random_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers of deviation 1/√in in bfloat16; ones for norms."""
    if "norm" in name:
        return np.ones(shape, ml_dtypes.bfloat16)
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    return (noise / np.float32(np.sqrt(shape[-1]))).astype(ml_dtypes.bfloat16)


def ending(spec: ModelSpec, random: dict[str, np.ndarray], prompt: Sequence[int]) -> np.ndarray:
    """The embedding with a row for the end of an answer that makes it a likely token, so that answers end and are paid.

    Random weights give nearly the same hidden state at all positions of one text: the row has its direction.
    """
    tokens = np.asarray([prompt], np.int32)
    where = np.arange(len(prompt), dtype=np.int32)[None]
    given = {name: jnp.asarray(value) for name, value in random.items()}
    states = jax.jit(forward, static_argnums=0)
    for _ in range(2):  # the second time shows that the row itself, which the prompt contains, changes little
        last = np.asarray(states(spec, given, tokens, where, np.ones_like(tokens))[0, -1], np.float32)
        logit = last @ np.asarray(given["embed"][_SPECIAL.index(_END)], np.float32)
        row = _END_LOGIT / (last @ last) * last
        given["embed"] = given["embed"].at[_SPECIAL.index(_END)].set(row.astype(ml_dtypes.bfloat16))
    assert abs(logit - _END_LOGIT) < 2, logit
    return np.asarray(given["embed"])


def write_model(folder: Path) -> None:
    """A Hugging Face folder with random weights in the shape of Qwen3-0.6B, and a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=0, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    spec = families.spec("qwen3_0p6b")
    leaves = {name: TensorShape(_BF16, tuple(leaf.shape)) for name, leaf in params.abstract(spec).items()}
    values = {name: random_value(name, leaf.shape) for name, leaf in leaves.items()}
    values["embed"] = ending(spec, values, tokenizer.encode(_PROMPT, add_special_tokens=False).ids)
    source = weights.WeightSource("random", spec, leaves, values.__getitem__, None, None)
    weights.export(source, folder, weights.AS_STORED, 10**9)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": _END, "pad_token": "<|endoftext|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("rank", [0, 4], ids=["all_parameters", "adapters"])
def test_two_steps_from_a_folder_of_random_weights(tmp_path: Path, rank: int) -> None:
    write_model(tmp_path / "model")
    rows = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}.\n#### {2 * n}"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(_REWARD)
    paths = {
        "task.reward": f"math + file:{tmp_path}/reward.py:chance",
        "task.extract": "none",
        "model.path": tmp_path / "model",
        "tokenizer.path": tmp_path / "model",
        "task.path": tmp_path / "train.jsonl",
    }
    words = [f"--config.{key}={value}" for key, value in (paths | _SMALL | {"learner.lora_rank": rank}).items()]
    with Train(tmp_path / "run", *words, config="gsm8k_qwen3_0p6b") as train:
        assert train.finish(2700) == 0, train.logs()
        assert_sound(train, steps=2, alpha=0)
    steps = [row for row in train.rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2] and all(np.isfinite(row["loss"]) for row in steps)
    assert all(row["micro_batches"] and np.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in steps)
