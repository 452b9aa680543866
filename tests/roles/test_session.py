"""The life of a process that plays: what it says to the store while it is silent otherwise."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import Config, RoleArgs
from jaxroll.errors import RestartRequired
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles import session as sessions
from jaxroll.store.server.server import LINGER_S


class Store:
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def report(self, rows: list[dict]) -> None:
        self.heard += [row["text"] for row in rows]

    async def status(self) -> dict[str, Any]:
        self.heard.append("status")
        return {}

    async def aclose(self) -> None:
        self.heard.append("closed")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()

    async def connect(*_: object, **__: object) -> Store:
        return found

    monkeypatch.setattr(sessions.StoreClient, "connect", connect)
    monkeypatch.setattr(sessions, "SEND_EVERY_S", 0.005)
    monkeypatch.setattr(sessions, "HEARTBEAT_S", 0.05)
    return found


def test_a_part_that_is_silent_for_long_is_heard_of_all_the_same(store: Store, tmp_path: Path) -> None:
    """The store of a closed run leaves when nobody calls any more: it would before the last evaluation is told."""

    async def job() -> None:
        session = sessions.Session(
            "evaluator", RoleArgs(Config(), tmp_path), ScoringPool(1), asyncio.get_running_loop()
        )

        async def play() -> None:
            session._add_row({"text": "begins"})
            while store.heard.count("status") < 3:
                await asyncio.sleep(0.005)
            session._add_row({"text": "scored"})

        await session.run(asyncio.sleep(0), play)

    asyncio.run(asyncio.wait_for(job(), 20))
    assert store.heard[0] == "begins" and store.heard[-2:] == ["scored", "closed"]
    assert store.heard.count("status") >= 3


def test_it_is_heard_of_more_often_than_a_closed_store_waits_for() -> None:
    assert 2 * sessions.HEARTBEAT_S < LINGER_S


def test_a_part_whose_environments_left_no_threads_ends_with_that(store: Store, tmp_path: Path) -> None:
    gone: list[str] = []

    async def job() -> None:
        loop = asyncio.get_running_loop()
        session = sessions.Session("sampler-0", RoleArgs(Config(), tmp_path), ScoringPool(1), loop)

        async def play() -> None:
            try:
                session.places.threads.worn.set()
                await loop.create_future()
            finally:
                gone.append("gave its leases back")

        with pytest.raises(RestartRequired, match="threads hang"):
            await session.run(asyncio.sleep(0), play)

    asyncio.run(asyncio.wait_for(job(), 20))
    assert gone == ["gave its leases back"] and store.heard[-1] == "closed"
