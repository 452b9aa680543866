"""Every family gives what transformers computed (tests/golden/write_families.py), in every entry point of the model."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.kernels.attention import SharedRows
from jaxroll.models import cache, folders, hf_config, params, transformer
from jaxroll.models.families import ModelSpec
from jaxroll.records import Message
from jaxroll.text.tokenizers import HFTokenizer
from tests.golden.write_families import CHATS, VARIANTS, tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
ONE = sharding.build(MeshConfig())
# Windows, other RoPE for layers without one, GeGLU, all norms; biases and stretched RoPE with windows.
MOST_OPTIONS = ("gemma3_text", "qwen2_yarn_windows")
_most_options = pytest.mark.parametrize(
    "variant", ["gemma3_text", pytest.param(MOST_OPTIONS[1], marks=pytest.mark.soak)]
)


@functools.cache
def golden(variant: str) -> tuple[ModelSpec, params.Params, dict[str, np.ndarray]]:
    """The model of a variant, its parameters, and what transformers computed."""
    spec = folders.described(GOLDEN / variant)
    made = {}
    for ours, leaf in params.abstract(spec).items():
        one = leaf.shape[hf_config.of_experts(ours) :]
        stored = functools.partial(tensor, shape=params.shape(ours, one), offset=spec.norm_offset)
        made[ours] = jax.numpy.asarray(params.leaf(spec, ours, leaf.shape, stored))
    return spec, made, dict(np.load(GOLDEN / variant / "expected.npz"))


@functools.partial(jax.jit, static_argnums=(0, 5))
def logits_of(spec, values, tokens, positions, segments, rows=None, prompt_ids=None):
    hidden = transformer.forward(spec, values, tokens, positions, segments, rows=rows, prompt_ids=prompt_ids)
    return transformer.logits(spec, values, hidden)


def whole_rows(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tokens, np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape), np.ones_like(tokens)


def continued(expected: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([expected["tokens"], expected["greedy"]], axis=1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(variant: str) -> None:
    """One pass over prompt and continuation: greedy if every token is the likeliest after the tokens before it."""
    spec, values, expected = golden(variant)
    logits, prompt = np.asarray(logits_of(spec, values, *whole_rows(continued(expected)))), expected["tokens"].shape[1]
    assert np.abs(logits[:, :prompt] - expected["logits"]).max() < 1e-4
    assert expected["logits"].std() > 0.9, "flat logits would prove little"
    assert np.array_equal(logits[:, prompt - 1 : -1].argmax(-1), expected["greedy"])


@pytest.mark.soak
@_most_options
def test_the_cache_gives_the_logits_of_the_whole_row(variant: str) -> None:
    """Prefill, a chunk behind it, and single tokens over both kinds of cache; windows cut all of them."""
    spec, values, expected = golden(variant)
    tokens = continued(expected)
    wanted = np.asarray(logits_of(spec, values, *whole_rows(tokens)))
    tables = np.array([[3, 0, 5, 8, 2, 9, 7, 1], [4, 6, 10, 12, 15, 14, 13, 11]], np.int32)
    zeros, lengths, close = jnp.zeros(2, jnp.int32), jnp.array([11, 8], jnp.int32), {"atol": 1e-4, "rtol": 0}
    first, keys, new_values = jax.jit(transformer.prefill, static_argnums=0)(spec, values, tokens[:, :11], lengths)
    np.testing.assert_allclose(first, wanted[np.arange(2), lengths - 1], **close)
    held = cache.empty(spec, 1, 16, 4, ONE, sharding.SAMPLER)
    fill = lambda pools, new: tuple(  # noqa: E731
        cache.begun(pool, one, zeros, jnp.asarray(tables), lengths) for pool, one in zip(pools, new, strict=True)
    )
    held = cache.KVCache(fill(held.keys, keys), fill(held.values, new_values))
    chunk = np.stack([tokens[0, 11:18], tokens[1, 8:15]])
    pages = transformer.Pages(zeros, tables, lengths)
    after, held = jax.jit(transformer.extend, static_argnums=0)(spec, values, held, chunk, pages, zeros + 7)
    lengths = lengths + 7
    np.testing.assert_allclose(after, wanted[np.arange(2), lengths - 1], **close)
    like = cache.abstract_contiguous(spec, 1, 2, 32, 4, ONE, sharding.SAMPLER)
    side = jax.tree.map(lambda leaf: jax.numpy.ones(leaf.shape, leaf.dtype), like)
    side = jax.jit(cache.refreshed)(side, held, tables[None], lengths[None])
    decode = jax.jit(transformer.decode, static_argnums=0)
    beside = jax.jit(transformer.decode_contiguous, static_argnums=0)
    for step in range(14):
        fed, where = tokens[np.arange(2), lengths + step], lengths + step
        paged, _ = decode(spec, values, held, fed, where, tables)
        dense, held, side = beside(spec, values, held, side, fed, where, tables, where.max())
        np.testing.assert_allclose(paged, wanted[np.arange(2), where], **close)
        np.testing.assert_allclose(dense, wanted[np.arange(2), where], **close)


@_most_options
def test_packed_rows_and_shared_prompts_give_the_logits_of_rows_alone(variant: str) -> None:
    """Two segments in one row; and one prompt computed once for two answers, whose windows reach into it."""
    spec, values, expected = golden(variant)
    tokens = continued(expected)
    wanted = np.asarray(logits_of(spec, values, *whole_rows(tokens)))
    row = np.concatenate([tokens[0, :20], tokens[1, :12]])[None]
    positions = np.concatenate([np.arange(20), np.arange(12)])[None].astype(np.int32)
    got = np.asarray(logits_of(spec, values, row, positions, np.repeat([1, 2], [20, 12])[None].astype(np.int32)))[0]
    np.testing.assert_allclose(got[:20], wanted[0, :20], atol=1e-4, rtol=0)
    np.testing.assert_allclose(got[20:], wanted[1, :12], atol=1e-4, rtol=0)
    prompt, first, second = tokens[0, :8], tokens[0, 8:20], tokens[1, 8:20]
    alone = np.stack([np.concatenate([prompt, first]), np.concatenate([prompt, second])])
    alone = np.asarray(logits_of(spec, values, *whole_rows(alone)))
    row, segments = np.concatenate([prompt, first, second])[None], np.repeat([1, 2, 3], [8, 12, 12])[None]
    positions = np.concatenate([np.arange(8), np.arange(8, 20), np.arange(8, 20)])[None].astype(np.int32)
    ids = np.repeat([0, 1, 1], [8, 12, 12])[None].astype(np.int32)
    shared = logits_of(spec, values, row, positions, segments.astype(np.int32), SharedRows(8, 2, 12), ids)[0]
    np.testing.assert_allclose(shared[:20], alone[0], atol=1e-4, rtol=0)
    np.testing.assert_allclose(shared[20:], alone[1, 8:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_tensors_are_imported_bit_for_bit(variant: str) -> None:
    spec, values, _ = golden(variant)
    config = hf_config.to_huggingface(spec, "float32", json.loads((GOLDEN / variant / "config.json").read_text()))
    again = hf_config.from_huggingface(config)
    assert dataclasses.replace(again, name=spec.name) == spec
    theirs = params.exported(spec, {name: np.asarray(value) for name, value in values.items()})
    for key, value in theirs.items():
        assert np.array_equal(value, tensor(key, value.shape, offset=spec.norm_offset)), key
    back = params.imported(again, theirs.__getitem__)
    assert all(np.array_equal(back[name], values[name]) for name in values) and back.keys() == values.keys()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_of_text_and_images_the_text_model_is_read(tmp_path: Path, prefix: str) -> None:
    spec, values, _ = golden("gemma3_text")
    text = json.loads((GOLDEN / "gemma3_text" / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = params.exported(spec, {name: np.asarray(value) for name, value in values.items()})
    tensors = {prefix + name.removeprefix("model."): value for name, value in theirs.items()}
    save_file(tensors | {"vision_tower.patch.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    assert folders.described(tmp_path) == spec
    found = params.leaves(tmp_path, spec)
    assert all(np.array_equal(found[name], values[name]) for name in values) and found.keys() == values.keys()


@pytest.mark.parametrize("family", CHATS)
def test_chats_are_rendered_as_by_transformers(family: str) -> None:
    tokenizer = HFTokenizer(GOLDEN / family)
    for one in json.loads((GOLDEN / family / "chats.json").read_text()):
        messages = tuple(Message(**message) for message in one["messages"])
        assert tokenizer.render(messages) == one["ids"], one["text"]
    ends = {"llama": "<|eot_id|>", "mistral": "</s>", "gemma3_text": "<end_of_turn>"}
    end = ends.get(family, "<|im_end|>")
    assert tokenizer.encode(end) == [tokenizer.eos_id]
    following = tokenizer.decode(tokenizer.render((Message("user", "two"),), first=False))
    assert not following.startswith(end), "the sampled answer ends with it"
