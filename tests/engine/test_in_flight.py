"""Two dispatches in flight: the next one is sent before a report is read, and the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxroll.engine import device
from jaxroll.engine.requests import Report, Request
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

CHUNK = 4
PAGED = {"slots": 8, "max_tokens": 64, "page_tokens": 8, "prefill_buckets": (16,), "cache_pages": 16}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """ "sent" and "read", in order, for each dispatch of every engine."""
    seen, decode, report = list[str](), device.Device.decode, device.Dispatch.report

    def sent(self: device.Device, *args: object) -> device.Dispatch:
        seen.append("sent")
        return decode(self, *args)  # type: ignore[arg-type]

    def read(self: device.Dispatch) -> Report:
        seen.append("read")
        return report(self)

    monkeypatch.setattr(device.Device, "decode", sent)
    monkeypatch.setattr(device.Dispatch, "report", read)
    return seen


def in_flight(events: list[str]) -> list[int]:
    """The number of dispatches in flight after each event."""
    return np.cumsum([1 if event == "sent" else -1 for event in events]).tolist()


def several(count: int, tokens: int) -> list[Request]:
    prompts = np.random.default_rng(5).integers(0, 64, (count, 8)).astype(np.int32)
    return [Request(i, prompts[i], GenerationKey(i, 0), SamplingParams(tokens)) for i in range(count)]


@pytest.mark.parametrize("most", [1, 2])
def test_the_next_dispatch_is_sent_before_the_report_of_the_one_before_is_read(bench, events, most):
    b = bench(in_flight=most)
    events.clear()  # of the warm-up
    b.run(several(4, 3 * CHUNK + 1))
    pending = in_flight(events)
    assert max(pending) == most and pending[-1] == 0
    if most == 2:
        assert events[:6] == ["sent", "sent", "read", "sent", "read", "sent"]


def assert_equal_tokens(found: dict, other: dict) -> None:
    assert found.keys() == other.keys()
    for id, result in found.items():
        one, two = result.completion, other[id].completion
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)
        assert (one.finish, one.versions) == (two.finish, two.versions)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
def test_tokens_are_those_of_one_dispatch_at_a_time_although_slots_change_hands_in_flight(bench, work, events, seed):
    requests = work(seed, 40)
    alone = bench().run(requests)
    events.clear()
    b = bench(in_flight=2)
    assert_equal_tokens(b.run(requests), alone)
    assert in_flight(events).count(2) > 10
    stats = b.engine.stats()
    assert stats.queue_depth == stats.active == 0


def test_requests_that_are_preempted_have_the_same_tokens(bench, events, monkeypatch):
    """They leave when no dispatch is in flight: what one of those samples would be sampled again."""
    save, pending = device.Device.save, list[int]()

    def saved(self: device.Device, *args: Any) -> device.SavedPages:
        pending.append(in_flight(events)[-1])
        return save(self, *args)

    rng = np.random.default_rng(3)
    prompts, limits = rng.integers(0, 64, (24, 12)).astype(np.int32), rng.choice([4, 8, 40], 24)
    requests = [Request(i, prompts[i // 2], GenerationKey(i, 0), SamplingParams(int(n))) for i, n in enumerate(limits)]
    alone = bench(**PAGED).run(requests)
    b = bench(**PAGED, in_flight=2)
    monkeypatch.setattr(device.Device, "save", saved)
    events.clear()
    before = b.engine.stats()
    assert_equal_tokens(b.run(requests), alone)
    assert b.engine.stats().preemptions > before.preemptions and 2 in in_flight(events)
    assert pending and not any(pending)


def settled(events: list[str], act: Callable[[], object], step: Callable[[], object]) -> list[str]:
    """The events of the step after `act`, up to the next dispatch."""
    assert in_flight(events)[-1] == 1
    act()
    begun = len(events)
    step()
    return events[begun:][: events[begun:].index("sent")] if "sent" in events[begun:] else events[begun:]


def test_a_swap_an_abort_and_a_suspension_wait_for_what_is_in_flight(bench, events, assert_replayed):
    b, requests = bench(in_flight=2), several(4, 20)
    b.add(*requests)
    b.steps(2)
    assert settled(events, lambda: b.swap(Version(0, 2), 1), b.engine.step) == ["read"]
    b.steps(1)
    assert settled(events, lambda: b.engine.abort(0, keep=True), b.engine.step) == ["read"]
    assert b.results[0].completion.finish == "abort"
    b.steps(1)
    assert settled(events, b.engine.suspend, b.engine.step) == ["read"]
    b.engine.resume()
    results = b.finish()
    runs = {id: [(run.version, run.count) for run in result.completion.versions] for id, result in results.items()}
    assert all([version for version, _ in run] == [Version(0, 1), Version(0, 2)] for run in runs.values()), runs
    assert_replayed(requests[1:], results)


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 3) for token in tokens)


def test_a_request_with_a_stop_string_is_read_after_every_dispatch(bench, events):
    strings = SamplingParams(20, stop_strings=("abc", "cab"))
    requests = several(3, 20)
    requests.append(Request(3, requests[0].prompt, GenerationKey(9, 0), strings))
    alone = bench(decode=letters).run(requests)
    events.clear()
    b = bench(decode=letters, in_flight=2)
    assert_equal_tokens(b.run([requests[3]]), {3: alone[3]})
    assert max(in_flight(events)) == 1
    b.results.clear()
    assert_equal_tokens(b.run(requests), alone)
