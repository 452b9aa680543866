"""Prompts computed once, in chunks when they are long; conversations that go on; and who may share what."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

LONG = {"max_tokens": 96, "page_tokens": 8, "prefill_buckets": (8, 16)}


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length).astype(np.int32)


def group(tokens: np.ndarray, members: int, first: int = 0) -> list[Request]:
    return [Request(first + m, tokens, GenerationKey(first, m), SamplingParams(6)) for m in range(members)]


@pytest.mark.parametrize("length", [8, 16, 17, 24, 32, 47, 80])
def test_a_prompt_longer_than_every_bucket_comes_in_chunks(bench, assert_replayed, length):
    b = bench(**LONG)
    before = b.engine.stats()
    requests = group(prompt(length, length), 2)
    b.run(requests)
    after = b.engine.stats()
    assert after.prefill_tokens - before.prefill_tokens == length
    assert after.prefills - before.prefills == -(-length // 16)
    assert_replayed(requests, b.results)


@pytest.mark.parametrize("length", [16, 21])
def test_members_that_come_later_find_the_prompt_computed_and_draw_the_same_tokens(bench, length):
    tokens = prompt(length, 100 + length)
    b = bench(**LONG)
    together = dict(b.run(group(tokens, 3)))
    b.swap(Version(0, 1), 0)  # forgets every prompt
    b.results.clear()
    before = b.engine.stats()
    for request in group(tokens, 3):
        b.run([request])
    after = b.engine.stats()
    assert (after.prefill_rows - before.prefill_rows, after.prefill_tokens - before.prefill_tokens) == (
        -(-length // 16),
        length,
    )
    assert after.prefix_hits - before.prefix_hits == 2
    for id, result in together.items():
        np.testing.assert_array_equal(result.completion.tokens, b.results[id].completion.tokens)
        np.testing.assert_array_equal(result.completion.logprobs, b.results[id].completion.logprobs)


def test_a_prompt_is_not_shared_across_weights(bench, assert_replayed):
    b, tokens = bench(**LONG), prompt(20, 7)
    b.run(group(tokens, 1))
    b.swap(Version(0, 2), 1)
    later = group(tokens, 2, first=10)
    before = b.engine.stats()
    b.run(later)
    assert b.engine.stats().prefill_tokens - before.prefill_tokens == 20
    assert_replayed(later, b.results)


def test_a_long_common_prompt_is_shared_in_whole_chunks(bench, assert_replayed):
    """With 32 shared tokens both chunks of 16 are shared; with 20 none, since a prefix must end with a chunk."""
    b = bench(**LONG)
    system = prompt(32, 8)
    b.run(group(system, 1))
    before = b.engine.stats()
    longer = group(np.concatenate([system, prompt(9, 9)]), 2, first=10)
    b.run(longer)
    after = b.engine.stats()
    assert after.prefill_tokens - before.prefill_tokens == 9
    odd = prompt(20, 10)
    b.run(group(odd, 1, first=20))
    before = b.engine.stats()
    others = group(np.concatenate([odd, prompt(9, 9)]), 1, first=30)
    b.run(others)
    assert b.engine.stats().prefill_tokens - before.prefill_tokens == 29
    assert_replayed(longer + others, b.results)


@pytest.mark.parametrize(
    ("mesh", "paged"),
    [
        (MeshConfig(), "dense"),
        pytest.param(MeshConfig(data=2, tensor=2), "dense", marks=pytest.mark.soak),
        pytest.param(MeshConfig(data=2, tensor=2), "xla", marks=pytest.mark.soak),
    ],
    ids=["one device, dense", "data=2,tensor=2, dense", "data=2,tensor=2, xla"],
)
def test_a_conversation_goes_on_where_it_stood(bench, assert_replayed, mesh, paged):
    """Three turns; each computes the new words and the one token that was drawn last, and no more."""
    b, text = bench(mesh, **LONG, paged_attention=paged), prompt(13, 11)
    turns = []
    for turn in range(3):
        before = b.engine.stats()
        turns.append(Request(turn, text, GenerationKey(0, turn), SamplingParams(9), keep=True))
        got = b.run([turns[-1]])[turn].completion
        computed = b.engine.stats().prefill_tokens - before.prefill_tokens
        assert computed == (13 if turn == 0 else 1 + 6)
        text = np.concatenate([text, got.tokens, prompt(6, 20 + turn)]).astype(np.int32)
    assert_replayed(turns, b.results)


def test_a_conversation_does_not_go_on_across_weights(bench, assert_replayed):
    b = bench(**LONG)
    first = Request(0, prompt(13, 11), GenerationKey(0, 0), SamplingParams(9), keep=True)
    got = b.run([first])[0].completion
    b.swap(Version(0, 2), 1)
    text = np.concatenate([first.prompt, got.tokens, prompt(6, 20)]).astype(np.int32)
    before = b.engine.stats()
    second = Request(1, text, GenerationKey(0, 1), SamplingParams(9))
    b.run([second])
    assert b.engine.stats().prefill_tokens - before.prefill_tokens == len(text)
    assert_replayed([second], b.results)


def test_a_kv_cache_of_two_versions_is_not_reused(bench):
    b = bench(**LONG, weight_swap="keep_kv")
    first = Request(0, prompt(13, 12), GenerationKey(0, 0), SamplingParams(20), keep=True)
    b.add(first)
    b.steps(1)
    b.swap(Version(0, 2), 1)
    b.finish()
    assert not [prefix for prefix in b.engine._scheduler.prefixes.all() if prefix.row is None]


def test_prompts_give_way_to_new_ones_when_their_rows_run_out(bench):
    b = bench(**LONG)
    requests = [Request(i, prompt(10, 100 + i), GenerationKey(i, 0), SamplingParams(2)) for i in range(40)]
    alone = {r.id: b.run([dataclasses.replace(r, id=1000 + r.id)])[1000 + r.id].completion for r in requests}
    b.run(requests)
    for request in requests:
        np.testing.assert_array_equal(alone[request.id].tokens, b.results[request.id].completion.tokens)
