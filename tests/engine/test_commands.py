"""Abort, suspend, resume, swap and bad requests, on a real engine."""

from __future__ import annotations

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import requests as inputs
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request
from jaxroll.errors import ConfigError, DataError, TransferError
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun
from tests.harness import naive_engine

V1, V2, V3 = Version(0, 1), Version(0, 2), Version(1, 2)
LONG = SamplingParams(15, temperature=1.0)


def long_requests(count: int, params: SamplingParams = LONG) -> list[Request]:
    return [Request(i, np.arange(3 + i % 5, dtype=np.int32), GenerationKey(i, 0), params) for i in range(count)]


def test_abort_keeps_the_tokens_so_far_or_discards_everything(bench):
    requests = long_requests(3)
    whole = bench().run(requests)
    b = bench()
    b.add(*requests)
    b.steps(2)  # 1 first token and 2 dispatches of 4
    b.engine.abort(0, keep=True)
    b.engine.abort(1, keep=False)
    b.finish()
    kept = b.results[0].completion
    assert (kept.finish, len(kept.tokens), kept.versions) == ("abort", 9, (VersionRun(V1, 9),))
    np.testing.assert_array_equal(kept.tokens, whole[0].completion.tokens[:9])
    np.testing.assert_array_equal(kept.logprobs, whole[0].completion.logprobs[:9])
    assert 1 not in b.results
    np.testing.assert_array_equal(b.results[2].completion.tokens, whole[2].completion.tokens)


def test_abort_of_a_waiting_request_delivers_no_tokens(bench):
    b = bench()
    b.add(*long_requests(7))
    b.steps(1)
    assert b.engine.stats().queue_depth == 3
    b.engine.abort(5, keep=True)
    b.engine.abort(6, keep=False)
    b.finish()
    completion = b.results[5].completion
    assert (completion.finish, len(completion.tokens), completion.versions) == ("abort", 0, ())
    assert sorted(b.results) == [0, 1, 2, 3, 4, 5]


def test_abort_of_an_ended_or_unknown_request_changes_nothing(bench):
    b = bench()
    b.run(long_requests(1))
    b.engine.abort(0, keep=True)
    b.engine.abort(99, keep=True)
    assert not b.engine.step()
    assert list(b.results) == [0] and b.results[0].completion.finish == "length"


def test_an_aborted_slot_is_free_for_the_next_request_and_leaves_no_trace(bench):
    requests = long_requests(8)
    whole = bench().run(requests)
    b = bench()
    b.add(*requests)
    b.steps(1)
    for id in range(4):
        b.engine.abort(id, keep=False)
    b.steps(1)
    assert b.engine.stats().active == 4 and b.engine.stats().queue_depth == 0
    b.finish()
    assert sorted(b.results) == [4, 5, 6, 7]
    for id, result in b.results.items():
        np.testing.assert_array_equal(result.completion.tokens, whole[id].completion.tokens)


def test_an_aborted_slot_stops_computing(bench):
    b = bench()
    b.add(*long_requests(2, SamplingParams(16)))
    b.steps(1)
    b.engine.abort(0, keep=False)
    b.engine.abort(1, keep=False)
    assert not b.engine.step()
    assert set(np.asarray(b.engine._device._state.status).tolist()) <= {inputs.IDLE, inputs.STOP, inputs.LENGTH}


def test_an_id_can_be_used_again_once_it_has_left(bench):
    b = bench()
    b.add(*long_requests(1))
    with pytest.raises(DataError, match="request 0 is in the engine already"):
        b.add(*long_requests(1))
    b.engine.abort(0, keep=False)
    b.steps(1)
    b.run(long_requests(1))
    assert len(b.results[0].completion.tokens) == 15


def test_suspend_holds_everything_and_resume_goes_on_as_if_nothing_was(bench):
    requests = long_requests(6)
    whole = bench().run(requests)
    b = bench()
    b.add(*requests)
    b.steps(2)
    b.engine.suspend()
    before = b.engine.stats().tokens_decoded
    assert not b.engine.step() and not b.engine.step()
    stats = b.engine.stats()
    assert stats.suspended and stats.active == 4 and stats.queue_depth == 2 and stats.tokens_decoded == before
    b.engine.resume()
    b.finish()
    for id, result in b.results.items():
        np.testing.assert_array_equal(result.completion.tokens, whole[id].completion.tokens)


def test_keep_kv_goes_on_with_new_weights_over_the_old_cache(bench, spec, seed, model, replayed):
    b = bench()
    b.add(*long_requests(2))
    b.steps(2)
    b.swap(V2, 1)
    b.steps(1)
    b.swap(V3, 2)
    b.finish()
    runs = (VersionRun(V1, 9), VersionRun(V2, 4), VersionRun(V3, 2))
    for request in long_requests(2):
        got = b.results[request.id].completion
        assert got.versions == runs
        tokens, _ = replayed(request, [model(0)] * 9 + [model(1)] * 4 + [model(2)] * 2)
        assert got.tokens.tolist() == tokens
        pure = naive_engine.generate(spec, model(0), request, seed)[0]
        assert got.tokens[:9].tolist() == pure[:9].tolist() and got.tokens.tolist() != pure.tolist()


def test_drain_ends_the_running_requests_first_and_holds_the_others(bench, spec, seed, model):
    """One of the first four ends early: its slot must stay empty until the other three have ended too."""
    b = bench(weight_swap="drain")
    requests = long_requests(7)
    requests[0] = dataclasses.replace(requests[0], params=SamplingParams(6))
    b.add(*requests)
    b.steps(1)
    b.swap(V2, 1)
    b.steps(2)
    stats = b.engine.stats()
    assert (stats.version, stats.active, stats.queue_depth) == (V1, 3, 3) and list(b.results) == [0]
    b.finish()
    assert b.engine.version == V2
    for request in requests:
        version, which = (V1, 0) if request.id < 4 else (V2, 1)
        got = b.results[request.id].completion
        assert got.versions == (VersionRun(version, request.params.max_tokens),)
        assert got.tokens.tolist() == naive_engine.generate(spec, model(which), request, seed)[0].tolist()


def test_of_two_swaps_that_wait_for_draining_the_later_counts(bench):
    b = bench(weight_swap="drain")
    b.add(*long_requests(5))
    b.steps(1)
    b.swap(V2, 1)
    b.steps(1)
    b.swap(V3, 2)
    b.finish()
    versions = {run.version for result in b.results.values() for run in result.completion.versions}
    assert versions == {V1, V3} and b.engine.version == V3


def test_an_idle_engine_swaps_at_once_under_either_policy(bench):
    for weight_swap in ("keep_kv", "drain"):
        b = bench(weight_swap=weight_swap)
        b.swap(V2, 1)
        assert not b.engine.step() and b.engine.version == V2


def test_requests_wait_for_the_first_weights(spec):
    sizes = {"slots": 2, "max_tokens": 32, "prefill_rows": 1, "prefill_buckets": (8,), "decode_chunk": 2, "seed": 0}
    engine = Engine(spec, sharding.build(MeshConfig()), sharding.SAMPLER, EngineConfig(**sizes))
    engine.add(long_requests(1)[0], lambda result: None)
    assert not engine.step()
    assert engine.version is None and engine.stats().queue_depth == 1


def test_a_decode_dispatch_copies_no_array_from_the_host(spec, model):
    sizes = {"slots": 2, "max_tokens": 32, "prefill_rows": 1, "prefill_buckets": (8,), "decode_chunk": 2, "seed": 0}
    own = Engine(spec, sharding.build(MeshConfig()), sharding.SAMPLER, EngineConfig(**sizes))._device
    own._tables = np.asarray(own._tables)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        own.decode(model(), 1, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": np.zeros(0, np.int32)}, "prompt is empty"),
        ({"prompt": np.zeros(29, np.int32)}, "29 prompt tokens and max_tokens = 15.*32"),
        ({"prompt": np.zeros((2, 2), np.int32)}, "one-dimensional integer array"),
        ({"prompt": np.zeros(3, np.float32)}, "one-dimensional integer array"),
        ({"prompt": np.array([64], np.int32)}, r"must lie in 0\.\.63"),
        ({"prompt": np.array([-1], np.int32)}, r"must lie in 0\.\.63"),
        ({"prompt": np.zeros(16, np.int32), "params": SamplingParams(17)}, "16 prompt tokens and max_tokens = 17.*32"),
        ({"params": SamplingParams(0)}, "max_tokens = 0"),
        ({"params": SamplingParams(4, stop_tokens=(1, 2, 3, 4, 5))}, "5 stop tokens.*compiled for 4"),
        ({"params": SamplingParams(4, temperature=-1.0)}, "temperature"),
        ({"params": SamplingParams(4, top_p=0.0)}, "top_p"),
        ({"params": SamplingParams(4, top_k=-2)}, "top_k"),
        ({"key": GenerationKey(2**31, 0)}, "group, member, salt"),
        ({"key": GenerationKey(0, -1)}, "group, member, salt"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_when_added(bench, change, words):
    b = bench()
    with pytest.raises(DataError, match=words):
        b.add(dataclasses.replace(long_requests(1)[0], **change))
    assert not b.engine.step()
    b.run(long_requests(1))  # the refused id was not taken


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: {k: v for k, v in p.items() if k != "embed"}, "embed"),
        (lambda p: p | {"extra": p["embed"]}, "extra"),
        (lambda p: p | {"embed": p["embed"].astype(jnp.bfloat16)}, "embed is bfloat16.*compiled for float32"),
        (lambda p: p | {"embed": p["embed"][:-8]}, r"embed has shape \(56, 32\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(bench, model, spoil, words):
    b = bench()
    with pytest.raises(TransferError, match=words):
        b.engine.swap(V2, spoil(model()))
    assert not b.engine.step() and b.engine.version == V1


def test_weights_on_another_mesh_are_refused(bench, model):
    with pytest.raises(TransferError, match=r"has NamedSharding.*this engine needs NamedSharding"):
        bench().engine.swap(V2, model(0, MeshConfig(tensor=2)))


def test_commands_come_from_any_thread(bench, work):
    b, requests = bench(), work(1, 40)
    threads = [threading.Thread(target=b.add, args=requests[i::4]) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        b.engine.step()
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(b.finish()) == list(range(40))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_swap": "later"}, "keep_kv, reprefill, restart, drain"),
        ({"cache_pages": 4}, "sampler.cache_pages = 4.*needs 5 pages of 8 tokens"),
        ({"slots": 0}, "sampler.slots = 0"),
        ({"decode_chunk": 0}, "sampler.decode_chunk = 0"),
        ({"prefill_buckets": ()}, "sampler.prefill_buckets"),
        ({"prefill_buckets": (8, 64)}, "every bucket must hold 1..32"),
    ],
)
def test_sizes_that_no_program_can_have_are_refused(spec, change, words):
    sizes = {
        "slots": 2,
        "max_tokens": 32,
        "prefill_rows": 1,
        "prefill_buckets": (8,),
        "decode_chunk": 2,
        "seed": 0,
        "page_tokens": 8,
    }
    with pytest.raises(ConfigError, match=words):
        Engine(spec, sharding.build(MeshConfig()), sharding.SAMPLER, EngineConfig(**(sizes | change)))
