"""Ways of drawing beyond temperature, top-k and top-p, against the naive reference and against plain definitions."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import msgspec
import numpy as np
import pytest

from jaxroll.config import Config, SamplerConfig
from jaxroll.engine.engine import EngineConfig
from jaxroll.engine.requests import Request, Sizes, check
from jaxroll.errors import DataError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.serving.engine_thread import EngineHost, EngineProxy
from tests.harness import naive_engine


def letters(ids: list[int]) -> str:
    return "".join("abcdefgh"[i % 8] for i in ids)


def requests_of(params: SamplingParams, count: int = 8, **fixed) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(i, rng.integers(0, 64, 3 + i % 9).astype(np.int32), GenerationKey(i, 0), params, **fixed)
        for i in range(count)
    ]


@pytest.fixture
def able(bench):
    return lambda **more: bench(slots=3, penalties=True, masks=True, decode=letters, prefill_buckets=(16,), **more)


def assert_naive(spec, seed, weights, requests, results):
    for request in requests:
        wanted, got = naive_engine.trace(spec, weights, request, seed), results[request.id].completion
        differing = np.flatnonzero(wanted.tokens != got.tokens)
        if len(differing):
            assert wanted.margins[differing[0]] < naive_engine.NEAR_TIE
            continue
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("paged", ["dense", pytest.param("xla", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(12, min_p=0.3),
        SamplingParams(12, min_p=0.1, top_k=6, top_p=0.9, temperature=0.7),
        SamplingParams(12, repetition_penalty=1.8),
        SamplingParams(12, repetition_penalty=1.8, temperature=0.0),
        SamplingParams(12, top_k=3, untruncated_logprobs=True),
        SamplingParams(12, seed=77),
        SamplingParams(12, stop_tokens=tuple(range(60, 64)), ignore_eos=True),
    ],
    ids=["min_p", "all of them", "penalty", "greedy penalty", "untruncated", "seed", "ignore_eos"],
)
def test_each_way_equals_the_naive_reference(able, spec, seed, model, params, paged):
    requests = requests_of(params)
    assert_naive(spec, seed, model(), requests, able(paged_attention=paged).run(requests))


def test_each_way_changes_something(able):
    plain = {r.id: able().run([r])[r.id].completion for r in requests_of(SamplingParams(12))}
    for params in (
        SamplingParams(12, min_p=0.3),
        SamplingParams(12, repetition_penalty=1.8),
        SamplingParams(12, seed=77),
        SamplingParams(12, top_k=3, untruncated_logprobs=True),
    ):
        other = able().run(requests_of(params))
        assert any(plain[i].tokens.tolist() != other[i].completion.tokens.tolist() for i in plain), params


def test_rows_that_ask_for_nothing_are_not_touched_by_those_that_do(able):
    plain = requests_of(SamplingParams(12))
    alone = dict(able().run(plain))
    odd = [
        dataclasses.replace(r, id=100 + r.id, params=SamplingParams(12, min_p=0.3, repetition_penalty=2.0, top_k=2))
        for r in plain
    ]
    mixed = able().run([request for pair in zip(plain, odd, strict=True) for request in pair])
    for request in plain:
        one, other = alone[request.id].completion, mixed[request.id].completion
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize(
    "params", [SamplingParams(4, top_k=3), SamplingParams(4, top_p=0.9), SamplingParams(4, min_p=0.1)]
)
def test_an_engine_without_programs_that_sort_refuses_truncation(params):
    sizes = Sizes(slots=2, max_tokens=32, rows=1, inserts=1, buckets=(16,), chunk=4, max_stops=4)
    (request,) = requests_of(params, 1)
    with pytest.raises(DataError, match="truncation=True"):
        check(request, sizes, vocab_size=64, decodes=False)
    greedy = dataclasses.replace(request, params=msgspec.structs.replace(params, temperature=0.0))
    for served, able in ((request, {"truncation": True}), (request, {"support": 4}), (greedy, {})):
        check(served, dataclasses.replace(sizes, **able), vocab_size=64, decodes=False)


@pytest.mark.parametrize(
    ("role", "port", "sorts"),
    [("sampler", -1, False), ("sampler", 0, True), ("evaluator", 0, False), ("requests", -1, True)],
)
def test_engines_with_clients_have_programs_that_sort(role: str, port: int, sorts: bool):
    """Clients of a sampler (`sampler.http_port`) choose their own truncation; rollouts of a run need no sort."""
    config = Config(sampler=SamplerConfig(http_port=port))
    assert EngineConfig.of(config, role, weight_swap="drain").truncation == sorts


def rising(drawn: np.ndarray) -> np.ndarray:
    """Words above the last one only, and any word at first."""
    allowed = np.arange(64) > (drawn[-1] if len(drawn) else -1)
    return allowed if allowed.any() else np.ones(64, bool)


def test_a_mask_is_asked_before_every_token_and_kept_to(able, spec, seed, model):
    constrained = requests_of(SamplingParams(8), allowed=rising)
    free = [dataclasses.replace(r, id=100 + r.id, allowed=None) for r in requests_of(SamplingParams(12))]
    alone = {r.id: able().run([r])[r.id].completion for r in free}
    results = able().run([request for pair in zip(constrained, free, strict=True) for request in pair])
    for request in constrained:
        tokens = results[request.id].completion.tokens
        falls = np.flatnonzero(np.diff(tokens) <= 0)
        assert all(tokens[i] == 63 for i in falls)
    assert_naive(spec, seed, model(), constrained, results)
    for request in free:
        np.testing.assert_array_equal(alone[request.id].tokens, results[request.id].completion.tokens)


def after(tokens: int, answer):
    """An `allowed` that lets everything pass until so many tokens are drawn, and then gives `answer()`."""
    return lambda drawn: np.ones(64, bool) if len(drawn) < tokens else answer()


def failing():
    raise KeyError("a grammar's own fault")


@pytest.mark.parametrize(
    ("drawn", "answer", "words"),
    [
        (0, lambda: np.zeros(64, bool), "request 2: its `allowed` allows no token after 0 tokens"),
        (3, lambda: np.zeros(64, bool), "allows no token after 3 tokens"),
        (3, failing, "raised KeyError after 3 tokens"),
        (0, lambda: np.ones(63, bool), "one bool for each of 64 tokens is needed"),
    ],
    ids=["at first", "later", "raises", "wrong shape"],
)
def test_an_invalid_mask_fails_only_its_request(able, drawn, answer, words):
    """Its caller gets the error and what was drawn; the others' tokens stay, and so do those who wait for its slot."""
    others = [request for request in requests_of(SamplingParams(9)) if request.id != 2]
    alone = {r.id: able().run([r])[r.id].completion for r in others}
    bad = requests_of(SamplingParams(9))[2]
    free = able().run([bad])[2].completion
    b = able()
    b.run([*others[:2], dataclasses.replace(bad, allowed=after(drawn, answer)), *others[2:]])
    ended = b.results.pop(2)
    assert isinstance(ended.error, DataError)
    assert words in str(ended.error)
    assert ended.completion.tokens.tolist() == free.tokens[:drawn].tolist()
    assert ended.completion.finish == "abort"
    assert b.results.keys() == alone.keys()
    for id, result in b.results.items():
        assert result.error is None
        np.testing.assert_array_equal(result.completion.tokens, alone[id].tokens)
        np.testing.assert_array_equal(result.completion.logprobs, alone[id].logprobs)


def test_the_caller_of_the_proxy_gets_the_error_and_others_their_tokens(able):
    b = able()
    host = EngineHost(b.engine)
    thread = threading.Thread(target=host.run, daemon=True)

    async def both():
        proxy, (one, other) = EngineProxy(host, asyncio.get_running_loop()), requests_of(SamplingParams(9), 2)
        ask = lambda request, **more: proxy.generate(request.prompt, request.key, request.params, **more)  # noqa: E731
        nothing_more = after(2, lambda: np.zeros(64, bool))
        async with asyncio.timeout(60):
            return await asyncio.gather(ask(one, allowed=nothing_more), ask(other), return_exceptions=True)

    thread.start()
    try:
        refused, served = asyncio.run(both())
    finally:
        host.stop()
        thread.join(60)
    assert isinstance(refused, DataError)
    assert isinstance(served, Completion)
    assert len(served.tokens) == 9


def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(able):
    whole = {r.id: able().run([r])[r.id].completion for r in requests_of(SamplingParams(14))}
    text = {i: letters(c.tokens.tolist()) for i, c in whole.items()}
    strings = tuple({t[3:5] for t in text.values()} | {t[9:11] for t in text.values()})
    results = able().run(requests_of(SamplingParams(14, stop_strings=strings)))
    stopped = 0
    for i, completion in whole.items():
        ends = [text[i].find(s) + len(s) for s in strings if s in text[i]]
        got = results[i].completion
        expected = min(ends) if ends else 14
        assert got.tokens.tolist() == completion.tokens[:expected].tolist()
        assert len(got.logprobs) == sum(run.count for run in got.versions) == expected
        assert got.finish == ("stop" if ends else "length")
        stopped += bool(ends)
    assert stopped == len(whole)


@pytest.mark.parametrize(
    ("params", "more", "words"),
    [
        (SamplingParams(4, repetition_penalty=1.1), {}, "penalties=True"),
        (SamplingParams(4, stop_strings=("a",)), {}, "decode="),
        (SamplingParams(4), {"allowed": rising}, "masks=True"),
        (SamplingParams(4, min_p=1.5), {}, "min_p must lie in"),
        (SamplingParams(4, repetition_penalty=0.0), {}, "repetition_penalty be > 0"),
        (SamplingParams(4, seed=-1), {}, "a seed must lie in"),
    ],
)
def test_requests_that_an_engine_does_not_support_are_refused(bench, params, more, words):
    b = bench()
    with pytest.raises(DataError, match=words):
        b.add(*requests_of(params, 1, **more))


@pytest.mark.soak
@pytest.mark.parametrize("weight_swap", ["keep_kv", "reprefill"])
def test_penalties_and_masks_go_on_after_pages_were_given_away(bench, weight_swap):
    sizes = {"slots": 8, "max_tokens": 64, "page_tokens": 8, "cache_pages": 16, "prefill_buckets": (16,)}
    able = {"penalties": True, "masks": True, "decode": letters}
    make = lambda: bench(**sizes, **able, weight_swap=weight_swap)  # noqa: E731
    requests = requests_of(SamplingParams(40, repetition_penalty=1.5), 12)
    requests += [dataclasses.replace(r, id=100 + r.id, allowed=rising) for r in requests[:4]]
    alone = {r.id: make().run([r])[r.id].completion for r in requests}
    b = make()
    before = b.engine.stats().preemptions
    b.run(requests)
    assert b.engine.stats().preemptions > before
    for request in requests:
        np.testing.assert_array_equal(alone[request.id].tokens, b.results[request.id].completion.tokens)
