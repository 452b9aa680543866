"""A TCP proxy before the learner's transfer listener that can damage weights on their way to the sampler.

The tap writes the proxy's address into the publication that the sampler receives, so both ends are real roles.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec

from jaxroll import wire
from jaxroll.records import Version
from jaxroll.rpc.protocol import Envelope
from jaxroll.store.messages import PublishedReply
from tests.harness.cluster.rpc_tap import Call, Forward, Tap

_CHUNK_BYTES = 1 << 14
Spoil = Callable[[int, bytes], bytes]  # (offset in the answers, bytes that came) → bytes that go on


class Courier:
    """A context manager, used within the tap's, that forwards each connection on its own thread.

    `spoil(version, how)` changes the answers of the next transfer of that version once. `carried` holds the answers of
    the last complete transfer.
    """

    def __init__(self, tap: Tap, sampler: str = "sampler-0") -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._upstream: tuple[str, Version] = ("", Version(0, 0))
        self._spoils: dict[Version, Spoil] = {}
        self._open: set[socket.socket] = set()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="courier", daemon=True)]
        self.carried: dict[Version, bytes] = {}
        self.spoilt: list[Version] = []
        tap.on(sampler, "Published", self._published)

    def spoil(self, version: Version, how: Spoil) -> None:
        """Change the answers of the next transfer of `version`."""
        self._spoils[version] = how

    @property
    def upstream(self) -> str:
        """The learner's address in the last publication."""
        return self._upstream[0]

    def __enter__(self) -> Courier:
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(10)

    async def _published(self, call: Call, forward: Forward) -> bytes:
        answer = await forward(call.body)
        envelope = wire.decode(answer, Envelope)
        reply = wire.decode(envelope.body, PublishedReply) if envelope.refusal is None else None
        if reply is None or reply.ref is None:
            return answer
        self._upstream = (reply.ref.address, reply.ref.version)
        through = PublishedReply(msgspec.structs.replace(reply.ref, address=self.address))
        return wire.encode(msgspec.structs.replace(envelope, body=wire.encode(through)))

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="courier", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        (host, _, port), version = self._upstream[0].rpartition(":"), self._upstream[1]
        with client, contextlib.suppress(OSError), socket.create_connection((host, int(port)), 10) as server:
            server.settimeout(None)
            self._open |= {client, server}
            back = threading.Thread(target=self._answers, args=(server, client, version), name="courier", daemon=True)
            back.start()
            _pump(client, server)
            back.join(10)
            self._open -= {client, server}

    def _answers(self, server: socket.socket, client: socket.socket, version: Version) -> None:
        how, passed = self._spoils.pop(version, None), bytearray()
        with contextlib.suppress(OSError):
            while data := server.recv(_CHUNK_BYTES):
                going = data if how is None else how(len(passed), data)
                if going != data and version not in self.spoilt:
                    self.spoilt.append(version)
                passed += data
                client.sendall(going)
            self.carried[version] = bytes(passed)
        for one in (server, client):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def flip(at: int) -> Spoil:
    """Change one bit of byte `at`."""

    def how(offset: int, data: bytes) -> bytes:
        if not offset <= at < offset + len(data):
            return data
        changed = bytearray(data)
        changed[at - offset] ^= 0x10
        return bytes(changed)

    return how


def overwrite(other: bytes, start: int, stop: int) -> Spoil:
    """Replace bytes `start` to `stop` by those of `other`, as if the buffer was overwritten while it was sent."""

    def how(offset: int, data: bytes) -> bytes:
        low, high = max(start, offset), min(stop, offset + len(data))
        if low >= high:
            return data
        return data[: low - offset] + other[low:high] + data[high - offset :]

    return how


def stall(at: int, stalled: threading.Event, go_on: threading.Event, limit_s: float = 60.0) -> Spoil:
    """Stop at byte `at` and set `stalled`, until `go_on` is set."""

    def how(offset: int, data: bytes) -> bytes:
        if offset + len(data) > at and not go_on.is_set():
            stalled.set()
            go_on.wait(limit_s)
        return data

    return how


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
