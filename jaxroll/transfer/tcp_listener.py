"""Publishing end of the tcp channel: one thread without JAX serves host snapshots to any number of readers.

The thread owns every socket. Other threads use only the shelf (with a lock) and the wake-up socket. At most
`max_connections` readers are served at a time, one batch of bytes each in rotation; more readers wait in the kernel's
backlog. A reader is dropped when it makes no progress for `stall_s`, or does not send its token within
`FIRST_QUESTION_S`. A reader can make this process allocate at most one request, whose size limit is small until the
token is verified.
"""

from __future__ import annotations

import errno
import hmac
import math
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.clock import Clock
from jaxroll.errors import TransferError
from jaxroll.records import Version
from jaxroll.transfer import channels
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channels import HostSnapshot

_TICK_S = 0.5  # interval of the check for stalled readers
FIRST_QUESTION_S = 5.0  # from the connection to the first question, TLS handshake included
_BACKLOG = 64
_NONE_FREE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class VersionShelf:
    """The newest `keep` snapshots, by version. A connection keeps the snapshot that it uses alive."""

    def __init__(self, keep: int) -> None:
        self._keep, self._lock = keep, threading.Lock()
        self._kept: dict[Version, HostSnapshot] = {}

    def put(self, snapshot: HostSnapshot) -> None:
        with self._lock:
            self._kept.pop(snapshot.version, None)
            self._kept[snapshot.version] = snapshot
            while len(self._kept) > self._keep:
                del self._kept[next(iter(self._kept))]

    def get(self, version: Version) -> HostSnapshot | None:
        with self._lock:
            return self._kept.get(version)

    def versions(self) -> tuple[Version, ...]:
        with self._lock:
            return tuple(self._kept)


class Listener:
    """The listening socket and its thread. Construct, then `start`; `close` waits for the thread to end."""

    def __init__(
        self,
        shelf: VersionShelf,
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
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._accepting = False
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
                for key, _ in self._selector.select(_TICK_S):
                    if key.fileobj is self._listening:
                        self._accept()
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
                self._rests_until_s = self._clock.now_s() + _TICK_S
            return
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock, self._clock.now_s(), self._tls and self._tls())
        except OSError:  # the reader left
            sock.close()
            return
        self._connections.add(connection)
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: Connection) -> None:
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
        if connection.ending and not left:
            self._drop(connection)
            return
        event = selectors.EVENT_WRITE if left else selectors.EVENT_READ
        self._selector.modify(connection.sock, event, connection)

    def _read(self, connection: Connection) -> bool:
        if not connection.receive():
            connection.ending = True
            return False
        return self._take_question(connection)

    def _take_question(self, connection: Connection) -> bool:
        """Take a complete question from the inbox and prepare its answer; return True if there is data to send."""
        try:
            question = connection.question()
            if question is None:
                return False
            connection.more = self._answer(connection, question)
        except Refusal as refusal:
            connection.more = iter((memoryview(channels.frame(refusal.answer)),))
            connection.ending = True
        connection.refill()
        return bool(connection.outbox)

    def _answer(self, connection: Connection, question: channels.Question) -> Iterator[memoryview]:
        self._admit(question)
        connection.admitted = True
        pinned = connection.pinned
        if pinned is None or pinned.version != question.version:
            pinned = self._shelf.get(question.version)
        if pinned is None:
            kept = ", ".join(map(str, self._shelf.versions())) or "none"
            raise Refusal("gone", f"version {question.version} is not available (available: {kept})")
        connection.pinned = pinned
        if isinstance(question, channels.AskManifest):
            head = channels.frame(channels.ManifestReply(pinned.version, len(pinned.encoded)))
            return iter((memoryview(head), memoryview(pinned.encoded)))
        for part in question.slices:
            _check_slice(pinned, part)
        return _chunks(pinned, question.slices)

    def _admit(self, question: channels.Question) -> None:
        if not hmac.compare_digest(question.token.encode("utf-8", "surrogatepass"), self._token):
            raise Refusal("unauthorized", "wrong transfer token; roles take it from JAXROLL_TOKEN or RUN/token")
        if question.protocol != wire.PROTOCOL_VERSION:
            versions = f"{question.protocol}, the publisher {wire.PROTOCOL_VERSION}"
            raise Refusal("unauthorized", f"the reader uses protocol {versions}; install the same JaxRoll on both")

    def _drop_stalled(self) -> None:
        now_s = self._clock.now_s()
        for connection in list(self._connections):
            silent = not connection.admitted and now_s - connection.opened_s > FIRST_QUESTION_S
            if silent or now_s - connection.moved_s > self._stall_s:
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()


def _check_slice(snapshot: HostSnapshot, part: channels.Slice) -> None:
    leaves = snapshot.manifest.leaves
    known = 0 <= part.leaf < len(leaves) and 0 <= part.source < len(leaves[part.leaf].boxes)
    if not known or not manifests.contains(leaves[part.leaf].boxes[part.source], part.box):
        raise Refusal("bad_request", f"leaf {part.leaf}, source {part.source} has no box {part.box}")


def _chunks(snapshot: HostSnapshot, slices: tuple[channels.Slice, ...]) -> Iterator[memoryview]:
    """The alternating frames and bytes of `slices`, computed only when the reader is ready for them."""
    for part in slices:
        source = snapshot.manifest.leaves[part.leaf].boxes[part.source]
        piece = snapshot.pieces[part.leaf][part.source]
        body = np.ascontiguousarray(manifests.bits(piece)[manifests.within(part.box, source)])
        seen = manifests.of_box(body.reshape(manifests.shape_of(part.box)), part.box) if part.checked else None
        yield memoryview(channels.frame(channels.Chunk(snapshot.version, body.nbytes, seen)))
        if body.nbytes:
            yield body.reshape(-1).data.cast("B")


# --- one reader: a non-blocking socket, plain or under TLS
#
# Until its first question has been answered, a reader is untrusted, and only short questions are read.

_BATCH_BYTES, _BATCH_BUFFERS = 1 << 20, 64  # of one sendmsg
_READ_BYTES = 1 << 16
_FIRST_QUESTION_BYTES = 1 << 16  # limit before the token is verified


class Refusal(Exception):
    """A refused question; the reader gets the reason, then the connection is closed."""

    def __init__(self, kind: str, reason: str) -> None:
        self.answer = channels.Refused(kind, reason)
        super().__init__(reason)


class Connection:
    """One reader: the received bytes of its question, the buffers to send, and the iterator of further buffers."""

    def __init__(self, sock: socket.socket, now_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Wrap the accepted `sock`; under TLS, call `greet` first."""
        sock.setblocking(False)
        self._plain = sock
        self._secured = None if tls is None else tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self.sock: socket.socket = self._secured or sock
        self.greeted, self.admitted = tls is None, False
        self.opened_s = self.moved_s = now_s
        self.inbox = bytearray()
        self.outbox: deque[memoryview] = deque()
        self.more: Iterator[memoryview] = iter(())
        self.pinned: HostSnapshot | None = None
        self.ending = False

    def greet(self) -> None:
        """Do one step of the TLS handshake. Raises ssl.SSLWantReadError or SSLWantWriteError until it is done."""
        if self._secured is not None and not self.greeted:
            self._secured.do_handshake()
            self.greeted = True

    def receive(self) -> bool:
        """Add received bytes to the inbox; return False if the reader has closed the connection."""
        data = self.sock.recv(_READ_BYTES)
        self.inbox += data
        while self._secured is not None and self._secured.pending():  # selectors do not see decrypted bytes
            self.inbox += self._secured.recv(_READ_BYTES)
        return bool(data)

    def refill(self) -> None:
        """Move buffers from `more` to the outbox until it holds a batch."""
        held = sum(len(buffer) for buffer in self.outbox)
        while held < _BATCH_BYTES and len(self.outbox) < _BATCH_BUFFERS:
            buffer = next(self.more, None)
            if buffer is None:
                return
            if len(buffer):
                self.outbox.append(buffer)
                held += len(buffer)

    def send(self) -> bool:
        """Write as much as the socket accepts now; return True if there is more to send."""
        self.refill()
        if self.outbox:
            sent = self._written()
            while sent:
                head = self.outbox[0]
                if sent < len(head):
                    self.outbox[0] = head[sent:]
                    break
                sent -= len(head)
                self.outbox.popleft()
            self.refill()
        return bool(self.outbox)

    def _written(self) -> int:
        """Write from the outbox; return the number of bytes that the socket accepted."""
        if self._secured is None:
            return self._plain.sendmsg(list(self.outbox))
        return self._secured.send(self.outbox[0])

    def question(self) -> channels.Question | None:
        """Take the next complete question from the inbox, or None. Refusal for one that is too long or malformed."""
        if len(self.inbox) < channels.LENGTH.size:
            return None
        (length,) = channels.LENGTH.unpack_from(self.inbox)
        most = channels.MAX_FRAME_BYTES if self.admitted else _FIRST_QUESTION_BYTES
        if length > most:
            raise Refusal("bad_request", f"a request of {length} bytes; at most {most} are read")
        end = channels.LENGTH.size + length
        if len(self.inbox) < end:
            return None
        body = bytes(self.inbox[channels.LENGTH.size : end])
        del self.inbox[:end]
        try:
            return wire.decode(body, channels.Question)
        except msgspec.MsgspecError as error:
            raise Refusal("bad_request", f"not a question: {error}") from error
