"""A checkpoint that transformers wrote, read by us: the same logits, the same greedy tokens."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxroll.config import ModelConfig
from jaxroll.engine import naive
from jaxroll.engine.requests import Request
from jaxroll.models import families, pretrained, transformer
from jaxroll.protocols import GenerationKey, SamplingParams

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(300)]


@functools.partial(jax.jit, static_argnums=0)
def forward_logits(spec, params, tokens, positions, segments):
    return transformer.logits(spec, params, transformer.forward(spec, params, tokens, positions, segments))


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_a_qwen3_of_transformers_gives_our_logits_and_greedy_tokens(tmp_path: Path, peer, embeddings: str) -> None:
    folder = tmp_path / "qwen3"
    said = peer("torch", "write_qwen3.py", str(folder), embeddings)
    assert said["torch"].startswith("2.13.0") and "cu" not in said["torch"], "not the pinned build"
    config, expected = ModelConfig(path=str(folder)), np.load(folder / "expected.npz")
    spec = pretrained.spec(config, vocab_size=64)
    params = {name: jax.numpy.asarray(value) for name, value in pretrained.weights(config, spec).items()}
    assert spec.tied_embeddings == (embeddings == "tied")
    assert families.parameter_count(spec) == said["parameters"]
    assert said["logits_std"] > 1, "flat logits would prove little"

    tokens = expected["tokens"]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    logits = forward_logits(spec, params, tokens, positions, np.ones_like(tokens))
    assert np.abs(np.asarray(logits) - expected["logits"]).max() < 1e-4

    wanted = SamplingParams(max_tokens=expected["greedy"].shape[1], temperature=0.0)
    for row, prompt in enumerate(tokens):
        request = Request(row, prompt, GenerationKey(row, 0), wanted)
        assert naive.generate(spec, params, request, seed=0)[0].tolist() == expected["greedy"][row].tolist()
