"""TLS between the ends of a call: accepted combinations, and the diagnosis of every mismatch."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.errors import ConfigError, InfraError, Unauthorized
from jaxroll.rpc import tls
from jaxroll.rpc.client import RawClient
from jaxroll.rpc.server import Caller, Method, RawServer
from jaxroll.rpc.tls import Material, validity

PATIENCE_S = 3600.0  # longer than pytest waits: a mismatch must be refused at once


async def _echo(caller: Caller, body: bytes) -> bytes:
    return body


def call(server_tls: Material | None, client_tls: Material | None, *, mutual: bool = False, host: str = "127.0.0.1"):
    """The answer to one call of `client_tls` to a server with `server_tls`; raises what the client raises."""

    async def calls() -> bytes:
        methods = {"echo": Method(_echo, frozenset({"sampler"}))}
        server = RawServer("t.S", methods, secret="s" * 32, max_message_bytes=2**20, tls=server_tls, mutual_tls=mutual)
        port = server.bind("127.0.0.1", 0)
        await server.start()
        client = RawClient(
            "t.S",
            f"{host}:{port}",
            role="sampler",
            name="s",
            token="s" * 32,
            patience_s=PATIENCE_S,
            max_message_bytes=2**20,
            tls=client_tls,
        )
        try:
            return await client.call("echo", b"x" * 300_000, 20.0)
        finally:
            await client.close()
            await server.stop(0)

    return asyncio.run(calls())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize(("client", "mutual"), [("anonymous", False), ("client", False), ("client", True)])
def test_both_ends_with_certificates_of_one_ca_understand_each_other(
    certified: SimpleNamespace, client: str, mutual: bool, host: str
) -> None:
    assert call(certified.server, getattr(certified, client), mutual=mutual, host=host) == b"x" * 300_000


@pytest.mark.parametrize(
    ("server", "client", "mutual", "words"),
    [
        ("server", "other_ca", False, r"not accepted.*another CA; copy ca\.pem"),
        ("past", "client", False, r"expired.*clocks.*jaxroll tls"),
        ("elsewhere", "client", False, r"made for other names.*jaxroll tls RUN --host"),
        ("server", None, False, r"uses TLS.*no certificates.*copy ca\.pem.*JAXROLL_TLS"),
        ("server", None, True, r"uses TLS.*no certificates"),
        ("server", "anonymous", True, r"asks for a certificate \(mutual TLS\).*copy client-cert\.pem and client-key"),
        ("server", "trusting_other_ca", True, r"does not accept the certificate.*jaxroll tls"),
        (None, "client", False, r"uses plain text.*give it some too, or remove these"),
    ],
)
def test_a_mismatch_is_refused_at_once_with_the_remedy(
    certified: SimpleNamespace, server: str | None, client: str | None, mutual: bool, words: str
) -> None:
    ends = [None if name is None else getattr(certified, name) for name in (server, client)]
    with pytest.raises(Unauthorized, match=words):
        call(*ends, mutual=mutual)


def test_the_folder_of_the_run_or_the_environment_is_used(certified: SimpleNamespace, tmp_path: Path) -> None:
    assert tls.load(None, {}) is None and tls.load(tmp_path, {}) is None
    assert tls.load(certified.root / "run", {}) == Material(certified.root / "run" / "tls")
    named = {"JAXROLL_TLS": str(certified.server.folder)}
    assert tls.load(certified.root / "run", named) == certified.server == tls.load(None, named)


def test_a_folder_that_lacks_something_is_named(certified: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    with pytest.raises(ConfigError, match=r"ca\.pem.*without it no peer can be verified"):
        tls.load(tmp_path, {})
    with pytest.raises(ConfigError, match="without it no peer can be verified"):
        tls.load(None, {"JAXROLL_TLS": str(tmp_path / "nowhere")})
    for make in (certified.client.server_credentials, certified.client.server_context):
        with pytest.raises(ConfigError, match=r"cert\.pem.*a server needs a certificate"):
            make(mutual=False)
    for file in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / "tls" / file).write_text("no certificate")
    with pytest.raises(ConfigError, match=r"cannot be used.*jaxroll tls"):
        Material(tmp_path / "tls").server_context(mutual=False)


def encrypted(folder: Path) -> None:
    """Encrypt the server's key with a password."""
    words = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", "key.pem", "-out", "encrypted.pem"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=30)
    (folder / "encrypted.pem").replace(folder / "key.pem")


def of_another(folder: Path) -> None:
    """Put the client's key in place of the server's."""
    shutil.copy(folder / "client-key.pem", folder / "key.pem")


def huge(name: str) -> Callable[[Path], None]:
    """A file of 1 GB in place of `name`."""
    return lambda folder: os.truncate(folder / name, 10**9)


@pytest.mark.parametrize("damage", [encrypted, of_another, huge("key.pem"), huge("cert.pem"), huge("ca.pem")])
def test_files_that_cannot_be_used_are_refused_before_anything_listens_or_connects(
    certified: SimpleNamespace, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(certified.root / "run" / "tls", tmp_path / "tls")
    damage(tmp_path / "tls")
    for name in ("client-cert.pem", "client-key.pem"):
        (tmp_path / "tls" / name).unlink()  # a client then shows the server's
    material, words = (
        Material(tmp_path / "tls"),
        {
            "encrypted": r"key\.pem.*password.*openssl pkey",
            "of_another": r"key\.pem.*does not belong to cert\.pem",
        }.get(damage.__name__, r"\.pem has 1,000,000,000 bytes"),
    )
    for use in (
        lambda: material.server_context(mutual=False),
        lambda: material.server_credentials(mutual=False),
        material.client_context,
        material.channel_credentials,
    ):
        with pytest.raises(ConfigError, match=words):
            use()


def test_an_error_about_missing_descriptors_does_not_ask_for_new_certificates(
    certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended whole runs, because a role that refuses its configuration is not started again."""

    def none_left(path: Path, most_bytes: int) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(tls.disk, "read_bytes", none_left)
    material = certified.server
    for made in (material.client_context, partial(material.server_context, mutual=False)):
        with pytest.raises(InfraError, match=r"\.pem: Too many open files$"):
            made()


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem", "client-cert.pem", "client-key.pem"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(certified: SimpleNamespace, tmp_path: Path, name: str) -> None:
    shutil.copytree(certified.root / "run" / "tls", tmp_path / "tls")
    (tmp_path / "tls" / name).unlink()
    os.mkfifo(tmp_path / "tls" / name, 0o600)

    warned: list[bool] = []

    def look() -> None:
        material = Material(tmp_path / "tls")
        for use in (
            lambda: tls.load(tmp_path, {}),
            lambda: material.server_context(mutual=False),
            material.channel_credentials,
        ):
            with contextlib.suppress(ConfigError):
                use()
        warned.append(any(f"/{name}: " in line for line in material.warnings(time.time())))

    threading.Thread(target=look, daemon=True).start()
    deadline_s = time.monotonic() + 40.0
    while not warned and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert warned == [not name.endswith("key.pem")]


def test_a_key_that_others_can_read_is_closed(certified: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copytree(certified.root / "run" / "tls", tmp_path / "tls")
    (tmp_path / "tls" / "key.pem").chmod(0o644)
    Material(tmp_path / "tls").server_credentials(mutual=False)
    assert stat.S_IMODE((tmp_path / "tls" / "key.pem").stat().st_mode) == 0o600


def test_made_again_the_ca_stays_and_new_hosts_come_in(tmp_path: Path, certified: SimpleNamespace) -> None:
    shutil.copytree(certified.root / "run", tmp_path / "run")
    ca = (tmp_path / "run" / "tls" / "ca.pem").read_bytes()
    printed = tls.make_certificates(tmp_path / "run", ["box", "10.0.0.3", "::2"], 1)
    assert "box, 10.0.0.3, ::2, localhost" in printed and "the CA stayed" in printed
    assert (tmp_path / "run" / "tls" / "ca.pem").read_bytes() == ca
    assert call(Material(tmp_path / "run" / "tls"), certified.client, mutual=True)
    private = [path for path in (tmp_path / "run").rglob("*") if path.name.endswith("key.pem") or path.name == "token"]
    assert len(private) == 4 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)
    secret = (tmp_path / "run" / "token").read_text().strip()
    assert secret not in printed


@pytest.mark.parametrize("host", ["a b", "../x", "x,DNS:evil", "", "x\ny"])
def test_a_host_that_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an address"):
        tls.make_certificates(tmp_path, [host], 1)


def test_without_openssl_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"Install it.*Between machines"):
        tls.make_certificates(tmp_path, [], 1)
    assert list(tmp_path.iterdir()) == []


# --- the life of certificates


def made(run_dir: Path, days: int = 1) -> Material:
    tls.make_certificates(run_dir, [], days)
    return Material(run_dir / "tls")


@pytest.mark.parametrize("days", [1, 365, 36500])  # the last one ends in another format of time
def test_validity_is_what_openssl_says(tmp_path: Path, certified: SimpleNamespace, days: int) -> None:
    pem = made(tmp_path / "run", days).folder / "cert.pem"
    words = ["openssl", "x509", "-in", str(pem), "-noout", "-dates", "-dateopt", "iso_8601"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
    dates = [datetime.fromisoformat(line.partition("=")[2].replace("Z", "+00:00")) for line in shown.split("\n")[:2]]
    assert list(validity(pem.read_text())) == [date.timestamp() for date in dates]


@pytest.mark.parametrize("text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----"])
def test_what_is_no_certificate_has_no_validity(text: str) -> None:
    with pytest.raises(ValueError, match="not a certificate"):
        validity(text)


def test_a_certificate_that_expires_soon_is_named_with_the_remedy(tmp_path: Path, certified: SimpleNamespace) -> None:
    material, now_s, day_s = made(tmp_path / "run", 100), time.time(), 86400.0
    assert material.warnings(now_s + 89 * day_s) == []
    soon = material.warnings(now_s + 91 * day_s)  # less than a tenth of its life
    assert [Path(line.split()[0]).name for line in soon] == ["cert.pem", "client-cert.pem"]
    assert all("in 9 days" in line and "jaxroll tls RUN" in line for line in soon)
    assert all("expired at" in line for line in material.warnings(now_s + 101 * day_s))
    assert len(material.warnings(now_s + 1001 * day_s)) == 3, "the CA too"
    assert all("not valid before" in line and "clocks" in line for line in material.warnings(now_s - day_s))
    assert made(tmp_path / "short", 5).warnings(now_s), "a week before its end every certificate is named"


def test_a_ca_that_would_end_before_its_certificates_is_made_new(tmp_path: Path, certified: SimpleNamespace) -> None:
    made(tmp_path / "run", 1)
    assert "the CA stayed" in tls.make_certificates(tmp_path / "run", [], 9)
    assert "a new CA" in tls.make_certificates(tmp_path / "run", [], 11)
    assert "the CA stayed" in tls.make_certificates(tmp_path / "run", [], -1), "an end in the past is every CA's"


def test_certificates_are_replaced_while_both_ends_live(tmp_path: Path, certified: SimpleNamespace) -> None:
    """A server uses new ones from the next connection on; a client that is refused checks for new ones of its own."""
    server_tls, client_tls = made(tmp_path / "server"), made(tmp_path / "client")

    def client(port: int) -> RawClient:
        return RawClient(
            "t.S",
            f"127.0.0.1:{port}",
            role="sampler",
            name="s",
            token="s" * 32,
            patience_s=PATIENCE_S,
            max_message_bytes=2**20,
            tls=client_tls,
        )

    async def calls() -> None:
        methods = {"echo": Method(_echo, frozenset({"sampler"}))}
        server = RawServer("t.S", methods, secret="s" * 32, max_message_bytes=2**20, tls=server_tls, mutual_tls=True)
        port = server.bind("127.0.0.1", 0)
        await server.start()
        shutil.copytree(server_tls.folder, client_tls.folder, dirs_exist_ok=True)
        old = client(port)
        assert await old.call("echo", b"a", 20.0) == b"a"
        (server_tls.folder / "ca.pem").unlink()  # a new CA: none of the old certificates is accepted any more
        tls.make_certificates(server_tls.folder.parent, [], 1)
        fresh = client(port)
        with pytest.raises(Unauthorized):
            await fresh.call("echo", b"b", 20.0)
        await fresh.close()
        await server.stop(0)
        server = RawServer("t.S", methods, secret="s" * 32, max_message_bytes=2**20, tls=server_tls, mutual_tls=True)
        assert server.bind("127.0.0.1", port) == port
        waiting = asyncio.ensure_future(old.call("echo", b"c", 20.0))
        await asyncio.sleep(0.3)  # it has failed by now
        (client_tls.folder / "client-cert.pem").write_text("half a copy")
        await asyncio.sleep(0.5)
        shutil.copytree(server_tls.folder, client_tls.folder, dirs_exist_ok=True)
        await server.start()
        assert await waiting == b"c"
        await old.close()
        await server.stop(0)

    asyncio.run(calls())


def test_a_listening_socket_shows_new_certificates(tmp_path: Path, certified: SimpleNamespace) -> None:
    material = made(tmp_path / "run")
    contexts = material.server_contexts(mutual=False)
    first = contexts()
    assert contexts() is first
    (material.folder / "cert.pem").write_text("half a copy")
    assert contexts() is first, "an invalid certificate is not used"
    tls.make_certificates(tmp_path / "run", [], 1)
    assert contexts() is not first


def test_certificates_that_are_replaced_while_they_are_read_end_no_role(
    tmp_path: Path, certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role that read the old certificate and the new key refused them, and is not started again: the run ended."""
    folder, read = tmp_path / "run" / "tls", tls.disk.read_bytes
    material = Material(folder)
    uses = (material.client_context, material.channel_credentials, partial(material.server_credentials, mutual=True))
    for use in (*uses, partial(material.server_contexts, mutual=True)):
        shutil.copytree(certified.server.folder, folder)
        for name in ("cert.pem", "client-cert.pem"):  # half of the new files are there
            shutil.copy(certified.root / "other" / "tls" / name, folder)
        monkeypatch.setattr(
            tls.time, "sleep", lambda _: shutil.copytree(certified.server.folder, folder, dirs_exist_ok=True)
        )
        assert use() is not None
        shutil.rmtree(folder)

    shutil.copytree(certified.root / "run" / "tls", folder)
    new = {path.name: path.read_bytes() for path in (certified.root / "other" / "tls").iterdir()}
    reads = iter(range(99))

    def replaced_after_the_key(path: Path, most_bytes: int) -> bytes:
        found = read(path, most_bytes)
        if next(reads) == 3:  # three were read for a check
            for name in new:
                (folder / name).unlink(missing_ok=True)
                (folder / name).write_bytes(new[name])
        return found

    monkeypatch.setattr(tls.disk, "read_bytes", replaced_after_the_key)
    monkeypatch.setattr(tls.grpc, "ssl_channel_credentials", lambda *shown: shown)
    assert material.channel_credentials() == (new["ca.pem"], new["client-key.pem"], new["client-cert.pem"])


def test_while_certificates_are_made_again_the_folder_holds_whole_ones(
    tmp_path: Path, certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(certified.root / "run", tmp_path / "run")
    material, made, found = Material(tmp_path / "run" / "tls"), tls._openssl, []

    def after_each_step(*words: object) -> None:
        made(*words)
        found.append(material.written())

    monkeypatch.setattr(tls, "_openssl", after_each_step)
    (tmp_path / "run" / "tls" / "ca-key.pem").unlink()  # so that the CA is a new one too
    before = material.written()
    assert "a new CA" in tls.make_certificates(tmp_path / "run", [], 1)
    assert len(found) == 8 and set(found) == {before} and not set(before) & set(material.written())
    assert sorted(os.listdir(material.folder)) == sorted(os.listdir(certified.root / "run" / "tls"))


def test_a_full_disk_leaves_the_certificates_as_they_are(
    tmp_path: Path, certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`openssl x509` ended with 0 and an empty file, and this file replaced the certificate."""
    shutil.copytree(certified.root / "run", tmp_path / "run")
    material, made = Material(tmp_path / "run" / "tls"), tls._openssl
    before = material.written()

    def cuts(*words: object) -> None:
        made(*words)
        if str(words[-1]).endswith("client-cert.pem"):
            Path(str(words[-1])).write_text("")

    monkeypatch.setattr(tls, "_openssl", cuts)
    with pytest.raises(ConfigError, match=r"tls cannot be written \(.*a disk with room"):
        tls.make_certificates(tmp_path / "run", [], 1)
    assert material.written() == before

    def has_no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tls.shutil, "copy2", has_no_room)
    with pytest.raises(ConfigError, match=r"tls cannot be written \(No space left on device\).*a disk with room"):
        tls.make_certificates(tmp_path / "run", [], 1)
    assert material.written() == before


def test_a_killed_command_leaves_no_keys_behind_for_long(tmp_path: Path, certified: SimpleNamespace) -> None:
    folder = tmp_path / "run" / "tls"
    shutil.copytree(certified.root / "run" / "tls", folder)
    shutil.copytree(folder, folder / ".new-killed")
    shutil.copy(certified.root / "other" / "tls" / "ca-key.pem", folder)  # killed before it replaced ca.pem
    assert "a new CA" in tls.make_certificates(tmp_path / "run", [], 1)
    assert not any(path.is_dir() for path in folder.iterdir())
    assert call(Material(folder), Material(folder), mutual=True)


def test_of_two_commands_at_once_one_makes_the_certificates(
    tmp_path: Path, certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both replaced files in turn: the folder had the CA of one and a certificate that the other one's CA signed."""
    step, steps = tls._openssl, []

    def another_begins(*words: object) -> None:
        steps.append(words[0])
        if len(steps) == 5:
            with pytest.raises(ConfigError, match=r"another `jaxroll tls` makes certificates in .*tls now.*has ended"):
                tls.make_certificates(tmp_path, ["box"], 1)
        step(*words)

    monkeypatch.setattr(tls, "_openssl", another_begins)
    assert "a new CA" in tls.make_certificates(tmp_path, [], 1) and len(steps) == 8
    assert call(Material(tmp_path / "tls"), Material(tmp_path / "tls"), mutual=True)
    assert "the CA stayed" in tls.make_certificates(tmp_path, [], 1)


def test_new_certificates_that_could_not_be_read_once_are_read_for_the_next_connection(
    tmp_path: Path, certified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(certified.root / "run" / "tls", tmp_path / "tls")
    material, read = Material(tmp_path / "tls"), tls.disk.read_bytes
    newest = material.server_contexts(mutual=False)
    first = newest()
    (tmp_path / "tls" / "ca.pem").touch()

    def none_left(path: Path, most_bytes: int) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(tls.disk, "read_bytes", none_left)
    assert newest() is first
    monkeypatch.setattr(tls.disk, "read_bytes", read)
    assert newest() is not first
