"""Waiting for a change by topic: long polls sleep here and are woken by what happens, never by a timer's guess."""

from __future__ import annotations

import asyncio

LEASE, CLAIM, PUBLISHED, ENDED = "lease", "claim", "published", "ended"


class Wakeups:
    """One event for each topic, made new at every notification. For one event loop."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def notify(self, *topics: str) -> None:
        """Wake everyone who waits for one of `topics`."""
        for topic in topics:
            if event := self._events.pop(topic, None):
                event.set()

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """Whether `topic` was notified within `timeout_s`. Nothing is missed between deciding and waiting: no await."""
        event = self._events.setdefault(topic, asyncio.Event())
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
