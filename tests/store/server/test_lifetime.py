"""Starts, restarts and ends of a store."""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.config import digest
from jaxroll.errors import (
    Closed,
    InfraError,
)
from jaxroll.records import Version
from jaxroll.store.client import StoreClient
from jaxroll.store.core import events as ev
from jaxroll.store.core import machine
from jaxroll.store.core.leases import Decision
from jaxroll.store.server.server import serve
from tests.harness.store.machine import V0


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
            await learner.publish(small.version_ref(await learner.begin(None)))
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


def test_a_store_is_seldom_stopped_by_the_garbage_collector(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """With 8,000 open calls a full collection takes 400 ms, and by default there was one every three seconds."""
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)

    async def check() -> None:
        async with small.serving(tmp_path, small.configured()):
            assert gc.get_freeze_count() > 10_000 and gc.get_threshold() == (10_000, 20, 20)

    run(check())


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
            assert time.monotonic() - started < small.DEADLINE_S

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


def test_a_closed_store_ends_without_further_calls(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()
    ready = []

    async def ends() -> None:
        job = asyncio.ensure_future(
            serve(config, tmp_path, small.Feed(), host="127.0.0.1", port=0, ready=ready.append, linger_s=2.0)
        )
        async with small.connected(tmp_path, config, "learner") as learner:
            await learner.close_run("done")
        ended, _ = await asyncio.wait([job], timeout=10.0)
        assert ended == {job}, "it still serves"
        assert job.exception() is None

    run(ends())


def test_the_store_of_a_complete_run_waits_for_a_learner_that_still_compiles(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train RUN --resume` of a complete run ended with a failure if the learner took longer than the store waits."""
    monkeypatch.setitem(machine._DECIDERS, ev.Open, lambda *_: Decision([]))  # as if all steps were trained
    config = small.configured()

    async def resumed() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.close_run("finished")
        job = asyncio.ensure_future(
            serve(config, tmp_path, small.Feed(), host="127.0.0.1", port=0, ready=lambda _: None, linger_s=1.0)
        )
        async with small.connected(tmp_path, config, "sampler") as sampler:
            await sampler.status()  # another role may be sooner
        ended, _ = await asyncio.wait([job], timeout=3.0)
        assert not ended
        async with small.connected(tmp_path, config, "learner") as learner:
            assert (await learner.status())["closed"] == "finished"
        ended, _ = await asyncio.wait([job], timeout=10.0)
        assert ended == {job} and job.exception() is None

    run(resumed())


def test_a_run_that_does_not_move_is_named_and_then_closed(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(stall_s=0.5, stall_abort_s=1.5, lease_s=1.0)

    async def stalls() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            await learner.publish(small.version_ref(await learner.begin(None)))
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


def test_a_callback_without_memory_ends_the_store(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """Otherwise it would fail again and again, for example at each byte of the feeder's pipe."""

    def callback() -> None:
        raise MemoryError

    def ready(address: str) -> None:
        asyncio.get_running_loop().call_soon(callback)

    with pytest.raises(InfraError, match="MemoryError; nothing can be made durable"):
        run(serve(small.configured(), tmp_path, small.Feed(), host="127.0.0.1", port=0, ready=ready))


def test_the_data_ends(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def ends() -> None:
        async with (
            small.serving(tmp_path, config, small.Feed(limit=3)),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            version = await learner.begin(None)
            await learner.publish(small.version_ref(version))
            await small.produce(sampler, version, 6)
            for step, size in ((0, 2), (1, 1)):
                assert len((await learner.claim(0, step, 5.0)).groups) == size
                await learner.publish(small.version_ref(Version(0, step + 1)))
                await learner.ack(Version(0, step))
            with pytest.raises(Closed, match="end of data"):
                await learner.claim(0, 2, 5.0)
            with pytest.raises(Closed, match="end of data"):
                await sampler.lease(Version(0, 2), 1)

    run(ends())
