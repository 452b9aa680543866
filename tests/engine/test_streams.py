"""Tokens that are delivered while a request runs: the beginning of its completion, each token once and in order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxroll.engine.requests import Request
from jaxroll.protocols import Completion
from jaxroll.records import Version

V2 = Version(0, 2)


def expanded(completion: Completion) -> list[Version]:
    return [run.version for run in completion.versions for _ in range(run.count)]


def streaming(requests: list[Request]) -> tuple[list[Request], dict[int, list[Completion]]]:
    """The requests with a list of the pieces of each."""
    pieces: dict[int, list[Completion]] = {request.id: [] for request in requests}
    return [dataclasses.replace(one, on_tokens=pieces[one.id].append) for one in requests], pieces


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="keep_kv"),
        pytest.param({"weight_swap": "reprefill"}, id="reprefill"),
        pytest.param({"page_tokens": 4, "cache_pages": 12, "prefill_buckets": (16,)}, id="preempted"),
    ],
)
def test_pieces_are_the_beginning_of_the_completion(bench, work, overrides) -> None:
    b = bench(**overrides)
    before = b.engine.stats()
    requests, pieces = streaming(work(5, 12, max_tokens=15, stop_tokens=()))
    b.add(*requests)
    b.steps(2)
    b.swap(V2, 1)
    b.finish()
    assert not overrides.get("cache_pages") or b.engine.stats().preemptions > before.preemptions
    for request in requests:
        final, parts = b.results[request.id].completion, pieces[request.id]
        assert len(parts) >= 2 and all(part.finish == "" for part in parts)
        count = sum(len(part.tokens) for part in parts)
        assert 0 < count < len(final.tokens), "the last dispatch delivers the completion instead"
        assert np.concatenate([part.tokens for part in parts]).tolist() == final.tokens[:count].tolist()
        assert np.concatenate([part.logprobs for part in parts]).tolist() == final.logprobs[:count].tolist()
        assert [version for part in parts for version in expanded(part)] == expanded(final)[:count]


def test_tokens_that_a_swap_may_discard_are_not_streamed(bench, work) -> None:
    b = bench(weight_swap="restart")
    requests, pieces = streaming(work(5, 4, max_tokens=15, stop_tokens=()))
    b.add(*requests)
    b.steps(2)
    b.swap(V2, 1)
    assert len(b.finish()) == 4 and not any(pieces.values())
