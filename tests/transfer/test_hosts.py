"""A learner on several hosts: each serves its own boxes, and receivers fetch from all of them at the same time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxroll import lifeline
from jaxroll.errors import DigestMismatch, TransferError
from jaxroll.records import Version, VersionRef
from jaxroll.transfer import manifest as manifests
from jaxroll.transfer import relay as relays
from jaxroll.transfer.channel_shm import SharedSegments
from jaxroll.transfer.channel_tcp import TcpReader, TcpSender
from jaxroll.transfer.channels import SlicePart
from jaxroll.transfer.ends import Receiver
from jaxroll.transfer.manifest import HostSnapshot
from jaxroll.transfer.relay import RelaySender
from tests.harness.transfer_arrays import big_values, host_snapshot

PROGRAM = Path(__file__).parents[1] / "harness/programs/weight_hosts.py"
VERSION = Version(0, 1)


def parts_of(values: dict[str, np.ndarray], version: Version = VERSION) -> list[HostSnapshot]:
    """The snapshots of two hosts: halves of the leaves that have rows, and every other one of the rest."""
    pieces: list[dict] = [{}, {}]
    for number, (name, value) in enumerate(sorted(values.items())):
        box = manifests.whole(value.shape)
        if value.ndim and value.shape[0] > 1:
            middle = value.shape[0] // 3
            for host, span in enumerate([(0, middle), (middle, value.shape[0])]):
                pieces[host][name] = (value.shape, [((span, *box[1:]), value[slice(*span)])])
        else:
            pieces[number % 2][name] = (value.shape, [(box, value)])
    return [manifests.from_pieces(version, some) for some in pieces]


class Hosts:
    """Two hosts of a learner: process 0's view of the other one, and the senders of both."""

    def __init__(self, kit, channel: str) -> None:
        def shared() -> SharedSegments | None:
            return None if channel == "tcp" else SharedSegments(required=True)

        self.senders = [TcpSender(name=channel, shared=shared()) for _ in range(2)]
        self.channel, self.address = channel, self.senders[1].address
        for sender in self.senders:
            kit.stack.callback(sender.close)

    def publish(self, values: dict[str, np.ndarray]) -> VersionRef:
        own, self.other = parts_of(values)
        self.senders[1].offer(self.other)
        whole = relays.of_all_hosts(own, self, 1.0)
        return VersionRef(VERSION, self.channel, self.senders[0].offer(whole), whole.manifest_digest)

    def parts(self, version: Version, limit_s: float) -> list[tuple[str, bytes]]:
        return [(self.address, self.other.encoded)]


def exact(placed: dict, values: dict[str, np.ndarray]) -> None:
    for name, value in values.items():
        assert np.asarray(placed[name]).tobytes() == value.tobytes(), name


@pytest.mark.parametrize(("channel", "connections"), [("tcp", 1), ("shm", 1), ("tcp", 3), ("shm", 3)])
@pytest.mark.parametrize(("dims", "rules"), [((1, 1, 2), "sampler"), ((1, 4, 1), "learner"), ((2, 1, 1), "replicated")])
def test_a_version_of_two_hosts_arrives_exactly(kit, channel: str, connections: int, dims, rules: str) -> None:
    hosts, values = Hosts(kit, channel), kit.values(1)
    ref = hosts.publish(values)
    for _ in range(2):
        receiver = kit.receiver(connections=connections)
        exact(receiver.fetch(ref, kit.shardings(dims, rules), kit.abstract(kit.shapes)).place(), values)
    other = hosts.other.size_bytes
    if channel == "tcp":
        deadline_s = time.monotonic() + 30
        while hosts.senders[1].sent_bytes < 2 * other and time.monotonic() < deadline_s:
            time.sleep(0.01)  # the listener counts after the receiver has what it sent
        assert hosts.senders[1].sent_bytes >= 2 * other > 0


@pytest.mark.parametrize(("connections", "used"), [(1, 1), (2, 2), (3, 3), (99, 4)])
def test_connections_to_one_host_read_whole_leaves_at_the_same_time(kit, monkeypatch, connections, used) -> None:
    values, shares = kit.values(1), []
    ref = kit.publisher().publish(VERSION, kit.params(values, kit.shardings((1, 2, 2), "learner")))
    read = TcpReader.read

    def recorded(reader: TcpReader, manifest: manifests.Manifest, parts: Sequence[SlicePart], leaf_read) -> None:
        shares.append((reader, threading.get_ident(), {part.leaf: part.into.nbytes for part in parts}))
        started.wait(20)  # all of them read at once
        read(reader, manifest, parts, leaf_read)

    monkeypatch.setattr(TcpReader, "read", recorded)
    started = threading.Barrier(used)
    target = kit.shardings((1, 1, 1), "replicated")
    exact(kit.receiver(connections=connections).fetch(ref, target, kit.abstract(kit.shapes)).place(), values)
    assert len({id(reader) for reader, _, _ in shares}) == len({thread for _, thread, _ in shares}) == len(shares)
    filled = [number for number, (_, value) in enumerate(sorted(values.items())) if value.size]
    assert sorted(leaf for _, _, leaves in shares for leaf in leaves) == filled


def test_memory_of_this_machine_is_mapped_and_not_read_over_more_connections(kit, monkeypatch) -> None:
    """The mapping verifies the bytes of the first connection; those of another one would be unverified."""
    publisher, values = kit.publisher("auto"), kit.values(1)
    ref = publisher.publish(VERSION, kit.params(values, kit.shardings((1, 2, 2), "learner")))
    asked = []
    monkeypatch.setattr(TcpReader, "_fill", lambda reader, request, name: asked.append(name))
    receiver, target = kit.receiver(channel="auto", connections=3), kit.shardings((1, 1, 1), "replicated")
    exact(receiver.fetch(ref, target, kit.abstract(kit.shapes)).place(), values)
    assert not asked


def test_a_connection_that_fails_ends_those_that_wait(kit, announced, monkeypatch) -> None:
    """The line is silent: without an interruption the other connection would take the deadline."""
    sender, snapshot = TcpSender(), host_snapshot(VERSION, big_values())
    kit.stack.callback(sender.close)
    ref, read = announced(snapshot, sender.offer(snapshot)), TcpReader.read
    silent = kit.middle(ref.address, stall_at=1_000_000)

    def failing(reader: TcpReader, manifest: manifests.Manifest, parts: Sequence[SlicePart], leaf_read) -> None:
        if parts[0].leaf == 1:
            raise TransferError("the line broke off")
        read(reader, manifest, parts, leaf_read)

    monkeypatch.setattr(TcpReader, "read", failing)
    through = msgspec.structs.replace(ref, address=silent.address)
    with pytest.raises(TransferError, match="the line broke off"):
        kit.fetch_big(through, deadline_s=3600.0, connections=2)  # long after pytest's own


@pytest.mark.parametrize("secured", [False, True])
def test_connections_give_their_place_to_those_that_wait(kit, certified, announced, secured: bool) -> None:
    """Twelve connections and two places: each place is free as soon as a share is read."""
    server, client = (certified.server, certified.client) if secured else (None, None)
    sender, snapshot = TcpSender(max_connections=2, tls=server), host_snapshot(VERSION, kit.values(1))
    kit.stack.callback(sender.close)
    ref = announced(snapshot, sender.offer(snapshot))
    target, shapes = kit.shardings((1, 1, 1), "replicated"), kit.abstract(kit.shapes)

    def fetch(_: int) -> Any:
        return Receiver(kit.config(connections=4), tls=client).fetch(ref, target, shapes)

    with ThreadPoolExecutor(3) as pool:
        fetched = list(pool.map(fetch, range(3)))
    assert [staged.size_bytes for staged in fetched] == [sum(value.nbytes for value in kit.values(1).values())] * 3
    for staged in fetched:
        exact(staged.place(), kit.values(1))


def test_the_shares_of_connections_have_nearly_as_many_bytes() -> None:
    def part(leaf: int, size: int) -> SlicePart:
        return SlicePart(leaf, 0, ((0, size),), np.empty(size, np.uint8), False)

    parts = [part(leaf, size) for leaf, size in enumerate([10, 10, 5, 5, 20, 10, 20, 20]) for size in (size, size)]
    shares = relays._divided(parts, 4)
    assert [sum(one.into.nbytes for one in share) for share in shares] == [50, 50, 60, 40]
    assert [[one.leaf for one in share][::2] for share in shares] == [[0, 1, 2], [3, 4], [5, 6], [7]]
    assert relays._divided([], 4) == [[]] and relays._divided(parts[:2], 4) == [parts[:2]]


def test_a_relay_hands_on_what_two_hosts_serve(kit) -> None:
    hosts, values = Hosts(kit, "tcp"), kit.values(1)
    ref = hosts.publish(values)
    listener = RelaySender(kit.config(), "127.0.0.1", token="")
    kit.stack.callback(listener.close)
    target, shapes = kit.shardings((1, 1, 2), "sampler"), kit.abstract(kit.shapes)
    receiver = relays_receiver(kit, listener)
    exact(receiver.fetch(ref, target, shapes).place(), values)
    for sender in hosts.senders:
        sender.close()
    found = kit.receiver().fetch(ref, target, shapes, relays=[relays.Relay("sampler-0", listener.address)])
    assert [one.source for one in found.sources] == ["sampler-0"]
    exact(found.place(), values)


def relays_receiver(kit, listener: RelaySender):
    from jaxroll.transfer.ends import Receiver

    return Receiver(kit.config(), relay=listener.relay)


def test_a_host_that_is_gone_is_a_transfer_error(kit) -> None:
    hosts = Hosts(kit, "tcp")
    ref = hosts.publish(big_values())
    hosts.senders[1].close()
    with pytest.raises(TransferError, match=hosts.address):
        kit.fetch_big(ref)


@pytest.mark.parametrize(("behaviour", "error", "message"), [
    ({"cut_at": 1_500_000}, TransferError, "broke off: the publisher closed"),
    ({"flip_at": 1_500_000}, DigestMismatch, r"leaf '[ab]' of version 0\.1"),
])  # fmt: skip
def test_a_bad_line_to_one_host_ends_the_transfer_at_once(kit, behaviour: dict, error: type, message: str) -> None:
    """The other host is silent: without its interruption the transfer would take the deadline."""
    hosts = Hosts(kit, "tcp")
    hosts.address = kit.middle(hosts.address, **behaviour).address
    ref = hosts.publish(big_values())
    silent = kit.middle(ref.address, stall_at=1_000_000)
    if error is TransferError:
        ref = msgspec.structs.replace(ref, address=silent.address)
    began_s = time.monotonic()
    with pytest.raises(error, match=message):
        kit.fetch_big(ref, deadline_s=60.0)
    assert time.monotonic() - began_s < 30.0


@pytest.mark.parametrize("hosts", [(0, 2), (0,), ()])
def test_a_manifest_of_unknown_hosts_is_refused(hosts: tuple[int, ...]) -> None:
    boxes = (((0, 1),), ((1, 2),))
    leaf = manifests.Leaf("w", (2,), "float32", boxes, (0, 0), hosts)
    encoded = manifests.encode(made := manifests.Manifest(VERSION, (leaf,), ("127.0.0.1:1",)))
    ref = VersionRef(VERSION, "tcp", "here", HostSnapshot(made, encoded, ()).manifest_digest)
    with pytest.raises(TransferError, match="leaf 'w': 2 boxes of hosts"):
        manifests.decode(encoded, ref)


def test_another_part_than_the_announced_one_is_refused(kit) -> None:
    hosts = Hosts(kit, "shm")
    ref = hosts.publish(big_values())
    hosts.senders[1].offer(parts_of({name: value + 1 for name, value in big_values().items()})[1])
    with pytest.raises(DigestMismatch, match="host 1 of the learner"):
        kit.fetch_big(ref)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(300)
def test_two_processes_publish_what_they_hold_and_one_receives_it_all(tmp_path: Path) -> None:
    """Over every channel, of parameters split by rows, by columns and replicated over both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": str(PROGRAM.parents[3]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_cpu_collective_timeout_seconds=200",
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
        lifeline.PARENT_ENV: str(os.getpid()),
    }
    logs = [(tmp_path / f"{index}.log").open("w+") for index in range(2)]
    children = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(tmp_path), str(index), address], env=environment,
                         stdout=log, stderr=log)
        for index, log in enumerate(logs)
    ]  # fmt: skip
    try:
        codes = [child.wait(240) for child in children]
    finally:
        for child, log in zip(children, logs, strict=True):
            child.kill()
            child.wait()
            log.seek(0)
    assert codes == [0, 0], [log.read()[-2000:] for log in logs]
