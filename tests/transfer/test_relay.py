"""Receivers that serve what they received: exact on any mesh, while it arrives, and past relays that fail."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from jaxroll.errors import ConfigError, TransferError, Unauthorized
from jaxroll.records import Relay, Version, VersionRef
from jaxroll.transfer import channel_tcp, ends, relay
from jaxroll.transfer.channel_tcp import TcpReader, TcpSender
from jaxroll.transfer.channels import Deadline, SlicePart
from jaxroll.transfer.ends import Receiver, Staged
from jaxroll.transfer.relay import Fetched, RelaySender

TOKEN = "sampler." + "0" * 64
V1 = Version(0, 1)
MESHES = [((1, 1, 2), "sampler"), ((1, 2, 2), "learner"), ((1, 1, 1), "replicated"), ((2, 2, 2), "sampler")]


@dataclass
class Peer:
    """A receiver with its listener, on a mesh."""

    name: str
    kit: SimpleNamespace
    listener: RelaySender
    receiver: Receiver
    dims: tuple[int, int, int]
    rules: str

    @property
    def relay(self) -> Relay:
        return Relay(self.name, self.listener.address)

    @property
    def leaves(self) -> int:
        """The verified leaves that it can serve."""
        newest = self.listener.relay._newest
        return 0 if newest is None else len(newest._leaves)

    def fetch(self, ref: VersionRef, *relays: Relay) -> Staged:
        target = self.kit.shardings(self.dims, self.rules)
        return self.receiver.fetch(ref, target, self.kit.abstract(self.kit.shapes), relays=relays)


@pytest.fixture
def peer(kit):
    """A function that makes peers, which are closed at the end."""

    def one(number: int, **changes: object) -> Peer:
        config = kit.config(**changes)
        listener = RelaySender(config, "127.0.0.1", token=TOKEN)
        kit.stack.callback(listener.close)
        receiver = Receiver(config, token=TOKEN, relay=listener.relay)
        return Peer(f"sampler-{number}", kit, listener, receiver, *MESHES[number % len(MESHES)])

    return one


@pytest.fixture
def learner(kit):
    """A publisher on 1 x 2 x 2 devices; `publish(step)` gives the announcement and the values."""
    publisher = kit.publisher(token=TOKEN)

    def publish(step: int) -> tuple[VersionRef, dict[str, np.ndarray]]:
        values = kit.values(step)
        return publisher.publish(Version(0, step), kit.params(values, kit.shardings((1, 2, 2), "learner"))), values

    return SimpleNamespace(publish=publish, sender=publisher._sender)


def assert_exact(staged: Staged, values: dict[str, np.ndarray]) -> None:
    placed = staged.place()
    for name, value in values.items():
        assert np.asarray(placed[name]).tobytes() == value.tobytes(), name


def in_thread(job) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(job()), daemon=True)
    thread.start()
    return thread, results


def until(condition, limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.002)


def whole_bytes(kit) -> int:
    return sum(4 * int(np.prod(shape)) for shape in kit.shapes.values())


@pytest.mark.parametrize("count", [*(pytest.param(count, marks=pytest.mark.soak) for count in (2, 4)), 8])
def test_receivers_of_any_mesh_take_the_same_bits_from_one_another(kit, learner, peer, count: int) -> None:
    """In a chain, so that every pair of neighboring meshes occurs; the learner sends one copy."""
    peers = [peer(number) for number in range(count)]
    alone, sent = peer(0), []
    for step in (1, 2, 3):
        before = learner.sender.sent_bytes
        ref, values = learner.publish(step)
        if step == 1:
            alone.fetch(ref)
        relays: tuple[Relay, ...] = ()
        for one in peers:
            staged = one.fetch(ref, *relays)
            assert [source.source for source in staged.sources] == [relays[0].name if relays else ends.LEARNER]
            assert_exact(staged, values)
            relays = (one.relay,)
        copies = 2 if step == 1 else 1  # the listener counts after the reader has received
        until(lambda before=before, copies=copies: learner.sender.sent_bytes - before >= copies * whole_bytes(kit))
        sent.append(learner.sender.sent_bytes - before)
    assert sent[1] > whole_bytes(kit) and sent == pytest.approx([2 * sent[1], sent[1], sent[1]], rel=0.02)


def test_a_relay_forwards_what_it_has_while_the_rest_arrives(kit, learner, peer) -> None:
    ref, values = learner.publish(1)
    middle = kit.middle(ref.address, stall_at=2200)
    first, second = peer(0), peer(1)
    slow = VersionRef(ref.version, "tcp", middle.address, ref.manifest_digest)
    received, fetched = in_thread(lambda: first.fetch(slow))
    until(lambda: first.leaves > 0)
    thread, forwarded = in_thread(lambda: second.fetch(ref, first.relay))
    until(lambda: second.leaves == first.leaves)
    assert 0 < second.leaves < len(values) and not fetched and not forwarded
    middle.go_on.set()
    received.join(10)
    thread.join(10)
    assert_exact(fetched[0], values)
    assert [source.source for source in forwarded[0].sources] == ["sampler-0"]
    assert_exact(forwarded[0], values)


def test_a_reader_may_come_before_its_relay_has_begun(kit, learner, peer) -> None:
    ref, values = learner.publish(1)
    first, second = peer(0), peer(1)
    thread, forwarded = in_thread(lambda: second.fetch(ref, first.relay))
    until(lambda: first.listener.relay._awaited is not None)
    first.fetch(ref)
    thread.join(10)
    assert [source.source for source in forwarded[0].sources] == ["sampler-0"]
    assert_exact(forwarded[0], values)


def test_signs_of_life_keep_a_reader_at_a_relay_whose_source_is_slow(kit, learner, peer, monkeypatch) -> None:
    monkeypatch.setattr(relay, "RELAY_STALL_S", 1.0)
    monkeypatch.setattr(channel_tcp, "TICK_S", 0.03)
    ref, values = learner.publish(1)
    middle = kit.middle(ref.address, stall_at=2200)
    first, second = peer(0), peer(1)
    _, _ = in_thread(lambda: first.fetch(VersionRef(ref.version, "tcp", middle.address, ref.manifest_digest)))
    until(lambda: first.leaves > 0)
    thread, forwarded = in_thread(lambda: second.fetch(ref, first.relay))
    time.sleep(2.0)  # twice the time after which a reader leaves a silent relay
    middle.go_on.set()
    thread.join(10)
    assert [(one.source, one.error) for one in forwarded[0].sources] == [("sampler-0", "")]
    assert_exact(forwarded[0], values)


def test_a_silent_relay_is_left_for_the_next_one(kit, learner, peer, monkeypatch) -> None:
    monkeypatch.setattr(relay, "RELAY_STALL_S", 1.0)
    ref, values = learner.publish(1)
    first, second, third = peer(0), peer(1), peer(2)
    first.fetch(ref)
    second.fetch(ref, first.relay)
    hung = kit.middle(first.listener.address, stall_at=2200)
    before = learner.sender.sent_bytes
    staged = third.fetch(ref, Relay("hung", hung.address), second.relay)
    one, two = staged.sources
    assert one.source == "hung" and "nothing received for 1 s" in one.error and one.size_bytes > 0
    assert two == Fetched("sampler-1", whole_bytes(kit) - one.size_bytes, two.seconds)
    assert_exact(staged, values)
    assert learner.sender.sent_bytes == before


def test_a_relay_that_dies_in_mid_transfer_costs_only_the_rest(kit, learner, peer) -> None:
    ref, values = learner.publish(1)
    first, second = peer(0), peer(1)
    first.fetch(ref)
    dying = kit.middle(first.listener.address, cut_at=2200)
    staged = second.fetch(ref, Relay("dying", dying.address))
    one, two = staged.sources
    assert one.error.startswith("TransferError") and "broke off" in one.error and two.source == ends.LEARNER
    assert one.size_bytes > 0 and two.size_bytes == whole_bytes(kit) - one.size_bytes
    assert_exact(staged, values)


def test_what_a_relay_damages_is_found_and_comes_from_elsewhere(kit, learner, peer) -> None:
    ref, values = learner.publish(1)
    first, second, third = peer(0), peer(1), peer(2)
    first.fetch(ref)
    held = first.listener.relay._newest._leaves
    number = next(n for n, leaf in held.items() if sum(array.size for array in leaf.values()) == 16 * 4 * 8)
    held[number] = {box: array ^ np.uint32(1 << 20) for box, array in held[number].items()}
    staged = second.fetch(ref, first.relay)
    assert [one.source for one in staged.sources] == ["sampler-0", ends.LEARNER]
    assert staged.sources[0].error.startswith("DigestMismatch")
    assert_exact(staged, values)
    assert_exact(third.fetch(ref, second.relay), values)


def test_a_relay_with_a_manifest_of_its_own_is_not_believed(kit, learner, peer) -> None:
    ref, values = learner.publish(1)
    forger = TcpSender(token=TOKEN)
    kit.stack.callback(forger.close)
    forger.offer(kit.host_snapshot(V1, kit.values(7)))
    staged = peer(0).fetch(ref, Relay("forger", forger.address))
    assert staged.sources[0].error.startswith("DigestMismatch") and staged.sources[0].size_bytes == 0
    assert_exact(staged, values)


def test_a_relay_that_does_not_fetch_the_version_refuses(kit, learner, peer, monkeypatch) -> None:
    monkeypatch.setattr(relay, "BEGIN_S", 0.05)
    monkeypatch.setattr(channel_tcp, "TICK_S", 0.03)
    ref, values = learner.publish(1)
    idle, failing, ahead = peer(0), peer(1, deadline_s=1.0), peer(2)
    gone = VersionRef(V1, "tcp", "127.0.0.1:1", ref.manifest_digest)
    with pytest.raises(TransferError):
        failing.fetch(gone)
    ahead.fetch(learner.publish(2)[0])
    staged = peer(3).fetch(ref, idle.relay, failing.relay, ahead.relay)
    errors = [one.error for one in staged.sources]
    assert "has not begun to fetch version 0.1" in errors[0]
    assert "could not fetch version 0.1" in errors[1]
    assert "version 0.1 is not available (available: 0.2)" in errors[2]
    assert all(error.startswith("VersionGone") for error in errors[:3]) and errors[3] == ""
    assert_exact(staged, values)


def test_relays_have_half_of_the_deadline(kit, learner, peer, monkeypatch) -> None:
    monkeypatch.setattr(channel_tcp, "TICK_S", 0.03)
    ref, values = learner.publish(1)
    idle = peer(0)
    staged = peer(1, deadline_s=1.0).fetch(ref, idle.relay, idle.relay)
    assert ["not done within 0.5 s" in one.error for one in staged.sources] == [True, True, False]
    assert_exact(staged, values)


def test_a_relay_asks_for_the_token(learner, peer) -> None:
    ref, _ = learner.publish(1)
    first = peer(0)
    first.fetch(ref)
    with (
        contextlib.closing(TcpReader(first.listener.address, V1, "sampler.1", Deadline(5.0, "reading"))) as reader,
        pytest.raises(Unauthorized, match="wrong transfer token"),
    ):
        reader.manifest()


def test_a_relay_beyond_the_loopback_needs_a_token_and_tls(kit) -> None:
    with pytest.raises(ConfigError, match="no token"):
        RelaySender(kit.config(), "0.0.0.0", token="")
    with pytest.raises(ConfigError, match=r"plain text|certificates"):
        RelaySender(kit.config(), "0.0.0.0", token=TOKEN)


@pytest.mark.parametrize("mutual", [False, True])
def test_a_relay_serves_under_tls(kit, certified: SimpleNamespace, mutual: bool) -> None:
    config, values = kit.config(), kit.values(1)
    publisher = TcpSender(token=TOKEN, tls=certified.server, mutual_tls=mutual)
    kit.stack.callback(publisher.close)
    taken = kit.host_snapshot(V1, values)
    ref = VersionRef(V1, "tcp", publisher.offer(taken), taken.manifest_digest)
    listener = RelaySender(config, "127.0.0.1", token=TOKEN, tls=certified.server, mutual_tls=mutual)
    kit.stack.callback(listener.close)
    target, shapes = kit.shardings((1, 1, 2), "sampler"), kit.abstract(kit.shapes)
    Receiver(config, token=TOKEN, tls=certified.client, relay=listener.relay).fetch(ref, target, shapes)
    first = Relay("sampler-0", listener.address)
    staged = Receiver(config, token=TOKEN, tls=certified.client).fetch(ref, target, shapes, relays=(first,))
    assert [(one.source, one.error) for one in staged.sources] == [("sampler-0", "")]
    assert_exact(staged, values)
    with (
        contextlib.closing(TcpReader(first.address, V1, TOKEN, Deadline(5.0, "reading"))) as reader,
        pytest.raises((Unauthorized, TransferError)),
    ):
        reader.manifest()


def test_a_relay_gives_no_digests_of_its_own(kit, learner, peer) -> None:
    """A receiver that holds parts of leaves relies on the sender's digests, which must be the learner's."""
    ref, _ = learner.publish(1)
    first = peer(0)
    first.fetch(ref)
    with contextlib.closing(TcpReader(first.listener.address, V1, TOKEN, Deadline(5.0, "reading"))) as reader:
        manifest = ends.manifests.decode(reader.manifest(), ref)
        into = np.empty((8,), np.uint32)
        box = manifest.leaves[0].boxes[0]
        part = SlicePart(0, 0, box, into[: box[0][1] - box[0][0]], checked=True)
        with pytest.raises(TransferError, match="fetch from the learner"):
            reader.read(manifest, [part])


def test_a_relay_answers_an_empty_slice_and_goes_on(kit, learner, peer) -> None:
    ref, values = learner.publish(1)
    first = peer(0)
    first.fetch(ref)
    with contextlib.closing(TcpReader(first.listener.address, V1, TOKEN, Deadline(5.0, "reading"))) as reader:
        manifest = ends.manifests.decode(reader.manifest(), ref)
        box = manifest.leaves[0].boxes[0]
        nothing = ((box[0][0], box[0][0]), *box[1:])
        for _ in range(2):
            reader.read(
                manifest, [SlicePart(0, 0, nothing, np.empty(ends.manifests.shape_of(nothing), np.uint32), False)]
            )
    assert_exact(peer(1).fetch(ref, first.relay), values)


class _OneHost:
    """The devices of a sharding over several hosts, as seen by the first host, which has one of them."""

    is_fully_addressable = False

    def __init__(self, sharding) -> None:
        self._sharding = sharding

    def addressable_devices_indices_map(self, shape):
        return dict([next(iter(self._sharding.addressable_devices_indices_map(shape).items()))])


def test_a_process_with_parts_of_leaves_fetches_from_the_learner_and_is_no_relay(kit, learner, peer) -> None:
    ref, _ = learner.publish(1)
    part, whole = peer(0), peer(1)
    whole.fetch(ref)
    target = {name: _OneHost(sharding) for name, sharding in kit.shardings((1, 1, 2), "sampler").items()}
    staged = part.receiver.fetch(ref, target, kit.abstract(kit.shapes), relays=(whole.relay,))
    assert [one.source for one in staged.sources] == [ends.LEARNER] and part.leaves == 0


def test_a_version_that_was_fetched_by_parts_is_read_only_and_kept_for_readers(kit, learner, peer) -> None:
    """The arrays that a relay serves are those that the engine got, so nothing may write to them."""
    ref, values = learner.publish(1)
    first = peer(0)
    staged = first.fetch(ref)
    assert_exact(staged, values)
    arrays = [array for leaf in first.listener.relay._newest._leaves.values() for array in leaf.values()]
    assert arrays and not any(array.flags.writeable for array in arrays)
    first.fetch(learner.publish(2)[0])
    late = peer(1)
    staged = late.fetch(ref, first.relay)
    assert staged.sources[0].error.startswith("VersionGone"), "a relay keeps the newest version only"
    assert_exact(staged, values)
