"""A JSON call over HTTP/1.1 on the event loop: one connection per call, which a cancellation closes at once."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

MAX_BODY_BYTES = 4 << 20
_MAX_HEADERS = 100


class HttpError(Exception):
    """A call without a usable response. `retry_after_s` is the server's wish, 0 without one."""

    def __init__(self, cause: str, detail: str = "", *, retry: bool = True, retry_after_s: float = 0.0) -> None:
        self.cause, self.retry, self.retry_after_s = cause, retry, retry_after_s
        super().__init__(f"{cause} {detail}".strip())


async def post_json(url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> Any:
    """The decoded response to a POST of `body` as JSON, at most `timeout_s` after the call.

    Raises HttpError, with `retry` false for a status that another attempt would not change (4xx except 408 and 429).
    """
    try:
        async with asyncio.timeout(timeout_s):
            status, found, text = await _exchange(url, msgspec.json.encode(body), headers)
    except TimeoutError as error:
        raise HttpError("timeout", f"after {timeout_s:g} s") from error
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise HttpError("connection", f"{type(error).__name__}: {error}") from error
    if status != 200:
        retry = status >= 500 or status in (408, 429)
        try:
            after_s = max(0.0, float(found.get("retry-after", 0)))
        except ValueError:  # a date
            after_s = 0.0
        raise HttpError(f"status {status}", text[:200].decode(errors="replace"), retry=retry, retry_after_s=after_s)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError("not JSON", str(error)) from error


async def _exchange(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(host, port, ssl=ssl.create_default_context() if secure else None)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = {
            "Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", "Accept": "application/json",
            "Content-Length": str(len(body)), "Connection": "close", **headers,
        }  # fmt: skip
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode() + body)
        await writer.drain()
        status, found = await _head(reader)
        return status, found, await _body(reader, found)
    finally:
        writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = (await reader.readuntil(b"\r\n")).decode("latin-1").split()
    if len(line) < 2 or not line[0].startswith("HTTP/1"):
        raise ValueError("not an HTTP response")
    found: dict[str, str] = {}
    while (text := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = text.decode("latin-1").partition(":")
        found[name.strip().lower()] = value.strip()
        if len(found) > _MAX_HEADERS:
            raise ValueError("too many headers")
    return int(line[1]), found


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        found = bytearray()
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            _limit(len(found) + size)
            found += (await reader.readexactly(size + 2))[:size]
        return bytes(found)
    if "content-length" in headers:
        size = int(headers["content-length"])
        _limit(size)
        return await reader.readexactly(size)
    found = bytearray()
    while data := await reader.read(1 << 16):
        found += data
        _limit(len(found))
    return bytes(found)


def _limit(size: int) -> None:
    if not 0 <= size <= MAX_BODY_BYTES:
        raise ValueError(f"a response of {size} bytes, at most {MAX_BODY_BYTES} are taken")
