"""Transfer channels: their interfaces (Sender, Reader), deadlines, and the messages of the tcp channel."""

from __future__ import annotations

import functools
import itertools
import math
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Protocol, cast

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.clock import Clock, MonotonicClock
from jaxroll.errors import TransferError, Unauthorized, VersionGone, one_line
from jaxroll.records import Version
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.manifest import Box, HostSnapshot, Manifest
from jaxroll.wire import Scattered

# --- Transfer channels


class SlicePart(NamedTuple):
    """One slice to fetch: `box` of leaf number `leaf`, contained in its source box `source`.

    `into` is the destination: a writable view of shape `box` in the dtype of the leaf's bits. With `checked` the
    channel must verify the bytes itself, because the receiver does not hold the whole leaf to compare its digest.
    """

    leaf: int
    source: int
    box: Box
    into: np.ndarray
    checked: bool


class Sender(Protocol):
    """The publishing end. `offer` returns the address for Readers; newer versions replace old ones. `hold` moves arrays
    to the memory from which the sender serves them, before their digests are computed."""

    name: str

    @property
    def sent_bytes(self) -> int: ...

    def hold(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]: ...

    def offer(self, snapshot: HostSnapshot) -> str: ...

    def close(self) -> None: ...


LeafRead = Callable[[int], None]


def ignore(leaf: int) -> None:
    """Do nothing."""
    del leaf


class Reader(Protocol):
    """One transfer of one version; used by one thread, closed at the end.

    `verified`, after `read`: the bytes need no comparison with the manifest's digests.
    """

    @property
    def verified(self) -> bool: ...

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked. Raises VersionGone when the version is not available."""
        ...

    def view(self, manifest: Manifest, leaf: int, source: int) -> np.ndarray | None:
        """The bits of one source box, read-only and verified, that can be used in place; None if it must be read."""
        ...

    def read(self, manifest: Manifest, parts: Sequence[SlicePart], leaf_read: LeafRead = ignore) -> None:
        """Fill every part. Calls `leaf_read` when all parts of a leaf (which are neighbors) are filled, if the channel
        has an order. Raises TransferError and its subclasses, and the errors of `leaf_read`."""
        ...

    def close(self) -> None: ...


class Shared(Protocol):
    """Shared memory of a sender, for readers on its host (`channel_shm`)."""

    def hold(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]: ...

    def store(self, snapshot: HostSnapshot) -> HostSnapshot: ...

    def located(self, snapshot: HostSnapshot, host: str) -> SharedReply: ...

    def close(self) -> None: ...


class Deadline:
    """The time limit of a transfer, and of each wait in it (`stall_s`)."""

    def __init__(self, limit_s: float, doing: str, clock: Clock | None = None, stall_s: float = math.inf) -> None:
        self._clock = clock or MonotonicClock()
        self._limit_s, self._doing, self._stall_s = limit_s, doing, stall_s
        self._end_s = self._clock.now_s() + limit_s

    def left_s(self) -> float:
        """Seconds that the next wait may take, more than 0; raises TransferError when there are none."""
        left_s = self._end_s - self._clock.now_s()
        if left_s <= 0:
            raise self.passed()
        return min(left_s, self._stall_s)

    def passed(self) -> TransferError:
        """The error of a wait that exceeded this deadline."""
        if self._clock.now_s() < self._end_s:
            return TransferError(f"{self._doing}: nothing received for {self._stall_s:g} s")
        return TransferError(f"{self._doing}: not done within {self._limit_s:g} s")


# --- Messages of the tcp channel
#
# A frame is a 4-byte little-endian length, that many bytes of MessagePack, and after `ManifestReply` and `SliceHeader`
# `size_bytes` raw bytes. The reader asks for a manifest, then for slices (many in one request); the slices are sent in
# the order of the request. Element bytes are little-endian, as on every platform of JAX.

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20  # a request for 10⁵ slices is about 4 MB
MAX_MANIFEST_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20  # of a copy: small enough to stay in the L2 cache between copy and send
SLICE_BYTES = 16 << 20  # of a slice; each costs a header and several system calls


class AskManifest(msgspec.Struct, frozen=True, tag="manifest"):
    """A request for the manifest of `version`; the connection keeps that version alive from then on."""

    protocol: int
    token: str
    version: Version


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A slice: `box` (in coordinates of the whole leaf) within source box `source` of leaf number `leaf`."""

    leaf: int
    source: int
    box: Box
    checked: bool  # the answer must contain the digest of these bytes


class AskSlices(msgspec.Struct, frozen=True, tag="slices"):
    """A request for slices of `version`."""

    protocol: int
    token: str
    version: Version
    slices: tuple[Slice, ...]


class AskShared(msgspec.Struct, frozen=True, tag="shared"):
    """A question for the shared memory of `version`, from a reader on the machine with key `host`."""

    protocol: int
    token: str
    version: Version
    host: str


class ManifestReply(msgspec.Struct, frozen=True, tag="manifest_reply"):
    """The header of a manifest of `size_bytes`, which follow."""

    version: Version
    size_bytes: int


class SliceHeader(msgspec.Struct, frozen=True, tag="chunk"):
    """The header of the next slice: `size_bytes` follow; `digest` is their digest if it was requested."""

    version: Version
    size_bytes: int
    digest: int | None = None


class SharedFile(msgspec.Struct, frozen=True, array_like=True):
    """Descriptor `fd` of the publisher's process: a file in memory that begins with `stamp`."""

    inode: int
    fd: Annotated[int, msgspec.Meta(ge=0)]
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    stamp: bytes


class SharedReply(msgspec.Struct, frozen=True, tag="shared_reply"):
    """The files of a version, none if it is not shared, and (file, offset) of each source box, in manifest order.
    `alive`: the inodes of all files of process `pid` that are still in use."""

    version: Version
    pid: int = 0
    files: tuple[SharedFile, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    alive: tuple[int, ...] = ()


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """A relay's sign of life while it does not have the next slice itself; the answer follows."""


class RefusedReading(msgspec.Struct, frozen=True, tag="refused"):
    """A refusal. `kind` is gone, unauthorized or bad_request."""

    kind: str
    reason: str


Question = AskManifest | AskSlices | AskShared
Answer = ManifestReply | SliceHeader | SharedReply | Waiting | RefusedReading


def frame(message: Question | Answer) -> bytes:
    """The frame of `message`, without the raw bytes that may follow it."""
    body = wire.encode(message)
    return LENGTH.pack(len(body)) + body


class TransferRefusal(Exception):
    """A refused question; the reader gets the reason, then the connection is closed."""

    def __init__(self, kind: str, reason: str) -> None:
        self.answer = RefusedReading(kind, reason)
        super().__init__(reason)


def take_question(inbox: bytearray, most: int) -> Question | None:
    """Take the next complete question, or None. TransferRefusal for one above `most` bytes or malformed."""
    if len(inbox) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(inbox)
    if length > most:
        raise TransferRefusal("bad_request", f"a request of {length} bytes; at most {most} are read")
    end = LENGTH.size + length
    if len(inbox) < end:
        return None
    body = bytes(inbox[LENGTH.size : end])
    del inbox[:end]
    try:
        return wire.decode(body, Question)
    except msgspec.MsgspecError as error:
        raise TransferRefusal("bad_request", f"not a question: {error}") from error


RUN_BYTES = 1 << 10  # shorter runs are copied: the kernel's work for each exceeds that of a copy
_BATCH_BYTES, _BATCH_BUFFERS = 1 << 20, 64  # of one sendmsg
Buffer = memoryview | Scattered
Buffers = Iterator[Buffer | None]  # None: the next buffer is not here yet


class Outbox:
    """Buffers to send, and the iterator of further ones."""

    def __init__(self) -> None:
        self.outbox: deque[Buffer] = deque()
        self.more: Buffers = iter(())
        self.sent_bytes = 0
        self.ending = self.waits = False  # `ending`: nothing follows; `waits`: the next buffer is not here yet

    def refill(self) -> None:
        """Move buffers from `more` to the outbox until it holds a batch; after a refusal the connection ends."""
        held, self.waits = sum(len(buffer) for buffer in self.outbox), False
        while held < _BATCH_BYTES and len(self.outbox) < _BATCH_BUFFERS:
            try:
                buffer = next(self.more)
            except StopIteration:
                return
            except TransferRefusal as refusal:
                buffer, self.ending = memoryview(frame(refusal.answer)), True
            if buffer is None:
                self.waits = not self.outbox
                return
            if len(buffer):
                self.outbox.append(buffer)
                held += len(buffer)

    def advance(self, sent: int) -> None:
        """Remove the first `sent` bytes."""
        self.sent_bytes += sent
        while sent:
            head = self.outbox[0]
            if sent < len(head):
                if isinstance(head, Scattered):
                    head.skip(sent)
                else:
                    self.outbox[0] = head[sent:]
                return
            sent -= len(head)
            self.outbox.popleft()


# --- one reader: a non-blocking socket, plain or under TLS
#
# Until its first question has been answered, a reader is untrusted, and only short questions are read.

_READ_BYTES = 1 << 16
_FIRST_QUESTION_BYTES = 1 << 16  # limit before the token is verified


class ReaderConnection(Outbox):
    """One reader: the received bytes of its question, the buffers to send, and the iterator of further buffers."""

    def __init__(self, sock: socket.socket, now_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Wrap the accepted `sock`; under TLS, call `greet` first."""
        super().__init__()
        sock.setblocking(False)
        self._plain = sock
        self._secured = None if tls is None else tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self.sock: socket.socket = self._secured or sock
        self.scatters = tls is None
        self.greeted, self.admitted = tls is None, False
        self.opened_s = self.moved_s = now_s
        self.inbox = bytearray()
        self.pinned: Any = None  # the version on the shelf that it reads

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

    def send(self) -> bool:
        """Write as much as the socket accepts now; return True if there is more to send."""
        self.refill()
        if self.outbox:
            self.advance(self._written())
            self.refill()
        return bool(self.outbox)

    def _written(self) -> int:
        """Write from the outbox; return the number of bytes that the socket accepted."""
        head = self.outbox[0]
        if isinstance(head, Scattered):
            return head.write(self._plain.fileno())
        if self._secured is not None:
            return self._secured.send(head)
        several = itertools.takewhile(lambda buffer: not isinstance(buffer, Scattered), self.outbox)
        return self._plain.sendmsg(cast(list[memoryview], list(several)))

    def end(self) -> None:
        """Close the socket and release the version: the listener's loop refers to its last connection for long."""
        self.sock.close()
        self.pinned, self.more = None, iter(())
        self.outbox.clear()

    def question(self) -> Question | None:
        """Take the next complete question, or None. TransferRefusal for one that is too long or malformed."""
        return take_question(self.inbox, MAX_FRAME_BYTES if self.admitted else _FIRST_QUESTION_BYTES)


class Shelf(Protocol):
    """Versions that a listener serves. A connection refers to the one that it reads, which keeps it alive."""

    def get(self, version: Version) -> Any: ...

    def versions(self) -> tuple[Version, ...]: ...

    def manifest(self, kept: Any) -> Buffers: ...

    def slices(self, kept: Any, slices: tuple[Slice, ...], scatters: bool) -> Buffers:
        """The answers; `scatters`: bytes may lie scattered. The method or its iterator raises TransferRefusal."""
        ...

    def located(self, kept: Any, host: str) -> SharedReply: ...


def check_slice(manifest: Manifest, part: Slice) -> None:
    """Raise TransferRefusal if `part` is not within a source box."""
    leaves = manifest.leaves
    known = 0 <= part.leaf < len(leaves) and 0 <= part.source < len(leaves[part.leaf].boxes)
    if not known or not manifests.contains(leaves[part.leaf].boxes[part.source], part.box):
        raise TransferRefusal("bad_request", f"leaf {part.leaf}, source {part.source} has no box {part.box}")


def manifest_reply(version: Version, encoded: bytes) -> Iterator[memoryview]:
    yield memoryview(frame(ManifestReply(version, len(encoded))))
    yield memoryview(encoded)


def scattered(box: Box, held: Sequence[tuple[Box, np.ndarray]]) -> Scattered | None:
    """The bytes of `box`, which the boxes of `held` fill once, in their memory; None if it lies in short runs."""
    arrays, starts = [array for _, array in held], [start for start, _ in box]
    # Relative to the box, so that all sources of a leaf have one layout.
    whole, *parts = (
        tuple((start - at, stop - at) for (start, stop), at in zip(one, starts, strict=True))
        for one in (box, *(inner for inner, _ in held))
    )
    strides = [array.strides for array in arrays]
    layout = _layout(whole, tuple(zip(parts, strides, strict=True)), arrays[0].itemsize)
    if len(layout[0]) * RUN_BYTES > int(layout[3][-1]):
        return None
    return Scattered(*layout, arrays)


@functools.lru_cache(maxsize=64)  # layers have the same layout, and so have versions
def _layout(
    box: Box, held: tuple[tuple[Box, tuple[int, ...]], ...], itemsize: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The runs of `box` in order: the number of their array, their offsets in it and lengths, and their ends."""
    found = [manifests.runs(inner, box, strides, itemsize) for inner, strides in held]
    runs, owners = np.concatenate(found), np.repeat(np.arange(len(found)), [len(one) for one in found])
    order = np.argsort(runs[:, 0], kind="stable")
    return owners[order], runs[order, 1], runs[order, 2], np.cumsum(runs[order, 2])


def intersections(box: Box, held: Sequence[tuple[Box, np.ndarray]]) -> list[tuple[Box, np.ndarray]]:
    """The parts of `held` (views) that lie in `box`."""
    found = manifests.copies([inner for inner, _ in held], [box])
    return [(one.box, held[one.source][1][(*manifests.within(one.box, held[one.source][0]), ...)]) for one in found]


def take_answer(body: bytes, address: str) -> ManifestReply | SliceHeader | SharedReply | Waiting:
    """The answer in a frame of `address`. Raises TransferError or, for a refusal, its kind."""
    try:
        answer = wire.decode(body, Answer)
    except msgspec.MsgspecError as error:
        raise TransferError(f"{address} does not speak this protocol: {error}") from error
    if isinstance(answer, RefusedReading):
        kinds = {"gone": VersionGone, "unauthorized": Unauthorized}
        raise kinds.get(answer.kind, TransferError)(one_line(f"{address}: {answer.reason}"))
    return answer


class SliceRequest(NamedTuple):
    """One slice to request: `box` of leaf number `leaf` in its source box `source`, and the views that it fills."""

    leaf: int
    source: int
    box: Box
    into: Sequence[tuple[Box, np.ndarray]]
    checked: bool


def requests(manifest: Manifest, parts: Sequence[SlicePart], *, merges: bool) -> Iterator[SliceRequest]:
    """The slices to request for `parts`, leaf by leaf, each of at most `SLICE_BYTES` (`checked`: `CHUNK_BYTES`).

    With `merges` parts of one source box that its sender would have to gather are requested as one contiguous slice, if
    they form one, and are scattered here: a sender has many receivers.
    """
    for (leaf, source), group in itertools.groupby(sorted(parts, key=_origin), _origin):
        found, outer = list(group), manifest.leaves[leaf].boxes[source]
        itemsize, checked = found[0].into.itemsize, found[0].checked
        for slab, numbers, whole in _slabs(tuple(part.box for part in found), outer, itemsize, checked, merges):
            held = [(found[number].box, found[number].into) for number in numbers]
            yield SliceRequest(leaf, source, slab, held if whole else intersections(slab, held), checked)


@functools.lru_cache(maxsize=1024)  # layers are alike
def _slabs(
    boxes: tuple[Box, ...], source: Box, itemsize: int, checked: bool, merges: bool
) -> list[tuple[Box, tuple[int, ...], bool]]:
    """The slices to request for parts with `boxes`: each with the numbers of its parts, and whether it has all of
    these.
    """
    limit, slabs = (CHUNK_BYTES if checked else SLICE_BYTES) // itemsize, []
    for numbers in _merged(boxes, source, merges=merges and not checked):
        box = manifests.bounds([boxes[number] for number in numbers])
        slabs += [(slab, numbers, slab == box) for slab in manifests.split(box, limit)]
    return slabs


def _origin(part: SlicePart) -> tuple[int, int]:
    return part.leaf, part.source


def _merged(boxes: tuple[Box, ...], source: Box, *, merges: bool) -> list[tuple[int, ...]]:
    """The numbers of the parts of one source box: with `merges` together, if they form a contiguous slice of it and one
    alone is not contiguous.
    """
    alone = [(number,) for number in range(len(boxes))]
    if not merges or all(manifests.is_contiguous(box, source) for box in boxes):
        return alone
    bounds = manifests.bounds(boxes)
    whole = sum(manifests.size_of(box) for box in boxes) == manifests.size_of(bounds)
    return [tuple(range(len(boxes)))] if whole and manifests.is_contiguous(bounds, source) else alone
