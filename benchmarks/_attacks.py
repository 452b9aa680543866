"""Attacks on a store, each as a process: `python _attacks.py KIND ORDERS_JSON`.

Prints "ready" when it is under way, goes on until its standard input ends (or its parent), then prints one JSON object
with what it counted. Used by benchmarks/hostile.py and tests/store/test_hostile.py.

    silent       TCP connections that never speak, opened again when they are dropped
    loris        connections that say the beginning of HTTP/2 byte by byte
    garbage      HTTP/2 preface, then random frames
    no_token     calls without a token               wrong_token  calls with a guessed token
    wrong_role   a sampler's token, calls of the learner
    two_gb       a valid token, an HTTP/2 stream that announces a message of 2 GB and begins to send it
    liars        a valid token, bodies longer and shorter than declared, and bodies that stop in the middle
    malformed    a valid token, random and mutated bytes to every method a sampler may call
    paths        a valid token, names, sessions, requests and runs like ../../x
    polls        a valid token, long polls up to what a connection may have, on many connections
    crowd        a valid token, a hello under a new name each time
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from jaxroll import lifeline, wire
from jaxroll.records import Failed, Finished, Member, Version, VersionRun
from jaxroll.rpc import auth, limits
from jaxroll.store import messages as msg

SAMPLER_METHODS = ("Hello", "Lease", "Renew", "Put", "Release", "Published", "Report", "Status")
LEARNER_METHODS = ("Claim", "Begin", "Publish", "Ack", "Durable", "Close")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Attack:
    """What an attacker knows, and what it counts."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.host, _, port = orders["address"].rpartition(":")
        self.port, self.orders = int(port), orders
        self.count: Counter[str] = Counter()
        self.random = random.Random(orders.get("seed", 0))
        self.stop = threading.Event()

    def said(self, **changes: str) -> list[tuple[str, str]]:
        """The metadata of a call, as a client would send it but for the changes."""
        orders = self.orders
        said = {"name": "mallory", "session": "m", "right": "sampler", "run": orders.get("run_id", ""),
                "protocol": str(wire.PROTOCOL_VERSION), "config": orders.get("config_digest", "")}  # fmt: skip
        token = changes.pop("token", orders.get("token", ""))
        metadata = [(f"jaxroll-{key}", value) for key, value in (said | changes).items()]
        return [*metadata, *([("authorization", f"Bearer {auth.bearer(token, 'sampler')}")] if token else [])]

    def channels(self) -> list[grpc.aio.Channel]:
        """As many connections of their own as ordered."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return [grpc.aio.insecure_channel(self.orders["address"], options=options)
                for _ in range(self.orders.get("connections", 4))]  # fmt: skip

    async def call(self, channel: grpc.aio.Channel, method: str, body: bytes, metadata: list[tuple[str, str]]) -> bytes:
        """The answer; its status is counted."""
        try:
            send = channel.unary_unary(f"/{msg.SERVICE}/{method}")
            answer = await send(body, metadata=metadata, timeout=self.orders.get("timeout_s", 20.0))
        except grpc.aio.AioRpcError as error:
            self.count[error.code().name] += 1
            return b""
        self.count["OK"] += 1
        return answer

    async def flood(self, one: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> None:
        """`in_flight` callers on every connection, each calling again at once, until told to stop."""

        async def again(channel: grpc.aio.Channel) -> None:
            while not self.stop.is_set():
                await one(channel)

        channels = self.channels()
        callers = [asyncio.ensure_future(again(c)) for c in channels for _ in range(self.orders.get("in_flight", 16))]
        await asyncio.sleep(0.2)
        print("ready", flush=True)
        await asyncio.to_thread(self.stop.wait)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        for channel in channels:
            await channel.close()


# --- below gRPC


def silent(attack: Attack, speak: Callable[[socket.socket, int], None] | None = None) -> None:
    """Hold connections; `speak` may say a little on each, every half second."""
    held: list[socket.socket] = []
    ready, rounds = False, 0
    while True:
        while len(held) < attack.orders["connections"] and not attack.stop.is_set():
            try:
                held.append(socket.create_connection((attack.host, attack.port), timeout=5))
            except OSError:
                attack.count["refused"] += 1
                break
            held[-1].setblocking(False)
            attack.count["opened"] += 1
        if not ready:
            ready = True
            print("ready", flush=True)
        if attack.stop.wait(0.5):
            break
        for sock in held:
            with contextlib.suppress(OSError):
                if speak is not None:
                    speak(sock, rounds)
        rounds += 1
        gone = [sock for sock in held if _is_closed(sock)]
        attack.count["dropped"] += len(gone)
        for sock in gone:
            sock.close()
        held = [sock for sock in held if sock.fileno() >= 0]


def _is_closed(sock: socket.socket) -> bool:
    try:
        while data := sock.recv(4096):
            del data
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def loris(attack: Attack) -> None:
    """The preface, a byte each half second."""
    silent(attack, lambda sock, rounds: (sock.send(_PREFACE[rounds % len(_PREFACE) :][:1]), None)[1])


def garbage(attack: Attack) -> None:
    """Frames of random types, lengths and contents."""

    def speak(sock: socket.socket, rounds: int) -> None:
        if rounds == 0:
            sock.send(_PREFACE + _SETTINGS)
        body = attack.random.randbytes(attack.random.randint(0, 200))
        head = struct.pack(">I", len(body))[1:] + attack.random.randbytes(6)
        sock.send(head + body)

    silent(attack, speak)


def two_gb(attack: Attack) -> None:
    """A gRPC message whose prefix says 2 GB, and as much of it as is taken."""

    def begin(sock: socket.socket) -> None:
        headers = [(":method", "POST"), (":scheme", "http"), (":path", f"/{msg.SERVICE}/Put"), (":authority", "x"),
                   ("content-type", "application/grpc"), ("te", "trailers")]  # fmt: skip
        headers += attack.said(bytes="60000000")
        block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers)
        frame = struct.pack(">I", len(block))[1:] + b"\x01\x04" + struct.pack(">I", 1) + block
        sock.sendall(_PREFACE + _SETTINGS + frame)
        sock.sendall(_data(b"\0" + struct.pack(">I", 2**31 - 1)))

    def speak(sock: socket.socket, rounds: int) -> None:
        if rounds == 0:
            sock.setblocking(True)
            sock.settimeout(2)
            begin(sock)
            sock.setblocking(False)
        for _ in range(64):
            attack.count["bytes"] += sock.send(_data(bytes(16_000)))

    silent(attack, speak)


def _literal(text: str) -> bytes:
    """A string of HPACK, plain."""
    data, length = text.encode(), len(text.encode())
    if length < 127:
        return bytes([length]) + data
    more, rest = [], length - 127
    while rest >= 128:
        more.append(rest % 128 + 128)
        rest //= 128
    return bytes([127, *more, rest]) + data


def _data(body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + b"\0\0" + struct.pack(">I", 1) + body


# --- over gRPC


async def no_token(attack: Attack) -> None:
    await attack.flood(lambda channel: attack.call(channel, "Put", bytes(65_536), attack.said(token="")))


async def wrong_token(attack: Attack) -> None:
    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        guessed = attack.said(token=f"{attack.random.getrandbits(256):064x}")
        return attack.call(channel, attack.random.choice(SAMPLER_METHODS), bytes(65_536), guessed)

    await attack.flood(one)


async def wrong_role(attack: Attack) -> None:
    await _greet(attack)

    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        right = attack.random.choice(("sampler", "learner", "admin"))
        method = attack.random.choice(LEARNER_METHODS)  # with what would do harm: a new lineage, the end of the run
        body = {"Begin": msg.BeginCall(None), "Close": msg.CloseCall("mallory")}.get(method)
        return attack.call(channel, method, wire.encode(body) if body else b"", attack.said(right=right))

    await attack.flood(one)


async def liars(attack: Attack) -> None:
    """Whole pieces, half pieces, and none after the first."""
    forever = asyncio.Event()

    async def one(channel: grpc.aio.Channel) -> None:
        kind = attack.random.randrange(4)
        declared = (100, 60_000_000, 2**31, 4 * limits.PIECE_BYTES)[kind]

        async def pieces():
            for _ in range(1 if kind == 3 else 8):
                yield bytes(limits.PIECE_BYTES if kind else 200_000)
            if kind == 3:
                await forever.wait()

        try:
            send = channel.stream_unary(f"/{msg.SERVICE}/Put")
            await send(pieces(), metadata=attack.said(bytes=str(declared)), timeout=15)
        except grpc.aio.AioRpcError as error:
            attack.count[error.code().name] += 1

    await attack.flood(one)


async def malformed(attack: Attack) -> None:
    """Bytes that were valid once."""
    member = Member(0, 0, 1, Finished((), "stop", 1.0, {}, (VersionRun(Version(0, 0), 1),)))
    bodies = [wire.encode(body) for body in (
        member, Member(0, 0, 1, Failed("DATA", "x")), msg.Hello(1, "x"), msg.Members(((0, 0, 1),)),
        msg.LeaseCall(Version(0, 0), 2**53, 0.0, "r"), msg.PublishedCall(None, 0.0), msg.ReportCall((b"{}",), "r"),
    )]  # fmt: skip

    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        body = bytearray(attack.random.choice(bodies))
        for _ in range(attack.random.randint(0, 4)):
            body[attack.random.randrange(len(body))] = attack.random.randrange(256)
        sent = bytes(body) if attack.random.random() < 0.7 else attack.random.randbytes(attack.random.randint(0, 300))
        return attack.call(channel, attack.random.choice(SAMPLER_METHODS), sent, attack.said())

    await attack.flood(one)


async def paths(attack: Attack) -> None:
    """Names that would be files."""
    texts = ("../../outside", "/etc/outside", "..", "a/../../outside", "%2e%2e%2foutside", "outside.db", "~/outside")

    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        text, place = attack.random.choice(texts), attack.random.choice(("name", "session", "run", "config", "request"))
        if place == "request":
            body = wire.encode(msg.LeaseCall(Version(0, 0), 1, 0.0, text))
            return attack.call(channel, "Lease", body, attack.said())
        return attack.call(channel, "Hello", wire.encode(msg.Hello(1, text)), attack.said(**{place: text}))

    await attack.flood(one)


async def polls(attack: Attack) -> None:
    """Lease and published, each to be held as long as can be."""
    known = Version(0, 0)
    bodies = {
        "Lease": wire.encode(msg.LeaseCall(known, 1, 30.0, "r")),
        "Published": wire.encode(msg.PublishedCall(known, 30.0)),
    }
    await _greet(attack)

    def one(channel: grpc.aio.Channel) -> Awaitable[bytes]:
        method = attack.random.choice(tuple(bodies))
        return attack.call(channel, method, bodies[method], attack.said())

    await attack.flood(one)


async def _greet(attack: Attack) -> None:
    """Says Hello once, as a sampler would."""
    hello = wire.encode(msg.Hello(wire.PROTOCOL_VERSION, attack.orders.get("config_digest", "")))
    channel = attack.channels()[0]
    await attack.call(channel, "Hello", hello, attack.said())
    await channel.close()


async def crowd(attack: Attack) -> None:
    hello = wire.encode(msg.Hello(wire.PROTOCOL_VERSION, attack.orders.get("config_digest", "")))

    async def one(channel: grpc.aio.Channel) -> None:
        name = f"{attack.random.getrandbits(64):x}"
        await attack.call(channel, "Hello", hello, attack.said(name=name, session=name))

    await attack.flood(one)


KINDS: dict[str, Callable[[Attack], Any]] = {
    function.__name__: function
    for function in (silent, loris, garbage, no_token, wrong_token, wrong_role, two_gb, liars, malformed, paths, polls,
                     crowd)
}  # fmt: skip


def main() -> None:
    """Attack until standard input ends."""
    kind, orders = sys.argv[1], json.loads(sys.argv[2])
    lifeline.bind(orders.get("parent", os.getppid()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if hard > soft else (soft, hard))
    attack = Attack(orders)
    threading.Thread(target=lambda: (sys.stdin.read(), attack.stop.set()), daemon=True).start()
    job = KINDS[kind](attack)
    if asyncio.iscoroutine(job):
        asyncio.run(job)
    print(json.dumps(dict(attack.count)), flush=True)


if __name__ == "__main__":
    main()
