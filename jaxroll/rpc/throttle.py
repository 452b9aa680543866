"""Who is turned away, and how slowly: refused callers are held for a while, so that they cannot ask fast.

A connection has a bounded number of calls open (limits.CALLS_PER_CONNECTION), so holding a refusal bounds how often a
connection can be refused, at the price of a timer. The first few refusals are told at once: a mistake should not wait.
Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator

from jaxroll.rpc import limits
from jaxroll.rpc.intake import Busy

HOLD_S = 2.0
_TOLD_WITHIN = 0.8  # of a caller's deadline: an answer that comes too late is asked for again
_AT_ONCE, _AT_ONCE_PER_S = 20.0, 2.0  # refusals that are told without holding

Refused = Callable[[str, str, str], None]  # (peer, who it said it is, why)


class Crowded(Busy):
    """More of this than is allowed; the answer is held back for a while, and the call may be made again."""


class Credit:
    """So many at once, so many a second in the long run."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at_s = burst, float("-inf")

    def take(self, now_s: float) -> bool:
        """Whether there is credit for one more, which is taken."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Doorman:
    """Counts refusals and polls."""

    def __init__(self, refused: Refused | None = None) -> None:
        self._refused = refused
        self._at_once, self._nonsense = (Credit(_AT_ONCE, _AT_ONCE_PER_S) for _ in range(2))
        self._polls: Counter[str] = Counter()
        self._waiting = 0
        self.refusals = 0

    async def hold(self, left_s: float) -> None:
        """Return after as long as somebody who asks too much has to wait for the answer, of the `left_s` it waits.

        Not all wait equally long: who is turned away together should not be back together.
        """
        await asyncio.sleep(min(random.uniform(HOLD_S, 2 * HOLD_S), left_s * _TOLD_WITHIN))

    async def misunderstood(self, left_s: float) -> None:
        """Return when somebody may be told that its message makes no sense. No client of ours says such a thing."""
        if not self._nonsense.take(asyncio.get_running_loop().time()):
            await self.hold(left_s)

    async def turn_away(self, peer: str, who: str, why: str, left_s: float) -> None:
        """Return when the refusal may be told."""
        self.refusals += 1
        if self._refused is not None:
            self._refused(peer, who, why)
        if not self._at_once.take(asyncio.get_running_loop().time()):
            await self.hold(left_s)

    @contextlib.contextmanager
    def poll(self, peer: str) -> Iterator[None]:
        """Count a call that may be held among those of its connection; Crowded when there are too many."""
        mine = self._polls[peer]
        assured = mine < limits.POLLS_ASSURED
        if mine >= limits.POLLS_PER_CONNECTION or (self._waiting >= limits.MAX_POLLS and not assured):
            raise Crowded(f"{mine} calls of this connection wait already, {self._waiting} in all")
        self._polls[peer] += 1
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._polls[peer] -= 1
            if not self._polls[peer]:
                del self._polls[peer]
