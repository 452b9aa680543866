"""Several sources of one version: relays, and the hosts of a learner.

A relay is a receiver's listener, which serves a version to other receivers while it arrives.

The receiver adds each leaf as soon as its digest equals that of the learner's manifest; readers get it then. A relay
holds whole leaves, partitioned as its own mesh needs them, and cuts from them the slices of any other mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import selectors
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.clock import Clock, MonotonicClock
from jaxroll.config import TransferConfig
from jaxroll.errors import DigestMismatch, TransferError, Unauthorized
from jaxroll.records import Relay, Version
from jaxroll.rpc.tls import Material
from jaxroll.transfer import channel_tcp, channels
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer.channel_device import chunk
from jaxroll.transfer.channel_tcp import Listener, ReaderConnection, TcpReader, TcpSender
from jaxroll.transfer.channels import (
    Buffers,
    Deadline,
    LeafRead,
    Reader,
    SharedReply,
    Shelf,
    Slice,
    SlicePart,
    TransferRefusal,
)
from jaxroll.transfer.manifest import Box, HostSnapshot, Manifest

Leaf = Mapping[Box, np.ndarray]  # the bits of a whole leaf, by box
BEGIN_S = 5.0  # that a reader waits for a version which this receiver has not begun to fetch


class ArrivingVersion:
    """One version in the memory of a receiver, complete or not.

    Threads: the fetching one calls `open`, `add` and `end`, the listener's reads.
    """

    def __init__(self, version: Version, changed: Callable[[], None], clock: Clock) -> None:
        self.version, self.begun = version, False
        self._changed, self._clock, self._asked_s = changed, clock, clock.now_s()
        self._encoded, self._manifest, self._reason = b"", None, ""
        self._leaves: dict[int, Leaf] = {}

    def open(self, encoded: bytes, manifest: Manifest) -> None:
        """Serve the manifest from now on."""
        self._manifest, self._encoded = manifest, encoded
        self._changed()

    def add(self, number: int, leaf: Leaf) -> None:
        """Serve the verified leaf `number`, whose arrays must not change any more."""
        self._leaves[number] = leaf
        self._changed()

    def end(self, reason: str) -> None:
        """Refuse the readers that wait for what is missing."""
        self._reason = reason
        self._changed()

    def manifest(self) -> Buffers:
        """The answer with the manifest, when it is here."""
        while not self._encoded:
            yield self._not_yet()
        yield from channels.manifest_reply(self.version, self._encoded)

    def slices(self, slices: tuple[Slice, ...], scatters: bool) -> Buffers:
        """The answers with the slices, each when its leaf is here."""
        for part in slices:
            while part.leaf not in self._leaves:
                yield self._not_yet()
            assert self._manifest is not None
            channels.check_slice(self._manifest, part)
            if part.checked:  # its digest would be the relay's word, not the learner's
                raise TransferRefusal(
                    "bad_request", "a relay serves receivers that hold whole leaves; fetch from the learner"
                )
            held = channels.intersections(part.box, list(self._leaves[part.leaf].items()))
            yield from chunk(self.version, part.box, held, scatters)

    def _not_yet(self) -> None:
        if self._reason:
            raise TransferRefusal("gone", self._reason)
        if not self.begun and self._clock.now_s() - self._asked_s > BEGIN_S:
            raise TransferRefusal(
                "gone", f"this relay has not begun to fetch version {self.version} within {BEGIN_S:g} s"
            )


class RelayShelf:
    """The newest version of a receiver, and one that readers ask for before this receiver has begun to fetch it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock, self._lock = clock or MonotonicClock(), threading.Lock()
        self._newest: ArrivingVersion | None = None
        self._awaited: ArrivingVersion | None = None
        self.changed: Callable[[], None] = lambda: None  # the listener's wake-up

    def begin(self, version: Version) -> ArrivingVersion:
        """The version to fill, instead of the one before, which connections keep."""
        with self._lock:
            awaited = self._awaited
            known = awaited is not None and awaited.version == version
            self._newest = made = awaited if known and awaited is not None else self._made(version)
            made.begun = True
            if awaited is not None and awaited.version <= version:
                self._awaited = None
        if awaited is not None and awaited.version < version:
            awaited.end(f"this relay fetches version {version}")
        return made

    def get(self, version: Version) -> ArrivingVersion | None:
        """The version, also one that may come; None for an older one."""
        with self._lock:
            newest, awaited = self._newest, self._awaited
            if newest is not None and version <= newest.version:
                return newest if version == newest.version else None
            if awaited is None or awaited.version < version:
                awaited = self._awaited = self._made(version)
            return awaited if awaited.version == version else None

    def versions(self) -> tuple[Version, ...]:
        with self._lock:
            return () if self._newest is None else (self._newest.version,)

    def manifest(self, kept: ArrivingVersion) -> Buffers:
        return kept.manifest()

    def slices(self, kept: ArrivingVersion, slices: tuple[Slice, ...], scatters: bool) -> Buffers:
        return kept.slices(slices, scatters)

    def located(self, kept: ArrivingVersion, host: str) -> SharedReply:
        """No shared memory: a relay is for other hosts."""
        del host
        return SharedReply(kept.version)

    def clear(self) -> None:
        with self._lock:
            self._newest = self._awaited = None

    def _tell(self) -> None:
        self.changed()

    def _made(self, version: Version) -> ArrivingVersion:
        return ArrivingVersion(version, self._tell, self._clock)


class RelayListener(Listener):
    """A listener whose readers may wait for what is not here yet; every half second they get a sign of life."""

    def __init__(self, relay: RelayShelf, shelf: Shelf, host: str, **options: Any) -> None:
        del shelf
        super().__init__(relay, host, **options)
        relay.changed = self._wake

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or closed
            self._wake_out.send(b"x")

    def _woken(self) -> None:
        super()._woken()
        for connection in self._connections:
            if connection.waits:
                self._continue(connection)

    def _drop_stalled(self) -> None:
        super()._drop_stalled()
        now_s = self._clock.now_s()
        for connection in self._connections:
            if connection.waits and now_s - connection.moved_s > channel_tcp.TICK_S:
                self._continue(connection)
                if not connection.outbox:
                    connection.outbox.append(memoryview(channels.frame(channels.Waiting())))
                    self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)

    def _continue(self, connection: ReaderConnection) -> None:
        """Send what is here by now."""
        connection.refill()
        if connection.outbox:
            self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)


class RelaySender(TcpSender):
    """The listening end of a receiver that serves what it has received; `relay` is for its `Receiver`."""

    def __init__(self, config: TransferConfig, host: str, *, token: str, **exposure: Any) -> None:
        """Listen on a free port of `host`; `exposure` and errors as for TcpSender."""
        self.relay = RelayShelf()
        listener = functools.partial(RelayListener, self.relay)
        super().__init__(host, token=token, stall_s=config.deadline_s, listener=listener, **exposure)


# --- the reading end

RELAY_STALL_S = 5.0  # without a byte from a relay, which sends some every half second; then the next source is asked


class Fetched(NamedTuple):
    """Bytes of one version that came from `source` (a relay's name, or `learner`), and the error that ended it."""

    source: str
    size_bytes: int
    seconds: float
    error: str = ""


class RelayedVersion(Protocol):
    """One version on its way into host memory (`ends`)."""

    fetched_bytes: int

    @property
    def is_complete(self) -> bool: ...

    def read(self, reader: Reader) -> None: ...


def read_from_relays(
    transfer: RelayedVersion,
    relays: Sequence[Relay],
    version: Version,
    token: str,
    tls: Material | None,
    clock: Clock,
    limit_s: float,
) -> list[Fetched]:
    """Read as much as possible from `relays`, one after the other, within half of `limit_s`."""
    sources: list[Fetched] = []
    doing, stall_s = f"fetching version {version} from relays", min(RELAY_STALL_S, limit_s / 4)
    deadline = Deadline(limit_s / 2, doing, clock, stall_s)
    for relay in relays:
        if transfer.is_complete:
            break
        started_s, before, error = clock.now_s(), transfer.fetched_bytes, ""
        try:
            with contextlib.closing(TcpReader(relay.address, version, token, deadline, tls, merges=False)) as reader:
                transfer.read(reader)
        except (TransferError, Unauthorized) as failure:
            error = f"{type(failure).__name__}: {failure}"
        sources.append(Fetched(relay.name, transfer.fetched_bytes - before, clock.now_s() - started_s, error))
    return sources


# --- A learner on several hosts: each serves its own boxes, and process 0 the manifest of them all


class OtherHosts(Protocol):
    """The other hosts of a learner, as process 0 sees them; each has a Publisher with `announce`."""

    def publish(self, version: Version, *, frozen: bool) -> None:
        """Let all call `start`, or with `frozen` `freeze`, with their part of the same parameters."""
        ...

    def parts(self, version: Version, limit_s: float) -> list[tuple[str, bytes]]:
        """The address and the encoded manifest of every host's part, in order. TransferError after `limit_s`."""
        ...


def of_all_hosts(own: HostSnapshot, others: OtherHosts, limit_s: float) -> HostSnapshot:
    """The part of process 0 with the manifest of all hosts' parts, which they serve by now."""
    parts = [(address, wire.decode(encoded, Manifest)) for address, encoded in others.parts(own.version, limit_s)]
    return dataclasses.replace(own, encoded=manifests.encode(of_hosts([("", own.manifest), *parts])))


def of_hosts(parts: Sequence[tuple[str, Manifest]]) -> Manifest:
    """The manifest of a version of which each host has a part, given with its address, in the order of the hosts."""
    found: dict[str, list[tuple[int, manifests.Leaf]]] = {}
    for host, (_, part) in enumerate(parts):
        for leaf in part.leaves:
            found.setdefault(leaf.name, []).append((host, leaf))
    leaves = []
    for _, some in sorted(found.items()):
        served = [
            (box, digest, host) for host, leaf in some for box, digest in zip(leaf.boxes, leaf.digests, strict=True)
        ]
        boxes, digests, hosts = zip(*served, strict=True)
        leaves.append(msgspec.structs.replace(some[0][1], boxes=boxes, digests=digests, hosts=hosts))
    return Manifest(parts[0][1].version, tuple(leaves), tuple(address for address, _ in parts[1:]))


def of_host(manifest: Manifest, host: int) -> tuple[Manifest, dict[tuple[int, int], tuple[int, int]]]:
    """The part of one host, and for each leaf and source box of `manifest` in it their numbers in the part."""
    leaves, numbers = [], {}
    for number, leaf in enumerate(manifest.leaves):
        mine = [source for source in range(len(leaf.boxes)) if _host(manifest, number, source) == host]
        if mine:
            numbers |= {(number, source): (len(leaves), own) for own, source in enumerate(mine)}
            boxes, digests = tuple(leaf.boxes[at] for at in mine), tuple(leaf.digests[at] for at in mine)
            leaves.append(manifests.Leaf(leaf.name, leaf.shape, leaf.dtype, boxes, digests))
    return Manifest(manifest.version, tuple(leaves)), numbers


class _Lane(NamedTuple):
    """The connection to one host: its part of the manifest, and the numbers of leaves and boxes in it."""

    reader: TcpReader
    manifest: Manifest
    numbers: Mapping[tuple[int, int], tuple[int, int]]  # (leaf, source) → the same in the part
    leaves: Mapping[int, int]  # leaf of the part → leaf


class HostsReader:
    """A reader of all hosts of a learner at the same time, over one connection to each of them or several."""

    def __init__(self, first: Any, address: str, opened: Callable[[str], Any], connections: int = 1) -> None:
        """`first` reads from process 0 at `address`; `opened` makes others. The caller closes all readers."""
        self._first, self._address, self._opened, self._connections = first, address, opened, connections
        self._lanes: list[_Lane] = []

    @property
    def verified(self) -> bool:
        """True if no host's bytes need a comparison with the manifest's digests."""
        return all(lane.reader.verified for lane in self._lanes)

    def view(self, manifest: Manifest, leaf: int, source: int) -> np.ndarray | None:
        """The bits of one source box that can be used in place, from the host that serves it."""
        lane = self._connected(manifest)[_host(manifest, leaf, source)]
        return lane.reader.view(lane.manifest, *lane.numbers[leaf, source])

    def read(self, manifest: Manifest, parts: Sequence[SlicePart], leaf_read: LeafRead = channels.ignore) -> None:
        """Fill every part; `leaf_read` is called on the thread of the last host that has filled parts of a leaf."""
        lanes, guard = self._connected(manifest), threading.Lock()
        shares: list[list[SlicePart]] = [[] for _ in lanes]
        missing: dict[int, set[int]] = {}
        errors: list[BaseException] = []
        for part in parts:
            host = _host(manifest, part.leaf, part.source)
            leaf, source = lanes[host].numbers[part.leaf, part.source]
            shares[host].append(part._replace(leaf=leaf, source=source))
            missing.setdefault(part.leaf, set()).add(host)
        jobs: list[tuple[int, bool, list[SlicePart]]] = []  # the first of a host has its lane's connection
        for host, lane in enumerate(lanes):  # only the first connection can map the memory of a host on this machine
            divided = _divided(shares[host], 1 if lane.reader.verified else self._connections)
            jobs += [(host, number == 0, some) for number, some in enumerate(divided)]
        readers = [lane.reader for lane in lanes]

        def read(host: int, is_first: bool, some: list[SlicePart]) -> None:
            def filled(own: int) -> None:
                leaf = lanes[host].leaves[own]
                with guard:
                    missing[leaf].discard(host)
                    last = not missing[leaf]
                if last:
                    leaf_read(leaf)

            try:
                reader = lanes[host].reader
                if not is_first:  # a host serves some connections at a time: this one may wait for a place
                    reader = self._opened(manifest.addresses[host - 1] if host else self._address)
                    with guard:
                        readers.append(reader)
                        if errors:
                            return
                reader.read(lanes[host].manifest, some, filled)
                reader.interrupt()  # its place is free for those that wait
            except BaseException as error:
                with guard:
                    errors.append(error)
                    for other in readers:  # they would read what is not needed any more
                        other.interrupt()
                raise

        with ThreadPoolExecutor(len(jobs), thread_name_prefix="transfer-host") as pool:
            for job in jobs:
                pool.submit(read, *job)
        if errors:
            raise errors[0]

    def _connected(self, manifest: Manifest) -> list[_Lane]:
        """The connections to all hosts of the manifest, the first to each."""
        for host in range(len(self._lanes), 1 + len(manifest.addresses)):
            part, numbers = of_host(manifest, host)
            reader = self._opened(manifest.addresses[host - 1]) if host else self._first
            leaves = {own: leaf for (leaf, _), (own, _) in numbers.items()}
            self._lanes.append(_Lane(reader, part, numbers, leaves))
            if host and reader.manifest() != manifests.encode(part):
                raise DigestMismatch(f"host {host} of the learner does not serve its part of version {part.version}")
        return self._lanes


def _host(manifest: Manifest, leaf: int, source: int) -> int:
    hosts = manifest.leaves[leaf].hosts
    return hosts[source] if hosts else 0


def _divided(parts: Sequence[SlicePart], count: int) -> list[list[SlicePart]]:
    """The parts of at most `count` connections, one at least: ranges of whole leaves, of nearly as many bytes."""
    total, before, found = sum(part.into.nbytes for part in parts), 0, dict[int, list[SlicePart]]()
    at: dict[int, int] = {}
    for part in parts:
        number = at.setdefault(part.leaf, min(count - 1, count * before // max(1, total)))
        found.setdefault(number, []).append(part)
        before += part.into.nbytes
    return list(found.values()) or [[]]
