"""Tokens by role, names, addresses, envelopes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from jaxroll import errors, wire
from jaxroll.errors import ConfigError
from jaxroll.rpc import auth, limits
from jaxroll.rpc.envelope import Envelope, Refusal, error_of, refusal_of


def test_a_token_admits_its_own_role_only() -> None:
    secret = "s" * 64
    for right in auth.ROLES:
        for shown in auth.ROLES:
            assert auth.admits(secret, right, auth.bearer(secret, shown)) == (right == shown)
    assert not auth.admits(secret, "learner", secret)
    assert not auth.admits(secret, "learner", "")
    assert not auth.admits(secret, "learner", "learner.")
    assert auth.admits(None, "learner", "")


def test_a_role_token_is_shown_as_it_is_and_does_not_show_the_secret() -> None:
    token = auth.bearer("secret", "sampler")
    assert auth.bearer(token, "sampler") == token
    assert "secret" not in token
    assert auth.bearer(token, "learner") != auth.bearer("secret", "learner")


def test_the_secret_is_made_once_for_its_owner(tmp_path: Path) -> None:
    assert auth.load(tmp_path, {}) is None
    secret = auth.create(tmp_path)
    assert auth.create(tmp_path) == secret == auth.load(tmp_path, {})
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert auth.load(tmp_path, {"JAXROLL_TOKEN": "other"}) == "other"
    assert auth.load(None, {}) is None


def test_roles_have_rights() -> None:
    assert [auth.right_of(r) for r in ("learner", "actor", "evaluator", "supervisor")] == [
        "learner", "sampler", "observer", "admin",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="unknown role"):
        auth.right_of("root")


@pytest.mark.parametrize("name", ["sampler-0", "a", "A-b_c9", "x" * 64])
def test_names(name: str) -> None:
    assert limits.is_name(name)


@pytest.mark.parametrize("name", ["", "../x", "a.b", "sampler:0", "x" * 65, "a b", "a/b", "é", "a\n"])
def test_what_is_no_name(name: str) -> None:
    assert not limits.is_name(name)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False),
     ("10.0.0.1", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert limits.is_loopback(host) == loopback
    if loopback:
        limits.check_exposure(host, has_token=False, insecure=False)
    else:
        with pytest.raises(ConfigError):
            limits.check_exposure(host, has_token=False, insecure=True)
        with pytest.raises(ConfigError):
            limits.check_exposure(host, has_token=True, insecure=False)
        limits.check_exposure(host, has_token=True, insecure=True)


@pytest.mark.parametrize(
    "refusal",
    [errors.NoCredit("window", 0.5), errors.NotReady("a"), errors.StaleClient("b"), errors.Fenced("c"),
     errors.Conflict("d"), errors.Closed("e"), errors.Unauthorized("f"), errors.StoreRefusal("g")],
)  # fmt: skip
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
    assert type(error_of(Refusal("TOO_TIRED", "later"))) is errors.StoreRefusal
