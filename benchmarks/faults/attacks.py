"""Attacks on a store, each as a process: `python -m benchmarks.faults.attacks KIND ORDERS_JSON`.

The process prints "ready" when it has received all answers that it aims at (`AIMS`), attacks until its standard input
or its parent ends, then prints one JSON object: `counted` answers, the aims it `missed`, and `strange`, unexpected
answers. Used by benchmarks/faults/hostile.py, tests/store/server/test_under_attack.py and
tests/faults/test_hostile_clients.py.

    silent       TCP connections that send nothing, opened again when they are dropped
    loris        connections that send the HTTP/2 preface byte by byte
    garbage      HTTP/2 preface, then random frames
    no_token     calls without a token               wrong_token  calls with a guessed token
    wrong_role   a sampler's token, calls of the learner
    two_gb       a valid token, an HTTP/2 stream that announces a message of 2 GB and begins to send it
    liars        a valid token, bodies longer and shorter than declared, and bodies that stop in the middle
    malformed    a valid token, random and mutated bytes to every method a sampler may call, and inside of puts
    paths        a valid token, names, sessions, requests, runs and configs like ../../x
    polls        a valid token, more long polls than a connection may have, on many connections
    crowd        a valid token, a hello under a new name each time
    heavy        a valid token, puts of the largest size: many members of thousands of empty and tiny segments, of
                 unknown groups; and an eighth as many of groups that it has leased, which the store must check
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import msgspec
import numpy as np

from jaxroll import lifeline, wire
from jaxroll.records import MAX_SEGMENTS, Failed, Finished, Member, Segment, Version, VersionRun
from jaxroll.rpc import protocol
from jaxroll.rpc.protocol import Envelope
from jaxroll.store import messages as msg

SAMPLER_METHODS = ("Hello", "Lease", "Renew", "Ended", "Put", "Release", "Published", "Report", "Status")
LEARNER_METHODS = ("Claim", "Begin", "Publish", "Ack", "Durable", "Close")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_UNPARSABLE, _TOO_LARGE = b"Failed parsing HTTP/2", b"larger than max"  # gRPC's messages
V0 = Version(0, 0)
UNKNOWN_GROUP = 2**40  # a group that was never issued
PATIENCE_S = 30.0  # time to reach the aims
STALE_S = 8.0  # a connection that lasted as long was closed because it was silent
HELD_S = 2.5  # a call that waits as long is held, not refused

# Answers that each attack must get at least once: "Method CODE: reason" of a call, "member CODE: reason" of a member in
# a put, or the fate of a connection. Regular expressions for the beginning.
_METHOD, _NO_TOKEN, _MALFORMED = (
    "[A-Z][a-z]+",
    "UNAUTHENTICATED: no valid token",
    "INVALID_ARGUMENT: malformed message: ",
)
AIMS: dict[str, tuple[str, ...]] = {
    "silent": ("opened", "dropped"),
    "loris": ("opened", "dropped for being slow"),
    "garbage": ("opened", "dropped for malformed bytes"),
    "no_token": (f"Put {_NO_TOKEN}",),
    "wrong_token": tuple(f"{method} {_NO_TOKEN}" for method in SAMPLER_METHODS),
    "wrong_role": (
        *(f"{method} PERMISSION_DENIED: the role sampler may not call {method}" for method in LEARNER_METHODS),
        f"{_METHOD} {_NO_TOKEN}",
    ),
    "two_gb": ("opened", "refused as too large"),
    "liars": (
        rf"Put {_MALFORMED}\d+ bytes came, 100 were declared",
        rf"Put {_MALFORMED}the message ended after \d+ bytes",
        rf"Put {_MALFORMED}a message of 2147483648 bytes; the limit is",
        "Put RESOURCE_EXHAUSTED: the message stalled",
    ),
    "malformed": (
        *(f"{method} {_MALFORMED}" for method in SAMPLER_METHODS if method != "Status"),
        *(f"{method} OK" for method in SAMPLER_METHODS),
        "Hello UNAUTHORIZED: the store uses protocol",
        r"member REFUSED: put .*: versions cover 1 tokens, 0 were sampled",
        rf"member STALE_CLIENT: group {UNKNOWN_GROUP} was never issued",
    ),
    "paths": (
        "Hello INVALID_ARGUMENT: name and session must match",
        "Status STALE_CLIENT: .*the caller belongs to",
        "(Hello|Status) UNAUTHORIZED: the store and the caller have different configs",
        "Lease REFUSED: a lease request must match",
    ),
    "polls": ("Ended held", "Published held", rf"{_METHOD} RESOURCE_EXHAUSTED: \d+ calls of this connection are held"),
    "crowd": ("Hello OK", "Hello RESOURCE_EXHAUSTED: too many processes join"),
    "heavy": (
        r"member REFUSED: put .*: versions cover \d+ tokens, \d+ were sampled",
        r"member STALE_CLIENT: group \d+ was never issued",
    ),
}
# Other answers that each attack may get, and answers that any client may get from a busy machine.
BESIDES: dict[str, tuple[str, ...]] = {
    "silent": ("refused", "dropped for being slow"),
    "loris": ("refused", "dropped"),
    "garbage": ("refused", "dropped for being slow", "dropped"),
    "two_gb": ("refused", "dropped", "bytes"),
    "liars": ("Put INTERNAL: Internal error from Core",),  # this client's gRPC, if it is refused while it sends
    "malformed": (
        f"{_METHOD} (REFUSED|STALE_CLIENT|UNAUTHORIZED|NO_CREDIT): ",
        "member (REFUSED|STALE_CLIENT|FENCED|SURPLUS)",
    ),
    "polls": ("(Ended|Published) OK", "(Ended|Published) CANCELLED"),  # gRPC refuses streams beyond its own limit
    "heavy": ("Put OK", "member FENCED: "),
}
_BUSY = (
    f"{_METHOD} (DEADLINE_EXCEEDED|UNAVAILABLE): ",
    rf"{_METHOD} RESOURCE_EXHAUSTED: (\d+ bytes of requests are being processed|the message stalled)",
)


class Attack:
    """An attacker's knowledge of the run, and its counts."""

    def __init__(self, kind: str, orders: dict[str, Any]) -> None:
        self._aims, self._expected = AIMS[kind], (*AIMS[kind], *BESIDES.get(kind, ()), *_BUSY)
        self.host, _, port = orders["address"].rpartition(":")
        self.port, self.orders = int(port), orders
        self.count: Counter[str] = Counter()
        self.random = random.Random(orders.get("seed", 0))
        self.stop = threading.Event()

    def note(self, answer: str, times: int = 1) -> None:
        """Count an answer under the expected pattern; a strange one under its text without numbers."""
        for expected in self._expected:
            if re.match(expected, answer, re.DOTALL):
                self.count[expected] += times
                return
        self.count[re.sub(r"\d+", "N", answer)[:160]] += times

    def missed(self) -> list[str]:
        """The aims that have not been reached yet."""
        return [aim for aim in self._aims if not self.count[aim]]

    def result(self) -> dict[str, Any]:
        """The object that the parent reads."""
        strange = {answer: times for answer, times in self.count.items() if answer not in self._expected}
        return {"counted": dict(self.count), "missed": self.missed(), "strange": strange}

    def metadata(self, **changes: str) -> list[tuple[str, str]]:
        """The metadata of a call as a client sends it, with the changes."""
        orders = self.orders
        said = {
            "name": "mallory",
            "session": "m",
            "right": "sampler",
            "run": orders.get("run_id", ""),
            "protocol": str(wire.PROTOCOL_VERSION),
            "config": orders.get("config_digest", ""),
        }
        token = changes.pop("token", orders.get("token", ""))
        metadata = [(f"jaxroll-{key}", value) for key, value in (said | changes).items()]
        return [*metadata, *([("authorization", f"Bearer {protocol.bearer(token, 'sampler')}")] if token else [])]

    def channels(self) -> list[grpc.aio.Channel]:
        """As many separate connections as ordered."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return [
            grpc.aio.insecure_channel(self.orders["address"], options=options)
            for _ in range(self.orders.get("connections", 4))
        ]

    async def call(
        self, channel: grpc.aio.Channel, method: str, body: bytes, metadata: list[tuple[str, str]] | None = None
    ) -> bytes:
        """Make a call and count the answer; return its body, or b"" if there is none."""
        metadata = self.metadata(bytes=str(len(body))) if metadata is None else metadata
        answer = await self._answer(channel, method, body, metadata, self.orders.get("timeout_s", 20.0))
        if isinstance(answer, str):
            self.note(f"{method} {answer}")
            return b""
        self.note(f"{method} OK")
        for one in wire.decode(answer, msg.PutReply).answers if method == "Put" else ():
            self.note(f"member {one.refusal.code}: {one.refusal.reason}" if one.refusal else f"member {one.result}")
        return answer

    async def _answer(
        self, channel: grpc.aio.Channel, method: str, body: bytes, metadata: list[tuple[str, str]], timeout_s: float
    ) -> bytes | str:
        """The body, or the refusal as text."""
        path = f"/{msg.SERVICE}/{method}"
        try:
            if len(body) <= protocol.PIECE_BYTES:
                answer = await channel.unary_unary(path)(body, metadata=metadata, timeout=timeout_s)
            else:
                answer = await channel.stream_unary(path)(_pieces(body), metadata=metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        envelope = wire.decode(answer, Envelope)
        return f"{envelope.refusal.code}: {envelope.refusal.reason}" if envelope.refusal else envelope.body

    async def ask(self, method: str, message: Any) -> bytes:
        """Send a valid message, again while the store has no room; return the answer's body, which is not counted."""
        channel, body = self.channels()[0], wire.encode(message)
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            answer = await self._answer(channel, method, body, self.metadata(), 10.0)
            if isinstance(answer, bytes):
                await channel.close()
                return answer
            if not any(re.match(busy, f"{method} {answer}") for busy in _BUSY) or time.monotonic() > give_up_s:
                raise SystemExit(f"{method}: {answer}")
            await asyncio.sleep(0.1)

    async def greet(self) -> None:
        """Send Hello once, as a sampler does."""
        await self.ask("Hello", msg.Hello(wire.PROTOCOL_VERSION, self.orders.get("config_digest", "")))

    async def lease(self, members: int, request: str) -> list[msg.Key]:
        """Lease at most so many members; return their keys."""
        call = msg.LeaseCall(V0, members, 5.0, request)
        grants = wire.decode(await self.ask("Lease", call), msg.LeaseReply).grants
        return [(grant.group, member, attempt) for grant in grants for member, attempt in grant.members]

    async def flood(self, one: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> None:
        """Run `in_flight` callers on every connection, each calling again at once, until the attack stops."""

        async def again(channel: grpc.aio.Channel) -> None:
            while not self.stop.is_set():
                await one(channel)

        channels = self.channels()
        callers = [asyncio.ensure_future(again(c)) for c in channels for _ in range(self.orders.get("in_flight", 16))]
        give_up_s = time.monotonic() + PATIENCE_S
        while self.missed() and time.monotonic() < give_up_s and not self.stop.is_set():
            await asyncio.sleep(0.05)
        print("ready", flush=True)
        await asyncio.to_thread(self.stop.wait)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        for channel in channels:
            await channel.close()


# --- below gRPC


@dataclass
class Line:
    """A connection: its start, the number of its writes, the end of the bytes received, its stream."""

    sock: socket.socket
    since_s: float
    rounds: int = 0
    sent: bytes = b""
    stream: int = 1


def silent(attack: Attack, speak: Callable[[Line], None] | None = None) -> None:
    """Hold connections; `speak` may send a little on each, every half second."""
    held: list[Line] = []
    ready, give_up_s = False, time.monotonic() + PATIENCE_S
    while True:
        while len(held) < attack.orders["connections"] and not attack.stop.is_set():
            try:
                sock = socket.create_connection((attack.host, attack.port), timeout=5)
            except OSError:
                attack.note("refused")
                break
            sock.setblocking(False)
            held.append(Line(sock, time.monotonic()))
            attack.note("opened")
        if not ready and (not attack.missed() or time.monotonic() > give_up_s):
            ready = True
            print("ready", flush=True)
        if attack.stop.wait(0.5):
            break
        for line in held:
            with contextlib.suppress(OSError):
                if speak is not None:
                    speak(line)
            line.rounds += 1
        for line in held:
            if _is_closed(line):
                attack.note(_end(line))
                line.sock.close()
        held = [line for line in held if line.sock.fileno() >= 0]


def _end(line: Line) -> str:
    """The reason for a connection's end, as far as the client can tell."""
    if _UNPARSABLE in line.sent:
        return "dropped for malformed bytes"
    return "dropped for being slow" if line.rounds and time.monotonic() - line.since_s > STALE_S else "dropped"


def _is_closed(line: Line) -> bool:
    try:
        while data := line.sock.recv(4096):
            line.sent = (line.sent + data)[-4096:]
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def loris(attack: Attack) -> None:
    """Send the preface, one byte each half second."""
    silent(attack, lambda line: (line.sock.send(_PREFACE[line.rounds % len(_PREFACE) :][:1]), None)[1])


def garbage(attack: Attack) -> None:
    """Send frames of random types, lengths and contents."""

    def speak(line: Line) -> None:
        if line.rounds == 0:
            line.sock.send(_PREFACE + _SETTINGS)
        body = attack.random.randbytes(attack.random.randint(0, 200))
        kind = attack.random.randrange(attack.random.choice((10, 256)))  # HTTP/2 has ten kinds
        head = struct.pack(">I", len(body))[1:] + bytes([kind]) + attack.random.randbytes(5)
        line.sock.send(head + body)

    silent(attack, speak)


def two_gb(attack: Attack) -> None:
    """Announce a gRPC message of 2 GB and send as much as the store accepts; then the same on another stream."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{msg.SERVICE}/Put"),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    headers += attack.metadata(bytes="60000000")
    block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers)

    def begin(line: Line) -> None:
        opening = _PREFACE + _SETTINGS if line.stream == 1 else b""
        frame = struct.pack(">I", len(block))[1:] + b"\x01\x04" + struct.pack(">I", line.stream) + block
        line.sock.settimeout(2)
        try:
            line.sock.sendall(opening + frame + _data(line.stream, b"\0" + struct.pack(">I", 2**31 - 1)))
        finally:
            line.sock.setblocking(False)

    def speak(line: Line) -> None:
        if line.rounds == 0:
            begin(line)
        elif _TOO_LARGE in line.sent:
            attack.note("refused as too large")
            line.sent, line.stream = b"", line.stream + 2
            begin(line)
        for _ in range(64):
            attack.note("bytes", line.sock.send(_data(line.stream, bytes(16_000))))

    silent(attack, speak)


def _literal(text: str) -> bytes:
    """An HPACK string without compression."""
    data, length = text.encode(), len(text.encode())
    if length < 127:
        return bytes([length]) + data
    more, rest = [], length - 127
    while rest >= 128:
        more.append(rest % 128 + 128)
        rest //= 128
    return bytes([127, *more, rest]) + data


def _data(stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + b"\0\0" + struct.pack(">I", stream) + body


# --- over gRPC


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """The body in pieces, as a client sends it."""
    for start in range(0, len(body), protocol.PIECE_BYTES):
        yield body[start : start + protocol.PIECE_BYTES]


async def no_token(attack: Attack) -> None:
    await attack.flood(lambda channel: attack.call(channel, "Put", bytes(65_536), attack.metadata(token="")))


async def wrong_token(attack: Attack) -> None:
    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        guessed = attack.metadata(token=f"{attack.random.getrandbits(256):064x}")
        return attack.call(channel, attack.random.choice(SAMPLER_METHODS), bytes(65_536), guessed)

    await attack.flood(one)


async def wrong_role(attack: Attack) -> None:
    await attack.greet()

    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        right = attack.random.choice(("sampler", "learner", "admin"))
        method = attack.random.choice(LEARNER_METHODS)  # calls that would do harm: a new lineage, the end of the run
        body = {"Begin": msg.BeginCall(None), "Close": msg.CloseCall("mallory")}.get(method)
        return attack.call(channel, method, wire.encode(body) if body else b"", attack.metadata(right=right))

    await attack.flood(one)


async def liars(attack: Attack) -> None:
    """Send whole pieces, half pieces, or one piece, of a small message and of messages that fill the room."""
    forever = asyncio.Event()
    large = 60_000_000
    kinds = (  # declared bytes, bytes per piece, pieces, True if it ends then
        (100, 200_000, 8, True),
        (large, protocol.PIECE_BYTES, 8, True),
        (2**31, protocol.PIECE_BYTES, 8, True),
        (4 * protocol.PIECE_BYTES, protocol.PIECE_BYTES, 1, False),
        (large, protocol.PIECE_BYTES, 1, False),
    )

    async def one(channel: grpc.aio.Channel) -> None:
        declared, piece_bytes, count, ends = attack.random.choice(kinds)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(count):
                yield bytes(piece_bytes)
            if not ends:
                await forever.wait()

        try:
            send = channel.stream_unary(f"/{msg.SERVICE}/Put")
            await send(pieces(), metadata=attack.metadata(bytes=str(declared)), timeout=15)
        except grpc.aio.AioRpcError as error:
            attack.note(f"Put {error.code().name}: {error.details()}")
        else:
            attack.note("Put OK")

    await attack.flood(one)


async def malformed(attack: Attack) -> None:
    """Send damaged bytes: valid messages, and puts of leased or unknown members, damaged inside or outside.

    No put here is valid before the damage, and only the attacker's own leases are renewed or returned.
    """
    await attack.greet()
    unknown = (UNKNOWN_GROUP, 0, 1)
    bad = Finished((), "stop", 1.0, {}, (VersionRun(V0, 1),))
    failed = Failed("DATA", "x")
    members = [
        wire.encode(one) for one in (Member(*(await attack.lease(1, "malformed"))[0], bad), Member(*unknown, failed))
    ]
    hello, keys = attack.orders.get("config_digest", ""), msg.Members((unknown,))
    meant = {
        "Hello": (msg.Hello(wire.PROTOCOL_VERSION, hello), msg.Hello(wire.PROTOCOL_VERSION - 1, hello)),
        "Renew": (keys,),
        "Release": (keys,),
        "Ended": (msg.EndedCall(0.0),),
        "Status": (None,),
        "Lease": (msg.LeaseCall(V0, 1, 0.0, "r"),),
        "Published": (msg.PublishedCall(None, 0.0),),
        "Report": (msg.ReportCall((b"{}",), "r"),),
    }
    bodies = {method: [wire.encode(body) for body in some] for method, some in meant.items()}
    every = [body for some in bodies.values() for body in some]

    def spoiled(valid: bytes) -> bytes:
        body = bytearray(valid)
        if attack.random.random() < 0.2:
            return valid  # now and then a call that waits for its answer must be valid
        for _ in range(attack.random.randint(0, 4)):
            body[attack.random.randrange(len(body))] = attack.random.randrange(256)
        return bytes(body) if attack.random.random() < 0.7 else attack.random.randbytes(attack.random.randint(0, 300))

    def put() -> bytes:
        inside = attack.random.random() < 0.5
        some = [attack.random.choice(members) for _ in range(attack.random.randint(0, 3))]
        call = wire.encode(msg.PutCall(tuple(spoiled(one) if inside else one for one in some)))
        return call if inside else spoiled(call)

    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        method = attack.random.choice(SAMPLER_METHODS)
        known = attack.random.random() < 0.5
        body = put() if method == "Put" else spoiled(attack.random.choice(bodies[method] if known else every))
        return attack.call(channel, method, body)

    (first, *others) = attack.channels()
    for method, some in {**bodies, "Put": [wire.encode(msg.PutCall((member,))) for member in members]}.items():
        for body in (*some, b"\xc1"):  # so that each answer comes at least once
            await attack.call(first, method, body)
    for channel in (first, *others):
        await channel.close()
    await attack.flood(one)


async def paths(attack: Attack) -> None:
    """Send names that would be file paths."""
    texts = ("../../outside", "/etc/outside", "..", "a/../../outside", "%2e%2e%2foutside", "outside.db", "~/outside")
    await attack.greet()

    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        text, place = attack.random.choice(texts), attack.random.choice(("name", "session", "run", "config", "request"))
        if place == "request":
            return attack.call(channel, "Lease", wire.encode(msg.LeaseCall(V0, 1, 0.0, text)))
        if place == "run" or (place == "config" and attack.random.random() < 0.5):
            return attack.call(channel, "Status", b"", attack.metadata(**{place: text}))
        return attack.call(
            channel, "Hello", wire.encode(msg.Hello(wire.PROTOCOL_VERSION, text)), attack.metadata(**{place: text})
        )

    await attack.flood(one)


async def polls(attack: Attack) -> None:
    """Call Ended and Published with the longest wait."""
    bodies = {"Ended": wire.encode(msg.EndedCall(30.0)), "Published": wire.encode(msg.PublishedCall(V0, 30.0))}
    await attack.greet()

    async def one(channel: grpc.aio.Channel) -> None:
        method = attack.random.choice(tuple(bodies))
        held = asyncio.get_running_loop().call_later(HELD_S, attack.note, f"{method} held")
        try:
            await attack.call(channel, method, bodies[method])
        finally:
            held.cancel()

    await attack.flood(one)


async def crowd(attack: Attack) -> None:
    hello = wire.encode(msg.Hello(wire.PROTOCOL_VERSION, attack.orders.get("config_digest", "")))

    async def one(channel: grpc.aio.Channel) -> None:
        name = f"{attack.random.getrandbits(64):x}"
        await attack.call(channel, "Hello", hello, attack.metadata(name=name, session=name))

    await attack.flood(one)


async def heavy(attack: Attack) -> None:
    """Put calls of `bytes` with as many segments as possible; only the last number of a member is wrong."""
    await attack.greet()
    size = attack.orders.get("bytes", 2**26)
    said = np.zeros(1, np.int32), np.ones(1, np.uint8), np.zeros(1, np.float32)
    tokens, mask, logprobs = said
    tiny, empty = Segment(*said), Segment(tokens[:0], mask[:0], logprobs[:0])
    shown = Segment(said[0], np.zeros(1, np.uint8), said[2])
    segments = (shown,) + (empty,) * (MAX_SEGMENTS - 1025) + (tiny,) * 1024
    right, wrong = (
        wire.encode(Finished(segments, "stop", 1.0, {}, (VersionRun(V0, count),))) for count in (1024, 1025)
    )
    count = min(msg.MAX_PUTS, (size - 1024) // (len(wrong) + 64))
    leased = await attack.lease(count, "heavy")
    bodies = [
        wire.encode(msg.PutCall(tuple(_member(leased[i % len(leased)], wrong) for i in range(1 + count // 8)))),
        wire.encode(msg.PutCall(tuple(_member((UNKNOWN_GROUP + i, 0, 1), right) for i in range(count)))),
    ]
    await attack.flood(lambda channel: attack.call(channel, "Put", attack.random.choice(bodies)))


def _member(key: msg.Key, outcome: bytes) -> bytes:
    """The bytes of a member from its encoded outcome."""
    group, member, attempt = key
    return wire.encode({"group": group, "member": member, "attempt": attempt, "outcome": msgspec.Raw(outcome)})


KINDS: dict[str, Callable[[Attack], Any]] = {
    function.__name__: function
    for function in (
        silent,
        loris,
        garbage,
        no_token,
        wrong_token,
        wrong_role,
        two_gb,
        liars,
        malformed,
        paths,
        polls,
        crowd,
        heavy,
    )
}


def main() -> None:
    """Attack until standard input ends."""
    kind, orders = sys.argv[1], json.loads(sys.argv[2])
    lifeline.bind(orders.get("parent", os.getppid()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if hard > soft else (soft, hard))
    attack = Attack(kind, orders)
    threading.Thread(target=lambda: (sys.stdin.read(), attack.stop.set()), daemon=True).start()
    job = KINDS[kind](attack)
    if asyncio.iscoroutine(job):
        asyncio.run(job)
    print(json.dumps(attack.result()), flush=True)


if __name__ == "__main__":
    main()
