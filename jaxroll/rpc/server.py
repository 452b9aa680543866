"""RPC server: grpc.aio methods on raw bytes that check the caller before they read the body.

Each call carries its caller in metadata: token, name, session, run, protocol, config. A caller without the right is
refused before a byte of its body is read (`RefusalThrottle`); a body is read within a budget (`Intake`). A handler gets
(Caller, body) and returns a body or raises a StoreRefusal, which is sent typed. A malformed body is INVALID_ARGUMENT; a
server that has failed is UNAVAILABLE and one without room RESOURCE_EXHAUSTED: clients repeat calls after both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import msgspec

from jaxroll import wire
from jaxroll.errors import ConfigError, InfraError, StoreRefusal
from jaxroll.rpc import protocol as rpc_protocol
from jaxroll.rpc.intake import Busy, Intake, MalformedBody, RefusalThrottle, Refused, TooManyCalls
from jaxroll.rpc.protocol import Envelope, refusal_of
from jaxroll.rpc.tls import Material

Code = grpc.StatusCode


@dataclass(frozen=True)
class Caller:
    """A caller: its right, name, session (one process of that name), and the time that it waits for the reply.

    `run_id` and `config_digest` are those that the caller claims; `peer` is its end of the connection.
    """

    right: str
    name: str
    session: str
    run_id: str
    deadline_s: float
    config_digest: str = ""
    peer: str = ""


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # RFC 9113, 3.4
Handler = Callable[[Caller, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class Method:
    """A method and the rights that may call it. `held`: it may wait for an event before it replies.

    `max_bytes` limits its messages further than the server does.
    """

    handler: Handler
    rights: frozenset[str]
    held: bool = False
    max_bytes: int | None = None


class RawServer:
    """One service on one port."""

    def __init__(
        self,
        service: str,
        methods: Mapping[str, Method],
        *,
        secret: str | None,
        max_message_bytes: int,
        position: Callable[[], int] = lambda: 0,
        tls: Material | None = None,
        mutual_tls: bool = False,
        refused: Refused | None = None,
        calls_per_connection: int = rpc_protocol.CALLS_PER_CONNECTION,
        held_bytes: int = 0,
    ) -> None:
        self._secret, self._tls, self._mutual_tls = secret, tls, mutual_tls
        self.intake = Intake(max_message_bytes, held_bytes)
        self.throttle = RefusalThrottle(refused)
        most = rpc_protocol.connections(rpc_protocol.raise_descriptor_limit())
        options = rpc_protocol.server_options(rpc_protocol.PIECE_BYTES, most, calls_per_connection)
        self._server = grpc.aio.server(options=options)
        paths = {f"/{service}/{name}": method for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((_Dispatcher(paths, secret, self.throttle, self.intake, position),))

    def bind(self, host: str, port: int, *, insecure: bool = False) -> int:
        """Bind to `port` if it is free, otherwise (and for 0) to any; the port bound. ConfigError if that fails."""
        rpc_protocol.check_exposure(host, secret=self._secret, has_tls=self._tls is not None, insecure=insecure)
        if port and rpc_protocol.bind_error(host, port):
            port = 0
        address = rpc_protocol.address(host, port)
        try:
            if self._tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, self._tls.server_credentials(mutual=self._mutual_tls))
        except RuntimeError as error:
            raise ConfigError("host", f"{host}:{port}", f"cannot listen there ({error})", "Choose another.") from error

    async def start(self) -> None:
        """Begin to serve."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop serving; calls under way may end within `grace_s`."""
        await self._server.stop(grace_s)


class _Refused(Exception):
    """The call ends before its body is read."""

    def __init__(self, code: Code, why: str) -> None:
        self.code, self.why = code, why
        super().__init__(why)


class _Dispatcher(grpc.GenericRpcHandler):
    """Chooses the handler of a call, or refuses it, by its metadata alone.

    Its handlers read the request stream themselves, so that gRPC reads nothing before them.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        secret: str | None,
        throttle: RefusalThrottle,
        intake: Intake,
        position: Callable[[], int],
    ) -> None:
        self._methods, self._throttle, self._intake, self._position = methods, throttle, intake, position
        self._tokens = None if secret is None else rpc_protocol.tokens(secret)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        metadata = {
            key: value for key, value in handler_call_details.invocation_metadata or () if isinstance(value, str)
        }
        path = handler_call_details.method
        try:
            caller = self._caller(metadata)
            method = self._methods.get(path)
            if method is None:
                return None
            if caller.right not in method.rights:
                name = path.rpartition("/")[2]
                raise _Refused(Code.PERMISSION_DENIED, f"the role {caller.right} may not call {name}")
            declared, asks_first = _number(metadata.get("jaxroll-bytes")), rpc_protocol.ASKS_FIRST in metadata
        except _Refused as refusal:
            who = f"{metadata.get('jaxroll-right', '')}:{metadata.get('jaxroll-name', '')}"
            return self._refusing_handler(refusal, who)
        return grpc.stream_unary_rpc_method_handler(self._handler(method, caller, declared, asks_first))

    def _caller(self, metadata: Mapping[str, str]) -> Caller:
        right, name, session = (metadata.get(f"jaxroll-{key}", "") for key in ("right", "name", "session"))
        shown = metadata.get("authorization", "").removeprefix("Bearer ")
        known = right in rpc_protocol.ROLES and (
            self._tokens is None or rpc_protocol.matches(self._tokens, right, shown)
        )
        if not known:
            raise _Refused(
                Code.UNAUTHENTICATED,
                f"no valid token for the role {right[:64]!r}; roles take it from "
                f"{rpc_protocol.TOKEN_VARIABLE} or RUN/token",
            )
        if not (rpc_protocol.NAME.fullmatch(name) and rpc_protocol.NAME.fullmatch(session)):
            raise _Refused(Code.INVALID_ARGUMENT, "name and session must match [A-Za-z0-9_-]{1,64}")
        protocol = metadata.get("jaxroll-protocol", "")
        if protocol != str(wire.PROTOCOL_VERSION):
            raise _Refused(
                Code.UNAUTHENTICATED,
                f"the server has protocol {wire.PROTOCOL_VERSION}, the caller "
                f"{protocol[:16] or 'none'}: install the same JaxRoll on both sides",
            )
        return Caller(
            right,
            name,
            session,
            metadata.get("jaxroll-run", ""),
            rpc_protocol.MAX_WAIT_S,
            metadata.get("jaxroll-config", ""),
        )

    def _refusing_handler(self, refusal: _Refused, who: str) -> grpc.RpcMethodHandler:
        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> bytes:
            await self._throttle.delay_refusal(context.peer() or "", who, refusal.why, _left_s(context))
            await context.abort(refusal.code, refusal.why)
            return b""

        return grpc.stream_unary_rpc_method_handler(refuse)

    def _handler(self, method: Method, caller: Caller, declared: int | None, asks_first: bool):
        async def answer(_: Any, context: grpc.aio.ServicerContext) -> bytes:
            peer = context.peer() or ""
            known = replace(caller, peer=peer, deadline_s=_left_s(context))
            read = _announcing_read(context) if asks_first else context.read
            body = b""
            try:
                with self._throttle.poll(peer) if method.held else contextlib.nullcontext():
                    async with self._intake.body(read, declared, known.deadline_s, method.max_bytes) as body:
                        return await self._answer(method, known, body)
            except (MalformedBody, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
                late = Code.INVALID_ARGUMENT, f"malformed message: {error}"[:500]
            except TooManyCalls as error:
                late = Code.RESOURCE_EXHAUSTED, str(error)
            except Busy as error:
                await context.abort(Code.RESOURCE_EXHAUSTED, str(error))
            except InfraError as error:
                await context.abort(Code.UNAVAILABLE, str(error))
            del body  # with the exception its traceback is freed too: nothing large is kept during the delay
            if late[0] is Code.INVALID_ARGUMENT:
                await self._throttle.delay_malformed(_left_s(context))
            else:
                await self._throttle.hold(_left_s(context))
            await context.abort(*late)
            return b""

        return answer

    async def _answer(self, method: Method, caller: Caller, body: bytes) -> bytes:
        try:
            envelope = Envelope(await method.handler(caller, body), None, self._position())
        except StoreRefusal as refusal:
            envelope = Envelope(b"", refusal_of(refusal), self._position())
        return wire.encode(envelope)


def _left_s(context: grpc.aio.ServicerContext) -> float:
    """Seconds that the caller still waits for the reply."""
    left_s = context.time_remaining()
    return rpc_protocol.MAX_WAIT_S if left_s is None else left_s


def _announcing_read(context: grpc.aio.ServicerContext) -> Callable[[], Awaitable[bytes]]:
    """`context.read` that first announces to the caller that its body is read."""
    announced = False

    async def read() -> bytes:
        nonlocal announced
        if not announced:
            announced = True
            await context.send_initial_metadata(((rpc_protocol.READS_NOW, "1"),))
        return await context.read()

    return read


def _number(text: str | None) -> int | None:
    """The declared size; None without one."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise _Refused(Code.INVALID_ARGUMENT, "jaxroll-bytes must be the number of bytes of the message")
    return int(text)


async def is_silent(address: str, limit_s: float) -> bool:
    """True if a server accepts a new connection and sends nothing for `limit_s`, or leaves it in the queue so long.

    A gRPC server sends its settings at once; one with TLS refuses what is not TLS. False if no connection can be made.
    """
    host, _, port = address.rpartition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(_PREFACE)
            await reader.read(1)
    except TimeoutError:
        return True
    except (OSError, RuntimeError):  # a name cannot be looked up without a thread
        return False
    finally:
        if writer is not None:
            writer.close()
    return False
