"""A grpc.aio server of raw-bytes methods that knows who calls before it reads what is said.

Each call carries its caller in metadata: token, name, session, run, protocol, config. Whoever may not call is turned
away before a byte of the body is read (`doorman`); a body is read within a budget (`intake`). A handler gets
(Caller, body) and returns a body or raises a StoreRefusal, which travels typed. A body that is not what the method
expects is INVALID_ARGUMENT; a server that can no longer keep its promises is UNAVAILABLE, one that has no room is
RESOURCE_EXHAUSTED: callers answer both with patience.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import msgspec

from jaxroll import wire
from jaxroll.errors import ConfigError, InfraError, StoreRefusal
from jaxroll.rpc import auth
from jaxroll.rpc import protocol as limits
from jaxroll.rpc.intake import Busy, Intake, Malformed, RefusalThrottle, Refused, TooManyCalls
from jaxroll.rpc.protocol import Envelope, refusal_of
from jaxroll.rpc.tls import Material

Code = grpc.StatusCode


@dataclass(frozen=True)
class Caller:
    """Who calls: a right, a name, one life of a process (session), and how long it waits for the answer.

    `run_id` and `config_digest` are what the caller believes to be part of; `peer` is its end of the connection.
    """

    right: str
    name: str
    session: str
    run_id: str
    deadline_s: float
    config_digest: str = ""
    peer: str = ""


Handler = Callable[[Caller, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class Method:
    """A method and the rights that may call it. `held`: it may wait for something to happen before it answers.

    `max_bytes` of a message, where that is less than what the server takes of any.
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
        calls_per_connection: int = limits.CALLS_PER_CONNECTION,
        held_bytes: int = 0,
    ) -> None:
        self._secret, self._tls, self._mutual_tls = secret, tls, mutual_tls
        self.intake = Intake(max_message_bytes, held_bytes)
        self.doorman = RefusalThrottle(refused)
        most = limits.connections(limits.raise_descriptor_limit())
        options = limits.server_options(limits.PIECE_BYTES, most, calls_per_connection)
        self._server = grpc.aio.server(options=options)
        paths = {f"/{service}/{name}": method for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((_Door(paths, secret, self.doorman, self.intake, position),))

    def bind(self, host: str, port: int, *, insecure: bool = False) -> int:
        """The port taken: `port` if it is free, else any (always any for 0)."""
        limits.check_exposure(host, secret=self._secret, has_tls=self._tls is not None, insecure=insecure)
        if port and not _is_free(host, port):
            port = 0
        address = limits.address(host, port)
        try:
            if self._tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, self._tls.server_credentials(mutual=self._mutual_tls))
        except RuntimeError as error:
            raise ConfigError("host", f"{host}:{port}", f"cannot listen there ({error})", "Choose another.") from error

    async def start(self) -> None:
        """Begin to answer."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop answering; calls under way may end within `grace_s`."""
        await self._server.stop(grace_s)


class _TurnedAway(Exception):
    """The call ends before its body is read."""

    def __init__(self, code: Code, why: str) -> None:
        self.code, self.why = code, why
        super().__init__(why)


class _Door(grpc.GenericRpcHandler):
    """Chooses what becomes of a call from its metadata alone.

    The handlers are of the kind that reads its request itself: gRPC then reads nothing on its own.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        secret: str | None,
        doorman: RefusalThrottle,
        intake: Intake,
        position: Callable[[], int],
    ) -> None:
        self._methods, self._doorman, self._intake, self._position = methods, doorman, intake, position
        self._tokens = None if secret is None else auth.tokens(secret)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        said = {key: value for key, value in handler_call_details.invocation_metadata or () if isinstance(value, str)}
        path = handler_call_details.method
        try:
            caller = self._caller(said)
            method = self._methods.get(path)
            if method is None:
                return None
            if caller.right not in method.rights:
                name = path.rpartition("/")[2]
                raise _TurnedAway(Code.PERMISSION_DENIED, f"the role {caller.right} may not call {name}")
            declared, asks_first = _number(said.get("jaxroll-bytes")), limits.ASKS_FIRST in said
        except _TurnedAway as refusal:
            return self._turning_away(refusal, f"{said.get('jaxroll-right', '')}:{said.get('jaxroll-name', '')}")
        return grpc.stream_unary_rpc_method_handler(self._answering(method, caller, declared, asks_first))

    def _caller(self, said: Mapping[str, str]) -> Caller:
        right, name, session = (said.get(f"jaxroll-{key}", "") for key in ("right", "name", "session"))
        shown = said.get("authorization", "").removeprefix("Bearer ")
        known = right in auth.ROLES and (self._tokens is None or auth.matches(self._tokens, right, shown))
        if not known:
            raise _TurnedAway(Code.UNAUTHENTICATED, f"no valid token for the role {right[:64]!r}; roles take it from "
                              f"{auth.TOKEN_VARIABLE} or RUN/{auth.TOKEN_FILE}")  # fmt: skip
        if not (limits.is_name(name) and limits.is_name(session)):
            raise _TurnedAway(Code.INVALID_ARGUMENT, "name and session must match [A-Za-z0-9_-]{1,64}")
        protocol = said.get("jaxroll-protocol", "")
        if protocol != str(wire.PROTOCOL_VERSION):
            raise _TurnedAway(Code.UNAUTHENTICATED, f"protocol {wire.PROTOCOL_VERSION} is spoken here, the caller "
                              f"speaks {protocol[:16] or 'none'}: install the same JaxRoll on both sides")  # fmt: skip
        return Caller(
            right, name, session, said.get("jaxroll-run", ""), limits.MAX_WAIT_S, said.get("jaxroll-config", "")
        )

    def _turning_away(self, refusal: _TurnedAway, who: str) -> grpc.RpcMethodHandler:
        async def turn_away(_: Any, context: grpc.aio.ServicerContext) -> bytes:
            await self._doorman.turn_away(context.peer() or "", who, refusal.why, _left_s(context))
            await context.abort(refusal.code, refusal.why)
            return b""

        return grpc.stream_unary_rpc_method_handler(turn_away)

    def _answering(self, method: Method, caller: Caller, declared: int | None, asks_first: bool):
        async def answer(_: Any, context: grpc.aio.ServicerContext) -> bytes:
            peer = context.peer() or ""
            known = replace(caller, peer=peer, deadline_s=_left_s(context))
            read = _telling(context) if asks_first else context.read
            body = b""
            try:
                with self._doorman.poll(peer) if method.held else contextlib.nullcontext():
                    async with self._intake.body(read, declared, known.deadline_s, method.max_bytes) as body:
                        return await self._answer(method, known, body)
            except (Malformed, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
                late = Code.INVALID_ARGUMENT, f"malformed message: {error}"[:500]
            except TooManyCalls as error:
                late = Code.RESOURCE_EXHAUSTED, str(error)
            except Busy as error:
                await context.abort(Code.RESOURCE_EXHAUSTED, str(error))
            except InfraError as error:
                await context.abort(Code.UNAVAILABLE, str(error))
            del body  # and with the exception its traceback: nothing large is kept while the answer is held back
            if late[0] is Code.INVALID_ARGUMENT:
                await self._doorman.misunderstood(_left_s(context))
            else:
                await self._doorman.hold(_left_s(context))
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
    """How long the caller waits for its answer."""
    left_s = context.time_remaining()
    return limits.MAX_WAIT_S if left_s is None else left_s


def _telling(context: grpc.aio.ServicerContext) -> Callable[[], Awaitable[bytes]]:
    """`context.read`, which tells the caller first that its body is read: it asked before it sends."""
    told = False

    async def read() -> bytes:
        nonlocal told
        if not told:
            told = True
            await context.send_initial_metadata(((limits.READS_NOW, "1"),))
        return await context.read()

    return read


def _number(text: str | None) -> int | None:
    """A declared size; None when nothing was declared."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise _TurnedAway(Code.INVALID_ARGUMENT, "jaxroll-bytes must be the number of bytes of the message")
    return int(text)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True
