"""Bytes that were never a message: a typed answer, and memory in proportion to them."""

from __future__ import annotations

import contextlib
import gc
import random
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.config import digest
from jaxroll.errors import StoreRefusal
from jaxroll.records import (
    MAX_PARTS,
    MAX_RUNS,
    MAX_SEGMENTS,
    Failed,
    Finished,
    Member,
    Segment,
    Version,
    VersionRef,
    VersionRun,
)
from jaxroll.rpc import intake, protocol
from jaxroll.rpc.protocol import Envelope
from jaxroll.store import messages as msg
from tests.harness.resource_bounds import MB
from tests.harness.store.machine import V0

_SEGMENT = Segment(np.arange(3, dtype=np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32))
_MEMBERS = tuple(
    wire.encode(member)
    for member in (
        Member(0, 0, 1, Finished((_SEGMENT,), "stop", 1.0, {"a": 1.0}, (VersionRun(V0, 3),))),
        Member(0, 0, 1, Failed("DATA", "x")),
        Member(2**53, 2**53, 2**53, Failed("INFRA", "x")),
    )
)


def _valid() -> dict[str, list[bytes]]:
    """Bodies that each method understands."""
    bodies: dict[str, list[Any]] = {
        "Hello": [msg.Hello(wire.PROTOCOL_VERSION, "x")],
        "Lease": [msg.LeaseCall(V0, 2**53, 0.0, "r"), msg.LeaseCall(V0, 0, float("nan"), "r")],
        "Renew": [msg.Members(((0, 0, 1), (-1, 2**62, 0)))],
        "Put": [msg.PutCall(_MEMBERS[:count]) for count in (0, 1, 3)],
        "Release": [msg.Members(((0, 0, 1), (2**62, -5, 2**40)))],
        "Ended": [msg.EndedCall(0.0), msg.EndedCall(float("nan"))],
        "Claim": [msg.ClaimCall(0, 0, 0.0, 2**53), msg.ClaimCall(2**53, 2**53, float("inf"))],
        "Begin": [msg.BeginCall(None), msg.BeginCall(Version(2**53, 2**53)), msg.BeginCall(V0, "fork")],
        "Publish": [VersionRef(Version(0, 2**53), "tcp", "x", "y")],
        "Ack": [msg.VersionCall(Version(0, 2**53))],
        "Durable": [msg.VersionCall(Version(0, 2**53))],
        "Published": [msg.PublishedCall(Version(2**53, 0), -1.0)],
        "Report": [msg.ReportCall((b'{"a": 1}', b"[1]"), "r"), msg.ReportCall((b'{"a": ' + b"[" * 90_000,), "r")],
        "Status": [None],
        "Control": [
            msg.ControlCall("checkpoint"),
            msg.ControlCall("profile"),
            msg.ControlCall("profile", msg.ProfileOrder("learner", "r", 1000, 3600.0, True)),
        ],
    }
    return {method: [wire.encode(body) for body in list(kept)] for method, kept in bodies.items()}


# lengths of gigabytes, the largest and the smallest number, not a number, depth, half a character
_SPLINTERS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xcb\x7f\xf8" + bytes(6),
    b"\x91" * 3000,
    b"\xa2\xff\xa5",
)


def _mutated(body: bytes, chance: random.Random) -> bytes:
    """`body` with bytes changed, cut, doubled or put in place of others; or noise."""
    if chance.random() < 0.15:
        return chance.randbytes(chance.randint(0, 200))
    data = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if at < len(data):
                data[at] = chance.randrange(256)
            case 1:
                data[at:at] = chance.choice(_SPLINTERS)
            case 2:
                del data[at : at + chance.randint(1, 8)]
            case _:
                data[at:at] = data[max(0, at - 10) : at]
    return bytes(data)


def _with_another_byte(body: bytes, chance: random.Random) -> bytes:
    data = bytearray(body)
    data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


@contextlib.asynccontextmanager
async def _speaker(address: str, config_digest: str, run_id: str, right: str):
    """Send any bytes to any method as `right`; gives back status and answer."""
    said = {
        "right": right,
        "name": right,
        "session": "s",
        "run": run_id,
        "config": config_digest,
        "protocol": str(wire.PROTOCOL_VERSION),
    }
    async with grpc.aio.insecure_channel(address, options=protocol.client_options(2**24)) as channel:

        async def speak(method: str, body: bytes) -> grpc.StatusCode | Envelope:
            metadata = [(f"jaxroll-{key}", value) for key, value in {**said, "bytes": str(len(body))}.items()]
            path = f"/{msg.SERVICE}/{method}"
            try:
                if len(body) <= protocol.PIECE_BYTES:
                    answer = await channel.unary_unary(path)(body, metadata=metadata, timeout=30)
                else:
                    cut = range(0, len(body), protocol.PIECE_BYTES)
                    pieces = (body[at : at + protocol.PIECE_BYTES] for at in cut)
                    answer = await channel.stream_unary(path)(pieces, metadata=metadata, timeout=30)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return wire.decode(answer, Envelope)

        await speak("Hello", wire.encode(msg.Hello(wire.PROTOCOL_VERSION, config_digest)))
        yield speak


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 20))])
def test_whatever_is_sent_the_answer_is_typed_and_the_store_lives(
    tmp_path: Path, small: SimpleNamespace, run, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random and mutated bytes to every method: an answer, a refusal, or INVALID_ARGUMENT; never a broken handler.

    Members are spoiled by one byte too, inside of a good call: of greater damage little reaches what looks at members.
    """
    config, chance = small.configured(), random.Random(seed)
    valid = _valid()
    monkeypatch.setattr(intake, "HOLD_S", 0.0)

    async def fuzz() -> None:
        async with small.serving(tmp_path, config) as address:
            async with small.connected(tmp_path, config, "learner", "first") as learner:
                run_id = learner.welcome.run_id
                await learner.publish(small.version_ref(await learner.begin(None)))
            seen, inside = set(), set()
            async with _speaker(address, digest(config), run_id, "admin") as speak:
                for method, bodies in valid.items():
                    for body in bodies:
                        _note(seen, method, await speak(method, body))
                    for _ in range(40):
                        _note(seen, method, await speak(method, _mutated(chance.choice(bodies), chance)))
                    if method == "Put":
                        for _ in range(80):
                            spoiled = _with_another_byte(chance.choice(_MEMBERS), chance)
                            _note(inside, method, await speak(method, wire.encode(msg.PutCall((spoiled,)))))
            assert {grpc.StatusCode.INVALID_ARGUMENT, "member REFUSED"} <= inside, "no spoiled member was looked at"
            assert {grpc.StatusCode.INVALID_ARGUMENT, "REFUSED", "STALE_CLIENT", "OK"} <= seen
            async with small.connected(tmp_path, config, "observer", config_digest="") as observer:
                assert (await observer.status())["conservation_residual"] == 0

    run(fuzz())


def _note(seen: set, method: str, answer: grpc.StatusCode | Envelope) -> None:
    if isinstance(answer, Envelope):
        seen.add("OK" if answer.refusal is None else answer.refusal.code)
        if method == "Put" and answer.refusal is None:
            answers = wire.decode(answer.body, msg.PutReply).answers
            seen.update(f"member {one.refusal.code}" if one.refusal else f"member {one.result}" for one in answers)
        return
    assert answer is grpc.StatusCode.INVALID_ARGUMENT, (method, answer)
    seen.add(answer)


def _array(head: int, count: int, item: bytes) -> bytes:
    return bytes([head]) + struct.pack(">I", count) + item * count


def _text(value: str) -> bytes:
    return msgspec.msgpack.encode(value)


def _packed(*parts: Any) -> bytes:
    return msgspec.msgpack.encode(parts)


def _member(outcome: bytes) -> bytes:
    parts = [b"\x84", _text("group"), b"\0", _text("member"), b"\0", _text("attempt"), b"\1", _text("outcome"), outcome]
    return b"".join(parts)


def _finished(**changed: bytes) -> bytes:
    fields = {
        "type": _text("finished"),
        "segments": b"\x90",
        "finish": _text("stop"),
        "reward": b"\1",
        "reward_parts": b"\x80",
        "versions": b"\x90",
    } | changed
    return bytes([0x80 + len(fields)]) + b"".join(_text(key) + value for key, value in fields.items())


def _segment(tokens: bytes) -> bytes:
    array = msgspec.msgpack.encode(("uint8", [0], b""))
    fields = {"tokens": tokens, "loss_mask": array, "logprobs": array}
    return b"\x91\x83" + b"".join(_text(key) + value for key, value in fields.items())


N = 2_000_000
BOMBS = {
    "runs": _member(_finished(versions=_array(0xDD, N, b"\x92\x92\0\0\1"))),
    "runs announced": _member(_finished(versions=b"\xdd\xff\xff\xff\xff")),
    "segments": _member(_finished(segments=_array(0xDD, N, b"\x80"))),
    "parts": _member(_finished(reward_parts=_array(0xDF, N, b"\xa1a\0"))),
    "maps for an array": _member(_finished(segments=_segment(_array(0xDD, N, b"\x80")))),
    "maps for a shape": _member(_finished(segments=_segment(b"\x93" + _text("int32") + _array(0xDD, N, b"\x80")))),
    "dimensions": _member(_finished(segments=_segment(b"\x93" + _text("int32") + _array(0xDD, N, b"\1") + b"\xc4\0"))),
    "a shape of exabytes": _member(_finished(segments=_segment(_packed("int32", [2**40, 2**40], b"")))),
    "a negative shape": _member(_finished(segments=_segment(_packed("int32", [-1, -4], b"\0" * 16)))),
    "bytes announced": _member(_finished(segments=_segment(b"\x93" + _text("int32") + b"\x90\xc6\xff\xff\xff\xff"))),
    "an object dtype": _member(_finished(segments=_segment(_packed("object", [1], b"\0" * 8)))),
    "a long dtype": _member(_finished(segments=_segment(_packed("x" * N, [1], b"")))),
    "half a character": _member(_finished(finish=b"\xa2\xff\xa5")),
    "nesting": _member(b"\x91" * N),
    "nesting in an unknown field": _member(_finished(unknown=b"\x91" * N)),
    "nesting for an array": _member(_finished(segments=_segment(b"\x91" * N))),
    "a long finish": _member(_finished(finish=_text("x" * N))),
}


def test_messages_without_a_request_are_ignored() -> None:
    body = _member(_finished(unknown=_array(0xDD, N, b"\x80")))
    tracemalloc.start()
    try:
        assert wire.decode(body, Member).group == 0
        assert tracemalloc.get_traced_memory()[1] < MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BOMBS)
def test_a_message_costs_memory_in_proportion_to_itself(name: str) -> None:
    """Memory for a message is at most its own length once more and 1 MB, regardless of the sizes that it declares."""
    body = BOMBS[name]
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.MsgspecError):
            wire.decode(body, Member)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= len(body) + MB, f"{peak} bytes for a message of {len(body)}"


def test_the_largest_member_that_is_taken_stays_within_bounds() -> None:
    segment = Segment(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.float32))
    outcome = Finished(
        (segment,) * MAX_SEGMENTS, "stop", 1.0, {str(i): 0.0 for i in range(MAX_PARTS)}, (VersionRun(V0, 0),) * MAX_RUNS
    )
    body = wire.encode(Member(0, 0, 1, outcome))
    tracemalloc.start()
    try:
        assert len(wire.decode(body, Member).outcome.versions) == MAX_RUNS
        assert tracemalloc.get_traced_memory()[1] < 32 * MB
    finally:
        tracemalloc.stop()
    for longer in ({"segments": (segment,) * (MAX_SEGMENTS + 1)}, {"versions": (VersionRun(V0, 0),) * (MAX_RUNS + 1)}):
        with pytest.raises(msgspec.ValidationError, match="length <="):
            wire.decode(wire.encode(Member(0, 0, 1, msgspec.structs.replace(outcome, **longer))), Member)


@pytest.mark.parametrize("rows", [(b'{"a": [' + b"{}," * 2_000_000 + b"0]}",), (b"{}",) * 65_537])
def test_a_report_is_no_way_around(tmp_path: Path, small: SimpleNamespace, run, rows: tuple[bytes, ...]) -> None:
    config = small.configured()

    async def reports() -> None:
        async with small.serving(tmp_path, config), small.connected(tmp_path, config, "learner") as learner:
            with pytest.raises(StoreRefusal, match=r"the limit is|length <="):
                await learner._call("Report", msg.ReportCall(rows, "r"), msg.PutReply)

    run(reports())


def test_refused_members_are_dropped_at_once(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """A refusal that is kept keeps its traceback, which keeps what was decoded until Python looks for cycles."""
    config = small.configured()

    async def refused() -> None:
        async with small.opened(tmp_path, config) as (_learner, sampler):
            (key, *_) = small.keys(await sampler.lease(V0, 1))
            empty = Segment(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.float32))
            member = Member(*key, Finished((empty,) * 2_000, "stop", 1.0, {}, (VersionRun(V0, 1),)))
            body = wire.encode(msg.PutCall((wire.encode(member),)))

            async def put() -> None:
                reply = wire.decode(await sampler._raw.call("Put", body, 20.0), msg.PutReply)
                assert "versions cover 1 tokens" in str(reply.answers[0].refusal)

            await put()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(20):
                await put()
            kept = tracemalloc.get_traced_memory()[0] - before
            assert kept < 5 * MB, f"{kept} bytes are kept; twenty members are 34 MB once they are decoded"

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        run(refused())
    finally:
        tracemalloc.stop()
        gc.enable()
