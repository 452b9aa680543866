"""A grpc.aio server of raw-bytes methods that knows who calls before it reads what is said.

Each call carries its caller in metadata. A handler gets (Caller, body) and returns a body or raises a StoreRefusal,
which travels typed. A body that is not what the method expects is INVALID_ARGUMENT; a server that can no longer keep
its promises is UNAVAILABLE, which callers answer with patience.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import grpc
import grpc.aio
import msgspec

from jaxroll import wire
from jaxroll.errors import ConfigError, InfraError, StoreRefusal
from jaxroll.rpc import auth, limits
from jaxroll.rpc.envelope import Envelope, refusal_of


@dataclass(frozen=True)
class Caller:
    """Who calls: a right, a name, one life of a process (session), and how long it waits for the answer."""

    right: str
    name: str
    session: str
    run_id: str
    deadline_s: float


Handler = Callable[[Caller, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class Method:
    """A method and the rights that may call it."""

    handler: Handler
    rights: frozenset[str]


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
    ) -> None:
        self._secret, self._position = secret, position
        self._server = grpc.aio.server(
            options=limits.server_options(max_message_bytes), maximum_concurrent_rpcs=limits.MAX_CONCURRENT_CALLS
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._guarded(method)) for name, method in methods.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def bind(self, host: str, port: int, *, insecure: bool = False) -> int:
        """The port taken: `port` if it is free, else any (always any for 0)."""
        limits.check_exposure(host, has_token=self._secret is not None, insecure=insecure)
        if port and not _is_free(host, port):
            port = 0
        try:
            return self._server.add_insecure_port(limits.address(host, port))
        except RuntimeError as error:
            raise ConfigError("host", f"{host}:{port}", f"cannot listen there ({error})", "Choose another.") from error

    async def start(self) -> None:
        """Begin to answer."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop answering; calls under way may end within `grace_s`."""
        await self._server.stop(grace_s)

    def _guarded(self, method: Method):
        async def call(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
            caller = await self._caller(method, context)
            try:
                envelope = Envelope(await method.handler(caller, body), None, self._position())
            except StoreRefusal as refusal:
                envelope = Envelope(b"", refusal_of(refusal), self._position())
            except msgspec.MsgspecError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"malformed message: {error}")
            except InfraError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            return wire.encode(envelope)

        return call

    async def _caller(self, method: Method, context: grpc.aio.ServicerContext) -> Caller:
        said = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        right, name, session = (said.get(f"jaxroll-{key}", "") for key in ("right", "name", "session"))
        shown = said.get("authorization", "").removeprefix("Bearer ")
        if right not in auth.ROLES or not auth.admits(self._secret, right, shown):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"no valid token for the role {right[:64]!r}")
        if right not in method.rights:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"a {right} may not call this")
        if not (limits.is_name(name) and limits.is_name(session)):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "name and session must match [A-Za-z0-9_-]{1,64}")
        remaining = context.time_remaining()
        return Caller(right, name, session, said.get("jaxroll-run", ""), remaining if remaining else limits.MAX_WAIT_S)


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True
