"""Store, server and clients over real gRPC, in one process."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.config import digest
from jaxroll.config.rules import MAX_MEMBER_MB
from jaxroll.errors import (
    Closed,
    ConfigError,
    Conflict,
    Fenced,
    InfraError,
    NoCredit,
    NotReady,
    StaleClient,
    StoreRefusal,
    Unauthorized,
)  # fmt: skip
from jaxroll.records import Finished, Member, Segment, Version, VersionRun
from jaxroll.rpc import auth
from jaxroll.rpc import protocol as limits
from jaxroll.store import messages as msg
from jaxroll.store.client import BlockingStore, StoreClient
from jaxroll.store.core import apply
from jaxroll.store.log import commit_log as store_log
from jaxroll.store.server import service
from jaxroll.store.server.keeper import Wakeups
from jaxroll.store.server.server import serve

V0 = Version(0, 0)


def test_a_run_from_the_first_lease_to_the_end(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(steps=3)

    async def learn(learner: StoreClient) -> list[list[int]]:
        version = await learner.begin(None)
        await learner.publish(small.snapshot(version))
        trained = []
        for step in range(3):
            claim = await learner.claim(version.lineage, step, 10.0)
            assert (claim.step, claim.lineage, claim.replayed) == (step, 0, False)
            for group in claim.groups:
                assert group.task == small.task(group.group)
                for member in group.members:
                    expected = group.group * 100 + member.member
                    assert set(member.outcome.segments[1].tokens.tolist()) == {expected}
            trained.append(sorted(g.group for g in claim.groups))
            version = Version(0, step + 1)
            await learner.publish(small.snapshot(version))
            await learner.ack(Version(0, step))
        await learner.durable(version)
        return trained

    async def sample(sampler: StoreClient) -> None:
        published = await sampler.published(None, 10.0)
        assert published is not None
        while True:
            try:
                await small.produce(sampler, published.version, 6)
            except NoCredit:
                pass
            except Closed:
                return
            published = await sampler.published(published.version, 0.2) or published

    async def both() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler", "sampler-0") as sampler,
        ):
            assert learner.welcome.lineage == 0
            trained, _ = await asyncio.gather(learn(learner), sample(sampler))
            assert trained == [[0, 1], [2, 3], [4, 5]]
            report = await learner.status()
            assert report["counts"]["TRIMMED"] == 6
            assert report["conservation_residual"] == 0
            assert report["closed"] == "finished"
            assert learner.position == report["position"] > 0
            with pytest.raises(Closed, match="finished"):
                await learner.claim(0, 3)

    run(both())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    acked = [row["acked"] for row in rows if row["kind"] == "store"]
    assert {1, 2, 3} <= set(acked) and acked == sorted(acked)


def test_refusals_arrive_as_themselves(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def refused() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            with pytest.raises(NoCredit) as no_credit:
                await sampler.lease(V0, 2)
            assert no_credit.value.reason.startswith("weights")
            assert no_credit.value.retry_after_s > 0
            with pytest.raises(StaleClient, match="begin first"):
                await learner.claim(0, 0)
            await learner.publish(small.snapshot(await learner.begin(None)))
            with pytest.raises(NotReady):
                await learner.claim(0, 0)
            key = small.keys(await sampler.lease(V0, 2))[0]
            member = small.finished(*key, (V0, 3))
            assert [await sampler.put(member) for _ in range(3)] == ["OK"] * 3
            with pytest.raises(Conflict):
                await sampler.put(small.finished(*key, (V0, 3), reward=0.0))
            with pytest.raises(Fenced):
                await sampler.put(small.finished(key[0], key[1], 7, (V0, 3)))
            await learner.close_run("by hand")
            with pytest.raises(Closed, match="by hand"):
                await sampler.lease(V0, 2)

    run(refused())


def test_one_put_sent_many_times_at_once_counts_once(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def many() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            leased = small.keys(await sampler.lease(V0, 4))
            members = [small.finished(*key, (V0, 3)) for key in leased]
            answers = await asyncio.gather(*(sampler.put(member) for member in members * 250))
            assert set(answers) == {"OK"}
            assert (await sampler.status())["tokens_put"] == 4 * 3
            await learner.claim(0, 0, 5.0)
            await learner.publish(small.snapshot(Version(0, 1)))
            await learner.ack(V0)
            await learner.durable(Version(0, 1))
            assert set(await asyncio.gather(*(sampler.put(member) for member in members * 25))) == {"OK"}
            with pytest.raises(Conflict):
                await sampler.put(small.finished(*leased[0], (V0, 4)))
            assert (await sampler.status())["tokens_put"] == 4 * 3

    run(many())


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch):
    """A function that returns once somebody waits for a topic, in this process's store."""
    entered: dict[str, asyncio.Queue] = {}
    wait = Wakeups.wait

    async def noting(self, topic: str, timeout_s: float) -> bool:
        entered.setdefault(topic, asyncio.Queue()).put_nowait(None)
        return await wait(self, topic, timeout_s)

    monkeypatch.setattr(Wakeups, "wait", noting)
    return lambda topic: entered.setdefault(topic, asyncio.Queue()).get()


def test_waiting_calls_are_woken_by_what_they_wait_for(tmp_path: Path, small: SimpleNamespace, run, waiting) -> None:
    config = small.configured(alpha=0.0)

    async def woken() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            weights = asyncio.ensure_future(sampler.published(None, 20.0))
            await waiting("published")
            await learner.publish(small.snapshot(await learner.begin(None)))
            assert (await asyncio.wait_for(weights, 10.0)).version == V0
            assert await sampler.published(V0) is None
            claim = asyncio.ensure_future(learner.claim(0, 0, 20.0))
            await waiting("claim")
            await small.produce(sampler, V0, 4)
            await asyncio.wait_for(claim, 10.0)
            work = asyncio.ensure_future(sampler.lease(V0, 1, 20.0))
            await waiting("lease")
            await learner.close_run("over")
            with pytest.raises(Closed):
                await asyncio.wait_for(work, 10.0)

    run(woken())


def test_nothing_is_acknowledged_before_it_is_on_disk(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the disk held back no put is answered, a repeated one neither; when it goes on, all are."""
    config, disk = small.configured(), threading.Event()
    commit = store_log._commit

    def held_back(*arguments) -> bool:
        assert disk.wait(small.DEADLINE_S)
        return commit(*arguments)

    async def waits() -> None:
        disk.set()
        async with small.opened(tmp_path, config) as (learner, sampler):
            leased = small.keys(await sampler.lease(V0, 4))
            disk.clear()
            puts = [small.finished(*leased[0], (V0, 3)), *(small.finished(*key, (V0, 3)) for key in leased)]
            answers = [asyncio.ensure_future(sampler.put(member)) for member in puts]
            claim = asyncio.ensure_future(learner.claim(0, 0, 10.0))
            done, _ = await asyncio.wait([*answers, claim], timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            assert not done
            disk.set()
            assert await asyncio.gather(*answers) == ["OK"] * 5
            assert len((await claim).groups) == 2

    monkeypatch.setattr(store_log, "_commit", held_back)
    run(waits())


def test_a_waiting_call_ends_in_time_with_a_typed_answer(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def waits() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.publish(small.snapshot(await learner.begin(None)))
            started = time.monotonic()
            with pytest.raises(NotReady):
                await learner.claim(0, 0, 0.3)
            assert await learner.published(V0, 0.3) is None
            assert 0.6 <= time.monotonic() - started < 9.0

    run(waits())


def test_an_expired_lease_goes_to_the_sampler_that_waits(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(lease_s=2.0, alpha=0.0)

    async def expires() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler", "sampler-0") as first,
            small.connected(tmp_path, config, "sampler", "sampler-1") as second,
        ):
            await learner.publish(small.snapshot(await learner.begin(None)))
            lost = small.keys(await first.lease(V0, 4))
            taken = small.keys(await second.lease(V0, 4, 10.0))
            assert taken == [(g, m, 2) for g, m, _ in lost]
            assert sorted(await first.renew(lost)) == sorted(lost)
            assert await second.renew(taken) == []
            with pytest.raises(Fenced):
                await first.put(small.finished(*lost[0], (V0, 1)))
            await second.release(taken)
            assert small.keys(await first.lease(V0, 4)) == [(g, m, 3) for g, m, _ in lost]

    run(expires())


def test_a_batch_larger_than_a_message_comes_in_pages(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxroll.store.server.server.PAGE_BYTES", 700)
    config = small.configured(groups_per_step=5, group_size=3)
    pages = []
    page = service.StoreService._page

    async def counting(self, call, batch):
        pages.append(call.start)
        return await page(self, call, batch)

    monkeypatch.setattr(service.StoreService, "_page", counting)

    async def paged() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            await small.produce(sampler, V0, 15)
            claim = await learner.claim(0, 0, 5.0)
            assert sorted(small.contents(claim)) == [(g, [0, 1, 2]) for g in range(5)]
            again = await learner.claim(0, 0)
            assert wire.encode(again) == wire.encode(claim)
            assert len(pages) > 6
            assert pages[0] == 0

    run(paged())


def test_each_host_of_a_learner_fetches_its_own_rows(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first claims, and tells the others the step and its session; together they have the batch, each row once."""
    monkeypatch.setattr("jaxroll.store.server.server.PAGE_BYTES", 700)
    config, sent = small.configured(groups_per_step=5, group_size=3), []
    page = service.StoreService._page

    async def counting(self, call, batch):
        made = await page(self, call, batch)
        sent.append(sum(len(part.members) for part in made.parts))
        return made

    async def hosts() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as first,
            small.connected(tmp_path, config, "learner", session=first.session) as second,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            await first.publish(small.snapshot(await first.begin(None)))
            early = asyncio.ensure_future(second.claim(0, 0, 10.0, range(7, 15)))
            await small.produce(sampler, V0, 15)
            whole = await first.claim(0, 0, 5.0)
            await asyncio.wait([early])
            monkeypatch.setattr(service.StoreService, "_page", counting)
            rows = [await host.claim(0, 0, 5.0, some) for host, some in ((first, range(7)), (second, range(7, 15)))]
            assert sum(sent) == 15, "nothing is sent for nothing"
            assert wire.encode(await early) == wire.encode(rows[1])
            assert [sum(len(g.members) for g in one.groups) for one in rows] == [7, 8]
            members = [wire.encode(m) for one in rows for g in one.groups for m in g.members]
            assert members == [wire.encode(m) for g in whole.groups for m in g.members]
            assert {(one.step, one.lineage, one.shuffle_seed) for one in (whole, *rows)} == {(0, 0, whole.shuffle_seed)}
            async with small.connected(tmp_path, config, "learner", "stranger") as stranger:
                with pytest.raises(StaleClient, match="another learner"):
                    await stranger.claim(0, 0, 0.0, range(7))

    run(hosts())


def test_stale_tokens_are_masked_on_the_way_out(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(alpha=0.0, on_stale="mask", groups_per_step=1, group_size=2)

    async def masked() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            await small.produce(sampler, V0, 2)
            await learner.claim(0, 0, 5.0)
            await learner.publish(small.snapshot(Version(0, 1)))
            await learner.ack(V0)
            for key in small.keys(await sampler.lease(Version(0, 1), 2)):
                await sampler.put(small.finished(*key, (V0, 2), (Version(0, 1), 3)))
            claim = await learner.claim(0, 1, 5.0)
            for member in claim.groups[0].members:
                assert member.outcome.segments[1].loss_mask.tolist() == [0, 0, 1, 1, 1]
                assert member.outcome.segments[1].sampled_mask.tolist() == [True] * 5
                assert member.outcome.segments[0].loss_mask.tolist() == [0, 0, 0, 0]
            assert (await learner.status())["tokens_masked"] == 4

    run(masked())


SHOWN_ONCE = np.array([0, 1, 1], np.uint8)


def test_malformed_members_are_refused_and_do_no_harm(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    def broken(key: tuple[int, int, int], **changes) -> Member:
        parts = {
            "tokens": np.zeros(3, np.int32), "loss_mask": SHOWN_ONCE, "logprobs": np.zeros(3, np.float32),
        } | {k: v for k, v in changes.items() if k not in ("count", "reward")}  # fmt: skip
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


def test_a_call_of_many_members_leaves_others_their_turns(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as none is over, a turn ends after a member; so each finds the loop further on than the one before."""
    config, turns, seen = small.configured(), [0], []
    decided = service.put_request

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

    monkeypatch.setattr(service, "put_request", counted)
    monkeypatch.setattr(service, "_TURN_S", -1.0)
    run(many())
    assert len(set(seen)) == len(seen) == 9, seen


def in_segments(member: Member, count: int) -> Member:
    """`member` with `count` segments more, of nothing."""
    empty = Segment(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.float32))
    outcome = msgspec.structs.replace(member.outcome, segments=(*member.outcome.segments, *(empty,) * count))
    return msgspec.structs.replace(member, outcome=outcome)


def test_large_members_are_looked_at_beside_the_loop(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of many bytes and those of many segments."""
    config, decided, threads = small.configured(group_size=3), service.put_request, []

    def noted(*words, **limits) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return decided(*words, **limits)

    async def both() -> None:
        async with small.opened(tmp_path, config) as (_learner, sampler):
            first, second, third, *_ = small.keys(await sampler.lease(V0, 3))
            assert await sampler.put(small.finished(*first, (V0, 10_000))) == "OK"
            assert await sampler.put(small.finished(*second, (V0, 30_000))) == "OK"
            assert await sampler.put(in_segments(small.finished(*third, (V0, 3)), 65)) == "OK"

    monkeypatch.setattr(service, "put_request", noted)
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
    config, decided = small.configured(), service.put_request
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
            monkeypatch.setattr(service, "put_request", slowly)
            body = wire.encode(msg.PutCall((wire.encode(members[0]),)))
            put = asyncio.ensure_future(sampler._raw.call("Put", body, 20.0))
            await asyncio.to_thread(looking.wait, 20)
            await learner.claim(0, 0, 5.0)
            await learner.publish(small.snapshot(Version(0, 1)))
            await learner.ack(V0)
            await learner.durable(Version(0, 1))
            go_on.set()
            assert [one.result for one in wire.decode(await put, msg.PutReply).answers] == ["OK"], "not SURPLUS"

    run(again())


def test_nobody_makes_the_store_look_for_the_end_of_megabytes_of_nonsense(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    """A message has few bytes unless it carries members, nothing beside them, and each of them has a limit."""
    config, nils = small.configured(), b"\xc0" * 2**21
    many = b"\xdd" + len(nils).to_bytes(4, "big") + nils  # an array of them
    member = wire.encode(small.finished(0, 0, 1, (V0, 3)))
    stuffed = wire.encode({"members": [member], "more": msgspec.Raw(many)})
    large = wire.encode({"group": 0, "member": 0, "attempt": 1, "outcome": bytes(MAX_MEMBER_MB * 2**20)})

    async def refused() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "sampler") as sampler:
            for method in ("Lease", "Published", "Status", "Hello"):
                with pytest.raises(StoreRefusal, match=r"a message of 2097157 bytes; at most 1048576 are taken"):
                    await sampler._raw.call(method, many, 10.0)
            with pytest.raises(StoreRefusal, match="unknown field `more`"):
                await sampler._raw.call("Put", stuffed, 10.0)
            reply = await sampler._raw.call("Put", wire.encode(msg.PutCall((large,))), 10.0)
            (answer,) = wire.decode(reply, msg.PutReply).answers
            assert answer.refusal is not None and "at most 8 MB are taken" in answer.refusal.reason

    run(refused())


def test_a_name_that_was_forgotten_goes_on(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more names than are known the oldest are forgotten: those of the learner and of the first samplers."""
    config = small.configured()
    monkeypatch.setattr(apply, "NAMES_KNOWN", 4)
    monkeypatch.setattr(service, "NAMES_KNOWN", 4)

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
            monkeypatch.setattr(service, "put_request", looked_at)
            for key, words in (
                ((group + 99, member, attempt), "never issued"),
                ((group, 99, attempt), "no member 99"),
                ((group, member, attempt + 1), "never granted"),
                ((group, member, 0), "at attempt 1, this is 0"),
            ):
                with pytest.raises((StaleClient, Fenced), match=words):
                    await sampler.put(small.finished(*key, (V0, 3)))

    run(refused())


# --- who may speak


def test_wrong_protocol_config_role_and_token_are_turned_away(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()
    secret = auth.create(tmp_path)
    shown_by_sampler = auth.bearer(secret, "sampler")

    async def turned_away() -> None:
        async with small.serving(tmp_path, config) as address:
            with pytest.raises(Unauthorized, match="no valid token"):
                async with small.connected(tmp_path, config, "sampler", token="wrong"):
                    pass
            with pytest.raises(Unauthorized, match="no valid token"):
                await StoreClient.connect(address, role="sampler", name="s", config_digest=digest(config), patience_s=1)
            with pytest.raises(Unauthorized, match="no valid token"):
                async with small.connected(tmp_path, config, "learner", token=shown_by_sampler):
                    pass
            with pytest.raises(Unauthorized, match="same config"):
                async with small.connected(tmp_path, config, "sampler", config_digest="0" * 32):
                    pass
            with pytest.raises(Unauthorized, match="caller none"):
                async with small.connected(tmp_path, config, "sampler", config_digest=""):
                    pass
            async with small.connected(tmp_path, config, "sampler", token=shown_by_sampler) as sampler:
                with pytest.raises(Unauthorized, match="the role sampler may not call Begin"):
                    await sampler.begin(None)
                with pytest.raises(Unauthorized, match="protocol"):
                    await sampler._call("Hello", msg.Hello(99, digest(config)), msg.Welcome)
            async with small.connected(tmp_path, config, "observer", config_digest="") as observer:
                assert (await observer.status())["issued"] == 0
                with pytest.raises(Unauthorized):
                    await observer.lease(V0, 1)

    run(turned_away())


def test_a_caller_of_another_run_is_stale(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def stale() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "sampler") as sampler:
            sampler._raw.run_id = "another"
            with pytest.raises(StaleClient, match="belongs to another"):
                await sampler.status()

    run(stale())


def test_a_message_too_large_is_refused_before_it_is_read(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(max_message_mb=1)

    async def large() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "sampler") as sampler:
            with pytest.raises(StoreRefusal, match="1048577 bytes; at most 1048576"):
                await sampler._raw.call("Put", bytes(2**20 + 1), 5.0)
            assert (await sampler.status())["issued"] == 0

    run(large())


@pytest.mark.parametrize("metadata", [{"name": "../x"}, {"session": ""}, {"right": "root"}, {"name": "a" * 65}])
def test_hostile_metadata_is_refused(tmp_path: Path, small: SimpleNamespace, run, metadata: dict[str, str]) -> None:
    config = small.configured()

    async def hostile() -> None:
        async with (
            small.serving(tmp_path, config) as address,
            grpc.aio.insecure_channel(address, options=limits.client_options(2**20)) as channel,
        ):
            said = {"right": "sampler", "name": "s", "session": "x", "run": ""} | metadata
            call = channel.unary_unary(f"/{msg.SERVICE}/Hello")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(b"", metadata=[(f"jaxroll-{k}", v) for k, v in said.items()], timeout=5)
            assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)

    run(hostile())


def test_other_addresses_need_a_token_and_consent(tmp_path: Path, small: SimpleNamespace, run) -> None:
    async def exposed() -> None:
        async with small.serving(tmp_path, small.configured(), host="0.0.0.0"):
            pass

    with pytest.raises(ConfigError, match="no token"):
        run(exposed())
    auth.create(tmp_path)
    with pytest.raises(ConfigError, match="plain text"):
        run(exposed())


# --- restarts


def test_a_store_that_starts_again_keeps_run_port_cursor_and_leases(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    config, second_feed = small.configured(), small.Feed()

    async def twice() -> None:
        async with small.serving(tmp_path, config) as first:
            learner = await StoreClient.connect(
                tmp_path / "store.addr", role="learner", name="learner", config_digest=digest(config)
            )
            sampler = await StoreClient.connect(
                tmp_path / "store.addr", role="sampler", name="sampler-0", config_digest=digest(config)
            )
            await learner.publish(small.snapshot(await learner.begin(None)))
            leased = small.keys(await sampler.lease(V0, 6))
            assert await sampler.put(small.finished(*leased[0], (V0, 2))) == "OK"
        async with small.serving(tmp_path, config, second_feed) as second:
            assert first == second
            assert second_feed.restored == [b"3"]
            assert await sampler.put(small.finished(*leased[0], (V0, 2))) == "OK"
            assert await sampler.renew(leased[1:]) == []
            for key in leased[1:]:
                assert await sampler.put(small.finished(*key, (V0, 2))) == "OK"
            more = await sampler.lease(V0, 2, 5.0)
            assert [g.task.index for g in more] == [3]
            assert small.contents(await learner.claim(0, 0, 5.0))
            await learner.aclose()
            await sampler.aclose()

    run(twice())


def test_a_client_finds_a_store_that_moved(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def moved() -> None:
        async with small.serving(tmp_path, config) as first:
            client = await StoreClient.connect(tmp_path / "store.addr", role="observer", name="o", patience_s=20)
        (tmp_path / "store.addr").write_text("127.0.0.1:1\n")
        job = asyncio.ensure_future(client.status())
        async with small.serving(tmp_path, config) as second:
            assert first != second
            assert (await job)["issued"] == 0
            await client.aclose()

    run(moved())


def test_patience_ends(tmp_path: Path, small: SimpleNamespace, run) -> None:
    async def nobody() -> None:
        for address in (tmp_path / "store.addr", "127.0.0.1:1"):
            started = time.monotonic()
            with pytest.raises(InfraError, match="Hello"):
                await StoreClient.connect(address, role="observer", name="o", patience_s=0.3)
            assert time.monotonic() - started < 5.0

    run(nobody())


def test_a_run_stopped_by_hand_goes_on_with_the_next_store(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def twice() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.close_run("stopped")
            assert (await learner.status())["closed"] == "stopped"
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            assert (await learner.status())["closed"] == ""

    run(twice())


def test_a_closed_store_ends_when_nobody_calls(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()
    ready = []

    async def ends() -> None:
        job = asyncio.ensure_future(
            serve(config, tmp_path, small.Feed(), host="127.0.0.1", port=0, ready=ready.append, linger_s=2.0)
        )
        client = await StoreClient.connect(tmp_path / "store.addr", role="admin", name="a", patience_s=10)
        await client.close_run("done")
        await client.aclose()
        ended, _ = await asyncio.wait([job], timeout=10.0)
        assert ended == {job}, "it still serves"
        assert job.exception() is None

    run(ends())


def test_a_run_that_does_not_move_is_named_and_then_closed(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(stall_s=0.5, stall_abort_s=1.5, lease_s=1.0)

    async def stalls() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.publish(small.snapshot(await learner.begin(None)))
            with pytest.raises(Closed, match=r"stalled.*samplers have leased 0 of the 2 groups"):
                await learner.claim(0, 0, 15.0)

    run(stalls())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(row["kind"] == "event" and "samplers" in row["text"] for row in rows)
    with sqlite3.connect(tmp_path / "store.db") as db:
        (closed,) = db.execute("SELECT who, detail FROM audit WHERE what = 'Close'").fetchall()
    assert closed[0] == "store" and closed[1].startswith("stalled for")


def test_a_failing_feeder_ends_the_store_by_name(tmp_path: Path, small: SimpleNamespace, run) -> None:
    class Broken(small.Feed):
        async def next(self, count: int):
            raise InfraError("the feeder died")

    with pytest.raises(InfraError, match="the feeder died"):
        run(serve(small.configured(), tmp_path, Broken(), host="127.0.0.1", port=0, ready=lambda address: None))


def test_the_data_ends(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def ends() -> None:
        async with (
            small.serving(tmp_path, config, small.Feed(limit=3)),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            version = await learner.begin(None)
            await learner.publish(small.snapshot(version))
            await small.produce(sampler, version, 6)
            for step, size in ((0, 2), (1, 1)):
                assert len((await learner.claim(0, step, 5.0)).groups) == size
                await learner.publish(small.snapshot(Version(0, step + 1)))
                await learner.ack(Version(0, step))
            with pytest.raises(Closed, match="end of data"):
                await learner.claim(0, 2, 5.0)
            with pytest.raises(Closed, match="end of data"):
                await sampler.lease(Version(0, 2), 1)

    run(ends())


# --- reports and the blocking client


def test_rows_are_appended_whole_even_after_a_torn_line(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "torn')

    async def reports() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.report([{"loss": np.float32(0.5), "bad": float("nan")}, {"kind": "x"}])
            await learner.report([])

    run(reports())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"kind": "torn'
    rows = [json.loads(line) for line in lines[1:]]
    assert [row for row in rows if row.get("kind") != "store"] == [
        {"loss": 0.5, "bad": None}, {"kind": "x"}
    ]  # fmt: skip


def test_the_blocking_client_says_the_same(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(groups_per_step=1)

    def talk(address: Path) -> None:
        options = {"config_digest": digest(config)}
        learner = BlockingStore(address, role="learner", name="learner", **options)
        sampler = BlockingStore(address, role="sampler", name="sampler-0", **options)
        version = learner.begin(None)
        learner.publish(small.snapshot(version))
        assert sampler.published(None, 5.0) == small.snapshot(version)
        leased = small.keys(sampler.lease(version, 2, 5.0))
        assert sampler.renew(leased) == []
        sampler.release(leased)
        leased = small.keys(sampler.lease(version, 2, 5.0))
        for key in leased:
            assert sampler.put(small.finished(*key, (version, 2))) == "OK"
        assert len(learner.claim(0, 0, 5.0).groups) == 1
        learner.publish(small.snapshot(Version(0, 1)))
        learner.ack(V0)
        learner.durable(Version(0, 1))
        learner.report([{"kind": "step"}])
        assert learner.status()["durable"] == 1
        assert learner.welcome.run_id == sampler.welcome.run_id
        assert learner.position > 0
        learner.close_run("done")
        with pytest.raises(Closed):
            sampler.lease(version, 1)
        for client in (learner, sampler):
            client.aclose()
            client.aclose()
        with pytest.raises(InfraError, match="closed"):
            learner.status()

    async def both() -> None:
        async with small.serving(tmp_path, config):
            await asyncio.to_thread(talk, tmp_path / "store.addr")

    run(both())


def test_a_waiting_lease_is_granted_at_the_flip(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """A sampler asks, flips while it waits, and need not ask again: at alpha = 0 old weights get nothing."""
    config = small.configured(steps=3, alpha=0.0)

    async def flip_while_waiting() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            await small.produce(sampler, V0, 100)
            claim = await learner.claim(0, 0, 10.0)
            assert claim.step == 0
            newer = Version(0, 1)
            await learner.publish(small.snapshot(newer))
            await learner.ack(V0)
            waiting = asyncio.ensure_future(sampler.lease(V0, 100, 20.0))
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done, "old weights are granted nothing at alpha = 0"
            await sampler.published(newer)
            assert await asyncio.wait_for(waiting, 5.0)

    run(flip_while_waiting())
