"""The two ends of a weight transfer: the learner's publisher and the sampler's receiver."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxroll.clock import Clock, MonotonicClock
from jaxroll.config import TransferConfig
from jaxroll.errors import DigestMismatch, TransferError, one_line
from jaxroll.policy.routing import LEARNER
from jaxroll.records import Relay, Version, VersionRef
from jaxroll.rpc.tls import Material
from jaxroll.run_paths import RunPaths
from jaxroll.transfer import channel_device
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channel_device import HandedOver, NoSender, Params, PendingCopy, ReceiveMemory
from jaxroll.transfer.channel_shm import AutoReader, SharedSegments, ShmReader
from jaxroll.transfer.channel_tcp import TcpReader, TcpSender
from jaxroll.transfer.channel_tensorstore import TensorstoreReader, TensorstoreSender
from jaxroll.transfer.channels import Deadline, Reader, Sender, SlicePart
from jaxroll.transfer.manifest import Box, HostSnapshot
from jaxroll.transfer.relay import (
    ArrivingVersion,
    Fetched,
    HostsReader,
    OtherHosts,
    RelayShelf,
    of_all_hosts,
    read_from_relays,
)

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Exposure:
    """The protection of weights that other machines can fetch: TLS, or plain text if the user consents."""

    tls: Material | None = None
    mutual_tls: bool = False
    insecure: bool = False


LOOPBACK_ONLY = Exposure()


class Publisher:
    """Publisher of versions through one channel.

    Of a learner on several hosts, each has one and serves its own boxes; that of process 0 announces them all. Only for
    `tensorstore` process 0 gathers them.

    Threads: `start` dispatches the device copy on the calling (JAX) thread and returns; one worker thread waits for the
    bytes, computes their digests and offers them, in order. The tcp channel adds one listener thread. A caller of
    `publish` waits for the worker thread; the training step that follows `start` does not wait.
    """

    def __init__(
        self,
        config: TransferConfig,
        run_dir: str | os.PathLike[str],
        host: str = LOOPBACK,
        *,
        keep: int = 2,
        token: str = "",
        max_connections: int = 16,
        exposure: Exposure = LOOPBACK_ONLY,
        others: OtherHosts | None = None,
        announce: Callable[[Version, str, bytes], None] | None = None,
    ) -> None:
        """Open the channel that the config names; `tensorstore` without a path writes to RUN/transfer.

        Of a learner on several hosts, process 0 has `others`. The other processes have `announce`, which is called with
        each version that this one serves, its address and its encoded manifest.
        """
        self._config, self._others, self._announce = config, others, announce
        self._gathers = config.channel == "tensorstore"
        self._sender: Sender = NoSender()
        if not self._gathers:
            shared = None if config.channel in ("tcp", "device") else SharedSegments(required=config.channel == "shm")
            self._sender = TcpSender(
                host,
                keep=keep,
                token=token,
                max_connections=max_connections,
                stall_s=config.deadline_s,
                tls=exposure.tls,
                mutual_tls=exposure.mutual_tls,
                insecure=exposure.insecure,
                name=config.channel,
                shared=shared,
            )
        elif announce is None:
            path = config.path or RunPaths(pathlib.Path(run_dir)).transfer
            self._sender = TensorstoreSender(path, keep=keep, limit_s=config.deadline_s)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="transfer-publish")
        self._frozen: HostSnapshot | None = None

    def freeze(self, version: Version, params: Params) -> None:
        """Add `params`, which must not change any more, to every version that is started from now on.

        Blocks while they are copied and their digests computed, which happens only here. A receiver fetches them once.
        """
        if self._others is not None:
            self._others.publish(version, frozen=True)
        self._frozen = channel_device.take(
            version, params, self._config.dtype, self._sender.hold, gathers=self._gathers
        )

    def start(self, version: Version, params: Params) -> Future[VersionRef]:
        """Start publishing `params`, which may be donated on return; pass the future to `finish`."""
        if self._others is not None:
            self._others.publish(version, frozen=False)
        pending = channel_device.begin(params, self._config.dtype, gathers=self._gathers)
        return self._worker.submit(self._finish, version, pending)

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        """Wait until the parameters of `started` can be fetched and return their address; any thread may call this.

        Raises TransferError after `deadline_s`, which includes the device programs that are queued before the copy.
        """
        deadline = Deadline(self._config.deadline_s, f"publishing version {version}")
        try:
            return started.result(timeout=deadline.left_s())
        except TimeoutError as error:
            raise deadline.passed() from error

    @property
    def sent_bytes(self) -> int:
        """The bytes sent to receivers since the start; 0 for channels that send none themselves."""
        return self._sender.sent_bytes

    def drop_older(self, version: Version) -> None:
        """Do nothing: the channel keeps the newest `keep` versions."""
        del version

    def publish(self, version: Version, params: Params) -> VersionRef:
        """Start and finish publishing `version`. Raises TransferError like `finish`."""
        return self.finish(version, self.start(version, params))

    def offer(self, taken: HostSnapshot) -> VersionRef:
        """Offer an existing host snapshot and return its address."""
        return VersionRef(taken.version, self._sender.name, self._sender.offer(taken), taken.manifest_digest)

    def close(self) -> None:
        """Finish publishing and end the threads. A second close does nothing."""
        self._worker.shutdown(wait=True)
        self._sender.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _finish(self, version: Version, pending: PendingCopy) -> VersionRef:
        taken = channel_device.finish(version, pending, self._sender.hold)
        taken = taken if self._frozen is None else manifests.joined(taken, self._frozen)
        if self._others is not None and not self._gathers:
            taken = of_all_hosts(taken, self._others, self._config.deadline_s)
        ref = self.offer(taken)
        if self._announce is not None:
            self._announce(version, ref.address, taken.encoded)
        return ref


# --- The sampler's end of a weight transfer: fetches a version and places it on this process's mesh
#
# Verification: if this process holds every element of a leaf, the digest of the received leaf is compared with the
# manifest, which detects changed bytes, misplaced slices and a snapshot that changed during the transfer. A process of
# a receiver with several processes holds only a part of a leaf. Then each slice is compared with a digest that the
# sender computes when sending (tcp) or stored when writing (tensorstore), and source boxes that are contained in a
# local box are compared with the manifest. Shared memory is not compared: it is the memory that the sender wrote.

Received = dict[str, jax.Array]
_READERS = {"tcp": TcpReader, "shm": ShmReader, "auto": AutoReader, "tensorstore": TensorstoreReader}


@dataclass
class StagedLeaf:
    """One leaf on the host: a buffer (the leaf's bits) per distinct local box, and the box of each device."""

    manifest: manifests.Leaf
    sharding: jax.sharding.Sharding
    dtype: np.dtype  # on the device
    boxes: dict[Any, Box]
    buffers: dict[Box, np.ndarray]
    filled: frozenset[Box]  # buffers that need no reading: held ones, and views of shared memory

    @property
    def complete(self) -> bool:
        """True if this process holds every element of the leaf."""
        return sum(map(manifests.size_of, self.buffers)) == manifests.size_of(manifests.whole(self.manifest.shape))

    @property
    def size_bytes(self) -> int:
        """The size of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


Held = Mapping[str, StagedLeaf]  # verified leaves of an earlier version, by name
NOTHING_HELD: Held = MappingProxyType({})


class Staged:
    """Verified parameters in host memory, waiting for the weight swap. `place` may be called once."""

    def __init__(self, version: Version, leaves: list[StagedLeaf], sources: tuple[Fetched, ...]) -> None:
        """Stage `leaves`, fetched from `sources` in this order; the others were held."""
        self.version, self.sources = version, sources
        self.fetched_bytes = sum(source.size_bytes for source in sources)
        self._leaves: list[StagedLeaf] | None = leaves

    @property
    def size_bytes(self) -> int:
        """The size in host memory; 0 after `place`."""
        return sum(leaf.size_bytes for leaf in self._leaves or ())

    def held(self, names: Container[str]) -> Held:
        """The leaves of these names, for later fetches; they stay in host memory while this mapping is referenced."""
        return {leaf.manifest.name: leaf for leaf in self._leaves or () if leaf.manifest.name in names}

    def place(self) -> Received:
        """The parameters on the target mesh, in the dtypes given to `fetch`. Call this once, on the JAX thread."""
        # On CPU a placed array may alias the staged buffer, so buffers are released here and never written again.
        if self._leaves is None:
            raise TransferError(f"version {self.version} was placed before; fetch it again")
        leaves, self._leaves = self._leaves, None
        hosts, devices = [], []
        for leaf in leaves:
            for device, box in leaf.boxes.items():
                hosts.append(leaf.buffers[box].view(manifests.DTYPES[leaf.manifest.dtype]))
                devices.append(device)
        on_device = iter(jax.device_put(hosts, devices))
        arrays: Received = {
            leaf.manifest.name: jax.make_array_from_single_device_arrays(
                leaf.manifest.shape, leaf.sharding, [next(on_device) for _ in leaf.boxes]
            )
            for leaf in leaves
        }
        return manifests.cast(arrays, {leaf.manifest.name: leaf.dtype for leaf in leaves})


class Receiver:
    """Receiver of snapshots. Several threads may call `fetch` at the same time, without `relay`."""

    def __init__(
        self,
        config: TransferConfig,
        *,
        token: str = "",
        clock: Clock | None = None,
        tls: Material | None = None,
        relay: RelayShelf | None = None,
    ) -> None:
        """`relay` gets every leaf of a version, as soon as it is verified, and serves it to other receivers."""
        self._limit_s, self._token, self._clock, self._tls = config.deadline_s, token, clock or MonotonicClock(), tls
        self._connections = config.connections
        self._buffers, self._relay = ReceiveMemory(), relay

    def fetch(
        self,
        ref: VersionRef,
        target: Mapping[str, jax.sharding.Sharding],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        held: Held = NOTHING_HELD,
        relays: Sequence[Relay] = (),
    ) -> Staged | HandedOver:
        """The verified parameters of `ref`, sharded for `target`, in host memory (device channel: on devices).

        A leaf of `held` is not fetched if its shape, dtype and digest equal the published ones. The `relays` are asked
        first, in order, for half of the deadline at most; what one does not deliver comes from the next, and at last
        from the publisher. Runs no JAX program.

        Raises TransferError (deadline passed, publisher gone, shapes that do not match) or one of its subclasses
        VersionGone, VersionMixed, DigestMismatch; Unauthorized for a wrong token or certificate.
        """
        deadline = Deadline(self._limit_s, f"fetching version {ref.version} from {ref.address}", self._clock)
        if target.keys() != shapes.keys():
            raise TransferError(f"shardings and shapes differ in {sorted(target.keys() ^ shapes.keys())}")
        if ref.channel == channel_device.NAME:
            return channel_device.hand_over(ref, target, shapes)
        if ref.channel not in _READERS:
            known = ", ".join(sorted((*_READERS, channel_device.NAME)))
            raise TransferError(f"unknown channel {ref.channel!r} (known: {known})")
        is_whole = (not relays and self._relay is None) or all(one.is_fully_addressable for one in target.values())
        arriving = self._relay.begin(ref.version) if self._relay is not None and is_whole else None
        transfer = _Transfer(ref, target, shapes, held, self._buffers, arriving)
        try:
            sources = []
            if relays and is_whole:
                sources = read_from_relays(
                    transfer, relays, ref.version, self._token, self._tls, self._clock, self._limit_s
                )
            if not transfer.is_complete:
                started_s, before = self._clock.now_s(), transfer.fetched_bytes
                with contextlib.ExitStack() as stack:

                    def opened(address: str) -> Any:
                        made = _READERS[ref.channel](address, ref.version, self._token, deadline, self._tls)
                        return stack.enter_context(contextlib.closing(made))

                    transfer.read(opened(ref.address), opened, self._connections)
                sources.append(Fetched(LEARNER, transfer.fetched_bytes - before, self._clock.now_s() - started_s))
        except BaseException as error:
            if arriving is not None:
                arriving.end(one_line(f"this relay could not fetch version {ref.version}: {error}"))
            raise
        return Staged(ref.version, transfer.leaves, tuple(sources))


class _Transfer:
    """One version on its way into host memory, from one source or several; each leaf is verified when it is read."""

    def __init__(
        self,
        ref: VersionRef,
        target: Mapping[str, jax.sharding.Sharding],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        held: Held,
        buffers: ReceiveMemory,
        arriving: ArrivingVersion | None,
    ) -> None:
        self.ref, self._target, self._shapes, self._held = ref, target, shapes, held
        self._buffers, self._arriving = buffers, arriving
        self._published: manifests.Manifest | None = None
        self._missing: dict[int, StagedLeaf] = {}
        self._guard = threading.Lock()
        self.leaves: list[StagedLeaf] = []
        self.fetched_bytes = 0  # of verified leaves that were not held

    @property
    def is_complete(self) -> bool:
        """True if every leaf is here and verified."""
        return bool(self.leaves) and not self._missing

    def read(self, reader: Reader, opened: Callable[[str], Any] | None = None, connections: int = 1) -> None:
        """Read and verify what is missing. Raises TransferError, also for a damaged leaf.

        `opened` makes more `connections`, and those to the other hosts of the learner; without it `reader` reads from a
        relay.
        """
        published = self._published = self._published or self._manifest(reader)
        source: Reader | HostsReader = reader
        if opened is not None and (published.addresses or connections > 1):
            source = HostsReader(reader, self.ref.address, opened, connections)
        if not self.leaves:
            self._open(published, source)

        def verify(number: int) -> None:
            leaf = self._missing[number]
            _verify(leaf, self.ref.version, source.verified)
            with self._guard:  # the threads of several hosts may verify
                del self._missing[number]
                self.fetched_bytes += leaf.size_bytes
            self._hand_on(number, leaf)

        missing = list(self._missing.items())
        source.read(published, [part for number, leaf in missing for part in _parts(number, leaf)], verify)
        for number in list(self._missing):  # leaves without parts, and channels that read in any order
            verify(number)

    def _manifest(self, reader: Reader) -> manifests.Manifest:
        """The manifest, checked."""
        published = manifests.decode(encoded := reader.manifest(), self.ref)
        manifests.check(published, self._shapes)
        if self._arriving is not None:
            self._arriving.open(encoded, published)
        return published

    def _open(self, published: manifests.Manifest, reader: Reader | HostsReader) -> None:
        """Give the leaves their buffers."""
        leaves, self._missing = list[StagedLeaf](), {}
        target, held = self._target, self._held
        here = {leaf.name for leaf in published.leaves if _is_held(leaf, target[leaf.name], held)}
        self._buffers.expect(_buffer_sizes(published, target))
        for number, leaf in enumerate(published.leaves):
            known = held[leaf.name].buffers if leaf.name in here else None
            views = functools.partial(reader.view, published, number)
            staged = _staged_leaf(leaf, target[leaf.name], self._shapes[leaf.name].dtype, views, self._buffers, known)
            leaves.append(staged)
            if known is None:
                self._missing[number] = staged
            else:
                self._hand_on(number, staged)
        self.leaves = leaves

    def _hand_on(self, number: int, leaf: StagedLeaf) -> None:
        if self._arriving is not None:
            self._arriving.add(number, leaf.buffers)


class FetchedParameters:
    """Weight sync of full parameters, published as the model computes with them: `target` and `shapes` by name."""

    def __init__(self, receiver: Receiver, target: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        self._receiver, self._target, self._shapes = receiver, target, shapes

    async def fetch(self, ref: VersionRef, *relays: Relay) -> Staged | HandedOver:
        """The parameters on the host, fetched on a worker thread. Raises TransferError and its kinds."""
        return await asyncio.to_thread(self._receiver.fetch, ref, self._target, self._shapes, NOTHING_HELD, relays)

    def place(self, staged: Staged | HandedOver) -> dict[str, jax.Array]:
        """The parameters on the mesh; call it on the JAX thread."""
        return staged.place()


def _is_held(leaf: manifests.Leaf, sharding: jax.sharding.Sharding, held: Held) -> bool:
    known = held.get(leaf.name)
    if known is None or known.sharding != sharding:
        return False
    return (known.manifest.shape, known.manifest.dtype, known.manifest.total) == (leaf.shape, leaf.dtype, leaf.total)


def _buffer_sizes(published: manifests.Manifest, target: Mapping[str, jax.sharding.Sharding]) -> Iterator[int]:
    for leaf in published.leaves:
        itemsize = manifests.DTYPES[leaf.dtype].itemsize
        for box in manifests.unique(manifests.local_boxes(target[leaf.name], leaf.shape)):
            yield manifests.size_of(box) * itemsize


def _staged_leaf(
    leaf: manifests.Leaf,
    sharding: jax.sharding.Sharding,
    dtype: Any,
    view: Callable[[int], np.ndarray | None],
    memory: ReceiveMemory,
    held: Mapping[Box, np.ndarray] | None,
) -> StagedLeaf:
    """The leaf with the buffers of `held`, or else with views of source boxes where `view` has one that contains the
    local box, and new, uninitialized buffers for the others."""
    boxes = manifests.local_boxes(sharding, leaf.shape)
    if held is not None:
        return StagedLeaf(leaf, sharding, np.dtype(dtype), boxes, dict(held), frozenset(held))
    kind = manifests.bits_dtype(manifests.DTYPES[leaf.dtype].itemsize)
    buffers, filled = {}, set()
    for box in manifests.unique(boxes):
        source = next((n for n, outer in enumerate(leaf.boxes) if manifests.contains(outer, box)), None)
        whole = None if source is None else view(source)
        if source is None or whole is None:
            buffers[box] = memory.take(manifests.shape_of(box), kind)
        else:
            buffers[box] = whole[(*manifests.within(box, leaf.boxes[source]), ...)]
            filled.add(box)
    return StagedLeaf(leaf, sharding, np.dtype(dtype), boxes, buffers, frozenset(filled))


def _parts(number: int, leaf: StagedLeaf) -> list[SlicePart]:
    targets = [box for box in leaf.buffers if box not in leaf.filled]
    return [
        SlicePart(
            leaf=number,
            source=copy.source,
            box=copy.box,
            into=leaf.buffers[targets[copy.target]][(*manifests.within(copy.box, targets[copy.target]), ...)],
            checked=not leaf.complete,
        )
        for copy in manifests.copies(leaf.manifest.boxes, targets)
    ]


def _verify(leaf: StagedLeaf, version: Version, verified: bool) -> None:
    """Raise DigestMismatch if the leaf differs from the published one; otherwise it is read-only from now on."""
    if not verified:
        _compare(leaf, version)
    for buffer in leaf.buffers.values():
        buffer.flags.writeable = False


def _compare(leaf: StagedLeaf, version: Version) -> None:
    if leaf.complete:
        found = manifests.total([manifests.of_box(buffer, box) for box, buffer in leaf.buffers.items()])
        if found != leaf.manifest.total:
            raise DigestMismatch(
                f"leaf {leaf.manifest.name!r} of version {version} has digest {found:016x}, "
                f"{leaf.manifest.total:016x} was published; fetch again"
            )
        return
    for box, wanted in zip(leaf.manifest.boxes, leaf.manifest.digests, strict=True):
        for local, buffer in leaf.buffers.items():
            if manifests.contains(local, box) and manifests.of_box(buffer[manifests.within(box, local)], box) != wanted:
                raise DigestMismatch(
                    f"leaf {leaf.manifest.name!r} {box} of version {version} differs from what was published"
                )
