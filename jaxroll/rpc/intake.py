"""Request bodies, read piece by piece within a budget of bytes for the whole server.

A caller declares the size of its body in the call's metadata. The body is refused unread when it is more than the
limit, and waits unread until the budget has room for it, so what a caller can make the server hold is what the budget
says, whatever it declares or sends. Small bodies have a budget of their own: nobody's renewal waits for another's
megabytes. A body that stops coming is given up: after `STALLED_S` when others wait for its place, after `READ_S` in any
case. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager

from jaxroll.errors import InfraError, JaxRollError
from jaxroll.rpc import protocol
from jaxroll.rpc.protocol import PIECE_BYTES

READ_S = 10.0  # between two pieces
STALLED_S = 1.0
SMALL_BYTES = 256 * PIECE_BYTES  # for bodies of one piece, all together
_LARGE_BODIES = 2  # of the largest size
_LOOK_S = 0.25

Read = Callable[[], Awaitable[bytes]]


class Malformed(JaxRollError):
    """The body is not what was declared."""


class Busy(InfraError):
    """No room now; the same call may be made again."""


class Intake:
    """The bodies being read and worked on, each at most `max_body_bytes`.

    `held_bytes` is room for bodies of calls that are held for long, beyond the usual.
    """

    def __init__(self, max_body_bytes: int, held_bytes: int = 0) -> None:
        self.max_body_bytes = max_body_bytes
        self._small = _Budget(SMALL_BYTES + held_bytes)
        self._large = _Budget(max(_LARGE_BODIES * max_body_bytes, PIECE_BYTES) + held_bytes)

    @property
    def held_bytes(self) -> int:
        """What all bodies may take now."""
        return self._small.held_bytes + self._large.held_bytes

    def body(
        self, read: Read, declared: int | None, deadline_s: float, max_bytes: int | None = None
    ) -> AbstractAsyncContextManager[bytes]:
        """The body that `read` gives in pieces; its bytes count until the end of the block.

        Without a declared size it is one piece. Malformed, unread when it declares too much; Busy when there is no room
        within the deadline, or when it stops coming.
        """
        most = self.max_body_bytes if max_bytes is None else min(max_bytes, self.max_body_bytes)
        if declared is not None and declared > most:
            raise Malformed(f"a message of {declared} bytes; at most {most} are taken")
        size = max(PIECE_BYTES, declared or 0)  # a piece is read whole, however little was declared
        return _Body(self._small if size == PIECE_BYTES else self._large, size, read, declared, min(deadline_s, READ_S))


class _Body:
    """A body in its budget."""

    def __init__(self, budget: _Budget, size: int, read: Read, declared: int | None, wait_s: float) -> None:
        self._budget, self._size, self._read, self._declared, self._wait_s = budget, size, read, declared, wait_s

    async def __aenter__(self) -> bytes:
        await self._budget.take(self._size, self._wait_s)
        try:
            data = await self._budget.read(self._read, self._declared)
        except BaseException:
            self._budget.give_back(self._size)
            raise
        self._budget.give_back(self._size - len(data))
        self._size = len(data)
        return data

    async def __aexit__(self, *exc: object) -> None:
        self._budget.give_back(self._size)


class _Reader:
    """A body that is coming in."""

    def __init__(self, now_s: float) -> None:
        self.moved_s = now_s
        self.timeout = asyncio.timeout(READ_S)
        self._ended = False

    def end_if_stalled(self, now_s: float) -> None:
        """Make its reading time out now if nothing has come for a while."""
        if now_s - self.moved_s > STALLED_S and not self._ended:
            self._ended = True
            self.timeout.reschedule(now_s)


async def _read(read: Read, declared: int | None, reader: _Reader) -> bytes:
    pieces: list[bytes] = []
    total = 0
    try:
        async with reader.timeout:
            while True:
                piece = await read()
                if not isinstance(piece, bytes):  # grpc.aio.EOF
                    raise Malformed(f"the message ended after {total} bytes, {declared} were declared")
                total += len(piece)
                pieces.append(piece)
                if declared is None or total == declared:
                    return piece if len(pieces) == 1 else b"".join(pieces)
                if total > declared or len(piece) != PIECE_BYTES:
                    raise Malformed(f"{total} bytes came, {declared} were declared in pieces of {PIECE_BYTES}")
                reader.moved_s = asyncio.get_running_loop().time()
                reader.timeout.reschedule(reader.moved_s + READ_S)
    except TimeoutError:
        raise Busy("the message stopped coming; send it again") from None


class _Budget:
    """Bytes, taken first come, first served; who waits makes those end who do not move."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.held_bytes = 0
        self._waiting: deque[asyncio.Event] = deque()
        self._readers: set[_Reader] = set()

    async def read(self, read: Read, declared: int | None) -> bytes:
        """The body, read by a reader that may be ended for the sake of others."""
        reader = _Reader(asyncio.get_running_loop().time())
        self._readers.add(reader)
        try:
            return await _read(read, declared, reader)
        finally:
            self._readers.discard(reader)

    async def take(self, size: int, wait_s: float) -> None:
        """Return with `size` bytes; Busy when they are not to be had within `wait_s`."""
        if not self._waiting and self.held_bytes + size <= self._budget_bytes:
            self.held_bytes += size
            return
        loop, place = asyncio.get_running_loop(), asyncio.Event()
        give_up_s = loop.time() + wait_s
        self._waiting.append(place)
        try:
            while self._waiting[0] is not place or self.held_bytes + size > self._budget_bytes:
                for reader in self._readers:
                    reader.end_if_stalled(loop.time())
                if loop.time() >= give_up_s:
                    raise Busy(f"{self.held_bytes} bytes of requests are being worked on; try again")
                place.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await place.wait()
            self.held_bytes += size
        finally:
            self._waiting.remove(place)
            self._wake()

    def give_back(self, size: int) -> None:
        """Room for others."""
        self.held_bytes -= size
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0].set()


# --- Who is turned away, and how slowly: refused callers are held for a while, so that they cannot ask fast
#
# A connection has a bounded number of calls open (limits.CALLS_PER_CONNECTION), so holding a refusal bounds how often a
# connection can be refused, at the price of a timer. The first few refusals are told at once: a mistake should not
# wait.
# Belongs to one event loop.

HOLD_S = 2.0
_TOLD_WITHIN = 0.8  # of a caller's deadline: an answer that comes too late is asked for again
_AT_ONCE, _AT_ONCE_PER_S = 20.0, 2.0  # refusals that are told without holding

Refused = Callable[[str, str, str], None]  # (peer, who it said it is, why)


class TooManyCalls(Busy):
    """More of this than is allowed; the answer is held back for a while, and the call may be made again."""


class Credit:
    """So many at once, so many a second in the long run."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at_s = burst, float("-inf")

    def take(self, now_s: float) -> bool:
        """True if there is credit for one more, which is taken."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class RefusalThrottle:
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
        """Count a call that may be held among those of its connection; TooManyCalls when there are too many."""
        mine = self._polls[peer]
        assured = mine < protocol.POLLS_ASSURED
        if mine >= protocol.POLLS_PER_CONNECTION or (self._waiting >= protocol.MAX_POLLS and not assured):
            raise TooManyCalls(f"{mine} calls of this connection wait already, {self._waiting} in all")
        self._polls[peer] += 1
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._polls[peer] -= 1
            if not self._polls[peer]:
                del self._polls[peer]
