"""Completions of truncated requests contain the supports of their tokens, through preemption, swaps and aborts."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxroll.algorithms.sampling import token_logprobs
from jaxroll.engine.requests import Request
from jaxroll.errors import DataError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, Supports
from jaxroll.records import Version
from tests.harness import naive_engine

K, LENGTH = 8, 64
compiled_logprobs = jax.jit(token_logprobs)
CUT = (
    SamplingParams(30, top_k=5, temperature=1.2),
    SamplingParams(40, top_p=0.9),
    SamplingParams(14, min_p=0.05),
    SamplingParams(25, top_k=6, top_p=0.8, min_p=0.02, temperature=0.8),
    SamplingParams(12),
    SamplingParams(12, top_p=0.9, temperature=0.0),
)


@pytest.fixture
def few_pages(bench):
    sizes = {"slots": 8, "max_tokens": LENGTH, "page_tokens": 8, "cache_pages": 16, "prefill_buckets": (16,)}
    return lambda: bench(**sizes, support_tokens=K)


def requests(count: int) -> list[Request]:
    prompts = np.random.default_rng(3).integers(0, 64, (count, 12)).astype(np.int32)
    return [Request(i, prompts[i], GenerationKey(i, 0), CUT[i % len(CUT)]) for i in range(count)]


def ids_of(completion: Completion) -> list[list[int]]:
    rows = Supports.decoded(completion.support, completion.tokens).rows(K)
    return [sorted(row[row >= 0].tolist()) for row in rows]


def test_log_probs_are_those_of_a_full_forward_pass_over_the_support(few_pages, spec, model):
    b, asked = few_pages(), requests(18)
    before = b.engine.stats().preemptions
    results, widths = b.run(asked), set()
    assert b.engine.stats().preemptions > before, "some left their slot and came back"
    for request in asked:
        got, params = results[request.id].completion, request.params
        text = np.zeros(LENGTH + 1, np.int32)
        text[: 12 + len(got.tokens)] = np.concatenate([request.prompt, got.tokens])
        logits = naive_engine.all_logits(spec, model(), text[:-1])
        sampled = slice(11, 11 + len(got.tokens))  # the positions before them
        ids = ids_of(got)
        truncates = params.temperature and (params.top_k or params.top_p < 1 or params.min_p)
        assert all(token in kept for token, kept in zip(got.tokens.tolist(), ids, strict=True)) or not truncates
        assert got.support.size == 0 or truncates
        rows = np.full((LENGTH, K), -1, np.int32)
        rows[sampled] = Supports.decoded(got.support, got.tokens).rows(K)
        wanted = compiled_logprobs(logits, text[1:], np.float32(params.temperature), rows)
        tolerance = 1e-4 * max(1.0, float(np.std(np.asarray(logits)[sampled])))
        np.testing.assert_allclose(got.logprobs, np.asarray(wanted)[sampled], atol=tolerance, rtol=0)
        widths |= {len(kept) for kept in ids}
    assert widths >= {0, 1, K}, "the whole vocabulary, certain tokens, and supports at the limit"


def test_tokens_before_a_swap_keep_their_supports_and_an_abort_delivers_them(few_pages):
    asked = [dataclasses.replace(request, params=SamplingParams(40, top_p=0.9)) for request in requests(3)]
    whole = {i: r.completion for i, r in dict(few_pages().run(asked)).items()}
    b = few_pages()
    b.add(*asked)
    b.steps(2)
    b.swap(Version(0, 2), 1)
    b.steps(2)
    b.engine.abort(1, keep=True)
    b.finish()
    for i, complete in whole.items():
        got = b.results[i].completion
        old = got.versions[0].count
        assert 0 < old < len(got.tokens) and len(got.versions) == 2
        assert ids_of(got)[:old] == ids_of(complete)[:old]
        assert ids_of(got) != ids_of(complete)[: len(got.tokens)]
        assert all(token in kept for token, kept in zip(got.tokens.tolist(), ids_of(got), strict=True))
    assert b.results[1].completion.finish == "abort"


@pytest.mark.parametrize("params", [SamplingParams(4, top_k=K + 1), SamplingParams(4, untruncated_logprobs=True)])
def test_requests_beyond_the_support_are_refused(few_pages, params):
    with pytest.raises(DataError, match=r"supports of at most 8 tokens \(sampling.support_tokens\)"):
        few_pages().add(dataclasses.replace(requests(1)[0], params=params))
