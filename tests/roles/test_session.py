"""Session of a role: metric rows and heartbeats to the store, and its end."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from jaxroll import lifeline
from jaxroll.config import Config, RoleArgs
from jaxroll.errors import RestartRequired, Unauthorized
from jaxroll.loop_thread import LoopThread
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles import actor, evaluator
from jaxroll.roles import session as sessions
from jaxroll.store.server.server import LINGER_S


class Store:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def report(self, rows: list[dict]) -> None:
        self.calls += [row["text"] for row in rows]

    async def status(self) -> dict[str, Any]:
        self.calls.append("status")
        return {}

    async def leave(self) -> None:
        self.calls.append("left")

    async def aclose(self) -> None:
        self.calls.append("closed")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()

    async def connect(*_: object, **__: object) -> Store:
        return found

    monkeypatch.setattr(sessions.StoreClient, "connect", connect)
    monkeypatch.setattr(sessions, "SEND_EVERY_S", 0.005)
    monkeypatch.setattr(sessions, "HEARTBEAT_S", 0.05)
    return found


def test_a_role_without_rows_sends_heartbeats(store: Store, tmp_path: Path) -> None:
    """The store of a closed run ends when it gets no calls, which would be before the last evaluation is reported."""

    async def job() -> None:
        session = sessions.Session(
            "evaluator", RoleArgs(Config(), tmp_path), ScoringPool(1), asyncio.get_running_loop()
        )

        async def play() -> None:
            session._add_row({"text": "begins"})
            while store.calls.count("status") < 3:
                await asyncio.sleep(0.005)
            session._add_row({"text": "scored"})

        await session.run(lambda: asyncio.sleep(0), play)

    asyncio.run(asyncio.wait_for(job(), 20))
    assert store.calls[0] == "begins" and store.calls[-2:] == ["scored", "closed"]
    assert store.calls.count("status") >= 3


def test_heartbeats_come_more_often_than_a_closed_store_waits() -> None:
    assert 2 * sessions.HEARTBEAT_S < LINGER_S


def test_a_role_whose_environments_occupy_all_threads_ends(store: Store, tmp_path: Path) -> None:
    gone: list[str] = []

    async def job() -> None:
        loop = asyncio.get_running_loop()
        session = sessions.Session("sampler-0", RoleArgs(Config(), tmp_path), ScoringPool(1), loop)

        async def play() -> None:
            try:
                session.executors.threads.worn.set()
                await loop.create_future()
            finally:
                gone.append("returned its leases")

        with pytest.raises(RestartRequired, match="threads hang"):
            await session.run(lambda: asyncio.sleep(0), play)

    asyncio.run(asyncio.wait_for(job(), 20))
    assert gone == ["returned its leases"] and store.calls[-1] == "closed"


@pytest.mark.parametrize("role", ["sampler-0", "actor-1", "evaluator"])
def test_a_role_that_a_script_has_started_again_reports_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv(lifeline.ENDED_ENV, "139")
    loop = asyncio.new_event_loop()
    (row,) = sessions.Session(role, RoleArgs(Config(), tmp_path), ScoringPool(1), loop).take_rows()
    loop.close()
    assert (row["kind"], row["process"], row["code"]) == ("restart", role, -11)


def test_a_session_that_cannot_connect_raises_that_error_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The store refuses the process before anything waits for its engine: no coroutine is left without an awaiter."""

    async def refuse(*_: object, **__: object) -> None:
        raise Unauthorized("another config")

    async def job() -> None:
        session = sessions.EngineSession(
            "sampler-0", RoleArgs(Config(), tmp_path), ScoringPool(1), asyncio.get_running_loop()
        )
        await session.run(lambda: session.built(Future()), lambda: asyncio.sleep(0))

    monkeypatch.setattr(sessions.StoreClient, "connect", refuse)
    with pytest.raises(Unauthorized, match="another config"):
        asyncio.run(job())
    gc.collect()
    assert [one for one in recwarn if "never awaited" in str(one.message)] == []


def test_the_event_loop_answers_while_an_actor_and_an_evaluator_prepare(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a library and making the held-out items may take longer than an event loop may be blocked."""
    args, loops, answered = RoleArgs(Config(), tmp_path), [], []

    def slow(*_: object) -> dict:
        answer = threading.Event()
        loops[0].call_soon_threadsafe(answer.set)
        answered.append(answer.wait(2.0))
        return {}

    def loop_thread(name: str, config: Config) -> LoopThread:
        thread = LoopThread(name, 60.0)
        loops.append(thread.loop)
        return thread

    class Loops:
        def __init__(self, *_: object) -> None: ...

        async def run(self) -> None:
            """No evaluation and no lease."""

    monkeypatch.setattr(sessions, "loop_thread", loop_thread)
    monkeypatch.setattr(sessions, "install_signal_handlers", lambda session: threading.Event())
    monkeypatch.setattr(actor.registry, "scoring_pool", lambda *_: ScoringPool(1))
    monkeypatch.setattr(ScoringPool, "start", lambda pool: None)
    monkeypatch.setattr(actor.tokenizers, "build", slow)
    monkeypatch.setattr(actor.sources, "alphabet", lambda task: "ab")
    monkeypatch.setattr(actor, "ActorLoops", Loops)
    assert actor.main(args) == 0

    async def evaluate() -> None:
        loops[:] = [asyncio.get_running_loop()]
        await evaluator.role_spec(args.config).play(sessions.EngineSession("evaluator", args, ScoringPool(1), loops[0]))

    monkeypatch.setattr(evaluator.tasks, "evaluated", slow)
    monkeypatch.setattr(evaluator, "EvaluatorLoops", Loops)
    asyncio.run(evaluate())
    assert answered == [True, True]
