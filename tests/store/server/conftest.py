"""Fixtures for the tests of the store's server."""

from __future__ import annotations

import asyncio

import pytest

from jaxroll.store.server.keeper import Wakeups


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch):
    """A function that returns once a call waits for a topic in this process's store."""
    entered: dict[str, asyncio.Queue] = {}
    wait = Wakeups.wait

    async def noting(self, topic: str, timeout_s: float) -> bool:
        entered.setdefault(topic, asyncio.Queue()).put_nowait(None)
        return await wait(self, topic, timeout_s)

    monkeypatch.setattr(Wakeups, "wait", noting)
    return lambda topic: entered.setdefault(topic, asyncio.Queue()).get()
