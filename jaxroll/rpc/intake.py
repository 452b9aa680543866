"""Intake of request bodies, read piece by piece within a memory budget of the server, and a throttle for refusals.

A caller declares the size of its body in the call's metadata. A body over the limit is refused unread; other bodies
wait unread until the budget has room. So the budget bounds the memory of all bodies, regardless of what callers declare
or send. Small bodies have a budget of their own, so that a renewal does not wait for megabytes of another caller. A
stalled body is dropped after `STALLED_S` if other bodies wait for room, and after `READ_S` in any case. Belongs to one
event loop.
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
_POLL_S = 0.25

Read = Callable[[], Awaitable[bytes]]


class MalformedBody(JaxRollError):
    """The body does not match its declaration."""


class Busy(InfraError):
    """The server has no room now; the caller may repeat the call."""


class Intake:
    """The bodies that are being read and processed, each of at most `max_body_bytes`.

    `held_bytes` is additional room for bodies of calls that are held for long.
    """

    def __init__(self, max_body_bytes: int, held_bytes: int = 0) -> None:
        self.max_body_bytes = max_body_bytes
        self._small = _Budget(SMALL_BYTES + held_bytes)
        self._large = _Budget(max(_LARGE_BODIES * max_body_bytes, PIECE_BYTES) + held_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes reserved for bodies now."""
        return self._small.held_bytes + self._large.held_bytes

    def body(
        self, read: Read, declared: int | None, deadline_s: float, max_bytes: int | None = None
    ) -> AbstractAsyncContextManager[bytes]:
        """The body that `read` returns in pieces; its bytes count until the end of the block.

        Without a declared size it is one piece. Raises MalformedBody, before reading, if the declared size is over the
        limit; Busy if there is no room within the deadline, or if the body stalls.
        """
        most = self.max_body_bytes if max_bytes is None else min(max_bytes, self.max_body_bytes)
        if declared is not None and declared > most:
            raise MalformedBody(f"a message of {declared} bytes; the limit is {most}")
        size = max(PIECE_BYTES, declared or 0)  # a piece is read as a whole, even if less is declared
        return _Body(self._small if size == PIECE_BYTES else self._large, size, read, declared, min(deadline_s, READ_S))


class _Body:
    """A body with its reservation in a budget."""

    def __init__(self, budget: _Budget, size: int, read: Read, declared: int | None, wait_s: float) -> None:
        self._budget, self._size, self._read, self._declared, self._wait_s = budget, size, read, declared, wait_s

    async def __aenter__(self) -> bytes:
        await self._budget.take(self._size, self._wait_s)
        try:
            data = await self._budget.read(self._read, self._declared)
        except BaseException:
            self._budget.release(self._size)
            raise
        self._budget.release(self._size - len(data))
        self._size = len(data)
        return data

    async def __aexit__(self, *exc: object) -> None:
        self._budget.release(self._size)


class _Reader:
    """A body that is being read."""

    def __init__(self, now_s: float) -> None:
        self.moved_s = now_s
        self.timeout = asyncio.timeout(READ_S)
        self._ended = False

    def end_if_stalled(self, now_s: float) -> None:
        """Time out the reading now if no piece has arrived for `STALLED_S`."""
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
                    raise MalformedBody(f"the message ended after {total} bytes, {declared} were declared")
                total += len(piece)
                pieces.append(piece)
                if declared is None or total == declared:
                    return piece if len(pieces) == 1 else b"".join(pieces)
                if total > declared or len(piece) != PIECE_BYTES:
                    raise MalformedBody(f"{total} bytes came, {declared} were declared in pieces of {PIECE_BYTES}")
                reader.moved_s = asyncio.get_running_loop().time()
                reader.timeout.reschedule(reader.moved_s + READ_S)
    except TimeoutError:
        raise Busy("the message stalled; send it again") from None


class _Budget:
    """A memory budget, granted first come, first served; a waiting body ends the reading of stalled ones."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.held_bytes = 0
        self._waiting: deque[asyncio.Event] = deque()
        self._readers: set[_Reader] = set()

    async def read(self, read: Read, declared: int | None) -> bytes:
        """The body, read by a reader that times out early if it stalls while others wait."""
        reader = _Reader(asyncio.get_running_loop().time())
        self._readers.add(reader)
        try:
            return await _read(read, declared, reader)
        finally:
            self._readers.discard(reader)

    async def take(self, size: int, wait_s: float) -> None:
        """Reserve `size` bytes; Busy if there is no room within `wait_s`."""
        if not self._waiting and self.held_bytes + size <= self._budget_bytes:
            self.held_bytes += size
            return
        loop, ticket = asyncio.get_running_loop(), asyncio.Event()
        give_up_s = loop.time() + wait_s
        self._waiting.append(ticket)
        try:
            while self._waiting[0] is not ticket or self.held_bytes + size > self._budget_bytes:
                for reader in self._readers:
                    reader.end_if_stalled(loop.time())
                if loop.time() >= give_up_s:
                    raise Busy(f"{self.held_bytes} bytes of requests are being processed; try again")
                ticket.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await ticket.wait()
            self.held_bytes += size
        finally:
            self._waiting.remove(ticket)
            self._wake()

    def release(self, size: int) -> None:
        """Return `size` bytes to the budget."""
        self.held_bytes -= size
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0].set()


# --- Refusal throttle: refusals are delayed, so that refused callers cannot call often
#
# A connection has a bounded number of open calls (protocol.CALLS_PER_CONNECTION), so a delay bounds the rate of its
# refusals, at the cost of a timer. The first few refusals are sent at once, because they may be mistakes.
# Belongs to one event loop.

HOLD_S = 2.0
DELAYED_PER_S = 500.0  # delayed refusals that are sent, from all connections: each refused caller calls again
_DEADLINE_SHARE = 0.8  # of a caller's deadline: a refusal after it would be requested again
_AT_ONCE, _AT_ONCE_PER_S = 20.0, 2.0  # refusals that are sent without delay

Refused = Callable[[str, str, str], None]  # (peer, role:name that it claims, reason)


class TooManyCalls(Busy):
    """Too many calls of a kind; the refusal is delayed, and the caller may repeat the call."""


class Credit:
    """A token bucket: up to `burst` at once, `per_s` per second on average."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at_s = burst, float("-inf")

    def take(self, now_s: float) -> bool:
        """Take one credit; True if there was one."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class RefusalThrottle:
    """Delays refusals, and limits the calls that are held."""

    def __init__(self, refused: Refused | None = None) -> None:
        self._refused = refused
        self._at_once, self._malformed = (Credit(_AT_ONCE, _AT_ONCE_PER_S) for _ in range(2))
        self._polls: Counter[str] = Counter()
        self._waiting = 0
        self._next_s = float("-inf")
        self.refusals = 0

    async def hold(self, left_s: float) -> None:
        """Return after the delay of a refusal, within the `left_s` that the caller still waits.

        The delay is random, so that callers that were refused together do not return together, and grows with the
        number of refusals that are delayed, as far as the callers wait for them: thousands of connections cannot call
        more often than a few.
        """
        now_s, most_s = asyncio.get_running_loop().time(), left_s * _DEADLINE_SHARE
        next_s = max(self._next_s, now_s) + 1.0 / DELAYED_PER_S
        delay_s = max(random.uniform(HOLD_S, 2 * HOLD_S), next_s - now_s)
        if delay_s <= most_s:
            self._next_s = next_s
        else:
            delay_s = most_s * (1.0 if most_s < HOLD_S else random.uniform(0.5, 1.0))
        await asyncio.sleep(delay_s)

    async def delay_malformed(self, left_s: float) -> None:
        """Return when the refusal of a malformed message may be sent. JaxRoll's own clients send none."""
        if not self._malformed.take(asyncio.get_running_loop().time()):
            await self.hold(left_s)

    async def delay_refusal(self, peer: str, who: str, why: str, left_s: float) -> None:
        """Count the refusal, and return when it may be sent."""
        self.refusals += 1
        if self._refused is not None:
            self._refused(peer, who, why)
        if not self._at_once.take(asyncio.get_running_loop().time()):
            await self.hold(left_s)

    @contextlib.contextmanager
    def poll(self, peer: str) -> Iterator[None]:
        """Count a call that may be held; TooManyCalls if its connection, or the server, has too many."""
        mine = self._polls[peer]
        assured = mine < protocol.POLLS_ASSURED
        if mine >= protocol.POLLS_PER_CONNECTION or (self._waiting >= protocol.MAX_POLLS and not assured):
            raise TooManyCalls(f"{mine} calls of this connection are held already, {self._waiting} of all connections")
        self._polls[peer] += 1
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._polls[peer] -= 1
            if not self._polls[peer]:
                del self._polls[peer]
