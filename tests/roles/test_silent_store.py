"""A store that accepts connections and answers none ends with that cause, so that its supervisor starts it again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from benchmarks.faults import machine
from jaxroll.config import Config, RoleArgs
from jaxroll.errors import Closed, InfraError
from jaxroll.lifeline import PARENT_ENV
from jaxroll.loop_thread import DeviceThread
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles import learner, session
from jaxroll.roles import store as role
from jaxroll.rpc.server import is_silent
from jaxroll.sim.network import VirtualTimeLoop
from jaxroll.store.client import STORE_PATIENCE_S, StoreClient
from tests.harness.cluster.cluster import CONFIG

DEADLINE_S = 200.0
STORE = """
import sys
from jaxroll.roles import store
from tests.harness.cluster import scripted_store
store.CHECK_EVERY_S, store.CHECK_S = 0.1, 0.7
sys.exit(scripted_store.main())
"""


@pytest.mark.parametrize(
    ("answers", "ended_s"),
    [([False, True, True, False, True, True, True], 60.0), ([True, True, True], 30.0)],
    ids=["recovers", "silent"],
)
def test_half_a_minute_of_silence_in_a_row_ends_the_store(answers: list[bool], ended_s: float) -> None:
    left = iter(answers)

    async def check(address: str, limit_s: float) -> bool:
        silent = next(left)
        await asyncio.sleep(limit_s if silent else 0.0)
        return silent

    loop = VirtualTimeLoop()
    try:
        with pytest.raises(InfraError, match=r"here:1 accepts connections and has answered none for 30 s"):
            loop.run_until_complete(role.until_silent("here:1", check))
        assert loop.time() == ended_s
    finally:
        loop.close()


def test_half_of_the_patience_of_the_roles_is_left_to_start_the_store_again() -> None:
    assert role.SILENT_CHECKS * (role.CHECK_EVERY_S + role.CHECK_S) <= STORE_PATIENCE_S / 2


def test_all_roles_have_this_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []

    async def connect(*_: object, patience_s: float, **__: object) -> StoreClient:
        found.append(patience_s)
        raise Closed("no store")

    monkeypatch.setattr(StoreClient, "connect", connect)
    for module in (learner, session):
        monkeypatch.setattr(module, "STORE_PATIENCE_S", 17.0)
    args = RoleArgs(Config(), tmp_path)

    async def roles() -> None:
        with pytest.raises(Closed):
            await learner._run(args, threading.Event(), None, learner.ColocationHooks(), DeviceThread())
        sampler = session.Session("sampler-0", args, ScoringPool(1), asyncio.get_running_loop())
        with pytest.raises(Closed):
            await sampler.run(never, never)

    asyncio.run(roles())
    assert found == [17.0, 17.0]


async def never() -> None:
    raise AssertionError("not connected")


def test_a_server_that_is_gone_or_closes_the_connection_is_not_silent() -> None:
    async def found() -> list[bool]:
        gone = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        address = f"127.0.0.1:{gone.sockets[0].getsockname()[1]}"
        closes = await is_silent(address, DEADLINE_S)
        gone.close()
        return [closes, await is_silent(address, DEADLINE_S)]

    assert asyncio.run(found()) == [False, False]


@pytest.mark.process
def test_a_store_whose_grpc_has_no_threads_ends_with_the_cause(tmp_path: Path) -> None:
    """The real role; the kernel stops the threads that gRPC accepts connections with."""
    words = [sys.executable, "-c", STORE, "{}", "store", f"--config={CONFIG}", f"--run={tmp_path / 'run'}"]
    environ = {**os.environ, PARENT_ENV: str(os.getpid())}
    store = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(DEADLINE_S / 2, store.kill)
    timer.start()
    try:
        assert store.stdout is not None and store.stderr is not None
        address = store.stdout.readline().split()[-1]
        assert not asyncio.run(is_silent(address, DEADLINE_S))
        with machine.threads_stopped(psutil.Process(store.pid), {"event_engine", "lifeguard"}):
            text = store.stderr.read()
        assert f"error: {address} accepts connections and has answered none" in text
        assert store.wait(DEADLINE_S) == 1
    finally:
        timer.cancel()
        store.kill()
        store.communicate()
