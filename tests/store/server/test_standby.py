"""A log and its copy at a standby: equal after losses at any instant, and one store at most acknowledges."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jaxroll import wire
from jaxroll.clock import ManualClock
from jaxroll.errors import ConfigError, InfraError, StoreRefusal
from jaxroll.records import Version
from jaxroll.rpc.server import Caller, Method
from jaxroll.store import messages as msg
from jaxroll.store.core import events as ev
from jaxroll.store.log import database
from jaxroll.store.log.commit_log import Log
from jaxroll.store.log.replay import replay_log
from jaxroll.store.server import keeper
from jaxroll.store.server import standby as standbys
from jaxroll.store.server.keeper import Keeper
from jaxroll.store.server.standby import LogFollower, Standby
from tests.harness.store.recorded_log import SETTINGS, eventful_history, lease, publish, put

TAKEOVER_S = 0.1


async def nowhere(run_id: str, epoch: int) -> int:
    """The epoch of a store that is not reached."""
    return 0


class Wire:
    """Calls to a `Standby`: `lost` of them, in either direction, and all while there is none."""

    def __init__(self, to: Standby | None, rng: random.Random, lost: float = 0.0) -> None:
        self.to, self.session, self._rng, self._lost, self.calls = to, uuid.uuid4().hex, rng, lost, 0

    async def call(self, method: str, body: bytes, deadline_s: float, *, patience_s: float) -> bytes:
        assert (method, patience_s) == ("Follow", 0.0)
        self.calls += 1
        if self.to is None or self._rng.random() < self._lost:
            raise InfraError("no connection")
        reply = await self.to.follow(Caller("admin", "standby", self.session, "", deadline_s), body)
        if self._rng.random() < self._lost:
            raise InfraError("the reply is lost")
        return reply


def follower(folder: Path, to: Standby | None, rng: random.Random, lost: float = 0.0) -> LogFollower:
    folder.mkdir(exist_ok=True)
    return LogFollower(folder, Wire(to, rng, lost), TAKEOVER_S, lambda text: None)  # type: ignore[arg-type]


def tables(folder: Path) -> dict[str, list[tuple]]:
    """The content of all tables, without the mark of a follower."""
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        found = {name: sorted(db.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names}
    found["meta"] = [row for row in found["meta"] if row[0] != "follows"]
    return found


@contextlib.asynccontextmanager
async def store(folder: Path, clock: ManualClock) -> AsyncIterator[tuple[Keeper, Standby]]:
    """A keeper with a standby; its log ends without waiting."""
    log = Log(folder, history_bytes=1500, keep_bytes=800)
    standby = Standby(log, folder, clock.now_s, nowhere)
    try:
        yield Keeper(SETTINGS, log, clock), standby
    finally:
        log.fail(InfraError("the end of the test"))
        with contextlib.suppress(InfraError):
            await log.close()


async def committed(kept: Keeper, one: asyncio.Future[bool]) -> None:
    """Wait until all is on both disks; raise the error of the standby if it ends."""
    waiting = asyncio.ensure_future(kept.log.committed())
    await asyncio.wait([waiting, one], return_when=asyncio.FIRST_COMPLETED)
    assert waiting.done(), f"the standby has ended: {one.exception()!r}"
    await waiting


async def _lossy_copy(tmp_path: Path, rng: random.Random) -> None:
    clock = ManualClock()
    async with store(tmp_path / "a", clock) as (kept, standby):
        one = asyncio.ensure_future(follower(tmp_path / "b", standby, rng, 0.1).stand_by(is_first=False))
        for _ in eventful_history(kept, clock):
            if rng.random() < 0.3:
                kept.log.compact()
            if rng.random() < 0.1:  # the standby is killed and started again
                one.cancel()
                await asyncio.gather(one, return_exceptions=True)
                one = asyncio.ensure_future(follower(tmp_path / "b", standby, rng, 0.1).stand_by(is_first=False))
            if rng.random() < 0.7:
                await committed(kept, one)
        kept.decide(ev.Close("the end"))
        await committed(kept, one)
        await kept.log.tidy()
        while standby._commits:  # those of maintenance, for which no call waits
            await asyncio.sleep(0.01)
        assert tables(tmp_path / "a") == tables(tmp_path / "b")
        assert any("snapshot" in name and rows for name, rows in tables(tmp_path / "b").items())
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
    with database.transaction(tmp_path / "b") as db:
        assert replay_log(db).violations == []


@pytest.mark.parametrize("seed", range(5))
def test_the_copy_is_equal_whatever_is_lost(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and replies are lost, the standby is killed, and compaction and deletions go on."""
    monkeypatch.setattr(keeper, "COMPACT_EVERY", 7)
    monkeypatch.setattr(standbys, "_RETRY_S", 0.001)
    monkeypatch.setattr(standbys, "_FAILURES", 10**6)  # it never takes over
    asyncio.run(_lossy_copy(tmp_path, random.Random(seed)))


async def _lonely(tmp_path: Path) -> None:
    rng, clock = random.Random(0), ManualClock()
    async with store(tmp_path / "a", clock) as (kept, standby):
        begun = asyncio.ensure_future(kept.answer(ev.Begin("L", None)))
        while not kept.log.commits:  # it is on the first disk
            await asyncio.sleep(0.01)
        assert not begun.done()
        one = asyncio.ensure_future(follower(tmp_path / "b", standby, rng).stand_by(is_first=False))
        version = await begun
        publish(kept, version)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        (key,) = lease(kept, 1, version, "a")
        put(kept, key, version)
        stored = asyncio.ensure_future(kept.log.committed())
        before = kept.log.commits
        kept.decide(ev.Tick())
        while kept.log.commits == before and kept.log._busy:
            await asyncio.sleep(0.01)
        assert not stored.done(), "the standby may have taken over"
        two = asyncio.ensure_future(follower(tmp_path / "b", standby, rng).stand_by(is_first=False))
        await stored
        two.cancel()
        await asyncio.gather(two, return_exceptions=True)
        assert tables(tmp_path / "a") == tables(tmp_path / "b")


def test_nothing_is_acknowledged_without_the_standby(tmp_path: Path) -> None:
    asyncio.run(_lonely(tmp_path))


async def _taken_over(tmp_path: Path) -> None:
    rng, clock = random.Random(0), ManualClock()
    async with store(tmp_path / "a", clock) as (kept, standby):
        second = follower(tmp_path / "b", standby, rng)
        one = asyncio.ensure_future(second.stand_by(is_first=False))
        version = await kept.answer(ev.Begin("L", None))
        publish(kept, version)
        await kept.log.committed()
        second._peer.to = None  # type: ignore[attr-defined]
        assert await one, "it serves now"
        kept.decide(ev.EndData())
        unanswered = asyncio.ensure_future(kept.log.committed())
        async with store(tmp_path / "b", clock) as (other, its_standby):
            assert other.state.published == kept_before(kept, version)
            other.decide(ev.Begin("L", version))
            await other.log.committed()  # alone: the first store acknowledges nothing any more
            call = msg.FollowCall(standby._run_id, its_standby.epoch, probe=True)
            await standby.follow(Caller("admin", "standby", "x", "", 1.0), wire.encode(call))
            with pytest.raises(InfraError, match="taken over in epoch 2"):
                await unanswered
    async with store(tmp_path / "b", clock) as (other, its_standby):  # and the first one comes back as the standby
        first = asyncio.ensure_future(follower(tmp_path / "a", its_standby, rng).stand_by(is_first=True))
        publish(other, other.decide(ev.Begin("L", version)))
        await other.log.committed()
        while not its_standby._waits:
            await asyncio.sleep(0.01)
        publish(other, other.decide(ev.Begin("L", version)))
        await other.log.committed()
        assert tables(tmp_path / "a") == tables(tmp_path / "b")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


def kept_before(kept: Keeper, version: Version) -> object:
    """The published weights that both stores know."""
    published = kept.state.published
    assert published is not None
    return type(published)(version, published.channel, published.address, published.manifest_digest)


def test_a_standby_takes_over_and_the_first_store_becomes_its_standby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standbys, "_RETRY_S", 0.01)
    asyncio.run(_taken_over(tmp_path))


async def _of_another_run(tmp_path: Path) -> None:
    rng, clock = random.Random(0), ManualClock()
    for name in ("a", "b"):
        async with store(tmp_path / name, clock):
            pass
    async with store(tmp_path / "a", clock) as (_, standby):
        with pytest.raises(ConfigError, match=r"another run.*Give both stores folders of the same run"):
            await follower(tmp_path / "b", standby, rng).stand_by(is_first=False)
        with pytest.raises(StoreRefusal, match="another run"):
            call = msg.FollowCall("other", 1)
            await standby.follow(Caller("admin", "standby", "x", "", 1.0), wire.encode(call))


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    asyncio.run(_of_another_run(tmp_path))


async def _of_a_new_run(tmp_path: Path) -> None:
    rng, clock = random.Random(0), ManualClock()
    assert await follower(tmp_path / "a", None, rng).stand_by(is_first=True), "it begins after twice the time"
    async with store(tmp_path / "a", clock) as (kept, standby):

        async def hello(caller: Caller, body: bytes) -> bytes:
            return b"hello"

        methods, caller = standby.guarded({"Hello": Method(hello, frozenset())}), Caller("learner", "L", "s", "", 1.0)
        with pytest.raises(InfraError, match="waits for its standby"):
            await methods["Hello"].handler(caller, b"")
        one = asyncio.ensure_future(follower(tmp_path / "b", standby, rng).stand_by(is_first=False))
        await kept.answer(ev.Begin("L", None))
        assert await methods["Hello"].handler(caller, b"") == b"hello"
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        clock.advance(standbys.SILENT_S + 1)
        with pytest.raises(InfraError, match="waits for its standby"):
            await methods["Hello"].handler(caller, b"")
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)


def test_a_store_on_a_new_disk_misleads_no_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other store may have the run; a caller that this one answered would end, because it has another run."""
    monkeypatch.setattr(standbys, "_LOOK_S", 0.01)
    asyncio.run(_of_a_new_run(tmp_path))


async def _slow_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, clock, gate, made, copy = random.Random(0), ManualClock(), threading.Event(), [], database.copy

    def slowly(*values: Any) -> None:
        made.append(values)
        gate.wait()
        copy(*values)

    monkeypatch.setattr(database, "copy", slowly)
    async with store(tmp_path / "a", clock) as (kept, standby):
        second = follower(tmp_path / "b", standby, rng)
        one = asyncio.ensure_future(second.stand_by(is_first=False))
        begun = asyncio.ensure_future(kept.answer(ev.Begin("L", None)))
        while second._peer.calls < 10:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        gate.set()
        await begun
        assert len(made) == 1 and not one.done(), "it waits for the copy, and neither asks for another nor takes over"
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)


def test_a_standby_waits_for_a_copy_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "_WAIT_S", 0.02)
    asyncio.run(_slow_copy(tmp_path, monkeypatch))


async def _ended(tmp_path: Path) -> None:
    rng, clock = random.Random(0), ManualClock()
    async with store(tmp_path / "a", clock) as (kept, standby):
        one = asyncio.ensure_future(follower(tmp_path / "b", standby, rng).stand_by(is_first=False))
        await kept.answer(ev.Begin("L", None))
        kept.decide(ev.Close("stop"))
        await standby.end()
        assert not await one, "it does not take over"
        await kept.log.committed()
        assert tables(tmp_path / "a") == tables(tmp_path / "b")


def test_a_store_that_ends_in_order_ends_its_standby(tmp_path: Path) -> None:
    asyncio.run(_ended(tmp_path))
