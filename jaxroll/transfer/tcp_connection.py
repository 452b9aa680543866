"""One reader of the tcp channel, as its listener sees it: a socket that never blocks, plain or under TLS.

Until its first question has been answered a reader is a stranger, of whom little is read.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterator

import msgspec

from jaxroll import wire
from jaxroll.transfer import frames
from jaxroll.transfer.snapshot import HostSnapshot

_BATCH_BYTES, _BATCH_BUFFERS = 1 << 20, 64  # of one sendmsg
_READ_BYTES = 1 << 16
_FIRST_QUESTION_BYTES = 1 << 16  # of a reader that has not shown its token yet


class Refusal(Exception):
    """Ends a connection after telling the reader why."""

    def __init__(self, kind: str, reason: str) -> None:
        self.answer = frames.Refused(kind, reason)
        super().__init__(reason)


class Connection:
    """One reader: bytes of its question so far, buffers still to send, and where more of them come from."""

    def __init__(self, sock: socket.socket, now_s: float, tls: ssl.SSLContext | None = None) -> None:
        """The accepted `sock` as it is, or under TLS: then `greet` comes first."""
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
        """One step of the TLS handshake. Raises ssl.SSLWantReadError or SSLWantWriteError while it is not done."""
        if self._secured is not None and not self.greeted:
            self._secured.do_handshake()
            self.greeted = True

    def receive(self) -> bool:
        """Whether the reader is still there, after adding to the inbox what has come."""
        data = self.sock.recv(_READ_BYTES)
        self.inbox += data
        while self._secured is not None and self._secured.pending():  # no selector knows of bytes decrypted already
            self.inbox += self._secured.recv(_READ_BYTES)
        return bool(data)

    def refill(self) -> None:
        """Buffers moved from `more` to the outbox until a batch is there."""
        held = sum(len(buffer) for buffer in self.outbox)
        while held < _BATCH_BYTES and len(self.outbox) < _BATCH_BUFFERS:
            buffer = next(self.more, None)
            if buffer is None:
                return
            if len(buffer):
                self.outbox.append(buffer)
                held += len(buffer)

    def send(self) -> bool:
        """Whether anything is left to send after writing what the socket takes now."""
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
        """How many bytes of the outbox the socket took."""
        if self._secured is None:
            return self._plain.sendmsg(list(self.outbox))
        return self._secured.send(self.outbox[0])

    def question(self) -> frames.Question | None:
        """The next whole question in the inbox, or None; refuses what is too long or no question."""
        if len(self.inbox) < frames.LENGTH.size:
            return None
        (length,) = frames.LENGTH.unpack_from(self.inbox)
        most = frames.MAX_FRAME_BYTES if self.admitted else _FIRST_QUESTION_BYTES
        if length > most:
            raise Refusal("bad_request", f"a request of {length} bytes; at most {most} are read")
        end = frames.LENGTH.size + length
        if len(self.inbox) < end:
            return None
        body = bytes(self.inbox[frames.LENGTH.size : end])
        del self.inbox[:end]
        try:
            return wire.decode(body, frames.Question)
        except msgspec.MsgspecError as error:
            raise Refusal("bad_request", f"not a question: {error}") from error
