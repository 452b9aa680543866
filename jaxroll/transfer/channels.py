"""Transfer channels: what they carry (host snapshots), their interfaces (Sender, Reader), deadlines, tcp messages."""

from __future__ import annotations

import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxroll import sharding as layouts
from jaxroll import wire
from jaxroll.clock import Clock, MonotonicClock
from jaxroll.errors import TransferError, Unauthorized, VersionGone, one_line
from jaxroll.records import Version
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.manifest import Box, Hold, HostSnapshot, Manifest, from_pieces

# --- Host snapshots: immutable host copies of the parameters at one version
#
# A snapshot is taken in two steps on two threads: `begin` runs on the JAX thread and only dispatches (one jitted cast
# and copy, then the device-to-host copies of all unique shards); `finish` waits for the bytes and may run on any
# thread.
#
# When parameters are sharded over several processes, `begin` also waits: each leaf is gathered and copied to the host
# of process 0, a few leaves at a time, so that no device ever holds two whole copies.

GATHERED_LEAVES = 2  # gathered leaves that the devices hold at once
Params = Mapping[str, jax.Array]


@dataclass(frozen=True)
class PendingCopy:
    """Device copies during their transfer to the host: per leaf its shape and the arrays of its unique local boxes.

    `finish` removes them one by one, so that the device memory of each is freed as soon as it is on the host. Gathered
    leaves are on the host already. On processes other than 0 there are no leaves.
    """

    leaves: dict[str, tuple[tuple[int, ...], dict[Box, jax.Array | np.ndarray]]]


def begin(params: Params, dtype: str) -> PendingCopy:
    """Dispatch the copies. On return the caller may donate `params`, because the device executes the copy first.

    All processes of a mesh must call this in the same order; process 0 gets all leaves, the others get none.
    """
    copies = manifests.copied(params, dtype)
    leaves, gathering = {}, deque()
    for name in sorted(copies):
        copy = copies.pop(name)
        whole = _gathered(copy)
        leaves[name] = (whole.shape, _start_copy(name, whole))
        if whole is not copy:
            gathering.append(name)
            if len(gathering) > GATHERED_LEAVES:
                _finish_copy(leaves[gathering.popleft()][1])
    for name in gathering:
        _finish_copy(leaves[name][1])
    return PendingCopy(leaves if jax.process_index() == 0 else {})


def _gathered(array: jax.Array) -> jax.Array:
    """`array`, resharded so that the devices of each process together hold all of it; unchanged if they do already.

    Its sharding among the devices of a process does not change. Every process must call this in the same order.
    """
    sharding = array.sharding
    if sharding.is_fully_addressable or not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    crossing = layouts.axes_across_processes(sharding.mesh)
    parts = [layouts.without(part, crossing) for part in sharding.spec]
    if parts == list(sharding.spec):
        return array
    return layouts.resharding(NamedSharding(sharding.mesh, PartitionSpec(*parts)))(array)


def _start_copy(name: str, whole: jax.Array) -> dict[Box, jax.Array | np.ndarray]:
    """The unique boxes of `whole` on this process; on process 0 their copies to the host are started."""
    shards = {manifests.box_of(shard.index, whole.shape): shard.data for shard in whole.addressable_shards}
    if not whole.is_fully_addressable and not manifests.covers_once(tuple(shards), whole.shape):
        raise TransferError(f"leaf {name!r}: the {len(shards)} boxes of this process do not cover {whole.shape}")
    if jax.process_index() == 0:
        for data in shards.values():
            data.copy_to_host_async()
    return dict(shards)


def _finish_copy(shards: dict[Box, jax.Array | np.ndarray]) -> None:
    """Wait until the shards are on the host of process 0, and free their device memory."""
    first = jax.process_index() == 0
    for box, data in shards.items():
        shards[box] = np.asarray(data) if first else np.empty(0, jax.block_until_ready(data).dtype)


def finish(version: Version, pending: PendingCopy, hold: Hold | None = None) -> HostSnapshot:
    """Wait until every byte is on the host and return the snapshot, in the memory of `hold`."""
    # On CPU `np.asarray` is a view of the device copy's memory. That is safe: the copy is private to this snapshot, is
    # never donated, and the numpy array keeps it alive.
    pieces = {}
    while pending.leaves:
        name, (shape, shards) = pending.leaves.popitem()
        pieces[name] = (shape, [(box, np.asarray(shards.pop(box))) for box in sorted(shards)])
    return from_pieces(version, pieces, hold)


def take(version: Version, params: Params, dtype: str, hold: Hold | None = None) -> HostSnapshot:
    """The snapshot of `params` in `dtype` (float32 or bfloat16). Blocks until it is on the host."""
    return finish(version, begin(params, dtype), hold)


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

    verified: bool

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked. Raises VersionGone when the version is not available."""
        ...

    def view(self, manifest: Manifest, leaf: int, source: int) -> np.ndarray | None:
        """The bits of one source box, read-only and verified, that can be used in place; None if it must be read."""
        ...

    def read(self, manifest: Manifest, parts: Sequence[SlicePart], leaf_read: LeafRead = ignore) -> None:
        """Fill every part. Calls `leaf_read` when all parts of a leaf (which are neighbours) are filled, if the channel
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
# A frame is a 4-byte little-endian length, that many bytes of MessagePack, and after `ManifestReply` and `Chunk`
# `size_bytes` raw bytes. The reader asks for a manifest, then for slices (many in one request); the slices are sent in
# the order of the request. Element bytes are little-endian, as on every platform of JAX.

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20  # a request for 10⁵ slices is about 4 MB
MAX_MANIFEST_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20  # small enough to stay in the L2 cache between copy and send


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


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
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


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A refusal. `kind` is gone, unauthorized or bad_request."""

    kind: str
    reason: str


Question = AskManifest | AskSlices | AskShared
Answer = ManifestReply | Chunk | SharedReply | Waiting | Refused


def frame(message: Question | Answer) -> bytes:
    """The frame of `message`, without the raw bytes that may follow it."""
    body = wire.encode(message)
    return LENGTH.pack(len(body)) + body


class Refusal(Exception):
    """A refused question; the reader gets the reason, then the connection is closed."""

    def __init__(self, kind: str, reason: str) -> None:
        self.answer = Refused(kind, reason)
        super().__init__(reason)


def take_question(inbox: bytearray, most: int) -> Question | None:
    """Take the next complete question from `inbox`, or None. Refusal for one above `most` bytes or malformed."""
    if len(inbox) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(inbox)
    if length > most:
        raise Refusal("bad_request", f"a request of {length} bytes; at most {most} are read")
    end = LENGTH.size + length
    if len(inbox) < end:
        return None
    body = bytes(inbox[LENGTH.size : end])
    del inbox[:end]
    try:
        return wire.decode(body, Question)
    except msgspec.MsgspecError as error:
        raise Refusal("bad_request", f"not a question: {error}") from error


_BATCH_BYTES, _BATCH_BUFFERS = 1 << 20, 64  # of one sendmsg
Buffers = Iterator[memoryview | None]  # None: the next buffer is not here yet


class Outbox:
    """Buffers to send, and the iterator of further ones."""

    def __init__(self) -> None:
        self.outbox: deque[memoryview] = deque()
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
            except Refusal as refusal:
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
                self.outbox[0] = head[sent:]
                return
            sent -= len(head)
            self.outbox.popleft()


class Shelf(Protocol):
    """Versions that a listener serves. A connection refers to the one that it reads, which keeps it alive."""

    def get(self, version: Version) -> Any: ...

    def versions(self) -> tuple[Version, ...]: ...

    def manifest(self, kept: Any) -> Buffers: ...

    def slices(self, kept: Any, slices: tuple[Slice, ...]) -> Buffers:
        """The answers to the questions. This call or the iterator raises Refusal."""
        ...

    def located(self, kept: Any, host: str) -> SharedReply: ...


class VersionShelf:
    """The newest `keep` snapshots, by version, `shared` with readers of this host if possible. A connection keeps the
    snapshot that it uses alive."""

    def __init__(self, keep: int, shared: Shared | None = None) -> None:
        self._keep, self._shared, self._lock = keep, shared, threading.Lock()
        self._kept: dict[Version, HostSnapshot] = {}

    def hold(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The pieces, in shared memory if there is any."""
        return list(pieces) if self._shared is None else self._shared.hold(pieces)

    def put(self, snapshot: HostSnapshot) -> None:
        if self._shared is not None:
            snapshot = self._shared.store(snapshot)
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

    def manifest(self, kept: HostSnapshot) -> Buffers:
        return manifest_reply(kept.version, kept.encoded)

    def slices(self, kept: HostSnapshot, slices: tuple[Slice, ...]) -> Buffers:
        """The frames and bytes of `slices`, computed only when the reader is ready for them. Raises Refusal."""
        for part in slices:
            check_slice(kept.manifest, part)
        return _slices(kept, slices)

    def located(self, kept: HostSnapshot, host: str) -> SharedReply:
        """The shared memory of `kept` for a reader on `host`; empty if there is none."""
        return self._shared.located(kept, host) if self._shared else SharedReply(kept.version)

    def clear(self) -> None:
        """Drop all snapshots; readers keep what they map."""
        with self._lock:
            self._kept.clear()
        if self._shared is not None:
            self._shared.close()


def _slices(kept: HostSnapshot, slices: tuple[Slice, ...]) -> Buffers:
    for part in slices:
        source, piece = kept.manifest.leaves[part.leaf].boxes[part.source], kept.pieces[part.leaf][part.source]
        body = np.ascontiguousarray(manifests.bits(piece)[manifests.within(part.box, source)])
        seen = manifests.of_box(body.reshape(manifests.shape_of(part.box)), part.box) if part.checked else None
        yield from chunk(kept.version, body, seen)


def check_slice(manifest: Manifest, part: Slice) -> None:
    """Raise Refusal if `part` is not within a source box."""
    leaves = manifest.leaves
    known = 0 <= part.leaf < len(leaves) and 0 <= part.source < len(leaves[part.leaf].boxes)
    if not known or not manifests.contains(leaves[part.leaf].boxes[part.source], part.box):
        raise Refusal("bad_request", f"leaf {part.leaf}, source {part.source} has no box {part.box}")


def manifest_reply(version: Version, encoded: bytes) -> Iterator[memoryview]:
    yield memoryview(frame(ManifestReply(version, len(encoded))))
    yield memoryview(encoded)


def chunk(version: Version, body: np.ndarray, digest: int | None = None) -> Iterator[memoryview]:
    yield memoryview(frame(Chunk(version, body.nbytes, digest)))
    if body.nbytes:
        yield body.reshape(-1).data.cast("B")


def take_answer(body: bytes, address: str) -> ManifestReply | Chunk | SharedReply | Waiting:
    """The answer in a frame of `address`. Raises TransferError or, for a refusal, its kind."""
    try:
        answer = wire.decode(body, Answer)
    except msgspec.MsgspecError as error:
        raise TransferError(f"{address} does not speak this protocol: {error}") from error
    if isinstance(answer, Refused):
        kinds = {"gone": VersionGone, "unauthorized": Unauthorized}
        raise kinds.get(answer.kind, TransferError)(one_line(f"{address}: {answer.reason}"))
    return answer


def pieces(part: SlicePart) -> list[SlicePart]:
    """The part cut into chunks of at most `CHUNK_BYTES`, each with its view of the destination."""
    limit = CHUNK_BYTES // part.into.itemsize
    return [
        part._replace(box=box, into=part.into[manifests.within(box, part.box)] if box else part.into)
        for box in manifests.split(part.box, limit)
    ]
