"""A tap before the store: every call passes through it, and a test can hold or change the call or kill a process.

The store and its callers are real processes that are not aware of the tap; callers get its address. A hook acts at an
exact point of the protocol (before a call is forwarded, before its answer is returned), so that no test depends on
timing.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jaxroll import wire
from jaxroll.records import Finished, Member
from jaxroll.rpc import protocol
from jaxroll.rpc.protocol import Envelope
from jaxroll.store.client import MAX_MESSAGE_BYTES
from jaxroll.store.messages import SERVICE, ClaimPage, PutAnswer, PutCall, PutReply
from tests.harness.cluster.scripted_role import Heartbeat

START_S = 20.0


@dataclass(frozen=True)
class Call:
    """One call of `name` ("learner", "sampler-0") to `method`, as its bytes."""

    name: str
    method: str
    body: bytes


Forward = Callable[[bytes], Awaitable[bytes]]
Hook = Callable[[Call, Forward], Awaitable[bytes]]


class Lost(Exception):
    """Raised by a hook to drop a call before the store; the caller gets UNAVAILABLE."""


class Tap:
    """A pass-through to the store in `run_dir` on its own thread, as a context manager."""

    def __init__(self, run_dir: Path) -> None:
        self._upstream = run_dir / "store.addr"
        self._hooks: dict[tuple[str, str], Hook] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tap", daemon=True)
        self._heart = Heartbeat()
        self.address = ""
        self.journal: list[dict[str, Any]] = []  # ended calls, puts, claims, in the format of `criteria`
        self._under_way: dict[int, dict[str, Any]] = {}  # calls in flight, with their start times
        self._numbers = itertools.count()

    def on(self, name: str, method: str, hook: Hook | None) -> None:
        """Pass later calls of `name` to `method` through `hook`; None removes the hook."""
        if hook is None:
            self._hooks.pop((name, method), None)
        else:
            self._hooks[name, method] = hook

    def account(self) -> list[dict[str, Any]]:
        """The journal, with unfinished calls in their present state, whose outcome is `open`."""
        return [*self.journal, *(self._timed(began) for began in list(self._under_way.values()))]

    def run(self, job):
        """Run a coroutine on the tap's loop; return its result."""
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(START_S)

    def __enter__(self) -> Tap:
        self._thread.start()
        self.run(self._open())
        return self

    def __exit__(self, *exc: object) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    async def _open(self) -> None:
        target, options = self._upstream.read_text().strip(), protocol.client_options(MAX_MESSAGE_BYTES)
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._server = grpc.aio.server(options=protocol.server_options(MAX_MESSAGE_BYTES))
        self._server.add_generic_rpc_handlers((_Everything(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._beating = asyncio.ensure_future(self._heart.beat())

    async def _close(self) -> None:
        self._beating.cancel()
        await self._server.stop(0)
        await self._channel.close()

    async def answer(self, method: str, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """The store's answer to a call, possibly changed by a hook."""
        said = context.invocation_metadata() or ()
        passed_on = ("jaxroll-", "auth")  # but not the size: a hook may change the body
        metadata = [(k, v) for k, v in said if k.startswith(passed_on) and k != "jaxroll-bytes"]
        call = Call(str(dict(metadata).get("jaxroll-name", "")), method, body)
        send = self._channel.unary_unary(f"/{SERVICE}/{method}")

        async def forward(body: bytes) -> bytes:
            return await send(body, timeout=context.time_remaining(), metadata=metadata)

        hook = self._hooks.get((call.name, method))
        number = next(self._numbers)
        self._under_way[number] = began = {
            "kind": "rpc",
            "method": method,
            "name": call.name,
            "deadline_s": context.time_remaining() or 0.0,
            "began_s": time.monotonic(),
            "stood_s": self._heart.so_far_s(),
            "outcome": "open",
        }
        try:
            answer = await (hook(call, forward) if hook else forward(body))
            began["outcome"] = "OK"
            self._note(call, answer)
            return answer
        except Lost:
            began["outcome"] = "Lost"
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way")
        except grpc.aio.AioRpcError as error:
            began["outcome"] = error.code().name
            await context.abort(error.code(), error.details() or "")
        except asyncio.CancelledError:  # the caller has ended, or the deadline is over
            began["outcome"] = "CANCELLED"
            raise
        finally:
            self.journal.append(self._timed(self._under_way.pop(number)))
        raise AssertionError("abort raises")

    def _timed(self, began: dict[str, Any]) -> dict[str, Any]:
        """The row of a call from its start, with its duration until now."""
        stood_s = self._heart.so_far_s() - began["stood_s"]
        return began | {"took_s": time.monotonic() - began["began_s"], "stood_s": stood_s}

    def _note(self, call: Call, answer: bytes) -> None:
        envelope = wire.decode(answer, Envelope)
        refusal = envelope.refusal
        if call.method == "Claim" and refusal is None:
            page = wire.decode(envelope.body, ClaimPage)
            content = wire.digest(wire.encode((page.parts, page.shuffle_seed)))
            self.journal.append({"kind": "claimed", "step": page.step, "digest": content, "lineage": page.lineage})
        if call.method != "Put":
            return
        bodies = wire.decode(call.body, PutCall).members
        refused = [PutAnswer("", refusal)] * len(bodies)
        answers = refused if refusal else wire.decode(envelope.body, PutReply).answers
        for body, put in zip(bodies, answers, strict=True):
            member = wire.decode(body, Member)
            self.journal.append(
                {
                    "kind": "put",
                    "key": [member.group, member.member, member.attempt],
                    "digest": wire.digest(body),
                    "finished": isinstance(member.outcome, Finished),
                    "outcome": member.outcome,
                    "answer": put.refusal.code if put.refusal else put.result,
                }
            )


class _Everything(grpc.GenericRpcHandler):
    """A handler for every method of every service."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def service(self, handler_call_details):  # grpc's name
        method = handler_call_details.method.rpartition("/")[2]

        async def answer(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return await self._tap.answer(method, body, context)

        return grpc.unary_unary_rpc_method_handler(answer)
