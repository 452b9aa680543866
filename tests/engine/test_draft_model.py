"""A draft model: no token depends on it, its cache moves with the pages, and it rests where its drafts fail.

The engines verify every draft, however unlikely, except in the last test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import decoding, programs
from jaxroll.engine.engine import EngineConfig
from jaxroll.engine.requests import Request
from jaxroll.models import families
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version
from tests.engine.conftest import SPEC

SIZES = {"slots": 8, "max_tokens": 64, "cache_pages": 14, "page_tokens": 8, "prefill_buckets": (16,), "draft_tokens": 3}
TWIN = dataclasses.replace(SPEC, draft=SPEC)  # with parameters of number 0 the draft model is the model
OTHER = families.ModelSpec("other", 80, 1, 16, 2, 1, 8, 32, windows=(4,), rope_theta=1e4)  # more token ids than SPEC
FEWER = dataclasses.replace(OTHER, vocab_size=40)
USUAL = decoding.WORTH, decoding.LEAST


@pytest.fixture(autouse=True)
def every_draft_is_verified(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoding, "WORTH", 0.0)
    monkeypatch.setattr(decoding, "LEAST", 0.0)
    yield


def requests_of(count: int, seed: int, **fixed) -> list[Request]:
    """Pairs with a prompt in common, of which some are longer than a prefill's row; every way of sampling."""
    rng, made = np.random.default_rng(seed), list[Request]()
    for index in range(count):
        own = rng.integers(0, 64, rng.integers(1, 28)).astype(np.int32)
        prompt = made[-1].prompt if index % 2 else own
        wanted = {
            "max_tokens": int(rng.integers(8, 36)),
            "temperature": float(rng.choice([0.0, 0.7, 1.0])),
            "top_k": int(rng.choice([0, 0, 5])),
            "top_p": float(rng.choice([1.0, 1.0, 0.8])),
            "stop_tokens": tuple(int(t) for t in rng.integers(0, 64, rng.integers(0, 2))),
        }
        made.append(Request(index, prompt, GenerationKey(index // 2, index % 2), SamplingParams(**(wanted | fixed))))
    return made


def counted(bench) -> np.ndarray:
    stats = bench.engine.stats()
    return np.array([stats.tokens_drafted, stats.tokens_accepted, stats.preemptions, stats.decode_steps])


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        (MeshConfig(), {"paged_attention": "xla"}),
        pytest.param(MeshConfig(), {"paged_attention": "dense", "cache_pages": 0}, marks=pytest.mark.soak),
        pytest.param(MeshConfig(), {"scan_layers": True}, marks=pytest.mark.soak),
        pytest.param(MeshConfig(), {"support_tokens": 8, "penalties": True, "in_flight": 2}, marks=pytest.mark.soak),
        pytest.param(MeshConfig(tensor=2), {}, marks=pytest.mark.soak),
        pytest.param(MeshConfig(data=2), {"cache_pages": 22, "scan_layers": True}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_model_as_its_own_draft_model_is_always_right(bench, assert_naive, mesh, overrides):
    """At every temperature, because both sample with the same keys; also after preemption, which moves both caches."""
    b = bench(mesh, **(SIZES | {"spec": TWIN, "draft": 0} | overrides))
    before, requests = counted(b), requests_of(24, 1, top_k=0, top_p=1.0)
    assert_naive(requests, b.run(requests))
    drafted, accepted, preempted, steps = counted(b) - before
    stops = sum(result.completion.finish == "stop" for result in b.results.values())
    assert drafted - 3 * stops - 3 <= accepted <= drafted and drafted > 200, (drafted, accepted)  # 3: one near-tie
    assert steps < sum(len(result.completion.tokens) for result in b.results.values()) / 3
    assert preempted > 2 or not b.engine._sizes.pages


@pytest.mark.parametrize("draft", [OTHER, pytest.param(FEWER, marks=pytest.mark.soak)], ids=["more ids", "fewer ids"])
def test_no_token_depends_on_another_draft_model(bench, assert_naive, draft):
    """It has another vocabulary, other layers and windows. Weights change under requests, which keep their cache."""
    b = bench(**(SIZES | {"spec": dataclasses.replace(SPEC, draft=draft), "draft": 1}))
    before, requests = counted(b), requests_of(24, 2, stop_tokens=())
    b.add(*requests)
    b.steps(4)
    b.swap(Version(0, 2), 1)
    results = b.finish()
    drafted, accepted, preempted, _ = counted(b) - before
    assert 0 < accepted < drafted and preempted
    held = b.engine._device._state.cache.draft
    assert all(np.isfinite(np.asarray(pool)).all() for pool in held.keys + held.values), "ids that it does not have"
    assert any(len(result.completion.versions) > 1 for result in results.values())
    for one in requests:
        assert len(results[one.id].completion.tokens) == one.params.max_tokens
    for version in (1, 2):
        some = [
            one for one in requests if [run.version.step for run in results[one.id].completion.versions] == [version]
        ]
        assert some
        assert_naive(some, results, version - 1)


def test_a_draft_model_rests_where_it_fails_and_is_verified_once_it_was_right(bench, monkeypatch):
    monkeypatch.setattr(decoding, "WORTH", USUAL[0])
    monkeypatch.setattr(decoding, "LEAST", USUAL[1])
    b = bench(**(SIZES | {"spec": dataclasses.replace(SPEC, draft=OTHER), "draft": 2, "decode_chunk": 5}))
    prompt, before = np.array([1, 2, 3], np.int32), counted(b)
    b.run([Request(0, prompt, GenerationKey(0, 0), SamplingParams(36, temperature=0.0))])  # they have other favorites
    assert (counted(b) - before)[0] <= 6, "wrong guesses are not verified"
    assert np.asarray(b.engine._device._state.chances).max() == decoding.NEVER
    # The noise alone decides, and both models have the same.
    b.run([Request(1, prompt, GenerationKey(1, 0), SamplingParams(36, temperature=1e4))])
    _, accepted, _, steps = counted(b) - before
    assert accepted >= 20 and steps <= 36 + 16, (accepted, steps)


def test_the_memory_of_a_draft_model_counts() -> None:
    config = EngineConfig(8, 64, 2, (16,), 4, 0, page_tokens=8, draft_tokens=3, scan_layers=True)
    mesh = sharding.build(MeshConfig())
    sizes = {}
    for name, spec in (("none", SPEC), ("twin", TWIN), ("other", dataclasses.replace(SPEC, draft=OTHER))):
        spec = config.model(spec)
        attention, found = programs.kernels_and_sizes(spec, mesh, config.sizes(1))
        state = programs.abstract_state(spec, mesh, sharding.SAMPLER, found, attention)
        held = programs.build(spec, mesh, sharding.SAMPLER, found, attention).held
        sizes[name] = sharding.device_bytes(state.cache), sharding.device_bytes(held)
    pool, params = sizes["none"]
    assert sizes["twin"] == (2 * pool, 2 * params)
    assert sizes["other"][0] == pool + pool // 4  # one layer of two, one key-value head of two
    assert 0 < sizes["other"][1] - params < params
