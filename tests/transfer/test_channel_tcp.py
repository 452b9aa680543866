"""The tcp channel under bad networks, bad peers and crowds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import itertools
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from benchmarks.faults.tcp_proxy import Proxy
from jaxroll import wire
from jaxroll.clock import ManualClock, MonotonicClock
from jaxroll.errors import DigestMismatch, TransferError, Unauthorized, VersionGone
from jaxroll.records import Version, VersionRef
from jaxroll.transfer import channel_device, channel_tcp, channels
from jaxroll.transfer.channel_tcp import TcpReader, TcpSender
from jaxroll.transfer.channels import Deadline, SlicePart
from tests.harness.transfer_arrays import BIG, big_values

VERSION = Version(0, 1)


@pytest.fixture
def published(kit) -> VersionRef:
    return kit.publisher().offer(kit.host_snapshot(VERSION, big_values()))


def _through(kit, published: VersionRef, **behaviour: object) -> VersionRef:
    return msgspec.structs.replace(published, address=kit.middle(published.address, **behaviour).address)


@pytest.mark.parametrize(
    "direction", ["down", *(pytest.param(each, marks=pytest.mark.soak) for each in ("up", "both"))]
)
def test_a_line_that_is_cut_costs_the_deadline_and_nothing_once_it_is_healed(kit, published, direction: str) -> None:
    with Proxy(lambda: published.address) as proxy:
        through = msgspec.structs.replace(published, address=proxy.address)
        kit.fetch_big(through)
        proxy.partition(direction)
        began_s = time.monotonic()
        with pytest.raises(TransferError, match=r"version 0\.1"):
            kit.fetch_big(through, deadline_s=0.3)
        assert 0.3 <= time.monotonic() - began_s < 10.0
        proxy.heal()
        got = kit.fetch_big(through).place()
    for name, value in big_values().items():
        assert np.asarray(got[name]).tobytes() == value.tobytes()


def test_chunks_larger_than_the_socket_buffers_arrive_exactly(kit, published) -> None:
    got = kit.fetch_big(_through(kit, published)).place()
    for name, value in big_values().items():
        assert np.asarray(got[name]).tobytes() == value.tobytes()


@pytest.mark.parametrize("cuts", [(0, 1024), (0, 512, 1024)], ids=["contiguous", "scattered"])
def test_a_slice_that_arrives_in_pieces_is_read_by_one_call(kit, published, monkeypatch, cuts: tuple[int, ...]) -> None:
    sizes, read = [], TcpReader._read
    monkeypatch.setattr(TcpReader, "_read", lambda self, buffer: sizes.append(len(buffer)) or read(self, buffer))
    taken = kit.host_snapshot(VERSION, big_values())
    into = [np.zeros((512, stop - start), np.uint32) for start, stop in itertools.pairwise(cuts)]
    boxes = [((0, 512), span) for span in itertools.pairwise(cuts)]
    with _reader(kit, _through(kit, published).address) as reader:
        reader.read(taken.manifest, [SlicePart(0, 0, box, part, False) for box, part in zip(boxes, into, strict=True)])
    assert sizes[0] == 4 and sizes[2:] == [512 * 1024 * 4]  # the length of the header, the header, the slice
    np.testing.assert_array_equal(np.concatenate(into, axis=1).view(np.float32), big_values()["a"])


@pytest.mark.parametrize("flip_at", [1_000_000, 2_345_678, 4_000_000])
def test_a_byte_flipped_on_the_wire_is_a_digest_mismatch(kit, published, flip_at: int) -> None:
    with pytest.raises(DigestMismatch, match=r"leaf '[ab]' of version 0\.1"):
        kit.fetch_big(_through(kit, published, flip_at=flip_at))


def test_a_byte_flipped_in_a_slice_of_a_partial_leaf_is_a_digest_mismatch(kit, published) -> None:
    through = _through(kit, published, flip_at=700_000)
    deadline = Deadline(10, "reading")
    reader = TcpReader(through.address, VERSION, "", deadline)
    kit.stack.callback(reader.close)
    reader.manifest()
    taken = kit.host_snapshot(VERSION, big_values())
    into = np.empty((512, 512), np.uint32)
    with pytest.raises(DigestMismatch, match="damaged in transit"):
        reader.read(taken.manifest, [SlicePart(0, 0, ((0, 512), (0, 512)), into, checked=True)])


class _LeftHalf:
    """The devices of a sharding over two hosts, as seen by the first host."""

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
        return {"device": (slice(None), slice(0, shape[1] // 2))}


@pytest.mark.parametrize("flip_at", [None, 1_000_000])
def test_a_host_that_holds_half_of_a_leaf_asks_for_checked_slices(kit, published, flip_at: int | None) -> None:
    through, target = _through(kit, published, flip_at=flip_at), dict.fromkeys(BIG, _LeftHalf())
    if flip_at is None:
        assert kit.receiver().fetch(through, target, kit.abstract(BIG)).version == VERSION
        return
    with pytest.raises(DigestMismatch, match="damaged in transit"):
        kit.receiver().fetch(through, target, kit.abstract(BIG))


@pytest.mark.parametrize("cut_at", [0, 3, 60, 1_500_000])
def test_a_publisher_that_hangs_up_is_a_transfer_error_at_once(kit, published, cut_at: int) -> None:
    with pytest.raises(TransferError, match="broke off"):
        kit.fetch_big(_through(kit, published, cut_at=cut_at), deadline_s=3600.0)  # long after pytest's own


@pytest.mark.parametrize("stall_at", [0, 1_500_000])
def test_a_publisher_that_goes_silent_is_a_transfer_error_at_the_deadline(kit, published, stall_at: int) -> None:
    with pytest.raises(TransferError, match=r"fetching version 0\.1 .* not done within 0\.7 s"):
        kit.fetch_big(_through(kit, published, stall_at=stall_at), deadline_s=0.7)


def test_a_socket_that_takes_few_bytes_at_a_time_gets_all_of_them_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs.settimeout(5)
        rng = np.random.default_rng(0)
        buffers = [rng.bytes(int(n)) for n in [*rng.integers(0, 9, 100), *rng.integers(1, 60_000, 20)]]
        wanted = b"".join(buffers)
        connection = channel_tcp.ReaderConnection(ours, 0.0)
        connection.more = iter([memoryview(buffer) for buffer in buffers])
        got, partial = b"", 0
        while len(got) < len(wanted):
            with contextlib.suppress(BlockingIOError):
                partial += connection.send()
            got += theirs.recv(1 << 16)
        assert got == wanted
        assert partial > 10  # else this test has not tested what it is for
        assert not connection.send()


def test_a_dead_or_invalid_address_is_an_error(kit, published) -> None:
    import msgspec

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address, message in [(f"127.0.0.1:{port}", "no parameters from"), ("nowhere", "not a tcp address")]:
        with pytest.raises(TransferError, match=message):
            kit.fetch_big(msgspec.structs.replace(published, address=address))
    with pytest.raises(TransferError, match="unknown channel 'pigeon'"):
        kit.fetch_big(msgspec.structs.replace(published, channel="pigeon"))


def test_the_token_is_asked_for(kit) -> None:
    publisher = kit.publisher(token="s3cret")
    announced = publisher.offer(kit.host_snapshot(VERSION, big_values()))
    for wrong in ("", "s3cre", "s3cret2", "ключ"):
        with pytest.raises(Unauthorized, match="wrong transfer token"):
            _fetch_with(kit, announced, wrong)
    assert _fetch_with(kit, announced, "s3cret").version == VERSION


def _fetch_with(kit, announced: VersionRef, token: str):
    from jax.sharding import NamedSharding, PartitionSpec

    target = dict.fromkeys(BIG, NamedSharding(kit.mesh(1, 1, 1), PartitionSpec()))
    return kit.receiver(token=token).fetch(announced, target, kit.abstract(BIG))


def test_an_open_reader_keeps_its_version_while_newer_ones_push_it_out(kit) -> None:
    sender = TcpSender(keep=1)
    kit.stack.callback(sender.close)
    taken = kit.host_snapshot(VERSION, big_values())
    address = sender.offer(taken)
    with _reader(kit, address) as reader:
        assert reader.manifest() == taken.encoded
        for step in (2, 3):
            sender.offer(kit.host_snapshot(Version(0, step), big_values()))
        assert sender.versions() == (Version(0, 3),)
        into = np.empty(BIG["b"], np.uint32)
        reader.read(taken.manifest, [SlicePart(1, 0, ((0, 1024), (0, 512)), into, checked=False)])
        np.testing.assert_array_equal(into.view(np.float32), big_values()["b"])
    with _reader(kit, address) as late, pytest.raises(VersionGone, match=r"0\.1 is not available \(available: 0\.3\)"):
        late.manifest()


def _reader(kit, address: str, limit_s: float = 10.0):
    return contextlib.closing(TcpReader(address, VERSION, "", Deadline(limit_s, "reading")))


def test_more_readers_than_connections_wait_their_turn(kit) -> None:
    sender = TcpSender(max_connections=2)
    kit.stack.callback(sender.close)
    taken = kit.host_snapshot(VERSION, big_values())
    address = sender.offer(taken)

    def once(_: int) -> bytes:
        with _reader(kit, address) as reader:
            return reader.manifest()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(once, range(24), timeout=20)) == [taken.encoded] * 24

    with _reader(kit, address) as one, _reader(kit, address) as two, _reader(kit, address, 0.5) as third:
        one.manifest()
        two.manifest()
        with pytest.raises(TransferError, match=r"not done within 0\.5 s"):
            third.manifest()
    with _reader(kit, address) as fourth:
        assert fourth.manifest() == taken.encoded


def test_a_reader_that_stalls_is_dropped(kit) -> None:
    clock = ManualClock()
    sender = TcpSender(max_connections=1, stall_s=30, clock=clock)
    kit.stack.callback(sender.close)
    taken = kit.host_snapshot(VERSION, big_values())
    address = sender.offer(taken)
    with _reader(kit, address) as silent:
        assert silent.manifest() == taken.encoded
        _advance_until_hung_up(clock, silent._sock)
        with _reader(kit, address) as next_one:
            assert next_one.manifest() == taken.encoded


def _advance_until_hung_up(clock: ManualClock, sock: socket.socket) -> None:
    """Nothing, once the other side closed. The listener notes its last send after we have the bytes, on its own
    thread, so one step of the clock may come before that note: step until it takes effect, at most 20 s."""
    give_up_s = time.monotonic() + 20
    sock.settimeout(0.1)
    while time.monotonic() < give_up_s:
        clock.advance(31)
        with contextlib.suppress(TimeoutError):
            assert sock.recv(1) == b""
            return
    pytest.fail("the listener never dropped the silent reader")


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        channels.LENGTH.pack(3) + b"abc",
        channels.frame(channels.AskManifest(wire.PROTOCOL_VERSION, "ab", VERSION)).replace(b"ab", b"\xff\xa5"),
        channels.frame(channels.AskSlices(wire.PROTOCOL_VERSION, "", VERSION, (channels.Slice(9, 0, (), False),))),
        channels.frame(
            channels.AskSlices(wire.PROTOCOL_VERSION, "", VERSION, (channels.Slice(0, 0, ((-1, 2), (0, 2)), False),))
        ),
        channels.frame(
            channels.AskSlices(wire.PROTOCOL_VERSION, "", VERSION, (channels.Slice(0, -1, ((0, 2), (0, 2)), True),))
        ),
        channels.frame(channels.AskManifest(wire.PROTOCOL_VERSION + 1, "", VERSION)),
    ],
)
def test_noise_is_refused_and_others_are_served(kit, published, noise: bytes) -> None:
    host, _, port = published.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as rude:
        rude.sendall(noise)
        answer = b""
        while part := rude.recv(4096):
            answer += part
    refused = wire.decode(answer[4:], channels.Answer)
    assert isinstance(refused, channels.RefusedReading)
    assert refused.kind in ("bad_request", "unauthorized")
    assert kit.fetch_big(published).version == VERSION


def test_questions_may_be_sent_back_to_back_and_byte_by_byte(kit, published) -> None:
    host, _, port = published.address.rpartition(":")
    ask = channels.frame(channels.AskManifest(wire.PROTOCOL_VERSION, "", VERSION))
    taken = kit.host_snapshot(VERSION, big_values())
    one = channels.frame(channels.ManifestReply(VERSION, len(taken.encoded))) + taken.encoded
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(ask)):
            sock.sendall(ask[at : at + 1])
        sock.sendall(ask + ask)
        answer = b""
        while len(answer) < 3 * len(one):
            answer += sock.recv(4096)
    assert answer == one * 3


class _Liar:
    """A publisher that answers one question with prepared bytes."""

    def __init__(self, *answers: bytes) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._answers = answers
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listening.accept()
        with sock:
            for answer in self._answers:
                sock.recv(1 << 16)
                sock.sendall(answer)
            with contextlib.suppress(ConnectionResetError):  # the reader has left, disgusted
                sock.recv(1)

    def close(self) -> None:
        self._thread.join(5)
        self._listening.close()


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (
            channels.frame(channels.ManifestReply(VERSION, 1 << 40)),
            TransferError,
            "announces a manifest of 1099511627776 bytes",
        ),
        (b"\xff\xff\xff\x7f", TransferError, "does not speak this protocol"),
        (
            channels.frame(channels.SliceHeader(VERSION, 4)) + b"abcd",
            TransferError,
            "answered SliceHeader, not ManifestReply",
        ),
        (channels.frame(channels.ManifestReply(VERSION, 3)) + b"abc", DigestMismatch, "is not a manifest"),
    ],
)
def test_a_lying_publisher_is_refused(kit, reply: bytes, error: type, message: str) -> None:
    liar = _Liar(reply)
    kit.stack.callback(liar.close)
    with pytest.raises(error, match=message):
        kit.fetch_big(VersionRef(VERSION, "tcp", liar.address, "0" * 32))


def test_a_chunk_of_the_wrong_size_is_refused(kit) -> None:
    taken = kit.host_snapshot(VERSION, big_values())
    liar = _Liar(
        channels.frame(channels.ManifestReply(VERSION, len(taken.encoded))) + taken.encoded,
        channels.frame(channels.SliceHeader(VERSION, 12)) + b"x" * 12,
    )
    kit.stack.callback(liar.close)
    with pytest.raises(TransferError, match=r"leaf 'a' .* 12 bytes were announced, \d+ are needed"):
        kit.fetch_big(VersionRef(VERSION, "tcp", liar.address, taken.manifest_digest))


def test_a_closed_publisher_refuses_to_publish_and_closes_twice(kit) -> None:
    sender = TcpSender()
    sender.close()
    sender.close()
    with pytest.raises(TransferError, match="listener is not running"):
        sender.offer(kit.host_snapshot(VERSION, big_values()))


def test_closing_a_listener_whose_thread_is_just_ending() -> None:
    """Any event can end the loop between the stop flag and the wake-up byte; the thread is held in that moment."""
    listener = channel_tcp.Listener(
        channel_device.VersionShelf(2), "127.0.0.1", token="", max_connections=2, stall_s=9, clock=MonotonicClock()
    )
    run, ended, go_on = listener._run, threading.Event(), threading.Event()

    def held() -> None:
        run()
        ended.set()
        go_on.wait(10)

    listener._thread = threading.Thread(target=held, daemon=True)
    listener.start()
    listener._stopping.set()
    assert ended.wait(10)
    threading.Timer(0.05, go_on.set).start()
    listener.close()


def test_without_a_free_descriptor_the_listener_rests_and_then_serves(kit, monkeypatch) -> None:
    """The reader that waits makes the socket readable all the time: the thread must not spin for it."""
    sender, tries, free = TcpSender(), [], threading.Event()
    sender.offer(kit.host_snapshot(VERSION, big_values()))
    accept = socket.socket.accept

    def full(listening: socket.socket):
        if not free.is_set():
            tries.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", full)
    kit.stack.callback(sender.close)
    threading.Timer(1.2, free.set).start()
    with _reader(kit, sender.address) as reader:
        reader.manifest()
    assert 1 <= len(tries) < 20, len(tries)


def test_closing_wakes_readers_that_wait(kit) -> None:
    sender = TcpSender()
    sender.offer(kit.host_snapshot(VERSION, big_values()))
    with _reader(kit, sender.address) as reader:
        reader.manifest()
        sender.close()
        with pytest.raises(TransferError, match="broke off"):
            reader.manifest()
