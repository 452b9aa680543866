"""The calling side: finds the server by address or by the file that holds it, and survives its restarts.

Every call is idempotent by contract, so a call that met a dead server is made again, with back-off, until `patience_s`
is over. Each attempt has a deadline of its own.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import grpc
import grpc.aio
import msgspec

from jaxroll import wire
from jaxroll.errors import DeadlineExceeded, InfraError, StoreRefusal, Unauthorized
from jaxroll.rpc import auth, limits
from jaxroll.rpc.envelope import Envelope, error_of

_BACKOFF_S = (0.05, 0.1, 0.2, 0.4, 0.5)
_TRY_AGAIN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
_WHO_ARE_YOU = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


class RawClient:
    """Calls to one service. Belongs to one event loop; `session` names this life of the caller."""

    def __init__(
        self,
        service: str,
        address: str | Path,
        *,
        role: str,
        name: str,
        token: str | None,
        patience_s: float,
        max_message_bytes: int,
    ) -> None:
        self._service, self._address, self._patience_s = service, address, patience_s
        self._right, self._name, self.session = auth.right_of(role), name, uuid.uuid4().hex
        self._token, self._max_message_bytes = token, max_message_bytes
        self._target = ""
        self._channel: grpc.aio.Channel | None = None
        self._retired: list[grpc.aio.Channel] = []
        self.run_id = ""
        self.position = 0

    async def call(self, method: str, body: bytes, deadline_s: float, *, patience_s: float | None = None) -> bytes:
        """The body of the answer. Raises the typed refusal, Unauthorized, or InfraError when patience ends."""
        give_up = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        failures = 0
        while True:
            try:
                envelope = await self._attempt(method, body, deadline_s)
                break
            except (grpc.aio.AioRpcError, FileNotFoundError) as error:
                self._raise_if_final(method, error, give_up)
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1
        self.position = max(self.position, envelope.position)
        if envelope.refusal is not None:
            raise error_of(envelope.refusal)
        return envelope.body

    async def close(self) -> None:
        """Let go of the connection."""
        channels, self._retired = [*self._retired, self._channel], []
        self._channel, self._target = None, ""
        for channel in channels:
            if channel is not None:
                await channel.close()

    async def _attempt(self, method: str, body: bytes, deadline_s: float) -> Envelope:
        channel = await self._connected()
        send = channel.unary_unary(f"/{self._service}/{method}")
        answer = await send(body, timeout=deadline_s, metadata=self._metadata())
        try:
            return wire.decode(answer, Envelope)
        except msgspec.MsgspecError as error:
            raise InfraError(f"{method}: {self._target} answers in another protocol ({error})") from error

    async def _connected(self) -> grpc.aio.Channel:
        """The channel to where the server is now: the address file is read again before every attempt."""
        target = self._address if isinstance(self._address, str) else self._address.read_text().strip()
        if target != self._target or self._channel is None:
            if self._channel is not None:
                self._retired.append(self._channel)  # closing it would cancel the calls under way on it
            self._channel = grpc.aio.insecure_channel(target, options=limits.client_options(self._max_message_bytes))
            self._target = target
        return self._channel

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        said = {"name": self._name, "session": self.session, "right": self._right, "run": self.run_id}
        metadata = [(f"jaxroll-{key}", value) for key, value in said.items()]
        if self._token is not None:
            metadata.append(("authorization", f"Bearer {auth.bearer(self._token, self._right)}"))
        return tuple(metadata)

    def _raise_if_final(self, method: str, error: grpc.aio.AioRpcError | FileNotFoundError, give_up: float) -> None:
        where = f"{self._service}.{method} at {self._target or self._address}"
        if isinstance(error, FileNotFoundError):
            if time.monotonic() >= give_up:
                raise InfraError(f"{where}: no such address file; is the store running?") from error
            return
        code = error.code()
        if code in _WHO_ARE_YOU:
            raise Unauthorized(f"{where}: {error.details()}") from error
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise StoreRefusal(f"{where}: {error.details()}") from error
        if code not in _TRY_AGAIN:
            raise InfraError(f"{where}: {code.name}: {error.details()}") from error
        if time.monotonic() >= give_up:
            kind = DeadlineExceeded if code is grpc.StatusCode.DEADLINE_EXCEEDED else InfraError
            raise kind(f"{where}: no answer ({code.name}: {error.details()}); patience is over") from error
