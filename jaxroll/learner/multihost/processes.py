"""The processes of a learner that spans several hosts: process 0 leads, the others follow it.

JAX knows them as one cluster (`jax.distributed`), whose programs all must dispatch in one order. That order is the
leader's: what all are to do it says first, over one TCP connection to each follower. A word does not wait for the
devices, as a broadcast through them would: a claim can be laid out everywhere while the step before it is computed.

Whoever loses one of the others ends at once: a program that they share would wait forever. The supervisor then starts
all of them again. The connections are plain text, as JAX's own between the hosts are; where they lead and the secret
that opens them is handed out through the cluster.

Threads: a process has one for each connection, which reads.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from jaxroll import wire
from jaxroll.config import RoleArgs
from jaxroll.errors import EXIT_FAILURE, ConfigError, DeadlineExceeded, JaxRollError, exit_code
from jaxroll.records import Version
from jaxroll.rpc import protocol

ADDRESS_FILE = "learner.addr"  # in the run's folder: where the cluster meets, if nobody said which port to take
JOIN_S = 300  # from the first process that is there to the last
SILENCE_S = 60  # after which a host that does not even refuse connections any more counts as lost
_POLL_S = 0.1
_GREETING_BYTES = 512
_LENGTH = struct.Struct("<Q")
_INDEX = struct.Struct("<I")
_STOP, _FAILED = b"s", b"e"  # what a follower says: it is asked to leave; it ends, for the reason that comes after it


class Command(msgspec.Struct, frozen=True):
    """What all are to do now. `what` is the name of the call; the other fields are what it needs."""

    what: str
    version: Version | None = None
    position: int = 0
    text: str = ""
    code: int = 0
    body: bytes = b""


class _Greeting(msgspec.Struct, frozen=True):
    host: str
    port: int
    secret: bytes


class Leader:
    """Process 0's connections to the others. `stop` is set when one of them is asked to leave."""

    def __init__(self, links: Sequence[socket.socket], stop: threading.Event) -> None:
        self._links, self._stop, self._ended, self._end_now = tuple(links), stop, False, _end_now
        for index, link in enumerate(self._links, 1):
            threading.Thread(target=self._watch, args=(link, index), name=f"follower-{index}", daemon=True).start()

    def send(self, word: Command) -> None:
        """Let the others do it. Call this before doing it here, and from one thread."""
        body = wire.encode(word)
        for index, link in enumerate(self._links, 1):
            try:
                link.sendall(_LENGTH.pack(len(body)))
                link.sendall(body)
            except OSError as error:
                self._end_now(f"process {index} of the learner is gone ({error})")

    def end(self, code: int) -> None:
        """Let the others end with `code` after all that was said before."""
        self._ended = True
        self.send(Command("end", code=code))

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What went wrong ends all processes now: they may wait for one another."""
        if error is not None:
            self._ended = True
            code, text = _verdict(error)
            self.send(Command("abandon", code=code, text=text))
            self._end_now(text, code)

    def _watch(self, link: socket.socket, index: int) -> None:
        reason = Command("abandon", text=f"process {index} of the learner is gone", code=EXIT_FAILURE)
        while said := _read(link, 1):
            if said == _FAILED:
                reason = _word(link) or reason
                break
            self._stop.set()
        if not self._ended:
            self._end_now(reason.text, reason.code)


class Follower:
    """The connection of another process to process 0."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._end_now = link, _end_now
        self._words: queue.Queue[Command] = queue.Queue()
        threading.Thread(target=self._listen, name="leader", daemon=True).start()

    def commands(self) -> Iterator[Command]:
        """What to do, as it is said, up to and with the `end`."""
        while True:
            word = self._words.get()  # the thread that fills it ends this process when there is nobody to wait for
            yield word
            if word.what == "end":
                return

    def ask_to_stop(self) -> None:
        """Let the leader know that this process was asked to leave."""
        with contextlib.suppress(OSError):  # of one that is gone the thread hears
            self._link.sendall(_STOP)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What went wrong ends this process now, and so all, with its words."""
        if error is not None:
            code, text = _verdict(error)
            body = wire.encode(Command("abandon", text=text, code=code))
            with contextlib.suppress(OSError):
                self._link.sendall(_FAILED + _LENGTH.pack(len(body)) + body)
            self._end_now(text, code)

    def _listen(self) -> None:
        while word := _word(self._link):
            if word.what == "abandon":
                self._end_now(word.text, word.code)
            self._words.put(word)
            if word.what == "end":
                return
        self._end_now("process 0 of the learner is gone")


def join(args: RoleArgs, stop: threading.Event) -> Leader | Follower | None:
    """What this process is among those of the learner, once all of them are there; None where it is the only one.

    Call it before anything else of JAX. Raises ConfigError when they cannot find each other or are not as many as
    the config says, DeadlineExceeded when some do not come.
    """
    count = args.config.placement.learner_hosts
    if count == 1:
        return None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours
    host = _join_cluster(args, count)
    _check_cluster(args)
    if jax.process_index():
        return Follower(_called(_broadcast(None)))
    with socket.create_server((host if protocol.is_loopback(host) else "", 0), backlog=count) as listener:
        greeting = _Greeting(host, listener.getsockname()[1], secrets.token_hex(32).encode())
        _broadcast(greeting)
        return Leader(_answered(listener, greeting.secret, count - 1), stop)


def _join_cluster(args: RoleArgs, count: int) -> str:
    """Become part of JAX's cluster; the name under which the others reach process 0 (of use there only)."""
    if args.coordinator is None:
        try:
            jax.distributed.initialize(initialization_timeout=JOIN_S, heartbeat_timeout_seconds=SILENCE_S)
        except ValueError as error:
            reason = f"the hosts of the learner do not find each other ({error})"
            remedy = "Give the address of the first one, as HOST:PORT, and each of them its --index."
            raise ConfigError("--coordinator", None, reason, remedy) from error
        return socket.gethostname()
    host, port = _meeting_point(args.coordinator, args.run_dir, args.index)
    address = f"{host}:{port}"
    jax.distributed.initialize(
        address, count, args.index, cluster_detection_method="deactivate",  # a batch system has no say in devices
        initialization_timeout=JOIN_S, heartbeat_timeout_seconds=SILENCE_S,
        coordinator_bind_address=address if protocol.is_loopback(host) and not args.index else None,
    )  # fmt: skip
    return host


def _check_cluster(args: RoleArgs) -> None:
    count, mesh = args.config.placement.learner_hosts, args.config.learner.mesh
    if jax.process_count() != count:
        raise ConfigError("placement.learner_hosts", count, f"{jax.process_count()} processes came",
                          "Set it to the number of the learner's hosts.")  # fmt: skip
    if jax.device_count() != mesh.devices:
        raise ConfigError("learner.mesh", mesh.devices, f"the {count} hosts have {jax.device_count()} devices",
                          "The mesh of a learner on several hosts takes all of their devices.")  # fmt: skip


def _meeting_point(coordinator: str, run_dir: Path, index: int) -> tuple[str, int]:
    """Host and port of JAX's coordinator. With port 0 process 0 takes a free one, and writes down which."""
    host, _, text = coordinator.rpartition(":")
    if not host or not text.isdigit():
        raise ConfigError("--coordinator", coordinator, "not an address", "Write HOST:PORT.")
    file = run_dir / ADDRESS_FILE
    if int(text) or index:
        return (host, int(text)) if int(text) else _written_down(file)
    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    draft = file.with_suffix(".addr.tmp")
    draft.write_text(f"{host}:{port}\n", encoding="utf-8")
    os.replace(draft, file)
    return host, port


def _written_down(file: Path) -> tuple[str, int]:
    """The address in `file`, once somebody answers there: that of an earlier life is passed over."""
    by_s = time.monotonic() + JOIN_S
    while time.monotonic() < by_s:
        host, _, port = (file.read_text(encoding="utf-8").strip() if file.exists() else "").rpartition(":")
        if port:
            with socket.socket() as probe:
                probe.settimeout(_POLL_S)
                if probe.connect_ex((host, int(port))) == 0:
                    return host, int(port)
        time.sleep(_POLL_S)
    raise DeadlineExceeded(f"no address of the learner's first process in {file} that answers, within {JOIN_S} s")


def _broadcast(greeting: _Greeting | None) -> _Greeting:
    """Process 0's greeting, on every process."""
    sent = np.zeros(_GREETING_BYTES, np.uint8)
    body = wire.encode(greeting) if greeting is not None else b""
    sent[: len(body)] = np.frombuffer(body, np.uint8)
    came = np.asarray(multihost_utils.broadcast_one_to_all(sent)).tobytes()
    return wire.decode(came.rstrip(b"\0") if greeting is None else body, _Greeting)


def _called(greeting: _Greeting) -> socket.socket:
    link = socket.create_connection((greeting.host, greeting.port), timeout=JOIN_S)
    link.sendall(greeting.secret + _INDEX.pack(jax.process_index()))
    return _opened(link)


def _answered(listener: socket.socket, secret: bytes, count: int) -> list[socket.socket]:
    """The connections of `count` processes that show the secret, by their index."""
    links, by_s = {}, time.monotonic() + JOIN_S
    while len(links) < count:
        listener.settimeout(max(_POLL_S, by_s - time.monotonic()))
        try:
            link, _ = listener.accept()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{count - len(links)} processes of the learner did not call") from error
        link.settimeout(protocol.HANDSHAKE_S)
        shown = _read(link, len(secret) + _INDEX.size)
        if hmac.compare_digest(shown[: len(secret)], secret):
            links[_INDEX.unpack(shown[len(secret) :])[0]] = _opened(link)
        else:
            link.close()
    return [links[index] for index in sorted(links)]


def _opened(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return link


def _word(link: socket.socket) -> Command | None:
    """The next one, or None when the connection has ended."""
    size = _read(link, _LENGTH.size)
    body = _read(link, _LENGTH.unpack(size)[0]) if size else b""
    return wire.decode(body, Command) if body else None


def _read(link: socket.socket, size: int) -> bytes:
    """So many bytes, or none when the connection has ended before."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        try:
            more = link.recv_into(view[got:])
        except OSError:
            more = 0
        if not more:
            return b""
        got += more
    return bytes(data)


def _verdict(error: BaseException) -> tuple[int, str]:
    """Exit code and words for what went wrong."""
    if isinstance(error, JaxRollError):
        return exit_code(error), str(error)
    return EXIT_FAILURE, "".join(traceback.format_exception(error))


def _end_now(text: str, code: int = EXIT_FAILURE) -> NoReturn:
    """End this process without JAX's farewell, in which it would wait for those that are gone."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)
