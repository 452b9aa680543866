"""Waiting for a change by topic: long polls sleep here and are woken by what happens, never by a timer's guess."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque

LEASE, CLAIM, PUBLISHED, ENDED = "lease", "claim", "published", "ended"
_Places = dict[asyncio.Future[None], None]  # in the order in which they were taken
_AT_ONCE = 64  # who wakes asks again: of thousands, others have their turn in between


class Wakeups:
    """Those who wait, by topic, in the order in which they came. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Places] = {}
        self._due: deque[_Places] = deque()
        self._is_waking = False

    def notify(self, *topics: str) -> None:
        """Wake everyone who waits for one of `topics`, a few at each turn of the loop."""
        self._due += [waiting for topic in topics if (waiting := self._waiting.pop(topic, None))]
        self._go_on()

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

    def _go_on(self) -> None:
        if self._due and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        left, self._is_waking = _AT_ONCE, False
        while self._due and left:
            waiting = self._due[0]
            for place in list(itertools.islice(waiting, left)):
                del waiting[place]
                if not place.done():
                    place.set_result(None)
                    left -= 1
            if not waiting:
                self._due.popleft()
        self._go_on()
