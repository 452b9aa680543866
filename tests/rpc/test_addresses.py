"""Raw calls over real gRPC: restarts, files of addresses, two addresses, ports."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest

from jaxroll.errors import ConfigError, InfraError
from jaxroll.rpc.client import GrpcTransport
from jaxroll.rpc.server import RawServer
from tests.harness.cluster.raw_service import DEADLINE_S, Service, client, run, server


def test_a_restart_on_the_same_port_is_ridden_out_and_another_is_found_in_the_file(tmp_path: Path) -> None:
    address = tmp_path / "addr"

    async def calls() -> None:
        async with client(address) as raw:
            waiting = asyncio.ensure_future(raw.call("echo", b"1", DEADLINE_S))
            async with server(Service()) as port:
                address.write_text(f"127.0.0.1:{port}\n")
                assert await waiting == b"1"
            waiting = asyncio.ensure_future(raw.call("echo", b"2", DEADLINE_S))
            async with server(Service(), port) as again:
                assert again == port
                assert await waiting == b"2"
            waiting = asyncio.ensure_future(raw.call("echo", b"3", DEADLINE_S))
            async with server(Service()) as other:
                address.write_text(f"127.0.0.1:{other}\n")
                assert await waiting == b"3"

    run(calls())


def test_calls_that_fail_together_all_reach_the_address_that_serves() -> None:
    """Two failures at once are one reason to change to the next of two addresses, not two, which lead back."""

    async def calls() -> None:
        with socket.socket() as taken:  # it does not listen, so connections are refused
            taken.bind(("127.0.0.1", 0))
            await calls_to(taken.getsockname()[1])

    async def calls_to(gone: int) -> None:
        async with server(Service()) as port:
            transport = GrpcTransport(f"127.0.0.1:{gone},127.0.0.1:{port}", 2**20, None)

            async def attempts(count: int) -> list[bytes | BaseException]:
                tried = [
                    transport.attempt("/t.Service/echo", b"", (), DEADLINE_S, asks_first=False) for _ in range(count)
                ]
                return await asyncio.gather(*tried, return_exceptions=True)

            for failed in await attempts(2):
                assert isinstance(failed, grpc.aio.AioRpcError) and failed.code() is grpc.StatusCode.UNAVAILABLE
                transport.refresh()
            (_,) = await attempts(1)
            assert transport.target == f"127.0.0.1:{port}"
            await transport.close()

    run(calls())


def test_an_address_that_did_not_reach_the_disk_is_waited_for(tmp_path: Path) -> None:
    """An empty address file, as after a power failure."""
    address = tmp_path / "addr"
    address.write_text("")

    async def calls() -> None:
        async with client(address) as raw:
            waiting = asyncio.ensure_future(raw.call("echo", b"1", DEADLINE_S))
            await asyncio.sleep(0.2)
            async with server(Service()) as port:
                address.write_text(f"127.0.0.1:{port}\n")
                assert await waiting == b"1"
        async with client(tmp_path / "none", patience_s=0.1) as raw:
            (tmp_path / "none").write_text("\n")
            with pytest.raises(InfraError, match="no address in that file; is its server running"):
                await raw.call("echo", b"2", DEADLINE_S)

    run(calls())


def test_a_taken_port_is_not_shared() -> None:
    async def calls() -> None:
        async with server(Service()) as first, server(Service(), first) as second:
            assert first != second

    run(calls())


def test_an_address_that_is_not_here_is_refused() -> None:
    async def binds() -> None:
        raw = RawServer("t.Service", {}, secret="s" * 32, max_message_bytes=2**20)
        with pytest.raises(ConfigError, match="cannot listen"):
            raw.bind("203.0.113.7", 0, insecure=True)
        await raw.stop(0)

    run(binds())
