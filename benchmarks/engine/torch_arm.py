"""For .venv-torch: Hugging Face `generate` on the CPU, an arm of benchmarks/engine.

    python -m benchmarks.engine.torch_arm FOLDER CASE

Its best settings: one batch, KV cache, inference mode, fused attention, no log-probs.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import torch
import transformers

from benchmarks.engine.work import Generate, Work, serve


def made(folder: Path, case: str) -> Generate:
    """A function that runs `generate` over the case's batches, each to its longest request."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # requests end at their length
    model.generation_config.pad_token_id = 0
    work = Work.load(folder / f"{case}.npz")
    inputs = [(torch.from_numpy(batch.prompts).long(), int(batch.lengths.max())) for batch in work.batches()]

    @torch.inference_mode()
    def generate(greedy: bool) -> list[list[int]]:
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        rows = []
        for prompts, steps in inputs:
            mask = torch.ones_like(prompts)
            out = model.generate(prompts, attention_mask=mask, max_new_tokens=steps, use_cache=True, **how)
            rows += out[:, prompts.shape[1] :].tolist()
        return rows

    return generate


if __name__ == "__main__":
    serve(made)
