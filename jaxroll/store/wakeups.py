"""Waiting for a change by topic: long polls sleep here and are woken by what happens, never by a timer's guess."""

from __future__ import annotations

import asyncio
import itertools

LEASE, CLAIM, PUBLISHED, ENDED = "lease", "claim", "published", "ended"


_AT_ONCE = 64  # who wakes asks again: of thousands, others have their turn in between


class Wakeups:
    """Those who wait, by topic, in the order in which they came. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    def notify(self, *topics: str) -> None:
        """Wake everyone who waits for one of `topics`, a few at a time."""
        for topic in topics:
            if waiting := self._waiting.pop(topic, None):
                _wake(waiting)

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """Whether `topic` was notified within `timeout_s`. Nothing is missed between deciding and waiting: no await."""
        waiting, place = self._waiting.setdefault(topic, {}), asyncio.get_running_loop().create_future()
        waiting[place] = None
        try:
            async with asyncio.timeout(timeout_s):
                await place
        except TimeoutError:
            return False
        finally:
            waiting.pop(place, None)
        return True


def _wake(waiting: dict[asyncio.Future[None], None]) -> None:
    for place in list(itertools.islice(waiting, _AT_ONCE)):
        del waiting[place]
        if not place.done():
            place.set_result(None)
    if waiting:
        asyncio.get_running_loop().call_soon(_wake, waiting)
