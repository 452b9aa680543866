"""Members on their way to the store: what is ready while a call is under way goes together in the next one.

Most of what a put costs the store is the call. A sampler's members end in bursts, so under load a call carries many of
them and the store does more; alone, a member goes at once. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from jaxroll.errors import InfraError, StoreRefusal
from jaxroll.rpc.envelope import error_of
from jaxroll.store.messages import MAX_PUTS, PutAnswer, PutCall, PutReply

MAX_CALL_BYTES = 2**20  # of members in one call, unless a single one has more

Waiting = tuple[bytes, asyncio.Future[str]]


class Puts:
    """Puts by way of `call`, which sends some members and is patient with a store that is away."""

    def __init__(self, call: Callable[[PutCall], Awaitable[PutReply]]) -> None:
        self._call = call
        self._waiting: deque[Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    async def put(self, body: bytes) -> str:
        """The store's answer for the member `body`; raises its refusal, or the InfraError of a store that stays away.

        Cancelled, it may have been put or not.
        """
        if self._closed:
            raise InfraError("this client of the store is closed")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((body, answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all())
        return await answer

    async def close(self) -> None:
        """Give up what was not answered."""
        self._closed = True
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _send_all(self) -> None:
        batch: list[Waiting] = []
        try:
            while batch := self._next():
                await self._send(batch)
        except asyncio.CancelledError:
            self._fail(batch, InfraError("this client of the store was closed before it was answered"))
        except Exception as error:  # noqa: BLE001 - each put that waits raises it
            self._fail(batch, error)

    def _next(self) -> list[Waiting]:
        """The first of those that somebody still waits for, as many as go into one call."""
        batch: list[Waiting] = []
        size = 0
        while self._waiting and len(batch) < MAX_PUTS:
            body, answer = self._waiting[0]
            if batch and size + len(body) > MAX_CALL_BYTES:
                break
            self._waiting.popleft()
            if not answer.done():
                batch.append((body, answer))
                size += len(body)
        return batch

    async def _send(self, batch: list[Waiting]) -> None:
        try:
            answers = (await self._call(PutCall(tuple(body for body, _ in batch)))).answers
        except StoreRefusal as refusal:
            if len(batch) == 1:
                _settle(batch[0][1], refusal)
                return
            for one in batch:  # the call was refused as a whole, which may be one member's fault
                await self._send([one])
            return
        if len(answers) != len(batch):
            raise InfraError(f"the store gave {len(answers)} answers for {len(batch)} members")
        for (_, waiting), answer in zip(batch, answers, strict=True):
            _settle(waiting, _said(answer))

    def _fail(self, batch: list[Waiting], error: Exception) -> None:
        for _, answer in [*batch, *self._waiting]:
            _settle(answer, error)
        self._waiting.clear()


def _said(answer: PutAnswer) -> str | StoreRefusal:
    return answer.result if answer.refusal is None else error_of(answer.refusal)


def _settle(waiting: asyncio.Future[str], answer: str | Exception) -> None:
    if waiting.done():  # whoever waited has gone
        return
    if isinstance(answer, Exception):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)
