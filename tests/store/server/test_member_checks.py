"""Checks of members that are put: malformed, large, repeated and unasked-for ones."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.config.rules import MAX_MEMBER_MB
from jaxroll.errors import (
    Fenced,
    StaleClient,
    StoreRefusal,
)
from jaxroll.learner import minibatch
from jaxroll.records import Finished, Member, Segment, Version, VersionRun
from jaxroll.store import messages as msg
from jaxroll.store.core import machine
from jaxroll.store.server import keeper, puts
from tests.harness.store.machine import V0

SHOWN_ONCE = np.array([0, 1, 1], np.uint8)


def test_malformed_members_are_refused_and_do_no_harm(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    def broken(key: tuple[int, int, int], **changes) -> Member:
        parts = {
            "tokens": np.zeros(3, np.int32),
            "loss_mask": SHOWN_ONCE,
            "logprobs": np.zeros(3, np.float32),
        } | {k: v for k, v in changes.items() if k not in ("count", "reward")}
        runs = (VersionRun(V0, changes.get("count", 2)),)
        return Member(*key, Finished((Segment(**parts),), "stop", changes.get("reward", 1.0), {}, runs))

    async def refused() -> None:
        async with small.opened(tmp_path, config) as (_learner, sampler):
            key = small.keys(await sampler.lease(V0, 1))[0]
            for member in (
                broken(key, tokens=np.zeros(3, np.int64)),
                broken(key, tokens=np.zeros(2, np.int32)),
                broken(key, loss_mask=np.full(3, 2, np.uint8)),
                broken(key, sampled=np.ones(3, np.uint8)),
                broken(key, loss_mask=np.ones(3, np.uint8), count=3),  # nothing predicts its first token
                broken(key, count=3),
                broken(key, reward=float("nan")),
                broken(key, logprobs=np.array([0, np.nan, 0], np.float32)),
                small.failed(*key, "MOOD"),
            ):
                with pytest.raises(StoreRefusal, match="put"):
                    await sampler.put(member)
            with pytest.raises(StoreRefusal, match="malformed"):
                await sampler._raw.call("Put", b"\xc1nonsense", 5.0)
            for numbers in ((2**63, 0, 1), (-1, 0, 1), (0, 2**63, 1), (0, 0, -5)):
                with pytest.raises(StoreRefusal):
                    await sampler.put(broken(numbers))
            assert await sampler.put(broken(key)) == "OK"

    run(refused())


def test_members_need_the_supports_of_a_truncated_run_and_no_other_run_takes_them() -> None:
    tokens, logprobs, runs = np.array([0, 5, 7], np.int32), np.zeros(3, np.float32), (VersionRun(V0, 2),)

    def put(support: list[int] | np.ndarray, **limits: int) -> None:
        packed = np.asarray(support, np.uint8)
        outcome = Finished((Segment(tokens, SHOWN_ONCE, logprobs, support=packed),), "stop", 1.0, {}, runs)
        puts.put_request(wire.encode(Member(0, 0, 1, outcome)), **limits)

    good = [3, 1, 4, 2]  # 5 from {4, 5, 7}, and 7 for certain
    put(good, support_tokens=3, vocab_size=10)
    put([])
    for support, limits, words in (
        (good, {}, "segment 0 has a support, but this run does not truncate"),
        ([], {"support_tokens": 3}, "supports of 0 to 0 ids; in this run they have 1 to 3"),
        (good, {"support_tokens": 2}, "supports of 1 to 3 ids; in this run they have 1 to 2"),
        ([0, 1], {"support_tokens": 3}, "supports of 0 to 1 ids"),
        (good[:-1], {"support_tokens": 3}, "do not match the sizes"),
        ([*good, 200], {"support_tokens": 3}, "cut off"),
        ([2, 1, 9], {"support_tokens": 3, "vocab_size": 9}, "the id 9; ids are 0 to 8"),
        (np.zeros((1, 2)), {"support_tokens": 3}, r"it must be uint8 \[N\]"),
    ):
        with pytest.raises(StoreRefusal, match=words):
            put(support, **limits)


def test_stale_tokens_of_a_truncated_member_are_masked_and_keep_their_supports() -> None:
    runs = (VersionRun(V0, 1), VersionRun(Version(0, 4), 1))
    said = Segment(
        np.array([9, 5, 7], np.int32), SHOWN_ONCE, np.zeros(3, np.float32), support=np.array([3, 1, 4, 2], np.uint8)
    )
    body = wire.encode(Member(0, 0, 1, Finished((said,), "stop", 1.0, {}, runs)))
    kept = wire.decode(puts.masked(body, 4, 2), Member)
    sample = minibatch.of_member(kept, Version(0, 4))
    assert sample.mask.tolist() == [False, False, True]
    assert [row.tolist() for row in sample.supports.rows(3)] == [[-1, -1, -1], [5, 4, 7], [7, -1, -1]]


def test_a_call_of_many_members_leaves_others_their_turns(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as none is over, a turn ends after a member; so each finds the loop further on than the one before."""
    config, turns, seen = small.configured(), [0], []
    decided = puts.put_request

    def counted(*words, **limits) -> Any:
        seen.append(turns[0])
        return decided(*words, **limits)

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def many() -> None:
        async with small.opened(tmp_path, config) as (_learner, sampler):
            key = small.keys(await sampler.lease(V0, 1))[0]
            body = wire.encode(small.finished(*key, (V0, 3)))
            counter = asyncio.ensure_future(count())
            try:
                reply = await sampler._raw.call("Put", wire.encode(msg.PutCall((body,) * 9)), 10.0)
            finally:
                counter.cancel()
            assert [answer.result for answer in wire.decode(reply, msg.PutReply).answers] == ["OK"] * 9

    monkeypatch.setattr(puts, "put_request", counted)
    monkeypatch.setattr(puts, "_TURN_S", -1.0)
    run(many())
    assert len(set(seen)) == len(seen) == 9, seen


def in_segments(member: Member, count: int) -> Member:
    """`member` with `count` segments more, of nothing."""
    empty = Segment(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.float32))
    outcome = msgspec.structs.replace(member.outcome, segments=(*member.outcome.segments, *(empty,) * count))
    return msgspec.structs.replace(member, outcome=outcome)


def test_large_members_are_checked_outside_the_loop(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of many bytes and those of many segments."""
    config, decided, threads = small.configured(group_size=3), puts.put_request, []

    def noted(*words, **limits) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return decided(*words, **limits)

    async def both() -> None:
        async with small.opened(tmp_path, config) as (_learner, sampler):
            first, second, third, *_ = small.keys(await sampler.lease(V0, 3))
            assert await sampler.put(small.finished(*first, (V0, 10_000))) == "OK"
            assert await sampler.put(small.finished(*second, (V0, 30_000))) == "OK"
            assert await sampler.put(in_segments(small.finished(*third, (V0, 3)), 65)) == "OK"

    monkeypatch.setattr(puts, "put_request", noted)
    run(both())
    assert threads == ["", "large-puts", "large-puts"]
    until_s = time.monotonic() + 20
    while (
        left := [t for t in threading.enumerate() if t.name.startswith("large-puts")]
    ) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not left


def test_a_large_member_sent_again_is_known_though_its_group_ends_while_it_is_looked_at(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, decided = small.configured(), puts.put_request
    looking, go_on = threading.Event(), threading.Event()

    def slowly(*words, **limits) -> Any:
        if looking.is_set():
            return decided(*words, **limits)
        looking.set()
        assert go_on.wait(20)
        return decided(*words, **limits)

    async def again() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            leased = small.keys(await sampler.lease(V0, 4))
            members = [in_segments(small.finished(*key, (V0, 3)), 65) for key in leased]
            await asyncio.gather(*map(sampler.put, members))
            monkeypatch.setattr(puts, "put_request", slowly)
            body = wire.encode(msg.PutCall((wire.encode(members[0]),)))
            put = asyncio.ensure_future(sampler._raw.call("Put", body, 20.0))
            await asyncio.to_thread(looking.wait, 20)
            await learner.claim(0, 0, 5.0)
            await learner.publish(small.version_ref(Version(0, 1)))
            await learner.ack(V0)
            await learner.durable(Version(0, 1))
            go_on.set()
            assert [one.result for one in wire.decode(await put, msg.PutReply).answers] == ["OK"], "not SURPLUS"

    run(again())


def test_the_store_does_not_search_megabytes_of_nonsense_for_their_end(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    """Messages other than puts are small, puts contain members only, and each member has a limit."""
    config, nils = small.configured(), b"\xc0" * 2**21
    many = b"\xdd" + len(nils).to_bytes(4, "big") + nils  # an array of them
    member = wire.encode(small.finished(0, 0, 1, (V0, 3)))
    stuffed = wire.encode({"members": [member], "more": msgspec.Raw(many)})
    large = wire.encode({"group": 0, "member": 0, "attempt": 1, "outcome": bytes(MAX_MEMBER_MB * 2**20)})

    async def refused() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "sampler") as sampler:
            for method in ("Lease", "Published", "Status", "Hello"):
                with pytest.raises(StoreRefusal, match=r"a message of 2097157 bytes; the limit is 1048576"):
                    await sampler._raw.call(method, many, 10.0)
            with pytest.raises(StoreRefusal, match="unknown field `more`"):
                await sampler._raw.call("Put", stuffed, 10.0)
            reply = await sampler._raw.call("Put", wire.encode(msg.PutCall((large,))), 10.0)
            (answer,) = wire.decode(reply, msg.PutReply).answers
            assert answer.refusal is not None and "at most 8 MB are accepted" in answer.refusal.reason

    run(refused())


def test_a_name_that_was_forgotten_goes_on(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit the store drops the oldest names: those of the learner and of the first samplers."""
    config = small.configured()
    monkeypatch.setattr(machine, "NAMES_KNOWN", 4)
    monkeypatch.setattr(keeper, "NAMES_KNOWN", 4)

    async def crowd() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            leased = small.keys(await sampler.lease(V0, 4))
            for i in range(6):
                async with small.connected(tmp_path, config, "sampler", f"more-{i}"):
                    pass
            assert await sampler.renew(leased) == []
            await asyncio.gather(*(sampler.put(small.finished(*key, (V0, 3))) for key in leased))
            assert len((await learner.claim(0, 0, 5.0)).groups) == 2

    run(crowd())


def test_what_a_member_carries_is_not_looked_at_when_its_key_says_enough(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small.configured()

    def looked_at(*_, **__) -> None:
        raise AssertionError("the member was decoded")

    async def refused() -> None:
        async with small.opened(tmp_path, config) as (_learner, sampler):
            group, member, attempt = small.keys(await sampler.lease(V0, 1))[0]
            monkeypatch.setattr(puts, "put_request", looked_at)
            for key, words in (
                ((group + 99, member, attempt), "never issued"),
                ((group, 99, attempt), "no member 99"),
                ((group, member, attempt + 1), "never granted"),
                ((group, member, 0), "at attempt 1, this is 0"),
            ):
                with pytest.raises((StaleClient, Fenced), match=words):
                    await sampler.put(small.finished(*key, (V0, 3)))

    run(refused())
