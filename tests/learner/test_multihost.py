"""Commands from a learner's first process to the others: ordered, authenticated, and a lost connection ends all."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxroll.config import Config, PlacementConfig, RoleArgs
from jaxroll.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError, TransferError
from jaxroll.learner import multihost
from jaxroll.learner.multihost import Command, Follower, Leader
from jaxroll.records import Version
from jaxroll.run_paths import RunPaths

LIMIT_S = 20.0
TWO_HOSTS = Config(placement=PlacementConfig(learner_hosts=2))
Ends = queue.Queue


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """The (text, code) with which processes would have ended."""
    said: Ends = queue.Queue()
    monkeypatch.setattr(multihost, "_end_now", lambda text, code=EXIT_FAILURE: said.put((text, code)))
    return said


@pytest.fixture
def links() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for link in pair:
        link.close()


def test_commands_arrive_in_order_up_to_the_end(links, ends):
    leader, follower = Leader([links[0]], threading.Event().set), Follower(links[1])
    said = [Command("prepared", body=bytes(3_000_000)), Command("started"), Command("write", Version(1, 4), 7, "base")]
    for word in said:
        leader.send(word)
    with leader:
        leader.end(130)
    assert list(follower.commands()) == [*said, Command("end", code=130)]
    links[0].close()
    links[1].close()
    assert ends.empty(), "after `end` a lost connection is no error"


def test_a_follower_that_is_asked_to_stop_asks_the_leader(links, ends):
    stop = threading.Event()
    Leader([links[0]], stop.set)
    Follower(links[1]).ask_to_stop()
    assert stop.wait(LIMIT_S)


def test_the_leader_knows_what_part_of_a_version_a_follower_serves(links, ends):
    leader, follower = Leader([links[0]], threading.Event().set), Follower(links[1])
    with pytest.raises(TransferError, match=r"processes 1 of the learner did not serve version 0\.1 in 0\.05 s"):
        leader.parts(Version(0, 1), 0.05)
    for step in (1, 2):
        follower.serves(Version(0, step), f"host:{step}", bytes(100_000) + bytes([step]))
    for step in (2, 1):
        assert leader.parts(Version(0, step), LIMIT_S) == [(f"host:{step}", bytes(100_000) + bytes([step]))]
    leader.publish(Version(0, 2), frozen=False)
    leader.publish(Version(0, 2), frozen=True)
    with leader:
        leader.end(0)
    assert [command.what for command in follower.commands()] == ["publish", "freeze", "end"]


def test_a_leader_that_is_gone_ends_the_follower(links, ends):
    Follower(links[1])
    links[0].sendall(multihost._LENGTH.pack(100) + b"half a word")
    links[0].close()
    assert ends.get(timeout=LIMIT_S) == ("process 0 of the learner is gone", EXIT_FAILURE)


def test_a_follower_that_is_gone_ends_the_leader(links, ends):
    Leader([links[0]], threading.Event().set)
    links[1].close()
    assert ends.get(timeout=LIMIT_S) == ("process 1 of the learner is gone", EXIT_FAILURE)


def test_an_error_of_the_leader_ends_the_follower_with_its_message_during_any_wait(links, ends):
    leader, _ = Leader([links[0]], threading.Event().set), Follower(links[1])
    refusal = ConfigError("learner.mesh", 3, "no", "Yes.")
    with pytest.raises(ConfigError), leader:
        raise refusal
    assert {ends.get(timeout=LIMIT_S) for _ in range(2)} == {(str(refusal), EXIT_CONFIG)}


def test_an_error_of_the_follower_ends_the_leader_with_its_message(links, ends):
    """A config that is refused there is not tried again."""
    Leader([links[0]], threading.Event().set)
    refusal = ConfigError("learner.mesh", 3, "no", "Yes.")
    with pytest.raises(ConfigError), Follower(links[1]):
        raise refusal
    assert {ends.get(timeout=LIMIT_S) for _ in range(2)} == {(str(refusal), EXIT_CONFIG)}


def test_a_process_without_the_secret_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        secret, at = b"s" * 64, listener.getsockname()
        with socket.create_connection(at) as stranger, socket.create_connection(at) as ours:
            stranger.settimeout(LIMIT_S)
            stranger.sendall(b"x" * 68)
            ours.sendall(secret + multihost._INDEX.pack(1))
            (link,) = multihost._accept(listener, secret, RoleArgs(TWO_HOSTS, Path()).hosts("learner"))
            link.sendall(b"!")
            assert ours.recv(1) == b"!"
            assert stranger.recv(1) == b""
            link.close()


def test_an_address_of_an_earlier_run_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as dead:
        old = dead.getsockname()[1]
    meeting = RunPaths(tmp_path).coordinator_address("learner")
    meeting.write_text(f"127.0.0.1:{old}\n")
    with socket.socket() as late:

        def come(_: float) -> None:
            _, port = multihost._coordinator_address("127.0.0.1:0", meeting, 0)
            late.bind(("127.0.0.1", port))
            late.listen()

        monkeypatch.setattr(multihost.time, "sleep", come)
        assert multihost._coordinator_address("127.0.0.1:0", meeting, 1) == late.getsockname()


@pytest.mark.parametrize("words", ["", "host", "host:", ":7000", "host:x"])
def test_a_malformed_coordinator_address_is_refused(words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        multihost._coordinator_address(words, tmp_path / "a", 0)


def test_where_the_port_is_named_it_is_taken(tmp_path: Path):
    assert multihost._coordinator_address("10.0.0.1:7000", tmp_path / "a", 1) == ("10.0.0.1", 7000)
