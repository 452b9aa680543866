"""Tokens by role, names, addresses, envelopes."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from jaxroll import errors, wire
from jaxroll.errors import ConfigError
from jaxroll.rpc import protocol
from jaxroll.rpc.protocol import CallRefusal, Envelope, error_of, refusal_of


def test_a_token_admits_its_own_role_only() -> None:
    secret = "s" * 64
    for right in protocol.ROLES:
        for shown in protocol.ROLES:
            assert protocol.admits(secret, right, protocol.bearer(secret, shown)) == (right == shown)
    assert not protocol.admits(secret, "learner", secret)
    assert not protocol.admits(secret, "learner", "")
    assert not protocol.admits(secret, "learner", "learner.")
    assert protocol.admits(None, "learner", "")


def test_a_role_token_is_shown_as_it_is_and_does_not_show_the_secret() -> None:
    token = protocol.bearer("secret", "sampler")
    assert protocol.bearer(token, "sampler") == token
    assert "secret" not in token
    assert protocol.bearer(token, "learner") != protocol.bearer("secret", "learner")


def test_the_secret_is_made_once_for_its_owner(tmp_path: Path) -> None:
    assert protocol.load(tmp_path, {}) is None
    secret = protocol.create(tmp_path)
    assert protocol.create(tmp_path) == secret == protocol.load(tmp_path, {})
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert protocol.load(tmp_path, {"JAXROLL_TOKEN": "other"}) == "other"
    assert protocol.load(None, {}) is None


def test_a_token_that_others_can_read_is_made_private_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "token").write_text("a secret of a user\n")
    (tmp_path / "token").chmod(0o644)
    assert protocol.load(tmp_path, {}) == "a secret of a user"
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    printed = capsys.readouterr().err
    assert "other users could read" in printed and "a secret" not in printed
    assert protocol.load(tmp_path, {}) and capsys.readouterr().err == ""


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    for read in (protocol.create, lambda path: protocol.load(path, {}), lambda path: protocol.load_secret(path, {})):
        with pytest.raises(ConfigError, match="would admit every process"):
            read(tmp_path)


def test_two_processes_that_make_a_token_have_the_same(tmp_path: Path) -> None:
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(protocol.create(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and len(set(made)) == 1 and len(made[0]) == 64
    assert sorted(os.listdir(tmp_path)) == ["token"]


def test_a_token_that_another_process_makes_at_this_moment_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.is_file

    def is_file(path: Path) -> bool:
        found = original(path)
        if path.name == "token" and not found:
            path.write_text("ab" * 32)
        return found

    monkeypatch.setattr(Path, "is_file", is_file)
    assert protocol.create(tmp_path) == protocol.load(tmp_path, {})


def test_a_role_token_cannot_stand_for_the_secret(tmp_path: Path) -> None:
    """A store that took it for the secret would admit a caller with it in every role."""
    token = protocol.bearer(SECRET, "sampler")
    with pytest.raises(ConfigError, match="secret"):
        protocol.load_secret(tmp_path, {"JAXROLL_TOKEN": token})
    assert protocol.load(tmp_path, {"JAXROLL_TOKEN": token}) == token
    assert protocol.bearer(token, "learner") == token, "it is shown as it is, and refused"
    assert not protocol.admits(SECRET, "learner", token)


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison of a token uses hmac.compare_digest, on bytes."""
    compared = []
    monkeypatch.setattr(protocol.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    expected = protocol.tokens(SECRET)
    for shown in ("", "sampler.", "\udcff", "é" * 10_000, protocol.bearer(SECRET, "sampler")):
        assert protocol.matches(expected, "sampler", shown) == (shown == protocol.bearer(SECRET, "sampler"))
    assert len(compared) == 5 and all(len(shown) <= 1024 for _, shown in compared)
    assert not protocol.matches(expected, "root", protocol.bearer(SECRET, "sampler"))


def test_roles_have_rights() -> None:
    assert [protocol.right_of(r) for r in ("learner", "actor", "evaluator", "supervisor")] == [
        "learner",
        "sampler",
        "observer",
        "admin",
    ]
    with pytest.raises(ConfigError, match="unknown role"):
        protocol.right_of("root")


@pytest.mark.parametrize("name", ["sampler-0", "a", "A-b_c9", "x" * 64])
def test_names(name: str) -> None:
    assert protocol.NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", "../x", "a.b", "sampler:0", "x" * 65, "a b", "a/b", "é", "a\n"])
def test_what_is_no_name(name: str) -> None:
    assert not protocol.NAME.fullmatch(name)


ADDRESSES = {
    "127.0.0.1": True, "127.8.9.1": True, "localhost": True, "LOCALHOST": True, "::1": True, "[::1]": True,
    "::ffff:127.0.0.1": True, "0:0:0:0:0:0:0:1": True,
    "0.0.0.0": False, "::": False, "[::]": False, "": False, "0": False, "10.0.0.1": False, "192.168.1.4": False,
    "172.16.0.1": False, "169.254.1.1": False, "8.8.8.8": False, "fe80::1": False, "fe80::1%eth0": False,
    "fd00::1": False,
    "2001:db8::1": False, "::ffff:10.0.0.1": False, "::ffff:0.0.0.0": False, "example.org": False,
    "localhost.example.org": False, "127.0.0.1.example.org": False, "2130706433": False, "127.1": False, "*": False,
}  # fmt: skip
SECRET = "s" * 32


@pytest.mark.parametrize(("host", "loopback"), ADDRESSES.items())
def test_only_the_loopback_is_served_without_token_and_tls(host: str, loopback: bool) -> None:
    assert protocol.is_loopback(host) == loopback
    if loopback:
        protocol.check_exposure(host, secret=None, has_tls=False, insecure=False)
        return
    for secret, has_tls, insecure, words in (
        (None, True, True, "no token"),
        ("", True, True, "no token"),
        ("short", True, True, "guessed"),
        (SECRET, False, False, "plain text.*jaxroll tls.*--insecure"),
    ):
        with pytest.raises(ConfigError, match=words):
            protocol.check_exposure(host, secret=secret, has_tls=has_tls, insecure=insecure)
    protocol.check_exposure(host, secret=SECRET, has_tls=True, insecure=False)
    protocol.check_exposure(host, secret=SECRET, has_tls=False, insecure=True)


@pytest.mark.parametrize(
    ("resolved", "loopback"),
    [(["127.0.0.1", "::1"], True), (["10.0.0.7"], False), (["127.0.0.1", "10.0.0.7"], False), (["::"], False)],
)
def test_a_name_is_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch, resolved: list[str], loopback: bool) -> None:
    """/etc/hosts may map localhost to any address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolved]
    monkeypatch.setattr(protocol.socket, "getaddrinfo", lambda *_, **__: found)
    assert protocol.is_loopback("localhost") == loopback
    assert not protocol.is_loopback("box")  # a name that happens to resolve to the loopback today


@pytest.mark.parametrize(
    "refusal",
    [
        errors.NoCredit("window", 0.5),
        errors.NotReady("a"),
        errors.StaleClient("b"),
        errors.Fenced("c"),
        errors.Conflict("d"),
        errors.Closed("e"),
        errors.Unauthorized("f"),
        errors.StoreRefusal("g"),
    ],
)
def test_refusals_travel_as_themselves(refusal: errors.StoreRefusal) -> None:
    sent = wire.encode(Envelope(b"", refusal_of(refusal), 3))
    arrived = wire.decode(sent, Envelope)
    assert arrived.refusal is not None
    again = error_of(arrived.refusal)
    assert (type(again), str(again), arrived.position) == (type(refusal), str(refusal), 3)


def test_every_refusal_of_the_tree_has_a_code() -> None:
    kinds = {errors.StoreRefusal, *errors.StoreRefusal.__subclasses__()}
    assert len({refusal_of(kind("x")).code for kind in kinds}) == len(kinds)


def test_a_refusal_of_a_later_protocol_is_still_a_refusal() -> None:
    assert type(error_of(CallRefusal("TOO_TIRED", "later"))) is errors.StoreRefusal
