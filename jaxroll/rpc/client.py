"""RPC client: finds the server by its address or the file with it, and repeats calls across restarts of the server.

Every call is idempotent. A call that reaches no server, or a busy one, is repeated with back-off until `patience_s` is
over; each attempt has a deadline of its own. While the server is down, the patience begins again with every answer to
another call: a server that is killed repeatedly may never live long enough to answer a call that waits there.

gRPC drops a reply that arrives while it still sends the body. A call that broke off in this way therefore asks first if
its body is read, and sends it after that. If no connection can be made, the TLS handshake is tried separately
(`tls.diagnosis`), because waiting does not fix certificates.

If the machine refuses gRPC a thread, gRPC does not end calls at their deadlines, often for minutes, nor does it handle
cancellations. An overdue call is therefore ended here with InfraError; a new process may get its threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
import msgspec

from jaxroll import disk, wire
from jaxroll.errors import ConfigError, DataError, DeadlineExceeded, InfraError, StoreRefusal, Unauthorized
from jaxroll.rpc import protocol
from jaxroll.rpc import tls as tls_files
from jaxroll.rpc.protocol import Envelope, error_of
from jaxroll.rpc.tls import Material

_LOG = logging.getLogger(__name__)
SILENT_S = 5.0  # without an answer to any call: the log says so, once for each such time
_BACKOFF_S = (0.05, 0.1, 0.2, 0.4, 0.5)
_DIAGNOSE_EVERY_S = 5.0
_DOUBT_AFTER = 5  # failures in a row after an answered call: a restart is no reason to check certificates
_MAX_PATIENCES = 4  # limit on the extension: a call that kills its server must end too
_RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_SENDING = "SendMessageOperation"  # in gRPC's debug string; its status is INTERNAL then
_UNAUTHORIZED = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
Metadata = tuple[tuple[str, str], ...]
_UNREAD = (0, 0)
_ADDRESS_BYTES = 4096
_OVERDUE_S = 5  # a working gRPC is late by milliseconds
_NO_MEMORY = "MemoryError"  # in gRPC's text for an exception of a handler
_TOO_LARGE = "larger than max"  # in gRPC's text for a reply over this side's limit; the only exhaustion that is final


class Transport(Protocol):
    """Delivery of single attempts of calls to a server. Used from one event loop."""

    target: str  # the server's address, for error messages

    async def attempt(
        self, path: str, body: bytes, metadata: Metadata, deadline_s: float, *, asks_first: bool
    ) -> bytes:
        """The reply to one attempt. Raises AioRpcError, or FileNotFoundError while the server's address is unknown."""
        ...

    async def diagnosis(self) -> str | None:
        """The reason, with the remedy, why no connection can ever be made; None if there may be one later."""
        ...

    def refresh(self) -> None:
        """Use the server's current address, and current certificates, from the next attempt on."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class RawClient:
    """Calls to one service. Belongs to one event loop, whose clock it uses; `session` identifies this process.

    `address` is host:port, several of them with commas between (one of which serves), the file that holds it, or
    another transport than gRPC.
    """

    def __init__(
        self,
        service: str,
        address: str | Path | Transport,
        *,
        role: str,
        name: str,
        token: str | None,
        patience_s: float,
        max_message_bytes: int,
        config_digest: str = "",
        tls: Material | None = None,
    ) -> None:
        self._service, self._patience_s = service, patience_s
        is_address = isinstance(address, (str, Path))
        self._transport = GrpcTransport(address, max_message_bytes, tls) if is_address else address
        self._right, self._name, self.session = protocol.right_of(role), name, uuid.uuid4().hex
        self._proof = () if token is None else (("authorization", f"Bearer {protocol.bearer(token, self._right)}"),)
        self._config_digest = config_digest
        self._diagnosed_s, self._failures_before_doubt = float("-inf"), 0
        self._answered_s = float("-inf")  # time of the last reply
        self._is_silent = False  # the server, and the log says so
        self.run_id = ""
        self.position = 0

    async def call(self, method: str, body: bytes, deadline_s: float, *, patience_s: float | None = None) -> bytes:
        """The body of the reply. Raises the server's refusal, Unauthorized, or InfraError when the patience is over."""
        now_s = asyncio.get_running_loop().time
        started, patience_s = now_s(), self._patience_s if patience_s is None else patience_s
        failures, asks_first = 0, False
        while True:
            try:
                envelope = await self._attempt(method, body, deadline_s, asks_first=asks_first)
                break
            except (grpc.aio.AioRpcError, FileNotFoundError) as error:
                if failures >= self._failures_before_doubt:
                    await self._raise_if_tls_mismatch(method, error)
                broke_off = _broke_off(error)
                asks_first = asks_first or broke_off
                code = None if isinstance(error, FileNotFoundError) else error.code()
                lost = broke_off or code in (None, grpc.StatusCode.UNAVAILABLE)
                since = min(max(started, self._answered_s), started + _MAX_PATIENCES * patience_s) if lost else started
                self._raise_if_final(method, error, is_over=now_s() >= since + patience_s)
                if lost or code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._note_silence(now_s() - max(started, self._answered_s), error)
            self._transport.refresh()
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1
        if self._is_silent:
            self._is_silent = False
            _LOG.warning("%s: %s at %s answers again", self._name, self._service, self._transport.target)
        self._failures_before_doubt, self._answered_s = _DOUBT_AFTER, now_s()
        self.position = max(self.position, envelope.position)
        if envelope.refusal is not None:
            raise error_of(envelope.refusal)
        return envelope.body

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()

    async def _attempt(self, method: str, body: bytes, deadline_s: float, *, asks_first: bool) -> Envelope:
        path, metadata = f"/{self._service}/{method}", self._metadata(len(body))
        reply = await self._transport.attempt(path, body, metadata, deadline_s, asks_first=asks_first)
        try:
            return wire.decode(reply, Envelope)
        except msgspec.MsgspecError as error:
            raise InfraError(f"{method}: {self._transport.target} replies in another protocol ({error})") from error

    def _metadata(self, size_bytes: int) -> Metadata:
        fields = {
            "name": self._name,
            "session": self.session,
            "right": self._right,
            "run": self.run_id,
            "protocol": str(wire.PROTOCOL_VERSION),
            "config": self._config_digest,
            "bytes": str(size_bytes),
        }
        metadata = [(f"jaxroll-{key}", value) for key, value in fields.items()]
        return (*metadata, *self._proof)

    def _note_silence(self, seconds: float, error: grpc.aio.AioRpcError | FileNotFoundError) -> None:
        if seconds < SILENT_S or self._is_silent:
            return
        self._is_silent = True
        why = "no address" if isinstance(error, FileNotFoundError) else error.code().name
        text = "%s: no answer from %s at %s for %.0f s (%s); trying again"
        _LOG.warning(text, self._name, self._service, self._transport.target, seconds, why)

    async def _raise_if_tls_mismatch(self, method: str, error: grpc.aio.AioRpcError | FileNotFoundError) -> None:
        """Raise Unauthorized if the TLS settings of the two ends do not match, which waiting does not fix."""
        now_s = asyncio.get_running_loop().time()
        if isinstance(error, FileNotFoundError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return
        if now_s - self._diagnosed_s < _DIAGNOSE_EVERY_S:
            return
        self._diagnosed_s = now_s
        if (why := await self._transport.diagnosis()) is not None:
            raise Unauthorized(f"{self._service}.{method} at {self._transport.target}: {why}") from error

    def _raise_if_final(self, method: str, error: grpc.aio.AioRpcError | FileNotFoundError, *, is_over: bool) -> None:
        """Raise the error of a call that must not be repeated, or whose patience `is_over`."""
        where = f"{self._service}.{method} at {self._transport.target}"
        if isinstance(error, FileNotFoundError):
            if is_over:
                raise InfraError(f"{where}: no address in that file; is its server running? Start it first.") from error
            return
        code, details = error.code(), error.details() or ""
        if code in _UNAUTHORIZED:
            raise Unauthorized(f"{where}: {details}") from error
        if code is grpc.StatusCode.INVALID_ARGUMENT or _TOO_LARGE in details:
            raise StoreRefusal(f"{where}: {details}") from error
        no_memory = code is grpc.StatusCode.UNKNOWN and _NO_MEMORY in details  # such a server ends and starts again
        if code not in _RETRYABLE and not no_memory and not _broke_off(error):
            raise InfraError(f"{where}: {code.name}: {details}") from error
        if is_over:
            kind = DeadlineExceeded if code is grpc.StatusCode.DEADLINE_EXCEEDED else InfraError
            remedy = "Start its server, or check the address and the network."
            raise kind(f"{where}: no answer ({code.name}: {details}); patience is over. {remedy}") from error


class GrpcTransport:
    """Transport over grpc.aio: a channel to the server's current address, with the current certificates."""

    def __init__(self, address: str | Path, max_message_bytes: int, tls: Material | None) -> None:
        self._address, self._max_message_bytes, self._tls = address, max_message_bytes, tls
        self._switches = 0  # changes to the next one of several addresses
        self._target = self._target_written = ""
        self._file = _UNREAD
        self._channel: grpc.aio.Channel | None = None
        self._tls_files: tuple[tuple[int, int], ...] = ()  # identity of the certificates that the channel was made with
        self._retired: list[grpc.aio.Channel] = []

    @property
    def target(self) -> str:
        """See Transport."""
        return self._target or str(self._address)

    async def attempt(
        self, path: str, body: bytes, metadata: Metadata, deadline_s: float, *, asks_first: bool
    ) -> bytes:
        """See Transport."""
        channel, switches = await self._connected(), self._switches
        if len(body) <= protocol.PIECE_BYTES:
            attempt = channel.unary_unary(path)(body, timeout=deadline_s, metadata=metadata)
        elif asks_first:

            async def pieces_when_read() -> AsyncIterator[bytes]:
                if protocol.READS_NOW in dict(await call.initial_metadata()):  # otherwise the refusal is on its way
                    async for piece in _pieces(body):
                        yield piece

            metadata = (*metadata, (protocol.ASKS_FIRST, "1"))
            attempt = call = channel.stream_unary(path)(pieces_when_read(), timeout=deadline_s, metadata=metadata)
        else:
            attempt = channel.stream_unary(path)(_pieces(body), timeout=deadline_s, metadata=metadata)
        try:
            return await _ended(attempt, deadline_s, f"{path[1:].replace('/', '.')} at {self.target}")
        except grpc.aio.AioRpcError:
            if self._switches == switches:  # calls that fail together at one address all go on to the same next one
                self._switches += 1
            raise

    async def diagnosis(self) -> str | None:
        """See Transport."""
        return await asyncio.to_thread(tls_files.diagnosis, self._target, self._tls)

    def refresh(self) -> None:
        """See Transport."""
        self._file = _UNREAD
        self._take_new_certificates()

    async def close(self) -> None:
        """See Transport."""
        channels, self._retired = [*self._retired, self._channel], []
        self._channel, self._target = None, ""
        for channel in channels:
            if channel is not None:
                await channel.close()

    async def _connected(self) -> grpc.aio.Channel:
        """The channel to the server's current address; the address file is read before every attempt."""
        if isinstance(self._address, str):
            addresses = self._address.split(",")
            target = addresses[self._switches % len(addresses)]
        else:
            target = self._written(self._address)
        if target != self._target or self._channel is None:
            if self._channel is not None:
                self._retired.append(self._channel)  # closing it would cancel its calls under way
            options = protocol.client_options(self._max_message_bytes)
            if self._tls is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                self._tls_files = self._tls.written()
                self._channel = grpc.aio.secure_channel(target, self._tls.channel_credentials(), options=options)
            self._target = target
        return self._channel

    def _take_new_certificates(self) -> None:
        """Connect again if the certificates were replaced: a channel keeps its certificates."""
        if self._tls is None or self._channel is None or self._tls.written() == self._tls_files:
            return
        with contextlib.suppress(ConfigError, InfraError):  # files may be half copied; the next failure checks again
            self._tls.client_context()
            self._retired.append(self._channel)
            self._channel = None

    def _written(self, path: Path) -> str:
        """The address in the file; the file is replaced atomically, so an unchanged one is not read again."""
        found = path.stat()
        identity = (found.st_ino, found.st_mtime_ns)
        if identity != self._file:
            try:
                self._target_written = disk.read_text(path, _ADDRESS_BYTES).strip()
            except DataError as error:  # the server replaces the file as a whole, so waiting for it does not help
                raise ConfigError(str(path), "", str(error), "Remove it; the server writes it again.") from error
            if not self._target_written:  # the server's machine failed before a sync; it writes it again
                raise FileNotFoundError(errno.ENOENT, "holds no address", str(path))
            if not protocol.is_address(self._target_written):
                raise ConfigError(
                    str(path), self._target_written, "is not HOST:PORT", "Remove the file; the server writes it again."
                )
            self._file = identity
        return self._target_written


def _broke_off(error: grpc.aio.AioRpcError | FileNotFoundError) -> bool:
    """True if the server was gone or had replied before all pieces were sent; a reply is lost then."""
    if isinstance(error, FileNotFoundError):
        return False
    return error.code() is grpc.StatusCode.INTERNAL and _SENDING in (error.debug_error_string() or "")


async def _ended(attempt: Awaitable[bytes], deadline_s: float, where: str) -> bytes:
    """The reply of `attempt`. InfraError if gRPC does not end it at its deadline.

    The seconds after the deadline are counted one by one, so that a process that was suspended does not fail.
    """
    loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)

    def count_down(left_s: int) -> None:
        nonlocal timer
        if left_s > 0:
            timer = loop.call_later(1.0, count_down, left_s - 1)
        else:
            limit.reschedule(loop.time())

    timer = loop.call_later(deadline_s, count_down, _OVERDUE_S)
    try:
        async with limit:
            return await attempt
    except TimeoutError as error:
        reason = f"gRPC did not end a call at its deadline of {deadline_s:g} s, nor {_OVERDUE_S} s later"
        raise InfraError(f"{where}: {reason}; the machine may have refused gRPC a thread") from error
    finally:
        timer.cancel()


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """The body in the pieces that a server reads."""
    view = memoryview(body)
    for start in range(0, len(view), protocol.PIECE_BYTES):
        yield bytes(view[start : start + protocol.PIECE_BYTES])
