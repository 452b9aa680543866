"""The engine's tokens and log-probs against generation without cache and batch, for any history."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxroll.algorithms.sampling import token_logprobs
from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from tests.harness import naive_engine

TENSOR, DATA_TENSOR = MeshConfig(tensor=2), MeshConfig(data=2, tensor=2)
ROW = 32  # tokens
LEVELS = {"max_tokens": 160, "decode_chunk": 8, "prefill_buckets": (64,)}  # so many positions are several levels
ALONE: dict[str, dict[int, Completion]] = {}  # by engine: the completions of requests that ran without neighbors
compiled_logprobs = jax.jit(token_logprobs)


@pytest.fixture
def assert_naive(spec, seed, model):
    """Results equal the naive reference up to near-ties, of which there is at most one in 10,000 tokens."""

    def check(requests, results, allowed=1e-4):
        tokens = ties = 0
        for request in requests:
            wanted, got = naive_engine.trace(spec, model(), request, seed), results[request.id].completion
            tokens += len(wanted.tokens)
            shared = min(len(wanted.tokens), len(got.tokens))
            differing = np.flatnonzero(wanted.tokens[:shared] != got.tokens[:shared])
            if len(differing):
                assert wanted.margins[differing[0]] < naive_engine.NEAR_TIE, (request, wanted, got)
                ties += 1
                continue
            assert len(wanted.tokens) == len(got.tokens), request
            np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
            assert got.finish == ("stop" if got.tokens[-1] in request.params.stop_tokens else "length")
        assert ties <= max(1, tokens * allowed), f"{ties} near-ties in {tokens} tokens"

    return check


def scheduled(bench, requests, pauses):
    """Add the requests in order, with `pauses[i]` engine steps before request i."""
    for request, steps in zip(requests, pauses, strict=True):
        bench.steps(steps)
        bench.add(request)
    return bench.finish()


@pytest.mark.parametrize("paged", ["dense", "xla"])
@pytest.mark.parametrize("case", [0, 1, *(pytest.param(case, marks=pytest.mark.soak) for case in (2, 3))])
def test_tokens_equal_the_naive_reference_over_random_arrivals(bench, work, assert_naive, case, paged):
    requests = work(case, 24)
    pauses = np.random.default_rng(case).integers(0, 3, len(requests))
    assert_naive(requests, scheduled(bench(paged_attention=paged), requests, pauses))


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [TENSOR, DATA_TENSOR], ids=["tensor=2", "data=2,tensor=2"])
def test_tokens_equal_the_naive_reference_on_meshes(bench, work, assert_naive, mesh):
    requests = work(7, 24)
    assert_naive(requests, bench(mesh).run(requests))


@pytest.mark.soak
@pytest.mark.parametrize(
    "sizes",
    [{"slots": 1}, {"slots": 3, "decode_chunk": 1, "prefill_rows": 1, "prefill_buckets": (16,)}, {"slots": 16}],
    ids=str,
)
def test_tokens_equal_the_naive_reference_for_other_slot_counts(bench, work, assert_naive, sizes):
    requests = work(8, 16)
    assert_naive(requests, bench(**sizes).run(requests))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshConfig(), {"paged_attention": "dense"}),
        (MeshConfig(), {"paged_attention": "xla"}),
        pytest.param(MeshConfig(), LEVELS | {"paged_attention": "dense"}, marks=pytest.mark.soak),
        pytest.param(DATA_TENSOR, {"paged_attention": "dense"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_tokens_are_exactly_equal_for_any_slot_neighbours_and_order(bench, work, mesh, options, draw):
    bench = functools.partial(bench, mesh, **options)
    requests = work(3, 12, **({"max_tokens": 130} if "max_tokens" in options else {}))
    alone = ALONE.setdefault(repr((mesh, options)), {})
    for request in requests if not alone else ():
        alone[request.id] = bench().run([request])[request.id].completion
    strangers = [dataclasses.replace(r, id=100 + r.id) for r in work(draw.draw(st.integers(0, 99)), 10, group_size=1)]
    crowd = draw.draw(st.permutations(requests + strangers[: draw.draw(st.integers(0, 10))]))
    pauses = [draw.draw(st.integers(0, 2)) for _ in crowd]
    together = scheduled(bench(), crowd, pauses)
    for request in requests:
        one, other = alone[request.id], together[request.id].completion
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)  # to the bit


@pytest.mark.parametrize("paged", [pytest.param("dense", marks=pytest.mark.soak), "xla"])
def test_levels_that_a_request_reads_grow_within_a_dispatch_next_to_any_other(bench, paged):
    """From position 63 to 64, where the next level begins, alone and next to a longer request."""
    b = functools.partial(bench, paged_attention=paged, **LEVELS)
    words = np.random.default_rng(4).integers(0, 64, 64).astype(np.int32)
    short, long = (Request(n, words[:n], GenerationKey(n, 0), SamplingParams(20)) for n in (60, 64))
    alone, together = b().run([short])[60].completion, b().run([long, short])[60].completion
    np.testing.assert_array_equal(alone.tokens, together.tokens)
    np.testing.assert_array_equal(alone.logprobs, together.logprobs)


def test_a_request_of_another_identity_draws_other_tokens(bench, work):
    (request,) = work(5, 1, max_tokens=12, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=())
    keys = [GenerationKey(0, 0), GenerationKey(1, 0), GenerationKey(0, 1), GenerationKey(0, 0, 1)]
    others = [dataclasses.replace(request, id=i, key=key) for i, key in enumerate(keys)]
    others.append(dataclasses.replace(request, id=4, key=keys[0], position=20))
    drawn = {tuple(result.completion.tokens.tolist()) for result in bench().run(others).values()}
    assert len(drawn) == len(others)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward_pass(bench, work, spec, model, temperature):
    requests = work(4, 12, temperature=temperature, top_k=0, top_p=1.0)
    results = bench().run(requests)
    for request in requests:
        got = results[request.id].completion
        assert len(got.versions) == 1
        text = np.zeros(ROW + 1, np.int32)
        text[: len(request.prompt) + len(got.tokens)] = np.concatenate([request.prompt, got.tokens])
        logits = naive_engine.all_logits(spec, model(), text[:-1])
        sampled = slice(len(request.prompt) - 1, len(request.prompt) - 1 + len(got.tokens))
        wanted = np.asarray(compiled_logprobs(logits, text[1:], np.float32(temperature)))[sampled]
        tolerance = 1e-4 * max(1.0, float(np.std(np.asarray(logits)[sampled])))
        np.testing.assert_allclose(got.logprobs, wanted, atol=tolerance, rtol=0)


def full_logits(spec, params, text: np.ndarray) -> np.ndarray:
    """float32 [len(text), V], from one row."""
    row = np.zeros(ROW, np.int32)
    row[: len(text)] = text
    return np.asarray(naive_engine.all_logits(spec, params, row))[: len(text)]


def test_a_stop_token_ends_a_request_and_is_part_of_it(bench, work):
    (free,) = work(2, 1, max_tokens=14, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=())
    tokens = bench().run([free])[0].completion.tokens
    for index in (0, 1, 6):
        stop = int(tokens[index])
        first = tokens.tolist().index(stop)
        params = SamplingParams(14, stop_tokens=(63, stop))
        ended = bench().run([dataclasses.replace(free, params=params)])[0].completion
        assert ended.finish == "stop" and ended.tokens.tolist() == tokens[: first + 1].tolist()


def test_the_length_ends_a_request_and_a_stop_token_at_the_end_is_a_stop(bench, work):
    (request,) = work(2, 1, max_tokens=5, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=())
    completion = bench().run([request])[0].completion
    assert (completion.finish, len(completion.tokens)) == ("length", 5)
    last = int(completion.tokens[-1])
    assert last not in completion.tokens[:-1]
    stopped = dataclasses.replace(request, params=SamplingParams(5, stop_tokens=(last,)))
    assert bench().run([stopped])[0].completion.finish == "stop"


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 16])
def test_exactly_max_tokens_are_drawn_across_dispatches(bench, limit):
    request = Request(0, np.arange(16, dtype=np.int32), GenerationKey(0, 0), SamplingParams(limit))
    completion = bench().run([request])[0].completion
    assert len(completion.tokens) == len(completion.logprobs) == limit
    assert sum(run.count for run in completion.versions) == limit


def test_truncation_keeps_to_its_support_and_renormalises(bench, spec, model):
    prompt = np.arange(6, dtype=np.int32)
    logits = np.asarray(full_logits(spec, model(), prompt)[-1])
    best = np.argsort(-logits)
    probability = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    head = 1 + int(np.searchsorted(np.cumsum(probability[best]), 0.5))
    for params, kept in ((SamplingParams(1, top_k=3), 3), (SamplingParams(1, top_p=0.5), head)):
        results = bench().run(Request(i, prompt, GenerationKey(0, i), params) for i in range(64))
        drawn = np.array([r.completion.tokens[0] for r in results.values()])
        logprobs = np.array([r.completion.logprobs[0] for r in results.values()])
        assert set(drawn) <= set(best[:kept]) and len(set(drawn)) > 1
        np.testing.assert_allclose(logprobs, np.log(probability / probability[best[:kept]].sum())[drawn], atol=1e-4)


def test_temperature_zero_is_greedy(bench, spec, model):
    request = Request(0, np.arange(6, dtype=np.int32), GenerationKey(0, 0), SamplingParams(8, temperature=0.0))
    tokens = bench().run([request])[0].completion.tokens
    logits = full_logits(spec, model(), np.concatenate([request.prompt, tokens]))
    assert tokens.tolist() == np.argmax(logits, -1)[5:-1].tolist()
