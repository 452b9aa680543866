"""Running requests after a weight swap under each policy, against slow loops with the recorded weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun
from tests.harness import naive_engine

V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)


def requests_of(count: int, tokens: int = 15, prompt: int = 3) -> list[Request]:
    make = lambda i: np.arange(i, i + prompt + i % 5, dtype=np.int32)  # noqa: E731
    return [Request(i, make(i), GenerationKey(i, 0), SamplingParams(tokens)) for i in range(count)]


def test_restart_begins_again_and_says_how_much_was_thrown_away(bench, spec, seed, model):
    b = bench(weight_swap="restart")
    before = b.engine.stats()
    requests = requests_of(7)
    b.add(*requests)
    b.steps(2)  # four run and have 9 tokens each
    b.swap(V2, 1)
    b.finish()
    after = b.engine.stats()
    assert after.tokens_discarded - before.tokens_discarded == 4 * 9
    for request in requests:
        got = b.results[request.id].completion
        assert got.versions == (VersionRun(V2, 15),)
        assert got.tokens.tolist() == naive_engine.generate(spec, model(1), request, seed)[0].tolist()


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, tensor=2)], ids=["one device", "data=2,tensor=2"])
def test_reprefill_goes_on_over_a_cache_of_the_new_weights(bench, assert_replayed, mesh):
    b = bench(mesh, weight_swap="reprefill")
    before, requests = b.engine.stats(), requests_of(6)
    b.add(*requests)
    b.steps(2)
    b.swap(V2, 1)
    b.steps(1)
    b.swap(V3, 2)
    b.finish()
    assert b.engine.stats().tokens_discarded == before.tokens_discarded
    for completion in (b.results[i].completion for i in range(4)):
        assert completion.versions[0] == VersionRun(V1, 9) and completion.versions[-1].version == V3
        assert len(completion.tokens) == 15
    assert_replayed(requests, b.results, reprefill=True)


def test_reprefill_and_keep_kv_are_not_the_same(bench):
    drawn = []
    for weight_swap in ("keep_kv", "reprefill"):
        b = bench(weight_swap=weight_swap)
        b.add(*requests_of(4))
        b.steps(1)
        b.swap(V2, 1)
        b.finish()
        drawn.append([b.results[i].completion.logprobs.tolist() for i in range(4)])
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("case", "paged", "weight_swap"),
    [
        (0, "dense", "keep_kv"),
        (0, "dense", "restart"),
        pytest.param(1, "xla", "drain", marks=pytest.mark.soak),
        pytest.param(1, "xla", "reprefill", marks=pytest.mark.soak),
        pytest.param(0, "dense", "reprefill", marks=pytest.mark.soak),
        pytest.param(0, "dense", "drain", marks=pytest.mark.soak),
        pytest.param(1, "xla", "keep_kv", marks=pytest.mark.soak),
        pytest.param(1, "xla", "restart", marks=pytest.mark.soak),
    ],
)
def test_random_arrivals_aborts_and_swaps_equal_the_slow_loop(bench, work, assert_replayed, weight_swap, case, paged):
    """Every completion is what its recorded versions say; the first three policies never wait, the last never mixes."""
    rng = np.random.default_rng(case)
    b, step = bench(weight_swap=weight_swap, max_tokens=48, page_tokens=8, paged_attention=paged), 1
    requests = [dataclasses.replace(r, id=200 * case + r.id) for r in work(20 + case, 24, stop_tokens=())]
    requests += [
        Request(900 + i, rng.integers(0, 64, 30).astype(np.int32), GenerationKey(50 + i, 0), SamplingParams(12))
        for i in range(4)
    ]
    for request in requests:
        b.add(request)
        b.steps(int(rng.integers(0, 2)))
        if rng.random() < 0.25 and step < 4:
            step += 1
            b.swap(Version(0, step), step - 1)
    b.engine.abort(requests[3].id, keep=True)
    b.finish()
    assert step > 2
    whole = [r for r in requests if r.id in b.results and b.results[r.id].completion.finish != "abort"]
    assert len(whole) >= len(requests) - 1
    if weight_swap in ("drain", "restart"):
        assert all(len(b.results[r.id].completion.versions) == 1 for r in whole)
    assert_replayed(whole, b.results, reprefill=weight_swap == "reprefill")


def test_a_request_aborted_after_a_weight_swap_keeps_its_tokens(bench):
    b = bench(weight_swap="reprefill")
    b.add(*requests_of(2))
    b.steps(1)
    b.swap(V2, 1)
    b.steps(1)
    b.engine.abort(0, keep=True)
    b.finish()
    assert b.results[0].completion.versions == (VersionRun(V1, 5), VersionRun(V2, 4))
