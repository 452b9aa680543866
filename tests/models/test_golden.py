"""Checkpoints written by transformers (tests/golden/write_qwen3.py): JaxRoll's model gives the same outputs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.config import ModelConfig
from jaxroll.models import families, transformer
from jaxroll.models import params as model_params
from jaxroll.records import Message
from jaxroll.text import tokenizers
from jaxroll.text.tokenizers import HFTokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
# Seldom changed on purpose. `python tests/golden/write_qwen3.py tests/golden/qwen3` in .venv-torch writes them again.
VARIANTS = {
    "tied": (45_704, 1e4, 1e-6),
    "untied": (49_544, 50.0, 3e-2),
    "moe": (56_424, 1e4, 1e-6),
}  # parameters, RoPE's base, ε

variants = pytest.mark.parametrize("variant", VARIANTS)


@functools.partial(jax.jit, static_argnums=0)
def forward_logits(spec, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = transformer.forward(spec, params, tokens, positions, jnp.ones(tokens.shape, jnp.int32))
    return transformer.logits(spec, params, hidden)


@variants
def test_logits_and_greedy_tokens_are_those_of_transformers(variant: str) -> None:
    """One pass over prompt and continuation: greedy if every token is the likeliest after the tokens before it."""
    config, expected = ModelConfig(path=str(GOLDEN / variant)), np.load(GOLDEN / variant / "expected.npz")
    spec = model_params.spec(config, vocab_size=280)
    count, theta, eps = VARIANTS[variant]
    assert families.parameter_count(spec) == count and (spec.rope_theta, spec.norm_eps) == (theta, eps)
    assert spec.tied_embeddings == (variant == "tied")
    assert spec.heads * spec.head_dim != spec.width and spec.kv_heads < spec.heads
    params = {name: jax.numpy.asarray(value) for name, value in model_params.weights(config, spec).items()}
    prompt, greedy = expected["tokens"], expected["greedy"]
    logits = np.asarray(forward_logits(spec, params, np.concatenate([prompt, greedy], axis=1)))
    assert np.abs(logits[:, : prompt.shape[1]] - expected["logits"]).max() < 1e-4
    assert expected["logits"].std() > 1, "flat logits would prove little"
    assert np.array_equal(logits[:, prompt.shape[1] - 1 : -1].argmax(-1), greedy)


@variants
def test_chats_are_rendered_as_by_transformers(variant: str) -> None:
    folder = GOLDEN / variant
    tokenizer = HFTokenizer(folder)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write = tokenizers.jinja_format((folder / "chat_template.jinja").read_text(), special, str(folder))
    chats = json.loads((folder / "chats.json").read_text())
    assert {message["role"] for one in chats for message in one["messages"]} == {"system", "user", "assistant", "tool"}
    for one in chats:
        messages = tuple(Message(**message) for message in one["messages"])
        assert write(messages) == one["text"]
        assert tokenizer.render(messages) == one["ids"]
    assert tokenizer.eos_id == 2 and tokenizer.vocab_size <= 288
