"""Shared memory for the tcp channel: on one host a version is written once, and all readers map it.

The tcp connection carries the question, the token and the manifest; only the bytes take another way. The sender copies
the pieces of a snapshot into a *segment*, an anonymous file in memory (memfd), and serves readers of other hosts from
the same segment. A reader on the same host maps the file read-only, so that several readers share one copy, and source
boxes that contain one of its own boxes are not copied at all.

- Nothing can be left behind: a memfd has no name in any folder, and the kernel frees it with its last user, also after
  `kill -9`. Its size is not limited by /dev/shm, which is 64 MB in many containers.
- The first use of a page costs about ten times a copy, so segments are reused. A reader holds a shared `flock` as long
  as anything refers to the content, arrays on a CPU device included; the sender takes the exclusive one before it
  writes. The kernel releases the lock of a reader that dies.
- Mapping costs a reader about as much as a copy, so it keeps its mappings until the sender has given the segment back,
  or has ended.
- The file cannot shrink (F_SEAL_SHRINK), so a reader cannot get SIGBUS.
- Readers compute no digests: they read the memory that the sender wrote, which nothing changes while it is locked.
- Access is the kernel's: a reader opens /proc/PID/fd/FD, which needs the publisher's user and PID namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxroll import wire
from jaxroll.errors import ConfigError, DigestMismatch, TransferError, VersionGone, one_line
from jaxroll.records import Version
from jaxroll.rpc.tls import Material
from jaxroll.transfer import channels
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channel_tcp import TcpReader
from jaxroll.transfer.channels import Deadline, LeafRead, SharedFile, SlicePart, ignore
from jaxroll.transfer.manifest import HostSnapshot, Manifest

_NAME = "jaxroll-weights"
_ALIGNMENT = 64  # of every piece: XLA on CPU uses such host memory without a copy
_STAMP_BYTES = 16
_START = 4096  # the first page holds the stamp
_SPARE = 0.5  # a free segment is reused if at least this fraction of it is needed
_RESERVE_BYTES = 256 << 20  # memory that a new segment leaves for others


def host_key() -> str:
    """The identity of this machine's boot and PID namespace; empty where memory cannot be shared."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def available_bytes() -> int:
    """The memory that this process can still take: the machine's, or less if its control group (v2) has a limit."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
        limit, used = (int((group / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


# --- The sender's end


class _Segment:
    """A memfd with a writable mapping. `start` begins a new content; `busy` as long as someone uses the last one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, capacity)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._mapping = mmap.mmap(self.fd, capacity)
        except OSError:
            os.close(self.fd)
            raise
        weakref.finalize(self, os.close, self.fd)
        self.stamp, self.inode = b"", os.fstat(self.fd).st_ino
        self._content: weakref.ref[np.ndarray] | None = None
        self.address = _address(np.frombuffer(self._mapping, np.uint8))

    def start(self) -> np.ndarray | None:
        """The segment's bytes for a new content, locked for readers until `ready`; None while the last one is used."""
        if self._content is not None and self._content() is not None:
            return None
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        # Every view of the content has this array as its base, so the reference ends with the last view.
        content = np.frombuffer(self._mapping, np.uint8)
        self._content, self.stamp = weakref.ref(content), secrets.token_bytes(_STAMP_BYTES)
        content[:_STAMP_BYTES] = np.frombuffer(self.stamp, np.uint8)
        return content

    def ready(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def free(self) -> bool:
        """True if neither this process nor a reader uses the content."""
        if self._content is not None and self._content() is not None:
            return False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.ready()
        return True


class SharedSegments:
    """The segments of one sender. One thread calls `hold` and `store`, the listener's calls `located`.

    A segment is reused when its version was dropped and no reader maps it, so there are at most as many as versions
    kept or still mapped, and one to write. With `required` False (`transfer.channel=auto`) versions are stored while
    readers of this host come, or none came yet.
    """

    def __init__(self, *, required: bool) -> None:
        """ConfigError if sharing is `required` and this system cannot share memory."""
        self.host, self._required = host_key(), required
        if required and not self.host:
            reason = "shared memory needs Linux with memfd and /proc"
            raise ConfigError("transfer.channel", "shm", reason, "Set it to auto or tcp.")
        self._segments: tuple[_Segment, ...] = ()  # replaced as a whole, because two threads read it
        self._local, self._remote = False, False

    def hold(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The pieces in shared memory, read-only; each is copied once.

        Unchanged where sharing is not required and no reader would use it, or there is no memory for it. Otherwise
        TransferError if there is none.
        """
        if not self.host or (not self._required and self._remote and not self._local):
            return list(pieces)
        try:
            return self._written(pieces)
        except TransferError:
            if self._required:
                raise
            return list(pieces)

    def store(self, snapshot: HostSnapshot) -> HostSnapshot:
        """The same snapshot with all its pieces in shared memory, as in `hold`.

        DigestMismatch if a piece that was not there is not what the manifest says.
        """
        every = [piece for leaf in snapshot.pieces for piece in leaf]
        missing = [number for number, piece in enumerate(every) if piece.nbytes and self._segment(piece) is None]
        if not missing:
            return snapshot
        held = dict(zip(missing, self.hold([every[number] for number in missing]), strict=True))
        pieces, number = [], 0
        for leaf, old in zip(snapshot.manifest.leaves, snapshot.pieces, strict=True):
            pieces.append(tuple(held.get(number + at, piece) for at, piece in enumerate(old)))
            for at, (box, wanted) in enumerate(zip(leaf.boxes, leaf.digests, strict=True)):
                if number + at in held and manifests.of_box(held[number + at], box) != wanted:
                    raise DigestMismatch(f"leaf {leaf.name!r} of version {snapshot.version} changed after its manifest")
            number += len(old)
        return HostSnapshot(snapshot.manifest, snapshot.encoded, tuple(pieces))

    def located(self, snapshot: HostSnapshot, host: str) -> channels.SharedReply:
        """The files of `snapshot` and the place of each piece; no files for a reader of another host."""
        if not host or host != self.host:
            self._remote = True
            return channels.SharedReply(snapshot.version)
        self._local = True
        used: dict[_Segment, int] = {}
        places = []
        for piece in (piece for leaf in snapshot.pieces for piece in leaf):
            found = self._segment(piece)
            if not piece.nbytes:
                places.append((0, _START))
            elif found is None:
                return channels.SharedReply(snapshot.version)
            else:
                places.append((used.setdefault(found, len(used)), _address(piece) - found.address))
        files = tuple(SharedFile(one.inode, one.fd, one.capacity, one.stamp) for one in used)
        alive = tuple(segment.inode for segment in self._segments)
        return channels.SharedReply(snapshot.version, os.getpid(), files, tuple(places), alive)

    def close(self) -> None:
        """Forget all segments. Readers keep what they map."""
        self._segments = ()

    def _segment(self, piece: np.ndarray) -> _Segment | None:
        """The segment that holds `piece`."""
        address = _address(piece)
        return next((one for one in self._segments if 0 <= address - one.address < one.capacity), None)

    def _written(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        offsets, end = [], _START
        for piece in pieces:
            offsets.append(end)
            end += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        segment, content = self._taken(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        views = []
        for piece, offset in zip(pieces, offsets, strict=True):
            view = content[offset : offset + piece.nbytes].view(piece.dtype).reshape(piece.shape)
            np.copyto(view, piece)
            view.flags.writeable = False
            views.append(view)
        segment.ready()
        return views

    def _taken(self, size_bytes: int) -> tuple[_Segment, np.ndarray]:
        """A segment to write `size_bytes` into, with its bytes; other free segments are given back to the system."""
        for segment in self._segments:
            fits = size_bytes <= segment.capacity and segment.capacity * _SPARE <= size_bytes
            if fits and (content := segment.start()) is not None:
                self._segments = tuple(one for one in self._segments if one is segment or not one.free())
                return segment, content
        self._segments = tuple(one for one in self._segments if not one.free())
        if (free := available_bytes()) < size_bytes + _RESERVE_BYTES:
            raise TransferError(
                f"shared memory for a version of {size_bytes >> 20} MiB: {free >> 20} MiB are free, of which "
                f"{_RESERVE_BYTES >> 20} stay free; {len(self._segments)} older versions are in use. "
                "Set transfer.channel to tcp, or give the machine more memory"
            )
        try:
            segment = _Segment(size_bytes)
        except OSError as error:
            raise TransferError(f"shared memory of {size_bytes} bytes: {error}") from error
        content = segment.start()
        assert content is not None  # no other thread or process knows the new segment
        self._segments = (*self._segments, segment)
        return segment, content


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# --- The reader's end


class ShmReader(TcpReader):
    """A reader that maps the version's segments. Without them it reads slices over tcp, or raises if `required`."""

    required = True

    def __init__(
        self, address: str, version: Version, token: str, deadline: Deadline, tls: Material | None = None
    ) -> None:
        try:
            super().__init__(address, version, token, deadline, tls)
        except TransferError:
            _MAPPINGS.clear()  # the publisher is gone; the next one needs the memory
            raise
        self._files: list[np.ndarray] = []
        self._places: tuple[tuple[int, int], ...] = ()
        self._firsts: list[int] = []  # number of the first piece of each leaf

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked; the connection now keeps the version, and its segments are mapped."""
        data = super().manifest()
        self._send(channels.AskShared(wire.PROTOCOL_VERSION, self._token, self._version, host_key()))
        reply = self._answer(channels.SharedReply)
        try:
            if not reply.files:
                raise TransferError("the publisher is on another host, or shares no memory")
            self._files = _MAPPINGS.contents(reply)
            self._places = reply.places
        except (OSError, ValueError, TransferError) as error:
            self._files = []
            if self.required:
                raise TransferError(
                    one_line(f"shared memory of version {self._version} at {self._address}: {error}; ")
                    + "transfer.channel=auto falls back to tcp"
                ) from error
        return data

    @property
    def verified(self) -> bool:
        """True if the version is mapped."""
        return bool(self._files)

    def view(self, manifest: Manifest, leaf: int, source: int) -> np.ndarray | None:
        """The bits of one source box in shared memory, read-only; None if it must be read."""
        if not self._files:
            return None
        if not self._firsts:
            counts = [len(one.boxes) for one in manifest.leaves]
            if sum(counts) != len(self._places):
                raise TransferError(f"{self._address} names {len(self._places)} pieces of {sum(counts)}")
            self._firsts = [0, *np.cumsum(counts).tolist()]
        held = manifest.leaves[leaf]
        shape = manifests.shape_of(held.boxes[source])
        kind = manifests.bits_dtype(manifests.DTYPES[held.dtype].itemsize)
        file, offset = self._places[self._firsts[leaf] + source]
        size_bytes = manifests.size_of(held.boxes[source]) * kind.itemsize
        if not 0 <= file < len(self._files) or not _START <= offset <= len(self._files[file]) - size_bytes:
            raise TransferError(f"{self._address} places leaf {held.name!r} outside of its shared memory")
        return self._files[file][offset : offset + size_bytes].view(kind).reshape(shape)

    def read(self, manifest: Manifest, parts: Sequence[SlicePart], leaf_read: LeafRead = ignore) -> None:
        """Fill every part, from shared memory if there is any."""
        if not self._files:
            super().read(manifest, parts, leaf_read)
            return
        for part in parts:
            self._deadline.left_s()
            source = self.view(manifest, part.leaf, part.source)
            assert source is not None
            outer = manifest.leaves[part.leaf].boxes[part.source]
            part.into[...] = source[manifests.within(part.box, outer)]


class AutoReader(ShmReader):
    """A reader that maps the version if it is on the publisher's host, and otherwise reads it over tcp."""

    required = False


class _Mappings:
    """The mappings of publishers' segments in this process, by process and inode."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._kept: dict[tuple[int, int], mmap.mmap] = {}

    def contents(self, reply: channels.SharedReply) -> list[np.ndarray]:
        """The bytes of each file; it is locked as long as views of them exist.

        TransferError if a file is no segment of the announced content; OSError if this process may not open it.
        """
        with self._guard:
            self._kept = {key: kept for key, kept in self._kept.items() if _lives(*key, reply)}
            return [self._content(reply.pid, file) for file in reply.files]

    def clear(self) -> None:
        """Forget all mappings; the memory is freed when no array uses it."""
        with self._guard:
            self._kept.clear()

    def _content(self, pid: int, file: SharedFile) -> np.ndarray:
        path = f"/proc/{pid}/fd/{file.fd}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise TransferError(f"{path} is no shared memory of a publisher")
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_file(lock, path, file)
            if (pid, file.inode) not in self._kept:
                # A descriptor of its own: the mapping duplicates it, and would hold a lock taken on it.
                with open(path, "rb") as opened:
                    if os.fstat(opened.fileno()).st_ino != file.inode:
                        raise VersionGone(f"the shared memory of {path} is gone")
                    self._kept[pid, file.inode] = mmap.mmap(
                        opened.fileno(), file.size_bytes, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ
                    )
            content = np.frombuffer(self._kept[pid, file.inode], np.uint8)
            if content[:_STAMP_BYTES].tobytes() != file.stamp:
                raise VersionGone(f"the shared memory of {path} holds another version")
        except BaseException:
            os.close(lock)
            raise
        weakref.finalize(content, os.close, lock)
        return content


def _lives(pid: int, inode: int, reply: channels.SharedReply) -> bool:
    """True if a segment is in use by the publisher that replied, or by another host of the same learner."""
    return inode in reply.alive if pid == reply.pid else os.path.exists(f"/proc/{pid}")


def _check_file(fd: int, path: str, file: SharedFile) -> None:
    """Lock the segment for reading and check that it is the announced one."""
    found = os.fstat(fd)
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    facts = (found.st_ino, found.st_size)
    if not stat.S_ISREG(found.st_mode) or not sealed or facts != (file.inode, file.size_bytes) or facts[1] < _START:
        raise TransferError(f"{path} is not the announced shared memory")
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise VersionGone(f"the shared memory of {path} is being written for another version") from error


_MAPPINGS = _Mappings()
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # one call instead of a page fault every few pages
