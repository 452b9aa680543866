"""The tcp channel: length-prefixed headers over sockets, and raw bytes directly into the receiver's buffers.

Connections on the loopback are plain. For other addresses the publisher needs certificates (then all readers must use
TLS) or the user's consent to plain text.
"""

from __future__ import annotations

import itertools
import socket
import ssl
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.clock import Clock, MonotonicClock
from jaxroll.errors import DigestMismatch, TransferError, Unauthorized, VersionGone, VersionMixed, one_line
from jaxroll.records import Version
from jaxroll.rpc import protocol
from jaxroll.rpc import tls as tls_files
from jaxroll.rpc.tls import Material
from jaxroll.transfer import channels
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channels import Deadline, HostSnapshot, SlicePart
from jaxroll.transfer.manifest import Manifest
from jaxroll.transfer.tcp_listener import Listener, VersionShelf

A = TypeVar("A", channels.ManifestReply, channels.Chunk)
_ANY = ("0.0.0.0", "::", "")
_HEADERS_AHEAD = 4096  # slices per request


class TcpSender:
    """A sender that keeps the newest `keep` snapshots in memory and serves them from one thread."""

    name = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        keep: int = 2,
        token: str = "",
        max_connections: int = 16,
        stall_s: float = 60.0,
        clock: Clock | None = None,
        tls: Material | None = None,
        mutual_tls: bool = False,
        insecure: bool = False,
    ) -> None:
        """Listen on a free port of `host`.

        ConfigError when other machines can reach `host` and there is no token, or neither TLS nor consent.
        """
        protocol.check_exposure(host, secret=token, has_tls=tls is not None, insecure=insecure)
        self._shelf = VersionShelf(keep)
        self._listener = Listener(
            self._shelf,
            host,
            token=token,
            max_connections=max_connections,
            stall_s=stall_s,
            clock=clock or MonotonicClock(),
            tls=None if tls is None else tls.server_contexts(mutual=mutual_tls),
        )
        self.address = f"{socket.gethostname() if host in _ANY else host}:{self._listener.port}"
        self._listener.start()

    def offer(self, snapshot: HostSnapshot) -> str:
        """Add `snapshot` and return its address. The oldest snapshot is dropped when its readers are done."""
        if not self._listener.alive():
            raise TransferError("the transfer listener is not running; publish from a new Publisher")
        self._shelf.put(snapshot)
        return self.address

    def versions(self) -> tuple[Version, ...]:
        """The available versions."""
        return self._shelf.versions()

    def close(self) -> None:
        self._listener.close()


class TcpReader:
    """One connection to a TcpSender, for one version."""

    def __init__(
        self, address: str, version: Version, token: str, deadline: Deadline, tls: Material | None = None
    ) -> None:
        self._address, self._version, self._token, self._deadline = address, version, token, deadline
        self._tls, self._has_received = tls, False
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not port.isascii() or not 0 < int(port[:6]) < 1 << 16:
            raise TransferError(one_line(f"not a tcp address: {address!r} (HOST:PORT)"))
        try:
            self._sock = socket.create_connection((host.strip("[]"), int(port)), timeout=deadline.left_s())
        except (OSError, ValueError) as error:  # ValueError: the host is not a valid name
            raise TransferError(one_line(f"no parameters from {address}: {error}")) from error
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._sock = self._secured(tls, host.strip("[]"))
        self._scratch = bytearray(channels.LENGTH.size)

    def close(self) -> None:
        self._sock.close()

    def _secured(self, tls: Material, host: str) -> socket.socket:
        """The connection under TLS, after verifying the publisher's name."""
        try:
            self._sock.settimeout(self._deadline.left_s())
            return tls.client_context().wrap_socket(self._sock, server_hostname=host)
        except TimeoutError as error:
            tls_files.close_quietly(self._sock)
            raise self._deadline.passed() from error
        except OSError as error:
            tls_files.close_quietly(self._sock)
            raise self._lost(error) from error

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked."""
        self._send(channels.AskManifest(wire.PROTOCOL_VERSION, self._token, self._version))
        answer = self._answer(channels.ManifestReply)
        if not 0 <= answer.size_bytes <= channels.MAX_MANIFEST_BYTES:
            raise TransferError(f"{self._address} announces a manifest of {answer.size_bytes} bytes")
        data = bytearray(answer.size_bytes)
        self._receive(memoryview(data))
        return bytes(data)

    def read(self, manifest: Manifest, parts: Sequence[SlicePart]) -> None:
        """Fill every part. One request asks for up to `_HEADERS_AHEAD` slices, which are answered as a stream."""
        pieces = (piece for part in parts for piece in _pieces(part))
        while batch := list(itertools.islice(pieces, _HEADERS_AHEAD)):
            slices = tuple(channels.Slice(part.leaf, part.source, part.box, part.checked) for part in batch)
            self._send(channels.AskSlices(wire.PROTOCOL_VERSION, self._token, self._version, slices))
            for part in batch:
                self._fill(part, manifest.leaves[part.leaf].name)

    def _fill(self, part: SlicePart, name: str) -> None:
        answer = self._answer(channels.Chunk)
        size_bytes = part.into.nbytes
        if answer.size_bytes != size_bytes:
            received = f"{answer.size_bytes} bytes were announced, {size_bytes} are needed"
            raise TransferError(f"leaf {name!r} {part.box}: {received}")
        if size_bytes == 0:
            return
        body = part.into if part.into.flags.c_contiguous else np.empty(part.into.shape, part.into.dtype)
        self._receive(body.reshape(-1).data.cast("B"))
        if part.checked and answer.digest != manifests.of_box(body, part.box):
            raise DigestMismatch(f"leaf {name!r} {part.box} of version {self._version} was damaged in transit")
        if body is not part.into:
            part.into[...] = body

    def _answer(self, kind: type[A]) -> A:
        self._receive(memoryview(self._scratch))
        (length,) = channels.LENGTH.unpack(self._scratch)
        if length > channels.MAX_FRAME_BYTES:
            raise TransferError(f"{self._address} does not speak this protocol (a header of {length} bytes)")
        body = bytearray(length)
        self._receive(memoryview(body))
        try:
            answer = wire.decode(bytes(body), channels.Answer)
        except msgspec.MsgspecError as error:
            raise TransferError(f"{self._address} does not speak this protocol: {error}") from error
        if isinstance(answer, channels.Refused):
            raise _refusal(answer, self._address)
        if answer.version != self._version:
            raise VersionMixed(f"received a slice of version {answer.version}, requested {self._version}")
        if not isinstance(answer, kind):
            raise TransferError(f"{self._address} answered {type(answer).__name__}, not {kind.__name__}")
        return answer

    def _send(self, question: channels.Question) -> None:
        data = channels.frame(question)
        if len(data) > channels.MAX_FRAME_BYTES:
            raise TransferError(f"a request of {len(data)} bytes is more than the {channels.MAX_FRAME_BYTES} allowed")
        try:
            self._sock.settimeout(self._deadline.left_s())
            self._sock.sendall(data)
        except TimeoutError as error:
            raise self._deadline.passed() from error
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, buffer: memoryview) -> None:
        while len(buffer):
            try:
                self._sock.settimeout(self._deadline.left_s())
                count = self._sock.recv_into(buffer)
            except TimeoutError as error:
                raise self._deadline.passed() from error
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise self._lost("the publisher closed the connection")
            self._has_received = True
            buffer = buffer[count:]

    def _lost(self, why: OSError | str) -> Exception:
        """The error of a connection that ended: Unauthorized when the two ends do not agree on TLS."""
        reason = None
        if isinstance(why, ssl.SSLError):
            reason = tls_files.explanation(why, self._tls)
        if reason is None and not self._has_received:
            reason = tls_files.diagnosis(self._address, self._tls)
        if reason is not None:
            return Unauthorized(f"weights of {self._version} at {self._address}: {reason}")
        return TransferError(f"transfer of version {self._version} from {self._address} broke off: {why}")


def _pieces(part: SlicePart) -> list[SlicePart]:
    """The part cut into chunks of at most `channels.CHUNK_BYTES`, each with its view of the destination."""
    limit = channels.CHUNK_BYTES // part.into.itemsize
    return [
        part._replace(box=box, into=part.into[manifests.within(box, part.box)] if box else part.into)
        for box in manifests.split(part.box, limit)
    ]


def _refusal(answer: channels.Refused, address: str) -> Exception:
    kinds = {"gone": VersionGone, "unauthorized": Unauthorized}
    return kinds.get(answer.kind, TransferError)(one_line(f"{address}: {answer.reason}"))
