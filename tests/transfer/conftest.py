"""Meshes, parameters, publishers on both channels, and a man in the middle."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxroll.config import TransferConfig
from jaxroll.records import VersionRef
from jaxroll.transfer.channel_device import HandedOver
from jaxroll.transfer.ends import Publisher, Receiver, Staged
from jaxroll.transfer.manifest import HostSnapshot
from tests.harness.transfer_arrays import (
    BIG,
    SHAPES,
    abstract_of,
    host_snapshot,
    mesh_of,
    params_of,
    shardings_of,
    values_of,
)


@dataclass
class Kit:
    """Helpers that the tests of this folder share."""

    folder: Path
    stack: contextlib.ExitStack
    mesh = staticmethod(mesh_of)
    shardings = staticmethod(shardings_of)
    values = staticmethod(values_of)
    params = staticmethod(params_of)
    abstract = staticmethod(abstract_of)
    host_snapshot = staticmethod(host_snapshot)
    shapes: dict = field(default_factory=lambda: dict(SHAPES))

    def config(self, channel: str = "tcp", **changes: object) -> TransferConfig:
        return TransferConfig(channel=channel, **{"deadline_s": 20.0, **changes})

    def publisher(self, channel: str = "tcp", *, keep: int = 2, token: str = "", **changes: object) -> Publisher:
        made = Publisher(self.config(channel, **changes), self.folder, keep=keep, token=token)
        self.stack.callback(made.close)
        return made

    def receiver(self, *, token: str = "", **changes: object) -> Receiver:
        return Receiver(self.config(**changes), token=token)

    def fetch_big(self, announced: VersionRef, **receiver: object) -> Staged | HandedOver:
        """A version of the shapes BIG, for two devices that split the second axis."""
        from jax.sharding import NamedSharding, PartitionSpec

        target = dict.fromkeys(BIG, NamedSharding(self.mesh(1, 1, 2), PartitionSpec(None, "tensor")))
        return self.receiver(**receiver).fetch(announced, target, self.abstract(BIG))

    def middle(self, address: str, **behaviour: object) -> Middle:
        made = Middle(address, **behaviour)
        self.stack.callback(made.close)
        return made


class Middle:
    """A tcp proxy that flips a byte (`flip_at`), hangs up (`cut_at`) or goes silent (`stall_at`) in the answers.

    Silence ends when `go_on` is set.
    """

    def __init__(
        self, upstream: str, *, flip_at: int | None = None, cut_at: int | None = None, stall_at: int | None = None
    ) -> None:
        self._upstream = upstream.rpartition(":")
        self._flip_at, self._cut_at, self._stall_at = flip_at, cut_at, stall_at
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._stop, self.go_on = threading.Event(), threading.Event()
        self.passed_bytes = 0
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._stop.set()
        self.go_on.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(5)

    def _serve(self) -> None:
        try:
            client, _ = self._listening.accept()
        except OSError:
            return
        server = socket.create_connection((self._upstream[0], int(self._upstream[2])), timeout=10)
        with client, server:
            questions = threading.Thread(target=_pump, args=(client, server), daemon=True)
            self._threads.append(questions)
            questions.start()
            with contextlib.suppress(OSError):
                self._answers(server, client)
            for side in (client, server):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)
            questions.join(5)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        while data := bytearray(server.recv(1 << 14)):
            at, end = self.passed_bytes, self.passed_bytes + len(data)
            if self._flip_at is not None and at <= self._flip_at < end:
                data[self._flip_at - at] ^= 0x10
            if self._cut_at is not None and end > self._cut_at:
                client.sendall(data[: max(0, self._cut_at - at)])
                return
            if self._stall_at is not None and end > self._stall_at:
                client.sendall(data[: (passed := max(0, self._stall_at - at))])
                del data[:passed]
                self.go_on.wait(30)
                if self._stop.is_set():
                    return
            client.sendall(data)
            self.passed_bytes = end


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 14):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with contextlib.ExitStack() as stack:
        yield Kit(tmp_path, stack)


@pytest.fixture
def announced() -> Callable[[HostSnapshot, str], VersionRef]:
    """The record that would announce a host snapshot at a tcp address."""
    return lambda taken, address: VersionRef(taken.version, "tcp", address, taken.manifest_digest)
