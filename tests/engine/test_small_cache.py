"""The cache with fewer pages than its slots would like: the same tokens, and some requests that had to wait."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

PAGED = {"slots": 8, "max_tokens": 64, "page_tokens": 8, "prefill_buckets": (16,)}
QUARTER = 16  # pages of 8 tokens; eight slots of 64 tokens would need 64


def uneven(count: int) -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, 64, (count, 12)).astype(np.int32)
    limits = rng.choice([4, 8, 40], count)
    return [Request(i, prompts[i // 2], GenerationKey(i, 0), SamplingParams(int(n))) for i, n in enumerate(limits)]


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2)], ids=["one device", "data=2"])
def test_a_quarter_of_the_memory_gives_the_same_tokens_to_the_bit(bench, mesh):
    make = lambda: bench(mesh, **PAGED, cache_pages=QUARTER * mesh.data)  # noqa: E731
    requests = uneven(24)
    alone = {request.id: make().run([request])[request.id].completion for request in requests}
    b = make()
    before = b.engine.stats()
    b.run(requests)
    assert b.engine.stats().preemptions > before.preemptions
    for request in requests:
        one, other = alone[request.id], b.results[request.id].completion
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.soak
def test_a_quarter_of_the_memory_gives_the_tokens_of_all_of_it(bench, assert_replayed):
    requests = uneven(24)
    few, all_of_it = bench(**PAGED, cache_pages=QUARTER), bench(**PAGED)
    few.run(requests)
    all_of_it.run(requests)
    assert_replayed(requests, few.results)
    assert_replayed(requests, all_of_it.results)


@pytest.mark.parametrize(
    "weight_swap",
    ["keep_kv", "reprefill", *(pytest.param(other, marks=pytest.mark.soak) for other in ("restart", "drain"))],
)
def test_swaps_and_aborts_while_requests_wait_for_pages(bench, assert_replayed, weight_swap):
    b = bench(**PAGED, cache_pages=QUARTER, weight_swap=weight_swap)
    before, requests = b.engine.stats(), uneven(24)
    b.add(*requests)
    while b.engine.stats().preemptions < before.preemptions + 3:
        assert b.engine.step()
    waiting = [sequence.id for sequence in b.engine._scheduler.waiting if sequence.swapped]
    assert waiting
    b.engine.abort(waiting[0], keep=True)
    b.swap(Version(0, 2), 1)
    b.finish()
    kept = b.results[waiting[0]].completion
    assert kept.finish == "abort" and len(kept.tokens) > 0
    rest = [request for request in requests if request.id != waiting[0]]
    if weight_swap != "keep_kv":  # over pages that were computed in two programs of weights only the engine can go on
        assert_replayed(rest, b.results, reprefill=weight_swap == "reprefill")
    assert sorted(b.results) == [request.id for request in requests]


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2)], ids=["one device", "data=2"])
def test_saved_pages_hold_no_memory_of_the_device(bench, mesh):
    """The memory plan counts the pages of one preempted request, not those of all that wait."""
    b = bench(mesh, **PAGED, cache_pages=QUARTER * mesh.data)
    one = b.engine._device.save(0, ((), ()), 0)
    shapes = {leaf.shape for leaf in jax.tree.leaves(one.pages)}
    del one
    alive = lambda: sum(array.shape in shapes for array in jax.live_arrays())  # noqa: E731
    before = alive()
    b.add(*uneven(24))
    while sum(sequence.swapped for sequence in b.engine._scheduler.waiting) < 2:
        assert b.engine.step()
    assert alive() == before
    b.finish()


def test_all_pages_are_free_when_no_sequence_is_left(bench):
    b = bench(**PAGED, cache_pages=QUARTER)
    b.run(uneven(24))
    scheduler = b.engine._scheduler
    held = sum(len(prefix.table) for prefix in scheduler.prefixes.all())
    assert scheduler.pages[0].free == QUARTER - held


@pytest.mark.soak
def test_layers_in_a_loop_give_the_tokens_and_log_probs_of_single_layers(bench):
    """Through prompts in two chunks, shared prompts, preemptions and a weight swap."""
    how = PAGED | {"prefill_buckets": (8,), "cache_pages": QUARTER, "paged_attention": "xla"}
    found, requests = [], [replace(one, params=SamplingParams(one.params.max_tokens, 0.0)) for one in uneven(12)]
    for scan in (False, True):
        b = bench(**how, scan_layers=scan)
        before = b.engine.stats()
        b.add(*requests)
        while b.engine.stats().preemptions < before.preemptions + 2:
            assert b.engine.step()
        b.swap(Version(0, 2), 1)
        found.append(b.finish())
    for request in requests:
        one, other = (results[request.id].completion for results in found)
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
        assert one.versions == other.versions
