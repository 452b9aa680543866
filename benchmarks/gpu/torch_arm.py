"""Hugging Face's Qwen3 in PyTorch on the card (else on the CPU), an arm of `benchmarks.gpu --only=torch`.

    python -m benchmarks.gpu.torch_arm FOLDER SHAPE-AS-JSON

Its best settings: fused attention, KV cache, inference mode; AdamW fused, autocast, no recomputation.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.engine.work import answering
from benchmarks.learner.work import BETAS, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Batch

MICRO_ROWS = 2


class Learner:
    """float32 parameters, computation in the shape's dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
        named = list(self._model.parameters())
        groups = [
            {"params": [p for p in named if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in named if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8, fused=True)
        self._batch = Batch.load(folder / "batch.npz")

    def step(self) -> dict[str, Any]:
        """One optimizer step over the batch, a few rows at a time."""
        _wait(self._device)
        started = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        batch, rows = self._batch, len(self._batch.prompts)
        for first in range(0, rows, MICRO_ROWS):
            part = slice(first, first + MICRO_ROWS)
            answers = torch.from_numpy(batch.answers[part]).long().to(self._device)
            tokens = torch.cat([torch.from_numpy(batch.prompts[part]).long().to(self._device), answers], dim=1)
            advantages = torch.from_numpy(batch.advantages[part]).to(self._device)
            with torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32):
                out = self._model(tokens, use_cache=False, logits_to_keep=answers.shape[1] + 1)
            logits = out.logits[:, :-1].float()
            chosen = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), answers, reduction="none")
            (-(advantages[:, None] * chosen).mean(1).sum() / rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        _wait(self._device)
        return {"seconds": time.perf_counter() - started, "grad_norm": float(norm)}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Answer."""
    say = answering()
    folder, shape = Path(sys.argv[1]), json.loads(sys.argv[2])
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, shape["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None  # requests end at their length
    model.generation_config.pad_token_id = 0
    prompts, learners = torch.from_numpy(np.load(folder / "prompts.npy")).long().to(device), []

    @torch.inference_mode()
    def generate(greedy: bool) -> list[list[int]]:
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        mask = torch.ones_like(prompts)
        out = model.generate(prompts, attention_mask=mask, max_new_tokens=shape["new"], use_cache=True, **how)
        return out[:, prompts.shape[1] :].tolist()

    say(
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": device,
            "attention": str(model.config._attn_implementation),
        }
    )
    for line in sys.stdin:
        command = line.strip()
        if command == "greedy":
            say({"tokens": generate(True)})
        elif command == "run":
            started = time.perf_counter()
            generate(False)
            say({"seconds": time.perf_counter() - started})
        else:
            if not learners:
                learners.append(Learner(folder, dtype, device))
            say(learners[0].step())


if __name__ == "__main__":
    main()
