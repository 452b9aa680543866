"""The weight channel under TLS, and what it refuses."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import time
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxroll import wire
from jaxroll.clock import ManualClock
from jaxroll.errors import ConfigError, TransferError, Unauthorized
from jaxroll.records import Version
from jaxroll.rpc import tls
from jaxroll.rpc.tls import Material
from jaxroll.transfer import channels
from jaxroll.transfer.channel_shm import host_key
from jaxroll.transfer.channel_tcp import TcpReader, TcpSender
from jaxroll.transfer.channels import Deadline, SlicePart
from jaxroll.transfer.ends import Exposure, Publisher, Receiver

VERSION = Version(0, 1)
TOKEN = "sampler." + "0" * 64
_ALERT = 21  # content type of a TLS record
SHAPE = (1024, 1031)  # several chunks, none of a round size


def sender_of(kit, tls: Material | None, **options) -> tuple[str, bytes]:
    """The address of a sender with one snapshot, and the bytes of its one leaf."""
    sender = TcpSender(token=TOKEN, tls=tls, **options)
    kit.stack.callback(sender.close)
    value = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    return sender.offer(kit.host_snapshot(VERSION, {"a": value})), value.tobytes()


def read(kit, address: str, tls: Material | None) -> bytes:
    """The leaf as it arrives at a reader with `tls`."""
    with contextlib.closing(TcpReader(address, VERSION, TOKEN, Deadline(15.0, "reading"), tls)) as reader:
        manifest = kit.host_snapshot(VERSION, {"a": np.zeros(SHAPE, np.float32)}).manifest
        assert reader.manifest()
        into = np.empty(SHAPE, np.uint32)
        reader.read(manifest, [SlicePart(0, 0, ((0, SHAPE[0]), (0, SHAPE[1])), into, checked=True)])
        return into.tobytes()


@pytest.mark.parametrize("mutual", [False, True])
def test_weights_arrive_exactly_under_tls(kit, certified: SimpleNamespace, mutual: bool) -> None:
    address, value = sender_of(kit, certified.server, mutual_tls=mutual)
    assert read(kit, address, certified.client) == value
    if not mutual:
        assert read(kit, address, certified.anonymous) == value


def test_several_connections_are_all_under_tls(kit, certified: SimpleNamespace) -> None:
    exposure = Exposure(tls=certified.server)
    publisher = Publisher(kit.config(), kit.folder, token=TOKEN, exposure=exposure)
    kit.stack.callback(publisher.close)
    values = kit.values(1)
    ref = publisher.publish(VERSION, kit.params(values, kit.shardings((1, 2, 2), "learner")))
    receiver = Receiver(kit.config(connections=3), token=TOKEN, tls=certified.client)
    placed = receiver.fetch(ref, kit.shardings((1, 1, 2), "sampler"), kit.abstract(kit.shapes)).place()
    assert all(np.asarray(placed[name]).tobytes() == value.tobytes() for name, value in values.items())
    with pytest.raises(Unauthorized, match="uses TLS"):
        Receiver(kit.config(connections=3), token=TOKEN).fetch(
            ref, kit.shardings((1, 1, 2), "sampler"), kit.abstract(kit.shapes)
        )


@pytest.mark.parametrize(
    ("server", "client", "mutual", "words"),
    [
        ("server", "other_ca", False, r"not accepted.*another CA; copy ca\.pem"),
        ("past", "client", False, r"expired.*clocks.*jaxroll tls"),
        ("elsewhere", "client", False, r"made for other names.*jaxroll tls RUN --host"),
        ("server", None, False, r"uses TLS.*no certificates.*JAXROLL_TLS"),
        ("server", "anonymous", True, r"asks for a certificate \(mutual TLS\).*copy client-cert\.pem"),
        ("server", "trusting_other_ca", True, r"does not accept the certificate.*jaxroll tls"),
        (None, "client", False, r"uses plain text.*give it some too, or remove these"),
    ],
)
def test_a_tls_mismatch_is_refused_with_a_remedy(
    kit, certified: SimpleNamespace, server: str | None, client: str | None, mutual: bool, words: str
) -> None:
    ends = [None if name is None else getattr(certified, name) for name in (server, client)]
    address, _ = sender_of(kit, ends[0], mutual_tls=mutual)
    with pytest.raises(Unauthorized, match=words):
        read(kit, address, ends[1])


def test_certificates_that_are_replaced_during_a_handshake_are_no_mismatch(
    kit, certified: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role that refuses its certificates is not started again, so the whole run ended."""
    tls.make_certificates(tmp_path, [], 1)
    new = Material(tmp_path / "tls")
    shown = chain([certified.server.server_context(mutual=False)], repeat(new.server_context(mutual=False)))
    monkeypatch.setattr(Material, "server_contexts", lambda self, mutual: partial(next, shown))
    monkeypatch.setattr(tls, "PROBE_S", 0.2)
    address, value = sender_of(kit, new)
    with pytest.raises(TransferError, match="broke off"):
        read(kit, address, new)
    assert read(kit, address, new) == value


def test_a_folder_of_certificates_that_is_replaced_is_waited_for(
    certified: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "live"
    monkeypatch.setattr(tls.time, "sleep", lambda pause_s: shutil.copytree(certified.client.folder, live))
    assert isinstance(Material(live).client_context(), ssl.SSLContext)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "learner.example"])
def test_another_address_is_refused_in_plain_text_and_without_token(kit, certified: SimpleNamespace, host: str) -> None:
    config = kit.config()
    for token, exposure, words in (
        (TOKEN, Exposure(), "plain text"),
        ("", Exposure(tls=certified.server), "no token"),
        ("", Exposure(insecure=True), "no token"),
    ):
        with pytest.raises(ConfigError, match=words):
            Publisher(config, kit.folder, host, token=token, exposure=exposure)
    if host == "0.0.0.0":
        for exposure in (Exposure(insecure=True), Exposure(tls=certified.server)):
            Publisher(config, kit.folder, host, token=TOKEN, exposure=exposure).close()


@pytest.mark.parametrize("channel", ["tcp", "auto", "shm"])
def test_a_tls_sender_never_falls_back_to_plain_text(kit, certified: SimpleNamespace, channel: str) -> None:
    """Every question, with the right token but in plain text, is answered by a TLS alert or by nothing."""
    publisher = Publisher(kit.config(channel), kit.folder, token=TOKEN, exposure=Exposure(tls=certified.server))
    kit.stack.callback(publisher.close)
    announced = publisher.offer(kit.host_snapshot(VERSION, {"a": np.arange(64, dtype=np.float32)}))
    host, _, port = announced.address.rpartition(":")
    head = (wire.PROTOCOL_VERSION, TOKEN, VERSION)
    for question in (
        channels.AskManifest(*head),
        channels.AskSlices(*head, (channels.Slice(0, 0, ((0, 64),), False),)),
        channels.AskShared(*head, host_key()),
    ):
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            plain.sendall(channels.frame(question))
            answer = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while data := plain.recv(4096):
                    answer += data
        assert not answer or answer[0] == _ALERT, bytes(answer)
        assert len(answer) < 16, "more than an alert"


def test_silent_unauthenticated_readers_make_room_for_others(kit, certified: SimpleNamespace) -> None:
    """All places are taken by connections that never shake hands; a reader that waits gets one of them in time."""
    clock = ManualClock()
    address, value = sender_of(kit, certified.server, max_connections=2, stall_s=1e9, clock=clock)
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(2)]
        give_up_s = time.monotonic() + 20
        for sock in silent:
            sock.settimeout(0.05)
            while time.monotonic() < give_up_s:
                clock.advance(6.0)
                with contextlib.suppress(TimeoutError):
                    assert sock.recv(1) == b""
                    break
            else:
                pytest.fail("a silent, unauthenticated reader kept its connection")
        assert read(kit, address, certified.client) == value


def test_an_unauthenticated_reader_may_send_only_short_questions(kit) -> None:
    address, value = sender_of(kit, None)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as rude:
        rude.sendall((1 << 20).to_bytes(4, "little"))
        answer = rude.recv(4096)
    assert b"at most 65536 are read" in answer
    assert read(kit, address, None) == value


def test_names_are_verified_at_both_ends(certified: SimpleNamespace) -> None:
    context = certified.client.client_context()
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
    assert certified.server.server_context(mutual=True).verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
