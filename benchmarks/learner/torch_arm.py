"""For .venv-torch: one optimizer step of Hugging Face's Qwen3 in PyTorch, an arm of benchmarks/learner.

    python -m benchmarks.learner.torch_arm FOLDER CASE torch

Its best settings: one padded batch, fused attention, logits of the answers only, AdamW fused over all parameters.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import numpy as np
import torch
import transformers

from benchmarks.learner.work import BETAS, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Arm, Batch, serve


def made(folder: Path, batch: Batch) -> Arm:
    """The peer's model with our weights, and an optimizer."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    named = dict(model.named_parameters())
    matrices = [value for value in named.values() if value.ndim > 1]
    others = [value for value in named.values() if value.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8, fused=True)
    answers, mask = torch.from_numpy(batch.answers).long(), torch.from_numpy(batch.mask).float()
    tokens = torch.cat([torch.from_numpy(batch.prompts).long(), answers], dim=1)
    seen = torch.cat([torch.ones(batch.prompts.shape), mask], dim=1).long()
    advantages, count = torch.from_numpy(batch.advantages), answers.shape[1]

    def backward() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        out = model(tokens, attention_mask=seen, use_cache=False, logits_to_keep=count + 1)
        chosen = -torch.nn.functional.cross_entropy(
            out.logits[:, :-1].transpose(1, 2), answers, reduction="none"
        )  # log π of each answer token
        loss = -(advantages[:, None] * chosen * mask).sum(1).div(mask.sum(1)).mean()
        loss.backward()
        return loss

    def gradients() -> dict[str, np.ndarray]:
        backward()
        return {name: value.grad.numpy().copy() for name, value in named.items()}

    def step() -> float:
        loss = backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return float(loss)

    return Arm(gradients, step)


if __name__ == "__main__":
    serve(made)
