"""The device channel, where weights move from devices to devices within one process, and host snapshots of them.

A published version is a copy on the learner's devices. An engine with the learner's shardings and dtype uses this copy;
for other engines the devices exchange shards (`sharding.moved`, through the host only if an engine has devices that the
learner does not have). The copy is queued after the step that made the parameters and before the next step, which may
donate them. Only the newest version is kept: the previous one is dropped when the store has recorded the new one, and
its memory is freed when no engine uses it.

There are no checksums, because no bytes pass through files or sockets.
"""

from __future__ import annotations

import math
import threading
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxroll import sharding
from jaxroll.errors import TransferError, VersionGone
from jaxroll.records import Version, VersionRef
from jaxroll.transfer import channels
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.manifest import Box, Hold, HostSnapshot, from_pieces

NAME = "device"
Params = Mapping[str, jax.Array]


class DevicePublisher:
    """Publisher for the engines of this process; it has the interface of `ends.Publisher`."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self._address = dtype, uuid.uuid4().hex
        self._frozen: Params = {}
        self._guard = threading.Lock()
        self._kept: dict[Version, Params] = {}
        _OPEN[self._address] = self

    def freeze(self, version: Version, params: Params) -> None:
        """Add `params`, which must not change any more, to every version that is started from now on."""
        self._frozen = dict(params)

    def start(self, version: Version, params: Params) -> Future[VersionRef]:
        """Copy `params`, which may be donated on return. The future is already done."""
        copied = manifests.copied(params, self._dtype)
        with self._guard:
            self._kept[version] = {**self._frozen, **copied}
        started: Future[VersionRef] = Future()
        started.set_result(VersionRef(version, NAME, self._address, ""))
        return started

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        """The address of `version`; the previous version stays available until `drop_older`."""
        return started.result()

    @property
    def sent_bytes(self) -> int:
        """0: nothing leaves the devices by this channel."""
        return 0

    def drop_older(self, version: Version) -> None:
        """Drop versions older than `version`, which the store does not give out any more."""
        with self._guard:
            self._kept = {kept: params for kept, params in self._kept.items() if kept >= version}

    def publish(self, version: Version, params: Params) -> VersionRef:
        """Start and finish publishing `version`."""
        return self.finish(version, self.start(version, params))

    def kept(self, version: Version) -> Params:
        """The parameters of `version`. VersionGone if it was dropped or never published."""
        with self._guard:
            if version not in self._kept:
                raise VersionGone(f"version {version} is not kept; {', '.join(map(str, self._kept)) or 'none'} is")
            return self._kept[version]

    def close(self) -> None:
        """Drop all versions. A second close does nothing."""
        _OPEN.pop(self._address, None)
        with self._guard:
            self._kept = {}


_OPEN: WeakValueDictionary[str, DevicePublisher] = WeakValueDictionary()  # publishers of this process, by address


class HandedOver:
    """Parameters on the publisher's devices, waiting for the weight swap; it has the interface of `ends.Staged`."""

    def __init__(
        self, params: Params, target: Mapping[str, jax.sharding.Sharding], wanted: Mapping[str, np.dtype]
    ) -> None:
        self._params: Params | None = params
        self._target, self._wanted, self.sources = target, wanted, ()
        self.fetched_bytes = sum(array.nbytes for array in params.values())

    def held(self, names: Container[str]) -> Mapping[str, Any]:
        """An empty mapping: frozen parameters are on the devices already."""
        del names
        return {}

    def place(self) -> dict[str, jax.Array]:
        """The parameters on the target mesh, in the dtypes of the engine. Call this once, on the JAX thread."""
        if self._params is None:
            raise TransferError("these parameters were placed before; fetch them again")
        params, self._params = self._params, None
        names = list(params)
        placed = sharding.moved([params[n] for n in names], [self._target[n] for n in names])
        return manifests.cast(dict(zip(names, placed, strict=True)), self._wanted)


def hand_over(
    published: VersionRef,
    target: Mapping[str, jax.sharding.Sharding],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> HandedOver:
    """The parameters of a version that a publisher of this process holds.

    VersionGone if no publisher of this process holds it; TransferError for shapes that do not match.
    """
    publisher = _OPEN.get(published.address)
    if publisher is None:
        raise VersionGone(f"version {published.version} was published by a process that is gone, or by another one")
    params = publisher.kept(published.version)
    leaves = tuple(manifests.Leaf(name, tuple(a.shape), a.dtype.name, (), ()) for name, a in sorted(params.items()))
    manifests.check(manifests.Manifest(published.version, leaves), shapes)
    return HandedOver(params, target, {name: np.dtype(shape.dtype) for name, shape in shapes.items()})


# --- Host snapshots: immutable host copies of the parameters at one version
#
# A snapshot is taken in two steps on two threads: `begin` runs on the JAX thread and only dispatches (one jitted cast
# and copy, then the device-to-host copies of all unique shards); `finish` waits for the bytes and may run on any
# thread.
#
# Parameters on several processes: each process takes the boxes that it serves. For a channel that needs them all in
# process 0 (`gathers`) `begin` also waits: each leaf is gathered and copied to the host of process 0, a few leaves at a
# time, so that no device ever holds two whole copies.

GATHERED_LEAVES = 2  # gathered leaves that the devices hold at once


@dataclass(frozen=True)
class PendingCopy:
    """Device copies during their transfer to the host: per leaf its shape and the arrays of its unique local boxes.

    `finish` removes them one by one, so that the device memory of each is freed as soon as it is on the host. Gathered
    leaves are on the host already; processes other than 0 have none of them.
    """

    leaves: dict[str, tuple[tuple[int, ...], dict[Box, jax.Array | np.ndarray]]]


def begin(params: Params, dtype: str, *, gathers: bool = False) -> PendingCopy:
    """Dispatch the copies. On return the caller may donate `params`, because the device executes the copy first.

    All processes of a mesh must call this in the same order. Each gets the boxes that it serves, together all of them;
    with `gathers` process 0 gets all, and the others none.
    """
    copies = manifests.copied(params, dtype)
    if not gathers:
        own = {name: _own_boxes(copies.pop(name), turn) for turn, name in enumerate(sorted(copies))}
        return PendingCopy({name: found for name, found in own.items() if found[1]})
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


def _own_boxes(array: jax.Array, turn: int) -> tuple[tuple[int, ...], dict[Box, jax.Array | np.ndarray]]:
    """The shape, and the boxes that this process serves, whose copies to the host are started.

    Of replicas on several processes one is served; `turn` is the number of the leaf, so that they share the boxes.
    """
    shards = {manifests.box_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    if not array.is_fully_addressable:
        holders: dict[Box, set[int]] = {}
        for device, box in manifests.boxes(array.sharding, array.shape).items():
            holders.setdefault(box, set()).add(device.process_index)
        server = {box: sorted(holders[box])[(turn + n) % len(holders[box])] for n, box in enumerate(sorted(holders))}
        shards = {box: data for box, data in shards.items() if server[box] == jax.process_index()}
    for data in shards.values():
        data.copy_to_host_async()
    return array.shape, dict(shards)


def _gathered(array: jax.Array) -> jax.Array:
    """`array`, resharded so that the devices of each process together hold all of it; unchanged if they do already.

    Its sharding among the devices of a process does not change. Every process must call this in the same order.
    """
    held = array.sharding
    if held.is_fully_addressable or not isinstance(held, NamedSharding) or not isinstance(held.mesh, Mesh):
        return array
    crossing = sharding.axes_across_processes(held.mesh)
    parts = [sharding.without(part, crossing) for part in held.spec]
    if parts == list(held.spec):
        return array
    return sharding.resharding(NamedSharding(held.mesh, PartitionSpec(*parts)))(array)


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


def take(
    version: Version, params: Params, dtype: str, hold: Hold | None = None, *, gathers: bool = False
) -> HostSnapshot:
    """The snapshot of `params` in `dtype` (float32 or bfloat16). Blocks until it is on the host."""
    return finish(version, begin(params, dtype, gathers=gathers), hold)


class VersionShelf:
    """The newest `keep` snapshots, by version, `shared` with readers of this host if possible. A connection keeps the
    snapshot that it uses alive."""

    def __init__(self, keep: int, shared: channels.Shared | None = None) -> None:
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

    def manifest(self, kept: HostSnapshot) -> channels.Buffers:
        return channels.manifest_reply(kept.version, kept.encoded)

    def slices(self, kept: HostSnapshot, slices: tuple[channels.Slice, ...], scatters: bool) -> channels.Buffers:
        """The frames and bytes of `slices`, computed only when the reader is ready for them. Raises TransferRefusal."""
        for part in slices:
            channels.check_slice(kept.manifest, part)
        return _slices(kept, slices, scatters)

    def located(self, kept: HostSnapshot, host: str) -> channels.SharedReply:
        """The shared memory of `kept` for a reader on `host`; empty if there is none."""
        return self._shared.located(kept, host) if self._shared else channels.SharedReply(kept.version)

    def clear(self) -> None:
        """Drop all snapshots; readers keep what they map."""
        with self._lock:
            self._kept.clear()
        if self._shared is not None:
            self._shared.close()


def chunk(
    version: Version,
    box: Box,
    held: Sequence[tuple[Box, np.ndarray]],
    scatters: bool,
    digest: int | None = None,
) -> channels.Buffers:
    """The frame and the bytes of `box`, which the boxes of `held` fill once; where `scatters` is False, in chunks."""
    yield memoryview(channels.frame(channels.SliceHeader(version, sum(array.nbytes for _, array in held), digest)))
    if not manifests.size_of(box):
        return
    if len(held) == 1 and held[0][1].flags.c_contiguous:
        yield held[0][1].reshape(-1).data.cast("B")
        return
    if scatters and (gathered := channels.scattered(box, held)) is not None:
        yield gathered
        return
    for slab in manifests.split(box, channels.CHUNK_BYTES // held[0][1].itemsize):
        body = np.empty(manifests.shape_of(slab), held[0][1].dtype)
        for inner, array in channels.intersections(slab, held):
            body[(*manifests.within(inner, slab), ...)] = array
        yield body.reshape(-1).data.cast("B")


def _slices(kept: HostSnapshot, slices: tuple[channels.Slice, ...], scatters: bool) -> channels.Buffers:
    for part in slices:
        source, piece = kept.manifest.leaves[part.leaf].boxes[part.source], kept.pieces[part.leaf][part.source]
        body = manifests.bits(piece)[(*manifests.within(part.box, source), ...)]
        seen = manifests.of_box(body, part.box) if part.checked else None
        yield from chunk(kept.version, part.box, [(part.box, body)], scatters, seen)


class NoSender:
    """The sender of a host whose boxes process 0 gathers."""

    name, sent_bytes = "none", 0

    def hold(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(pieces)

    def offer(self, snapshot: HostSnapshot) -> str:
        del snapshot
        return ""

    def close(self) -> None: ...


# --- Memory of receivers

_ALIGNMENT = 64  # XLA on CPU uses host memory at such addresses without a copy


class ReceiveMemory:
    """Memory of earlier versions that is used again: the first use of new memory costs more than receiving into it.

    Memory returns when no array refers to it, arrays that share it on a CPU device included. As much is kept as one
    version needs. There is no lock, because the garbage collector may return memory on any thread at any time.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[np.ndarray]] = {}

    def expect(self, sizes: Iterable[int]) -> None:
        """Drop memory of other sizes than those of the buffers of a version."""
        counts = Counter(sizes)
        self._free = {size: self._free.get(size, deque(maxlen=count)) for size, count in counts.items()}

    def take(self, shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
        """An uninitialized array."""
        size = math.prod(shape) * kind.itemsize
        free = self._free.get(size, deque(maxlen=1))
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size + _ALIGNMENT, np.uint8)
        # The base of every view, so it ends with the last one. Of an array itself, that array would be the base.
        content = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(content, free.append, memory).atexit = False
        start = -content.__array_interface__["data"][0] % _ALIGNMENT
        return content[start : start + size].view(kind).reshape(shape)
