"""The tcp channel, both ends: length-prefixed headers over sockets, raw bytes directly into the receiver's buffers.

Connections on the loopback are plain. For other addresses the publisher needs certificates (then all readers must use
TLS) or the user's consent to plain text.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import math
import selectors
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from jaxroll import wire
from jaxroll.clock import Clock, MonotonicClock
from jaxroll.errors import DigestMismatch, TransferError, Unauthorized, VersionMixed, one_line
from jaxroll.records import Version
from jaxroll.rpc import protocol
from jaxroll.rpc import tls as tls_files
from jaxroll.rpc.tls import Material
from jaxroll.transfer import channels
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channel_device import VersionShelf
from jaxroll.transfer.channels import (
    Buffer,
    Buffers,
    Deadline,
    ReaderConnection,
    Scattered,
    Shared,
    Shelf,
    SlicePart,
    SliceRequest,
    TransferRefusal,
)
from jaxroll.transfer.manifest import Box, HostSnapshot, Manifest

# --- Publishing end of the tcp channel: one thread without JAX serves host snapshots to any number of readers
#
# The thread owns every socket. Other threads use only the shelf (with a lock) and the wake-up socket. At most
# `max_connections` readers are served at a time, one batch of bytes each in rotation; more readers wait in the kernel's
# backlog. A reader is dropped when it makes no progress for `stall_s`, or does not send its token within
# `FIRST_QUESTION_S`. A reader can make this process allocate at most one request, whose size limit is small until the
# token is verified.

TICK_S = 0.5  # interval of the check for stalled readers
FIRST_QUESTION_S = 5.0  # from the connection to the first question, TLS handshake included
_BACKLOG, _WAKE_UPS = 64, 4096
_NONE_FREE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """The listening socket and its thread. Construct, then `start`; `close` waits for the thread to end."""

    def __init__(
        self,
        shelf: Shelf,
        host: str,
        *,
        token: str,
        max_connections: int,
        stall_s: float,
        clock: Clock,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._shelf, self._token, self._clock = shelf, token.encode(), clock
        self._max_connections, self._stall_s, self._tls = max_connections, stall_s, tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._connections: set[ReaderConnection] = set()
        self._accepting, self.sent_bytes = False, 0
        self._rests_until_s = -math.inf  # no accept before this time: without a free descriptor it would spin
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer-listener", daemon=True)

    def start(self) -> None:
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, wait_s: float = 5.0) -> None:
        """End the thread and every connection. Raises TransferError when the thread does not end in `wait_s`."""
        self._stopping.set()
        if self._thread.is_alive():
            self._wake_out.send(b"x")
            self._thread.join(wait_s)
            if self._thread.is_alive():
                raise TransferError(f"the transfer listener did not stop within {wait_s:g} s")
        self._listening.close()
        self._wake_out.close()
        self._wake_in.close()  # here and not in the thread, which may end just before it is woken

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._accept_while_there_is_room()
                for key, _ in self._selector.select(TICK_S):
                    if key.fileobj is self._listening:
                        self._accept()
                    elif key.fileobj is self._wake_in:
                        self._woken()
                    elif key.data is not None:
                        self._serve(key.data)
                self._drop_stalled()
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            self._listening.close()  # here already, so that readers in the backlog do not wait for an answer

    def _accept_while_there_is_room(self) -> None:
        rested = self._clock.now_s() >= self._rests_until_s
        room = rested and len(self._connections) < self._max_connections
        if room and not self._accepting:
            self._selector.register(self._listening, selectors.EVENT_READ, None)
        elif self._accepting and not room:
            self._selector.unregister(self._listening)
        self._accepting = room

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError as error:  # the reader left between select and accept, or no descriptor is free
            if error.errno in _NONE_FREE:
                self._rests_until_s = self._clock.now_s() + TICK_S
            return
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = ReaderConnection(sock, self._clock.now_s(), self._tls and self._tls())
        except OSError:  # the reader left
            sock.close()
            return
        self._connections.add(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: ReaderConnection) -> None:
        """Do one step for one reader: read its question, or write a batch."""
        try:
            connection.greet()
            if connection.outbox:
                left = connection.send() or (not connection.ending and self._take_question(connection))
            else:
                left = self._read(connection)
        except BlockingIOError:
            return
        except ssl.SSLWantReadError:
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
            return
        except OSError:  # the reader is gone, or its handshake failed
            self._drop(connection)
            return
        connection.moved_s = self._clock.now_s()
        self.sent_bytes, connection.sent_bytes = self.sent_bytes + connection.sent_bytes, 0
        if connection.ending and not left:
            self._drop(connection)
            return
        event = selectors.EVENT_WRITE if left else selectors.EVENT_READ
        self._selector.modify(connection.sock, event, connection)

    def _read(self, connection: ReaderConnection) -> bool:
        if not connection.receive():
            connection.ending = True
            return False
        return self._take_question(connection)

    def _take_question(self, connection: ReaderConnection) -> bool:
        """Take a complete question from the inbox and prepare its answer; return True if there is data to send."""
        try:
            question = None if connection.waits else connection.question()
            if question is None:
                return False
            connection.more = self._answer(connection, question)
        except TransferRefusal as refusal:
            connection.more = iter((memoryview(channels.frame(refusal.answer)),))
            connection.ending = True
        connection.refill()
        return bool(connection.outbox)

    def _answer(self, connection: ReaderConnection, question: channels.Question) -> Buffers:
        self._admit(question)
        connection.admitted = True
        pinned = connection.pinned
        if pinned is None or pinned.version != question.version:
            pinned = self._shelf.get(question.version)
        if pinned is None:
            kept = ", ".join(map(str, self._shelf.versions())) or "none"
            raise TransferRefusal("gone", f"version {question.version} is not available (available: {kept})")
        connection.pinned = pinned
        if isinstance(question, channels.AskManifest):
            return self._shelf.manifest(pinned)
        if isinstance(question, channels.AskShared):
            return iter((memoryview(channels.frame(self._shelf.located(pinned, question.host))),))
        return self._shelf.slices(pinned, question.slices, connection.scatters)

    def _admit(self, question: channels.Question) -> None:
        if not hmac.compare_digest(question.token.encode("utf-8", "surrogatepass"), self._token):
            raise TransferRefusal("unauthorized", "wrong transfer token; roles take it from JAXROLL_TOKEN or RUN/token")
        if question.protocol != wire.PROTOCOL_VERSION:
            versions = f"{question.protocol}, the publisher {wire.PROTOCOL_VERSION}"
            raise TransferRefusal(
                "unauthorized", f"the reader uses protocol {versions}; install the same JaxRoll on both"
            )

    def _woken(self) -> None:
        """Go on with the loop."""
        self._wake_in.recv(_WAKE_UPS)

    def _drop_stalled(self) -> None:
        now_s = self._clock.now_s()
        for connection in list(self._connections):
            silent = not connection.admitted and now_s - connection.opened_s > FIRST_QUESTION_S
            if silent or now_s - connection.moved_s > self._stall_s:
                self._drop(connection)

    def _drop(self, connection: ReaderConnection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.end()


# --- The tcp channel, both ends

A = TypeVar("A", channels.ManifestReply, channels.SliceHeader, channels.SharedReply)
_ANY = ("0.0.0.0", "::", "")
_HEADERS_AHEAD = 4096  # slices per request
_TIMEVAL = struct.Struct("ll")
_WAIT_STEP_S, _LONGEST_WAIT_S = 0.01, 86_400.0  # a wait may be longer than the deadline by the former


class TcpSender:
    """A sender that keeps the newest `keep` snapshots in memory, `shared` with this host, served from one thread."""

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
        name: str = "tcp",
        shared: Shared | None = None,
        listener: Callable[..., Listener] | None = None,
    ) -> None:
        """Listen on a free port of `host`. `listener` makes the listener of a relay.

        ConfigError when other machines can reach `host` and there is no token, or neither TLS nor consent.
        """
        protocol.check_exposure(host, secret=token, has_tls=tls is not None, insecure=insecure)
        self.name = name
        self._shelf = VersionShelf(keep, shared)
        self.hold = self._shelf.hold
        self._listener = (listener or Listener)(
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

    @property
    def sent_bytes(self) -> int:
        """The bytes that readers were sent since the start."""
        return self._listener.sent_bytes

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
        self._shelf.clear()


def host_port(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port. TransferError if `address` is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not port.isascii() or not 0 < int(port[:6]) < 1 << 16:
        raise TransferError(one_line(f"not a tcp address: {address!r} (HOST:PORT)"))
    return host.strip("[]"), int(port)


class TcpReader:
    """One connection to a TcpSender, for one version."""

    verified = False

    def __init__(
        self,
        address: str,
        version: Version,
        token: str,
        deadline: Deadline,
        tls: Material | None = None,
        *,
        merges: bool = True,
    ) -> None:
        """Connect to `address`. `merges`: the manifest's source boxes are those of this sender's memory."""
        self._address, self._version, self._token, self._deadline = address, version, token, deadline
        self._tls, self._merges, self._has_received, self._wait_s = tls, merges, False, 0.0
        host, port = host_port(address)
        try:
            self._sock = socket.create_connection((host, port), timeout=deadline.left_s())
        except (OSError, ValueError) as error:  # ValueError: the host is not a valid name
            raise TransferError(one_line(f"no parameters from {address}: {error}")) from error
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._sock = self._secured(tls, host)
        else:
            self._sock.settimeout(None)  # the kernel limits each wait; see `_read`
        self._scratch = bytearray(channels.LENGTH.size)
        self._chunk: np.ndarray | None = None

    def close(self) -> None:
        self._sock.close()

    def interrupt(self) -> None:
        """End the connection; a thread that reads it gets TransferError."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _secured(self, tls: Material, host: str) -> socket.socket:
        """The connection under TLS, after verifying the publisher's name."""
        try:
            self._sock.settimeout(self._deadline.left_s())
            return tls.client_context().wrap_socket(self._sock, server_hostname=host)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sock.close()
            raise (self._deadline.passed() if isinstance(error, TimeoutError) else self._lost(error)) from error

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked."""
        self._send(channels.AskManifest(wire.PROTOCOL_VERSION, self._token, self._version))
        answer = self._answer(channels.ManifestReply)
        if not 0 <= answer.size_bytes <= channels.MAX_MANIFEST_BYTES:
            raise TransferError(f"{self._address} announces a manifest of {answer.size_bytes} bytes")
        data = bytearray(answer.size_bytes)
        self._receive(memoryview(data))
        return bytes(data)

    def view(self, manifest: Manifest, leaf: int, source: int) -> np.ndarray | None:
        """None: every box must be read."""

    def read(
        self, manifest: Manifest, parts: Sequence[SlicePart], leaf_read: channels.LeafRead = channels.ignore
    ) -> None:
        """Fill every part. One request asks for up to `_HEADERS_AHEAD` slices, which are answered as a stream."""
        requests, leaf = channels.requests(manifest, parts, merges=self._merges), None
        while batch := list(itertools.islice(requests, _HEADERS_AHEAD)):
            slices = tuple(channels.Slice(one.leaf, one.source, one.box, one.checked) for one in batch)
            self._send(channels.AskSlices(wire.PROTOCOL_VERSION, self._token, self._version, slices))
            for one in batch:
                if leaf is not None and one.leaf != leaf:
                    leaf_read(leaf)
                leaf = one.leaf
                self._fill(one, manifest.leaves[leaf].name)
        if leaf is not None:
            leaf_read(leaf)

    def _fill(self, request: SliceRequest, name: str) -> None:
        answer = self._answer(channels.SliceHeader)
        size_bytes = sum(view.nbytes for _, view in request.into)
        if answer.size_bytes != size_bytes:
            received = f"{answer.size_bytes} bytes were announced, {size_bytes} are needed"
            raise TransferError(f"leaf {name!r} {request.box}: {received}")
        if size_bytes == 0:
            return
        self._receive_into(request.box, request.into)
        if request.checked and answer.digest != manifests.of_box(request.into[0][1], request.box):
            raise DigestMismatch(f"leaf {name!r} {request.box} of version {self._version} was damaged in transit")

    def _receive_into(self, box: Box, into: Sequence[tuple[Box, np.ndarray]]) -> None:
        """Receive the bytes of `box` into views of its parts, without a copy unless they lie in short runs."""
        first = into[0][1]
        if len(into) == 1 and first.flags.c_contiguous:
            return self._receive(first.reshape(-1).data.cast("B"))
        if self._tls is None and (runs := channels.scattered(box, into)) is not None:
            return self._receive(runs)
        if self._chunk is None:
            self._chunk = np.empty(channels.CHUNK_BYTES, np.uint8)
        for slab in manifests.split(box, channels.CHUNK_BYTES // first.itemsize):
            body = self._chunk[: manifests.size_of(slab) * first.itemsize]
            self._receive(body.data)
            body = body.view(first.dtype).reshape(manifests.shape_of(slab))
            for inner, view in into if slab == box else channels.intersections(slab, into):
                view[...] = body[(*manifests.within(inner, slab), ...)]

    def _answer(self, kind: type[A]) -> A:
        self._receive(memoryview(self._scratch))
        (length,) = channels.LENGTH.unpack(self._scratch)
        if length > channels.MAX_FRAME_BYTES:
            raise TransferError(f"{self._address} does not speak this protocol (a header of {length} bytes)")
        body = bytearray(length)
        self._receive(memoryview(body))
        answer = channels.take_answer(bytes(body), self._address)
        if isinstance(answer, channels.Waiting):
            return self._answer(kind)
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
            self._sock.settimeout(None)
        except TimeoutError as error:
            raise self._deadline.passed() from error
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, buffer: Buffer) -> None:
        while len(buffer):
            try:
                count = self._read(buffer)
            except (TimeoutError, BlockingIOError) as error:  # the latter from the kernel's limit
                raise self._deadline.passed() from error
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise self._lost("the publisher closed the connection")
            self._has_received = True
            if count == len(buffer):
                return
            if isinstance(buffer, Scattered):
                buffer.skip(count)
            else:
                buffer = buffer[count:]

    def _read(self, buffer: Buffer) -> int:
        """Fill `buffer`, or wait and read what there is at the deadline or, under TLS, at once; 0 at the end.

        TimeoutError or BlockingIOError if nothing has come by the deadline.
        """
        wait_s = self._deadline.left_s()
        if self._tls is not None:
            assert isinstance(buffer, memoryview)
            self._sock.settimeout(wait_s)
            return self._sock.recv_into(buffer)
        if not 0 <= self._wait_s - wait_s <= _WAIT_STEP_S:
            self._wait_s = wait_s
            limit_us = int(1e6 * (min(wait_s, _LONGEST_WAIT_S) + _WAIT_STEP_S))  # the kernel's clock has steps, too
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*divmod(limit_us, 10**6)))
        if isinstance(buffer, memoryview):
            return self._sock.recv_into(buffer, 0, socket.MSG_WAITALL)
        return buffer.read(self._sock.fileno(), socket.MSG_WAITALL)

    def _lost(self, why: OSError | str) -> Exception:
        """The error of a connection that ended: Unauthorized when the two ends do not agree on TLS."""
        reason = None
        if (
            not self._has_received
        ):  # a further handshake decides: the certificates may have been replaced during this one
            reason = tls_files.diagnosis(self._address, self._tls)
        if reason is not None:
            return Unauthorized(f"weights of {self._version} at {self._address}: {reason}")
        return TransferError(f"transfer of version {self._version} from {self._address} broke off: {why}")
