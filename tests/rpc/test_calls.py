"""Raw calls over real gRPC: retries, deadlines, typed errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import msgspec
import pytest

from jaxroll.errors import DeadlineExceeded, Fenced, InfraError, StoreRefusal, Unauthorized
from jaxroll.rpc import client as rpc_client
from jaxroll.rpc import intake, protocol
from jaxroll.rpc import server as rpc_server
from jaxroll.rpc.client import RawClient
from jaxroll.rpc.server import Caller
from tests.harness.cluster.raw_service import DEADLINE_S, Service, client, run, server


def test_a_body_refused_while_it_is_sent_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC fails to send a piece after the reply has arrived, and drops the reply; asking before sending gets it."""
    broken: list[bool] = []

    def noted(error: grpc.aio.AioRpcError) -> bool:
        broken.append(broke_off(error))
        return broken[-1]

    async def job() -> None:
        async with server(Service(), secret="s" * 32) as port:
            address = f"127.0.0.1:{port}"
            async with client(address, token="s" * 32) as known, client(address, token="t" * 32) as stranger:
                for attempt in range(32):  # whether a call breaks off is a matter of time: most do not
                    if attempt >= 8 and any(broken):
                        break
                    with pytest.raises(StoreRefusal, match="the limit is 1048576"):
                        await known.call("echo", bytes(8 * 2**20), DEADLINE_S)
                    with pytest.raises(Unauthorized, match="no valid token"):
                        await stranger.call("echo", bytes(8 * 2**20), DEADLINE_S)
                assert await known.call("echo", b"x" * 2**19, DEADLINE_S) == b"x" * 2**19

    broke_off = rpc_client._broke_off
    monkeypatch.setattr(rpc_client, "_broke_off", noted)
    monkeypatch.setattr(intake.Credit, "take", lambda credit, now_s: False)  # who is held is sending meanwhile
    monkeypatch.setattr(intake, "HOLD_S", 0.1)
    run(job())
    assert any(broken), "no call broke off: this shows nothing"


def test_a_call_that_broke_off_sends_its_body_once_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    pieces, telling = rpc_client._pieces, rpc_server._announcing_read

    async def noted(body: bytes) -> AsyncIterator[bytes]:
        async for piece in pieces(body):
            events.append("piece")
            yield piece

    def later(context: grpc.aio.ServicerContext):
        read = telling(context)

        async def slowly() -> bytes:
            if "reads" not in events:
                await asyncio.sleep(0.2)
                events.append("reads")
            return await read()

        return slowly

    async def job() -> None:
        async with server(Service()) as port, client(f"127.0.0.1:{port}") as raw:
            body = bytes(range(256)) * 3000
            monkeypatch.setattr(RawClient, "_attempt", broken_off(1))
            assert await raw.call("echo", body, DEADLINE_S) == body

    monkeypatch.setattr(rpc_client, "_pieces", noted)
    monkeypatch.setattr(rpc_server, "_announcing_read", later)
    run(job())
    assert events == ["reads", "piece", "piece", "piece"]


def broken_off(times: int, answered: bool = False):
    """`RawClient._attempt`, of which the first ones break off; if `answered`, another call succeeds meanwhile."""
    attempt, left = RawClient._attempt, [times]

    async def breaks_off(raw: RawClient, method: str, body: bytes, deadline_s: float, *, asks_first: bool):
        assert asks_first == (left[0] < times)
        if left[0]:
            left[0] -= 1
            if answered:
                raw._answered_s = time.monotonic()
            words, none = f"Failed execute_batch: {rpc_client._SENDING}", grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, "Internal error", words)
        return await attempt(raw, method, body, deadline_s, asks_first=asks_first)

    return breaks_off


@pytest.mark.parametrize("answered", [True, False])
def test_a_server_that_dies_while_a_body_is_sent_has_the_patience_of_one_that_dies(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job() -> None:
        async with server(Service()) as port, client(f"127.0.0.1:{port}", patience_s=0.4) as raw:
            monkeypatch.setattr(RawClient, "_attempt", broken_off(5, answered))  # 0.75 s
            monkeypatch.setattr(rpc_client, "_MAX_PATIENCES", 100)  # however slow the machine is
            expected = contextlib.nullcontext() if answered else pytest.raises(InfraError, match="patience is over")
            with expected:
                assert await raw.call("echo", b"x", DEADLINE_S) == b"x"

    run(job())


@contextlib.asynccontextmanager
async def scripted(handler) -> AsyncIterator[int]:
    """A server whose every call is answered by `handler`."""
    raw = grpc.aio.server()

    class Door(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.stream_unary_rpc_method_handler(handler)

    raw.add_generic_rpc_handlers((Door(),))
    port = raw.add_insecure_port("127.0.0.1:0")
    await raw.start()
    try:
        yield port
    finally:
        await raw.stop(0.1)


def test_a_call_that_is_refused_in_the_midst_of_its_body_ends_with_a_status() -> None:
    """Not with an error of the caller's own, whenever between two pieces the end comes."""
    calls = 0

    async def refusing(_, context: grpc.aio.ServicerContext) -> bytes:
        nonlocal calls
        calls += 1
        await context.send_initial_metadata(((protocol.READS_NOW, "1"),))
        for _ in range(1 + calls % 6):
            await context.read()
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the message stalled")
        return b""

    async def job() -> None:
        async with scripted(refusing) as port, client(f"127.0.0.1:{port}") as raw:
            for _ in range(150):
                with pytest.raises(grpc.aio.AioRpcError) as found:
                    await raw._attempt("echo", bytes(8 * 2**20), DEADLINE_S, asks_first=True)
                error = found.value
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED or rpc_client._broke_off(error), error

    run(job())
    assert calls == 150


def test_a_caller_that_gives_up_while_it_asks_takes_its_call_along() -> None:
    async def job() -> None:
        came, gone = asyncio.Event(), asyncio.Event()

        async def waiting(_, context: grpc.aio.ServicerContext) -> bytes:
            came.set()
            try:
                await asyncio.sleep(20.0)
            except asyncio.CancelledError:
                gone.set()
                raise
            return b""

        async with scripted(waiting) as port, client(f"127.0.0.1:{port}") as raw:
            asking = asyncio.ensure_future(raw._attempt("echo", bytes(2**20), 20.0, asks_first=True))
            await came.wait()
            asking.cancel()
            await asyncio.wait([asyncio.ensure_future(gone.wait())], timeout=10.0)
            assert gone.is_set(), "its call is still held"

    run(job())


def test_an_answer_tells_the_caller_and_the_log_position() -> None:
    async def calls() -> None:
        service = Service()
        async with server(service) as port, client(f"127.0.0.1:{port}") as raw:
            raw.run_id = "r1"
            assert await raw.call("echo", b"x" * 1000, 25.0) == b"x" * 1000
            assert raw.position == 42
            (caller,) = service.calls
            assert (caller.right, caller.name, caller.session, caller.run_id) == ("sampler", "s", raw.session, "r1")
            assert 10.0 < caller.deadline_s < 25.1  # gRPC rounds up

    run(calls())


def test_refusals_are_raised_at_once() -> None:
    async def calls() -> None:
        async with server(Service()) as port, client(f"127.0.0.1:{port}", patience_s=3600.0) as raw:
            with pytest.raises(Fenced, match="another holder"):
                await raw.call("refuse", b"", DEADLINE_S)
            with pytest.raises(StoreRefusal, match="malformed"):
                await raw.call("malformed", b"\xc1", DEADLINE_S)
            with pytest.raises(Unauthorized, match="may not call"):
                await raw.call("learners", b"", DEADLINE_S)
            with pytest.raises(InfraError, match="UNIMPLEMENTED"):
                await raw.call("nothing", b"", DEADLINE_S)

    run(calls())


def test_who_talks_nonsense_without_end_is_answered_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first twenty refusals are sent at once; a caller that continues does not slow down the others."""
    held: list[int] = []

    async def hold(_: intake.RefusalThrottle, left_s: float) -> None:
        held.append(1)

    async def calls() -> None:
        async with server(Service()) as port, client(f"127.0.0.1:{port}") as raw:
            for _ in range(60):
                with pytest.raises(StoreRefusal, match="malformed"):
                    await raw.call("malformed", b"\xc1", DEADLINE_S)
            assert await raw.call("echo", b"good", DEADLINE_S) == b"good"

    monkeypatch.setattr(intake.RefusalThrottle, "hold", hold)
    run(calls())
    assert 20 <= len(held) <= 40, "of sixty the first twenty, and two a second more"


def test_nothing_large_is_kept_while_an_answer_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A malformed message is kept neither by the delayed call nor by the error."""
    seen: list[int] = []

    async def hold(_: intake.RefusalThrottle, left_s: float) -> None:
        gc.collect()
        seen.append(sum(len(one) for one in gc.get_objects() if type(one) is Body))

    async def malformed(caller: Caller, body: bytes) -> bytes:
        kept = Body([body])
        return msgspec.msgpack.decode(b"\xc1" + kept[0], type=bytes)

    async def calls() -> None:
        service = Service()
        monkeypatch.setattr(service, "malformed", malformed)
        async with server(service) as port, client(f"127.0.0.1:{port}") as raw:
            for _ in range(30):
                with pytest.raises(StoreRefusal, match="malformed"):
                    await raw.call("malformed", bytes(1000), DEADLINE_S)

    monkeypatch.setattr(intake.RefusalThrottle, "hold", hold)
    run(calls())
    assert seen and max(seen) == 0


class Body(list):
    """A message, weakly referenced while its handler runs."""


def test_tokens_are_checked_on_every_call() -> None:
    async def calls() -> None:
        service = Service()
        async with server(service, secret="secret") as port:
            async with client(f"127.0.0.1:{port}", token="secret") as raw:
                assert await raw.call("echo", b"a", DEADLINE_S) == b"a"
            for token in (None, "guess"):
                async with client(f"127.0.0.1:{port}", token=token) as raw:
                    with pytest.raises(Unauthorized):
                        await raw.call("echo", b"a", DEADLINE_S)
            assert len(service.calls) == 1

    run(calls())


def test_patience_outlives_failures_and_ends() -> None:
    async def calls() -> None:
        service = Service()
        async with server(service) as port, client(f"127.0.0.1:{port}") as raw:
            service.failures_left = 3
            assert await raw.call("flaky", b"", DEADLINE_S) == b"at last"
            service.failures_left = 10**6
            with pytest.raises(InfraError, match="not now"):
                await raw.call("flaky", b"", DEADLINE_S, patience_s=0.3)
            with pytest.raises(DeadlineExceeded, match="patience is over"):
                await raw.call("hang", b"", 0.2, patience_s=0.3)

    run(calls())


def test_a_call_outlives_a_server_without_memory() -> None:
    async def calls() -> None:
        service = Service()
        async with server(service) as port, client(f"127.0.0.1:{port}") as raw:
            service.failures_left = 2
            assert await raw.call("without_memory", b"", DEADLINE_S) == b"of the next server"
            service.failures_left = 10**6
            with pytest.raises(InfraError, match=r"MemoryError.*patience is over"):
                await raw.call("without_memory", b"", DEADLINE_S, patience_s=0.3)

    run(calls())


def test_a_call_that_waits_outlives_many_servers_and_not_their_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten processes of a server, each too short-lived for a waiting call, together longer than a call's patience."""
    service, asked = Service(), asyncio.Event()

    async def wait(caller: Caller, body: bytes) -> bytes:
        asked.set()
        return await (asyncio.Event().wait() if body == b"wait" else service.echo(caller, body)) and body

    monkeypatch.setattr(service, "hang", wait)

    async def calls() -> None:
        async with server(service) as port:
            pass
        loop, later_s = asyncio.get_running_loop(), 0.0
        real_s = loop.time
        monkeypatch.setattr(loop, "time", lambda: real_s() + later_s)
        async with client(f"127.0.0.1:{port}", patience_s=30.0) as raw:
            waiting = asyncio.ensure_future(raw.call("hang", b"wait", DEADLINE_S))
            for _ in range(10):
                asked.clear()
                later_s += 4.0
                async with server(service, port):
                    assert await raw.call("echo", b"there", DEADLINE_S) == b"there"
                    await asked.wait()
                assert not waiting.done(), waiting
            later_s += 30.0
            with pytest.raises(InfraError, match=r"hang.*patience is over"):
                await waiting

    run(calls())


def test_a_call_that_no_server_survives_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "_MAX_PATIENCES", 2)

    async def calls() -> None:
        service = Service()
        service.failures_left = 10**6
        async with server(service) as port, client(f"127.0.0.1:{port}", patience_s=0.3) as raw:
            deadly = asyncio.ensure_future(raw.call("flaky", b"", DEADLINE_S))
            while not deadly.done():
                await raw.call("echo", b"alive", DEADLINE_S)
            with pytest.raises(InfraError, match="not now"):
                await deadly

    run(calls())


@pytest.mark.parametrize("size", [1, 2**19])
def test_a_call_that_grpc_does_not_end_at_its_deadline_is_ended(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine refuses gRPC a thread, gRPC does not keep deadlines, and each call waited forever."""

    def without_deadlines(make):
        def made(path: str):
            def called(*words, timeout: float, **options):
                return make(path)(*words, **options)

            return called

        return made

    async def job() -> None:
        async with server(Service()) as port, client(f"127.0.0.1:{port}") as raw:
            channel = await raw._transport._connected()
            for kind in ("unary_unary", "stream_unary"):
                monkeypatch.setattr(channel, kind, without_deadlines(getattr(channel, kind)))
            with pytest.raises(InfraError, match="gRPC did not end a call"):
                await raw.call("hang", bytes(size), 0.1)
            assert await raw.call("echo", b"again", 10.0) == b"again"

    monkeypatch.setattr(rpc_client, "_OVERDUE_S", 1)
    run(job())
