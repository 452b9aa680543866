"""A service of raw calls over real gRPC, with its server and its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from jaxroll.errors import Fenced, InfraError
from jaxroll.rpc.client import RawClient
from jaxroll.rpc.server import Caller, Method, RawServer

ALL = frozenset({"sampler", "learner"})
DEADLINE_S = 50.0  # of calls that are answered at once


class Service:
    """Answers, refuses, breaks, hangs."""

    def __init__(self) -> None:
        self.calls: list[Caller] = []
        self.failures_left = 0

    async def echo(self, caller: Caller, body: bytes) -> bytes:
        self.calls.append(caller)
        return body

    async def refuse(self, caller: Caller, body: bytes) -> bytes:
        raise Fenced("another holder has it")

    async def malformed(self, caller: Caller, body: bytes) -> bytes:
        return msgspec.msgpack.decode(body, type=bytes)

    async def flaky(self, caller: Caller, body: bytes) -> bytes:
        self.failures_left -= 1
        if self.failures_left >= 0:
            raise InfraError("not now")
        return b"at last"

    async def without_memory(self, caller: Caller, body: bytes) -> bytes:
        self.failures_left -= 1
        if self.failures_left >= 0:
            raise MemoryError
        return b"of the next server"

    async def hang(self, caller: Caller, body: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    def methods(self) -> dict[str, Method]:
        names = ("echo", "refuse", "malformed", "flaky", "without_memory", "hang")
        return {name: Method(getattr(self, name), ALL) for name in names} | {
            "learners": Method(self.echo, frozenset({"learner"}))
        }


@contextlib.asynccontextmanager
async def server(service: Service, port: int = 0, secret: str | None = None) -> AsyncIterator[int]:
    raw = RawServer("t.Service", service.methods(), secret=secret, max_message_bytes=2**20, position=lambda: 42)
    taken = raw.bind("127.0.0.1", port)
    await raw.start()
    try:
        yield taken
    finally:
        await raw.stop(0.1)


@contextlib.asynccontextmanager
async def client(address: str | Path, **options) -> AsyncIterator[RawClient]:
    values = {"role": "sampler", "name": "s", "token": None, "patience_s": 100.0, "max_message_bytes": 2**20} | options
    raw = RawClient("t.Service", address, **values)
    try:
        yield raw
    finally:
        await raw.close()


def run(job) -> None:
    asyncio.run(asyncio.wait_for(job, 250.0))
