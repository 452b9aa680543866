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
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from jaxroll.errors import InfraError, JaxRollError
from jaxroll.rpc.limits import PIECE_BYTES

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
