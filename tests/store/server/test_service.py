"""Store, server and clients over real gRPC, in one process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll import wire
from jaxroll.config import digest
from jaxroll.errors import (
    Closed,
    Conflict,
    Fenced,
    InfraError,
    NoCredit,
    NotReady,
    StaleClient,
)
from jaxroll.records import Version
from jaxroll.store.client import StoreClient
from jaxroll.store.log import commit_log as store_log
from jaxroll.store.server import service
from tests.harness.blocking_store import BlockingStore
from tests.harness.store.machine import V0


def test_a_run_from_the_first_lease_to_the_end(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(steps=3)

    async def learn(learner: StoreClient) -> list[list[int]]:
        version = await learner.begin(None)
        await learner.publish(small.version_ref(version))
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
            await learner.publish(small.version_ref(version))
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
            await learner.publish(small.version_ref(await learner.begin(None)))
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
            await learner.publish(small.version_ref(Version(0, 1)))
            await learner.ack(V0)
            await learner.durable(Version(0, 1))
            assert set(await asyncio.gather(*(sampler.put(member) for member in members * 25))) == {"OK"}
            with pytest.raises(Conflict):
                await sampler.put(small.finished(*leased[0], (V0, 4)))
            assert (await sampler.status())["tokens_put"] == 4 * 3

    run(many())


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
            await learner.publish(small.version_ref(await learner.begin(None)))
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
    commit = store_log.commit

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

    monkeypatch.setattr(store_log, "commit", held_back)
    run(waits())


def test_a_waiting_call_ends_in_time_with_a_typed_answer(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def waits() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.publish(small.version_ref(await learner.begin(None)))
            started = time.monotonic()
            with pytest.raises(NotReady):
                await learner.claim(0, 0, 0.3)
            assert await learner.published(V0, 0.3) is None
            assert 0.6 <= time.monotonic() - started < 90.0

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
            await learner.publish(small.version_ref(await learner.begin(None)))
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


def test_an_open_lease_call_of_a_sampler_that_is_away_is_granted_nothing(
    tmp_path: Path, small: SimpleNamespace, run, waiting
) -> None:
    config = small.configured(alpha=0.0)

    async def acts() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler", "sampler-0") as first,
            small.connected(tmp_path, config, "sampler", "sampler-1") as second,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            held = small.keys(await first.lease(V0, 4))
            waits = asyncio.ensure_future(first.lease(V0, 4, 30.0))
            await waiting("lease")
            await first.release([], away=True)
            assert await asyncio.wait_for(waits, 10.0) == []
            await first.release(held)
            given = small.keys(await second.lease(V0, 4))
            assert given == [(g, m, 2) for g, m, _ in held], "it had room, and nothing is kept for it"
            await second.release(given)
            assert small.keys(await first.lease(V0, 4)), "its next call is granted as before"

    run(acts())


def test_a_batch_larger_than_a_message_comes_in_pages(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxroll.store.server.server.PAGE_BYTES", 700)
    config = small.configured(groups_per_step=5, group_size=3)
    pages = []
    page = service.StoreService._page

    async def counting(self, call, *batch):
        pages.append(call.start)
        return await page(self, call, *batch)

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
            await first.publish(small.version_ref(await first.begin(None)))
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
    """Also in a group that is handed out before its batch is complete."""
    config = small.configured(alpha=0.0, on_stale="mask", groups_per_step=2, group_size=2)

    async def masked() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            await small.produce(sampler, V0, 4)
            await learner.claim(0, 0, 5.0)
            await learner.publish(small.version_ref(Version(0, 1)))
            await learner.ack(V0)
            leased, claims = small.keys(await sampler.lease(Version(0, 1), 4)), []
            for part in (leased[:2], leased[2:]):
                for key in part:
                    await sampler.put(small.finished(*key, (V0, 2), (Version(0, 1), 3)))
                claims.append(await learner.claim(0, 1, 5.0, known=()))
            assert [claim.whole for claim in claims] == [False, True]
            for member in (member for claim in claims for group in claim.groups for member in group.members):
                assert member.outcome.segments[1].loss_mask.tolist() == [0, 0, 1, 1, 1]
                assert member.outcome.segments[1].sampled_mask.tolist() == [True] * 5
                assert member.outcome.segments[0].loss_mask.tolist() == [0, 0, 0, 0]
            assert (await learner.status())["tokens_masked"] == 8

    run(masked())


# --- reports and the blocking client


def test_the_blocking_client_says_the_same(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(groups_per_step=1)

    def talk(address: Path) -> None:
        options = {"config_digest": digest(config)}
        learner = BlockingStore(address, role="learner", name="learner", **options)
        sampler = BlockingStore(address, role="sampler", name="sampler-0", **options)
        version = learner.begin(None)
        learner.publish(small.version_ref(version))
        assert sampler.published(None, 5.0) == small.version_ref(version)
        leased = small.keys(sampler.lease(version, 2, 5.0))
        assert sampler.renew(leased) == []
        sampler.release(leased)
        leased = small.keys(sampler.lease(version, 2, 5.0))
        for key in leased:
            assert sampler.put(small.finished(*key, (version, 2))) == "OK"
        assert len(learner.claim(0, 0, 5.0).groups) == 1
        learner.publish(small.version_ref(Version(0, 1)))
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
            client.close()
            client.close()
        with pytest.raises(InfraError, match="closed"):
            learner.status()

    async def both() -> None:
        async with small.serving(tmp_path, config):
            await asyncio.to_thread(talk, tmp_path / "store.addr")

    run(both())


def test_a_waiting_lease_is_granted_at_the_weight_swap(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """A sampler that swaps weights while its lease call waits need not call again, even with alpha = 0."""
    config = small.configured(steps=3, alpha=0.0)

    async def flip_while_waiting() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            await small.produce(sampler, V0, 100)
            claim = await learner.claim(0, 0, 10.0)
            assert claim.step == 0
            newer = Version(0, 1)
            await learner.publish(small.version_ref(newer))
            await learner.ack(V0)
            waiting = asyncio.ensure_future(sampler.lease(V0, 100, 20.0))
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done, "old weights are granted nothing at alpha = 0"
            await sampler.published(newer)
            assert await asyncio.wait_for(waiting, small.DEADLINE_S)

    run(flip_while_waiting())
