"""The warm start: it learns, repeats itself exactly, trains on answers only, and its estimate is honest."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.config import Config, LearnerConfig, MeshConfig, ModelConfig, SftConfig, TaskConfig
from jaxroll.data import sources
from jaxroll.errors import ConfigError
from jaxroll.learner import weights
from jaxroll.models import transformer
from jaxroll.text import tokenizers
from jaxroll.tools import sft

LETTERS = {"min_word_len": 3, "max_word_len": 3}


def config(steps: int) -> Config:
    return Config(
        model=ModelConfig(size="nano"),
        task=TaskConfig(args=LETTERS, heldout_items=16),
        learner=LearnerConfig(mesh=MeshConfig(fsdp=2), micro_batch_rows=4, row_tokens=64),
        sft=SftConfig(steps=steps, batch=28, learning_rate=1e-2),
    )


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A warm start of 150 steps: (its folder, its metrics, its messages)."""
    folder, said = tmp_path_factory.mktemp("sft") / "warm", []
    return folder, sft.train(config(150), folder, said.append), said


def test_it_learns_to_spell_three_letters_backward(warm):
    _, row, _ = warm
    assert row["loss_first"] > 2.5
    assert row["loss"] < 0.6 * row["loss_first"]
    assert row["steps"] == 150 and row["tokens_per_s"] > 0 and row["padding_waste"] < 0.25


def test_where_prompts_are_shared_a_worked_answer_has_the_room_of_both():
    cfg = config(1)
    cfg = replace(cfg, learner=replace(cfg.learner, shared_prompt_tokens=16, row_tokens=13))
    course = sft.prepared(cfg, tokenizers.build(cfg.tokenizer, sources.alphabet(cfg.task)), (4,))
    assert {batch.streams["tokens"].shape[1] for batches in course.batches for batch in batches} == {29}
    assert max(place.length for batches in course.batches for batch in batches for place in batch.placements) <= 29


def test_worked_answers_that_a_rollout_has_no_room_for_are_counted():
    """A policy that learns them ends every rollout truncated, with reward 0."""
    words = tokenizers.build(config(2).tokenizer, sources.alphabet(config(2).task))
    shares = {}
    for limit in (1, 3, 4, 64):
        cfg = replace(config(2), sampling=replace(config(2).sampling, max_tokens=limit))
        shares[limit] = sft.prepared(cfg, words, (4,)).too_long
    assert shares == {1: 1.0, 3: 1.0, 4: 0.0, 64: 0.0}, "three letters and the end"
    masks = {"": 0, "0": 0, "1": 1, "0110": 2, "1101110": 3, "0111": 3}
    assert {m: sft.longest_answer(np.array([c == "1" for c in m], bool)) for m in masks} == masks


def test_progress_is_reported(warm):
    _, _, said = warm
    assert any("compiling" in text for text in said) and any("step 150/150" in text for text in said)
    assert "exact" in said[-1]


def test_its_estimate_is_what_greedy_decoding_answers(warm):
    folder, row, _ = warm
    spec, params = weights.model_spec(folder), {name: jnp.asarray(x) for name, x in weights.load(folder).items()}
    cfg = config(150)
    check = sft.prepared(cfg, tokenizers.build(cfg.tokenizer, sources.alphabet(cfg.task)), (4,)).check
    width = 24
    ones, positions = jnp.ones((len(check), width), jnp.int32), jnp.tile(jnp.arange(width), (len(check), 1))
    tokens, ends = np.zeros((len(check), width), np.int32), np.array([int((~sample.mask).sum()) for sample in check])
    for row_number, (sample, end) in enumerate(zip(check, ends, strict=True)):
        tokens[row_number, :end] = sample.tokens[:end]

    @jax.jit
    def scores(tokens):
        return transformer.logits(spec, params, transformer.forward(spec, params, tokens, positions, ones))

    rows = np.arange(len(check))
    for step in range(4):  # three letters and eos
        tokens[rows, ends + step] = np.asarray(jnp.argmax(scores(tokens), -1))[rows, ends + step - 1]
    right = sum(
        np.array_equal(got[: len(sample.tokens)], sample.tokens) for got, sample in zip(tokens, check, strict=True)
    )
    assert 0 < row["exact_match"] <= 1 and len(check) > 20
    assert row["exact_match"] == pytest.approx(right / len(check), abs=1 / len(check))


def test_the_folder_starts_a_run(warm):
    folder, row, _ = warm
    assert weights.tokenizer(folder) == {"kind": "char", "path": "", "alphabet": sources.alphabet(config(1).task)}
    assert sum(value.size for value in weights.load(folder).values()) == row["parameters"]


def test_the_same_config_gives_the_same_weights(tmp_path):
    for name in ("first", "second"):
        sft.train(config(3), tmp_path / name, lambda _: None)
    first, second = (weights.load(tmp_path / name) for name in ("first", "second"))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_prepared_trains_on_answers_and_never_on_the_check():
    cfg = config(4)
    text = tokenizers.build(cfg.tokenizer, sources.alphabet(cfg.task))
    course = sft.prepared(cfg, text, (4, 2))
    assert len(course.batches) == 4 and 0 < len(course.check) <= sft.CHECK_EXAMPLES
    kept_out = {tuple(sample.tokens) for sample in course.check}
    for batches in course.batches:
        total = 0.0
        for batch in batches:
            total += batch.streams["weight"].sum()
            for place in batch.placements:
                at = (place.row, slice(place.start, place.start + place.length))
                tokens, mask = batch.streams["tokens"][at], batch.streams["mask"][at]
                assert tuple(tokens) not in kept_out
                turn = int(np.flatnonzero(tokens == text.turn_id)[0])
                np.testing.assert_array_equal(mask, np.arange(len(tokens)) > turn)
                assert tokens[-1] == text.eos_id
        np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_it_ends_early_once_enough_answers_are_exact(warm, tmp_path):
    cfg = config(150)
    said: list[str] = []
    row = sft.train(replace(cfg, sft=replace(cfg.sft, enough_exact=0.05)), tmp_path / "warm", said.append)
    assert row["steps"] < 150 and row["steps"] % sft.CHECK_EVERY == 0
    assert 0.05 <= row["exact_match"] < warm[1]["exact_match"]
    assert f"after {row['steps']} steps" in said[-1]


def test_zero_steps_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"sft\.steps = 0"):
        sft.train(config(0), tmp_path, lambda _: None)
