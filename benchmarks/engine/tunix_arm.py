"""For .venv-tunix: google-tunix's vanilla sampler, an arm of benchmarks/engine.

    python -m benchmarks.engine.tunix_arm FOLDER CASE

Its best configuration: prompts and cache exactly as long as needed, prefill and decode loop jitted, batches decoded up
to their own longest request (each such length compiled beforehand), tokens instead of text in and out.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import sampler
from tunix.models.qwen3 import model as qwen3

from benchmarks.engine.work import MODEL, Generate, Work, serve

_OUTSIDE = MODEL["vocab_size"]  # not a token: the sampler treats every pad token in its buffer as padding


class Numbers:
    """A tokenizer by tunix's protocol: text "7" is prompt 7, and answers are not decoded."""

    def __init__(self, prompts: np.ndarray) -> None:
        self._prompts = prompts.tolist()

    def encode(self, text: str, **_) -> list[int]:
        return self._prompts[int(text)]

    def decode(self, ids, **_) -> str:
        return ""

    def pad_id(self) -> int:
        return _OUTSIDE

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return _OUTSIDE + 1  # requests end at their length


def model(folder: Path) -> qwen3.Qwen3:
    """The peer's module with our weights."""
    config = qwen3.ModelConfig(
        num_layers=MODEL["layers"],
        vocab_size=MODEL["vocab_size"],
        embed_dim=MODEL["width"],
        hidden_dim=MODEL["hidden"],
        num_heads=MODEL["heads"],
        head_dim=MODEL["head_dim"],
        num_kv_heads=MODEL["kv_heads"],
        rope_theta=int(MODEL["rope_theta"]),
        norm_eps=MODEL["norm_eps"],
        use_tied_embedding=True,
    )
    made = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    ours = dict(np.load(folder / "weights.npz"))

    def put(variable: nnx.Variable, name: str) -> None:
        value = jnp.asarray(ours.pop(name))
        if variable.value.shape != value.shape:
            raise ValueError(f"{name} is {value.shape} here and {variable.value.shape} in tunix")
        variable.value = value

    put(made.embedder.input_embedding, "embed")
    put(made.final_norm.w, "final_norm")
    for number, layer in enumerate(made.layers):
        theirs = {
            "attn_norm": layer.input_layernorm.w,
            "mlp_norm": layer.post_attention_layernorm.w,
            "attn.q": layer.attn.q_proj.w,
            "attn.k": layer.attn.k_proj.w,
            "attn.v": layer.attn.v_proj.w,
            "attn.o": layer.attn.o_proj.w,
            "attn.q_norm": layer.attn.q_norm.w,
            "attn.k_norm": layer.attn.k_norm.w,
            "mlp.gate": layer.mlp.gate_proj.kernel,
            "mlp.up": layer.mlp.up_proj.kernel,
            "mlp.down": layer.mlp.down_proj.kernel,
        }
        for name, variable in theirs.items():
            put(variable, f"layers.{number:02d}.{name}")
    if ours:
        raise ValueError(f"parameters that tunix has not: {sorted(ours)}")
    return made


def made(folder: Path, case: str) -> Generate:
    """A function that decodes each batch with the sampler for its length."""
    qwen, work = model(folder), Work.load(folder / f"{case}.npz")
    prompt_tokens, tokenizer = work.prompts.shape[1], Numbers(work.prompts)
    samplers: dict[int, sampler.Sampler] = {}
    calls = iter(range(1, 1_000_000))

    def one(texts: list[str], steps: int, greedy: bool) -> list[list[int]]:
        if steps not in samplers:
            cache = sampler.CacheConfig(
                cache_size=prompt_tokens + steps,
                num_layers=MODEL["layers"],
                num_kv_heads=MODEL["kv_heads"],
                head_dim=MODEL["head_dim"],
            )
            samplers[steps] = sampler.Sampler(qwen, tokenizer, cache)
        how = {"temperature": 0.0} if greedy else {"temperature": 1.0, "top_p": 1.0, "seed": next(calls)}
        out = samplers[steps](texts, steps, prompt_tokens, return_logprobs=True, **how)
        return [row.tolist() for row in out.tokens]

    def generate(greedy: bool) -> list[list[int]]:
        rows, at = [], 0
        for batch in work.batches():
            texts = [str(number) for number in range(at, at + len(batch.prompts))]
            rows += one(texts, int(batch.lengths.max()), greedy)
            at += len(texts)
        return rows

    return generate


if __name__ == "__main__":
    assert jax.default_backend() == "cpu"
    serve(made)
