"""HTTP servers: their socket, uvicorn without signal handlers, and the token of their clients.

Requests are parsed by httptools, in C; where it is not installed, by h11, which uvicorn brings.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope

from jaxroll import disk
from jaxroll.errors import ConfigError, DataError
from jaxroll.rpc import protocol

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    _PARSER: Any = "h11"
else:

    class _BoundedParser(HttpToolsProtocol):
        """uvicorn's protocol with httptools, which has no limit of its own for the head of a request."""

        _head_bytes = 0

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the head of the request has more than {_HEAD_BYTES} bytes")

        def on_headers_complete(self) -> None:
            self._head_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

    _PARSER = _BoundedParser

_STOP_S = 2.0  # for open connections when the server ends
_HEAD_BYTES = 64 << 10  # of a request: its line and headers, and the trailers after a body in chunks


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers: the process has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: ASGIApp, listening: socket.socket, *, sockets: bool = False) -> None:
    """Answer requests to `app` on `listening` until cancelled; with `sockets` WebSockets too (package websockets)."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="websockets-sansio" if sockets else "none",
        http=_PARSER,
        loop="none",
        server_header=False,
        timeout_graceful_shutdown=int(_STOP_S),
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    protocol.make_full_collections_rare()
    server = _Server(config)
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(running)
    finally:
        server.should_exit = True
        await asyncio.wait([running], timeout=_STOP_S + 1)
        running.cancel()


def listen(host: str, port: int, *, insecure: bool = False) -> socket.socket:
    """A socket that listens on `host` and `port` (0: any free one).

    ConfigError for an occupied port, and for an address that other machines reach unless `insecure`: the token and the
    answers would cross the network in plain text.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError("--host", host, f"the name has no address: {error.strerror}", "Use 127.0.0.1.") from error
    if not insecure and not (str(address[0]).startswith("127.") or address[0] == "::1"):
        raise ConfigError(
            "--host",
            host,
            "other machines reach this address, and HTTP sends the token in plain text",
            "Use 127.0.0.1 and a tunnel, or --insecure on a trusted network.",
        )
    made = socket.socket(family, kind, proto)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError as error:
        made.close()
        raise ConfigError(
            "--port", port, f"cannot listen on {host}: {error.strerror}", "Use 0 for a free port."
        ) from error
    made.setblocking(False)
    return made


def address(host: str, listening: socket.socket) -> str:
    """The base URL of the server, without `/v1`."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}"


# --- the token of the clients


_TOKEN_BYTES = 4096


def token(secret: str | None, path: Path) -> str:
    """The clients' token, which is written into `path` for its owner; derived from a run's `secret`, if there is one.

    Without a secret the token in `path` is used again. ConfigError if `path` is no file for a token, or cannot be
    written or made private.
    """
    remedy = "Name a file that holds a token, or one that does not exist."
    if path.exists() and not path.is_file():
        raise ConfigError("--token-file", str(path), "is not a regular file", remedy)
    if secret is None and path.is_file():
        try:
            kept = disk.read_text(path, _TOKEN_BYTES).strip()
        except DataError as error:
            raise ConfigError("--token-file", str(path), str(error), remedy) from error
        if len(kept.split()) > 1 or not kept.isprintable():
            raise ConfigError("--token-file", str(path), "holds no token", remedy)
        protocol.keep_private(path)
        if kept:
            return kept
    made = secrets.token_hex(32) if secret is None else protocol.derived(secret, "http")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk.replaced(path) as draft:
            draft.unlink(missing_ok=True)  # left by a killed process with this pid; its mode may differ
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(made + "\n")
    except OSError as error:
        if secret is not None or disk.remedy(error, path):  # the file is the run's, or its disk is the cause
            raise
        raise ConfigError("--token-file", str(path), f"cannot be written ({error.strerror})", remedy) from error
    return made


def shows_token(scope: Scope, token: bytes) -> bool:
    """True if the request's header `Authorization` has the token: Bearer, or Basic as clients send it for a URL."""
    shown = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    kind, _, value = shown.partition(b" ")
    if kind.lower() == b"basic":
        try:
            value = base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return False
    return kind.lower() in (b"bearer", b"basic") and hmac.compare_digest(value.strip(), token)


def user_token_file(name: str) -> Path:
    """The token file `name` of servers without a run: in the user's state folder (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "jaxroll" / name
