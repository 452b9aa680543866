"""Requests that begin with tokens sampled elsewhere: the continuation is that of the undisturbed request."""

from __future__ import annotations

import numpy as np
import pytest

from jaxroll.engine.requests import Request
from jaxroll.engine.sequence import Latencies
from jaxroll.errors import DataError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, Supports
from jaxroll.records import Version, VersionRun

V1, V2 = Version(0, 1), Version(0, 2)
PARAMS = SamplingParams(15)


def first(whole: Completion, count: int, version: Version = V1) -> Completion:
    """The first `count` tokens, as a store has them."""
    decoded = Supports.decoded(whole.support, whole.tokens)
    packed = decoded.first(count).encoded(whole.tokens[:count])
    return Completion(whole.tokens[:count], whole.logprobs[:count], (VersionRun(version, count),), "", packed)


def request(id: int, params: SamplingParams = PARAMS, prompt: int = 5, **more) -> Request:
    return Request(id, np.arange(2, 2 + prompt, dtype=np.int32), GenerationKey(3, 1), params, **more)


@pytest.mark.parametrize(
    ("params", "prompt"), [(SamplingParams(15, temperature=0.0), 16), (PARAMS, 5)], ids=["greedy", "sampled"]
)
def test_a_request_stopped_after_k_tokens_continues_as_if_it_had_not_been(bench, params, prompt):
    b = bench()
    b.add(request(0, params, prompt))
    whole = b.finish()[0].completion
    begun = b.engine.stats()
    for k in (1, 4, 7, 8, 9, 14):
        b.add(request(k, params, prompt, before=first(whole, k)))
    b.finish()
    for k in (1, 4, 7, 8, 9, 14):
        got = b.results[k].completion
        assert got.tokens.tolist() == whole.tokens.tolist()
        assert got.logprobs[:k].tolist() == whole.logprobs[:k].tolist(), "earlier log-probs are kept verbatim"
        np.testing.assert_allclose(got.logprobs, whole.logprobs, atol=1e-4)
        assert got.versions == (VersionRun(V1, 15),) and got.finish == "length"
    after = b.engine.stats()
    assert after.tokens_decoded - begun.tokens_decoded <= sum(15 - k for k in (1, 4, 7, 8, 9, 14)), "sampled twice"


def test_the_time_in_which_the_store_lags_is_summed():
    latencies = Latencies()
    noted = [
        latencies.note_wait(waits, now_s) for waits, now_s in ((True, 1.0), (True, 3.0), (False, 4.0), (False, 9.0))
    ]
    assert noted == [True, True, False, False] and latencies.flush_wait_s == 3.0
    latencies.note_wait(True, 20.0)
    latencies.idle()  # its requests were aborted
    latencies.note_wait(False, 90.0)
    assert latencies.flush_wait_s == 3.0


def test_the_tokens_keep_their_versions_and_the_stream_gets_only_the_others(bench):
    b = bench()
    b.add(request(0))
    whole = b.finish()[0].completion
    b.swap(V2, 1)
    pieces: list[Completion] = []
    b.add(request(1, before=first(whole, 6), on_tokens=pieces.append, piece_tokens=3))
    b.finish()
    got = b.results[1].completion
    assert got.versions == (VersionRun(V1, 6), VersionRun(V2, 9))
    assert got.tokens[:6].tolist() == whole.tokens[:6].tolist()
    assert pieces and all(len(piece.tokens) >= 3 for piece in pieces)
    streamed = np.concatenate([piece.tokens for piece in pieces])
    assert streamed.tolist() == got.tokens[6 : 6 + len(streamed)].tolist()
    assert all(run.version == V2 for piece in pieces for run in piece.versions)


@pytest.mark.parametrize("most", [1, 5, 8])
def test_requests_wait_while_one_may_sample_no_more_and_their_tokens_are_the_same(bench, most):
    b = bench()
    b.add(request(0))
    whole = b.finish()[0].completion
    pieces: list[Completion] = []
    known, ahead, rounds = 0, list[int](), 0

    def may_sample(sampled: int) -> int:
        ahead.append(sampled - known)
        return known + most - sampled

    b.add(request(1, on_tokens=pieces.append, piece_tokens=-(-most // 2), may_sample=may_sample))
    b.add(request(2, prompt=7))
    while len(b.results) < 3:
        b.finish(100)
        flushed = sum(len(piece.tokens) for piece in pieces)
        assert flushed > known or len(b.results) == 3, "it waits forever"
        known, rounds = flushed, rounds + 1
    assert max(ahead) == most and rounds >= 15 // most
    assert b.engine.latencies.flush_wait_s > 0
    assert b.results[1].completion.tokens.tolist() == whole.tokens.tolist()
    assert b.results[1].completion.logprobs.tolist() == whole.logprobs.tolist()


def test_what_is_left_of_a_stream_comes_when_it_is_asked_for(bench):
    b = bench()
    pieces: list[Completion] = []
    b.add(request(0, on_tokens=pieces.append, piece_tokens=100))
    b.steps(2)
    assert not pieces
    b.engine.stream()
    b.engine.stream()
    assert [len(piece.tokens) for piece in pieces] == [9]
    whole = b.finish()[0].completion
    assert pieces[0].tokens.tolist() == whole.tokens[:9].tolist()


def test_streams_and_continuations_carry_the_supports_of_truncated_sampling(bench):
    b = bench(slots=8, max_tokens=64, page_tokens=8, cache_pages=16, support_tokens=8, prefill_buckets=(16,))
    params = SamplingParams(15, top_k=5)
    pieces: list[Completion] = []
    b.add(request(0, params, on_tokens=pieces.append))
    whole = b.finish()[0].completion
    known = Supports.joined([Supports.decoded(piece.support, piece.tokens) for piece in pieces])
    count = len(known.sizes)
    tokens = np.concatenate([piece.tokens for piece in pieces])
    assert count >= 9 and known.sizes.min() >= 1
    packed = known.encoded(tokens)
    assert packed.tolist() == first(whole, count).support.tolist()
    b.add(request(1, params, before=first(whole, count)))
    got = b.finish()[1].completion
    assert got.support.tolist() == whole.support.tolist() and got.tokens.tolist() == whole.tokens.tolist()


def test_draining_engines_do_not_mix_versions(bench):
    b = bench(weight_swap="drain")
    b.add(request(0))
    whole = b.finish()[0].completion
    b.add(request(1, before=first(whole, 6)))
    assert b.finish()[1].completion.tokens.tolist() == whole.tokens.tolist()
    b.swap(V2, 1)
    b.add(request(2, before=first(whole, 6)))
    left = b.finish()[2].completion
    assert (left.finish, len(left.tokens)) == ("abort", 0)
    b.results.clear()
    b.add(request(2))
    assert len(b.finish()[2].completion.tokens) == 15, "its id is not free again"


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (lambda whole: first(whole, 15), "1 to max_tokens - 1"),
        (lambda whole: Completion(whole.tokens[:4], whole.logprobs[:3], (VersionRun(V1, 4),), ""), "another number"),
        (lambda whole: Completion(whole.tokens[:4] + 1000, whole.logprobs[:4], (VersionRun(V1, 4),), ""), "vocabulary"),
    ],
    ids=["nothing left", "log-probs", "ids"],
)
def test_earlier_tokens_that_cannot_be_continued_are_refused(bench, before, why):
    b = bench()
    b.add(request(0))
    whole = b.finish()[0].completion
    with pytest.raises(DataError, match=why):
        b.add(request(1, before=before(whole)))
