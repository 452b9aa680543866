"""The criteria of the fault tests: each one finds its violation in a run that the test corrupts."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from jaxroll.store.messages import SERVICE
from tests.harness.cluster import criteria
from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import _place
from tests.harness.cluster.rpc_tap import Call, Forward, Tap

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
SHAPE = ("schedule.groups_per_step=2", "schedule.group_size=2", "schedule.alpha=1", "schedule.steps=4")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A correct run that has ended."""
    with Cluster(tmp_path_factory.mktemp("ended") / "run", *SHAPE) as run:
        run.learner(checkpoint_every=4)
        run.sampler()
        run.until_acked(3)
        run.finish()
        criteria.judge(run, "none", 0, went_on_from=0)
        yield run


@pytest.fixture
def spoiled(ended: Cluster, tmp_path: Path) -> Path:
    """A copy of the run's folder that a test may corrupt."""
    return shutil.copytree(ended.run_dir, tmp_path / "run")


def execute(run_dir: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(run_dir / "store.db", isolation_level=None)) as db:
        assert db.execute(sql).rowcount > 0


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM members WHERE group_id = 3 AND member = 1",
        "UPDATE members SET digest = 'x' WHERE group_id = 3 AND member = 1",
        "UPDATE groups SET state = 'READY' WHERE id = 3; DELETE FROM payloads WHERE group_id = 3",
        "UPDATE groups SET state = 'EXPIRED' WHERE id = 3",
    ],
)
def test_a_lost_put_is_found(ended: Cluster, spoiled: Path, sql: str) -> None:
    assert criteria.lost_puts(spoiled, ended.sampled()) == []
    execute_all(spoiled, sql)
    assert len(criteria.lost_puts(spoiled, ended.sampled())) >= 1


def execute_all(run_dir: Path, script: str) -> None:
    with contextlib.closing(sqlite3.connect(run_dir / "store.db")) as db:
        db.executescript(script)


def test_a_group_missing_from_the_tables_is_found(spoiled: Path) -> None:
    assert criteria.conservation_residual(spoiled) == 0
    execute(spoiled, "DELETE FROM groups WHERE id = 2")
    assert criteria.conservation_residual(spoiled) == 1


def test_an_end_without_a_reason_is_found(spoiled: Path) -> None:
    execute(spoiled, "UPDATE groups SET state = 'DEAD' WHERE id = 2")
    with pytest.raises(AssertionError, match="without a reason"):
        criteria.conservation_residual(spoiled)


def test_a_group_in_two_steps_is_found(ended: Cluster) -> None:
    line = ended.weights()
    assert criteria.trained_twice(line) == set()
    again = [*line, (len(line), line[0][1])]
    assert criteria.trained_twice(again) == set(line[0][1])
    with pytest.raises(AssertionError, match="a step is missing"):
        criteria.trained_twice(line[1:])


def test_an_rpc_that_outlived_its_deadline_is_found() -> None:
    row = {"kind": "rpc", "took_s": 3.5, "deadline_s": 2.0, "stood_s": 0.0}
    assert criteria.overdue([row]) == [row]
    assert criteria.overdue([row | {"stood_s": 0.6}, row | {"deadline_s": 2.6}]) == []


def asked(tap: Tap, timeout_s: float) -> grpc.StatusCode:
    """The status of a call through the tap, which fails."""
    with grpc.insecure_channel(tap.address) as channel, pytest.raises(grpc.RpcError) as refusal:
        said = (("jaxroll-name", "somebody"),)
        channel.unary_unary(f"/{SERVICE}/Status")(b"", timeout=timeout_s, metadata=said)
    return refusal.value.code()  # type: ignore[attr-defined]


def until(seen: Callable[[], object]) -> None:
    """Return when `seen()` holds."""
    give_up_s, pause = time.monotonic() + 20, threading.Event()
    while not seen():
        assert time.monotonic() < give_up_s, "the condition never became true"
        pause.wait(0.01)


def test_a_call_that_a_store_never_answered_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        (tmp_path / "store.addr").write_text(f"127.0.0.1:{deaf.getsockname()[1]}")
        with Tap(tmp_path) as tap:
            assert asked(tap, 0.3) is grpc.StatusCode.DEADLINE_EXCEEDED
            until(lambda: tap.journal)
            row = tap.journal[0] | {"stood_s": 0.0}  # this process may have been paused for a tenth of the time
            assert criteria.unanswered([row]) == [row]
            assert row["name"] == "somebody" and row["method"] == "Status"
            assert criteria.overdue(tap.account()) == []
    assert criteria.unanswered([row | {"outcome": "OK"}, row | {"stood_s": 0.3}, row | {"took_s": 0.1}]) == []


def test_a_handler_that_swallows_its_deadline_is_found_before_and_after_it_ends(tmp_path: Path) -> None:
    (tmp_path / "store.addr").write_text("127.0.0.1:1")
    over = threading.Event()

    async def deaf(call: Call, forward: Forward) -> bytes:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        raise asyncio.CancelledError

    with Tap(tmp_path) as tap:
        tap.on("somebody", "Status", deaf)
        assert asked(tap, 1.0) is grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: criteria.overdue(tap.account()))
        assert [row["outcome"] for row in criteria.overdue(tap.account())] == ["open"]
        over.set()
        until(lambda: tap.journal)
        assert [row["outcome"] for row in criteria.overdue(tap.account())] == ["CANCELLED"]


def test_stored_bytes_that_no_sampler_sent_are_found(ended: Cluster) -> None:
    learned, sampled = ended.learned(), ended.sampled()
    assert criteria.unlike_what_was_sent(learned, sampled) == []
    without = [row for row in sampled if not (row["kind"] == "send" and row["key"] == [1, 0, 1])]
    assert criteria.unlike_what_was_sent(learned, without) == ["1.0.1"]


def test_the_table_is_ordered_by_the_number_of_the_fault() -> None:
    rows = [criteria.Row(f"{n} fault", 1, "yes", 0, 0, 1) for n in (10, 9, 2)]
    lines = criteria.table(sorted(rows, key=_place))
    assert [line.split()[0] for line in lines] == ["fault", "2", "9", "10"]


def test_a_run_that_made_no_progress_is_found(ended: Cluster) -> None:
    with pytest.raises(AssertionError, match="did not go on"):
        criteria.judge(ended, "none", 1, went_on_from=4)


def test_the_proxy_partitions_heals_and_cuts_connections() -> None:
    asyncio.run(asyncio.wait_for(_through_a_proxy(), 60))


async def _through_a_proxy() -> None:
    from benchmarks.faults.tcp_proxy import Proxy

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with Proxy(lambda: f"127.0.0.1:{port}") as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        proxy.partition()
        writer.write(b"two")
        waiting = asyncio.ensure_future(reader.readexactly(3))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        proxy.heal()
        assert await waiting == b"two"
        proxy.cut_after(2)
        writer.write(b"three")
        assert await reader.read() in (b"th", b"")
        writer.close()
        assert proxy.cuts == 1
    server.close()
