"""A learner that spans several hosts: process 0 leads, the others repeat its device work. Samplers connect as well.

They form one JAX cluster (`jax.distributed`), in which all processes must dispatch programs in the same order. The
leader decides that order: it sends each command over a TCP connection to every follower before it executes it. Unlike
a broadcast through the devices, a command does not wait for them, so a claim can be prepared on all hosts while the
previous step is computed.

A process that loses its connection to another one exits at once, because a program that they share would wait
forever. The supervisor then restarts all of them. The connections are not encrypted, like JAX's own between the hosts;
their address and secret are distributed through the cluster.

Threads: one reader per connection.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxroll import disk, wire
from jaxroll.config import Config, RoleHosts
from jaxroll.errors import EXIT_FAILURE, ConfigError, DeadlineExceeded, JaxRollError, TransferError, exit_code
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.state import Params, TrainState
from jaxroll.learner.trainer import Metrics, Ready, Running, Trainer
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Progress
from jaxroll.records import Claim, LogStart, Version
from jaxroll.rpc import protocol
from jaxroll.sharding import Rules

JOIN_S = 300  # from the arrival of the first process to that of the last
SILENCE_S = 60  # without a heartbeat, after which a host counts as lost
_POLL_S = 0.1
_GREETING_BYTES = 512
_LENGTH = struct.Struct("<Q")
_INDEX = struct.Struct("<I")
# From a follower: it was asked to stop; it failed; it serves its part of a version. A Command follows the last two.
_STOP, _FAILED, _SERVES = b"s", b"e", b"p"


class Command(msgspec.Struct, frozen=True):
    """A call that all processes make now. `what` is the name of the call, the other fields are its arguments."""

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
    """Process 0's connections to the followers. `stop` is called when one of them is asked to stop."""

    def __init__(self, links: Sequence[socket.socket], stop: Callable[[], None], role: str = "learner") -> None:
        self._links, self._stop, self._role = tuple(links), stop, role
        self._ended, self._end_now, self._sending = False, _end_now, threading.Lock()
        self._parts: dict[tuple[Version, int], tuple[str, bytes]] = {}  # that followers serve, until they are taken
        self._served = threading.Condition()
        for index, link in enumerate(self._links, 1):
            threading.Thread(target=self._watch, args=(link, index), name=f"follower-{index}", daemon=True).start()

    def send(self, command: Command) -> None:
        """Send `command` to all followers. Those that run programs must be sent by one thread, before they run here."""
        body = wire.encode(command)
        with self._sending:
            for index, link in enumerate(self._links, 1):
                try:
                    link.sendall(_LENGTH.pack(len(body)))
                    link.sendall(body)
                except OSError as error:
                    self._end_now(f"process {index} of the {self._role} is gone ({error})")

    def publish(self, version: Version, *, frozen: bool) -> None:
        """Let the followers publish the parameters that they have computed last; call it on the thread of `send`."""
        self.send(Command("freeze" if frozen else "publish", version))

    def parts(self, version: Version, limit_s: float, what: str = "serve") -> list[tuple[str, bytes]]:
        """Address and manifest of the part that each follower `serves`. TransferError after `limit_s`."""
        wanted = [(version, index) for index in range(1, len(self._links) + 1)]
        with self._served:
            if not self._served.wait_for(lambda: all(one in self._parts for one in wanted), limit_s):
                late = ", ".join(str(index) for _, index in wanted if (version, index) not in self._parts)
                late = f"processes {late} of the {self._role}"
                raise TransferError(f"{late} did not {what} version {version} in {limit_s:g} s")
            return [self._parts.pop(one) for one in wanted]

    def end(self, code: int) -> None:
        """Let the followers exit with `code` after they have executed all earlier commands."""
        self._ended = True
        self.send(Command("end", code=code))

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End all processes now if the block failed, because they may wait for one another."""
        if error is not None:
            self._ended = True
            code, text = _exit_reason(error)
            self.send(Command("abandon", code=code, text=text))
            self._end_now(text, code)

    def _watch(self, link: socket.socket, index: int) -> None:
        reason = Command("abandon", text=f"process {index} of the {self._role} is gone", code=EXIT_FAILURE)
        while message := _read(link, 1):
            if message == _FAILED:
                reason = _read_command(link) or reason
                break
            if message == _STOP:
                self._stop()
            elif part := _read_command(link):
                with self._served:
                    self._parts[_version(part), index] = part.text, part.body
                    self._served.notify_all()
        if not self._ended:
            self._end_now(reason.text, reason.code)


class Follower:
    """A follower's connection to process 0."""

    def __init__(self, link: socket.socket, role: str = "learner") -> None:
        self._link, self._end_now, self._role = link, _end_now, role
        self._sending = threading.RLock()  # a signal may interrupt a sender
        self._commands: queue.Queue[Command] = queue.Queue()
        threading.Thread(target=self._listen, name="leader", daemon=True).start()

    def commands(self) -> Iterator[Command]:
        """The leader's commands as they arrive, up to and including `end`."""
        while True:
            command = self._commands.get()  # no timeout: the reader thread ends this process if the leader is gone
            yield command
            if command.what == "end":
                return

    @property
    def host(self) -> str:
        """The host at which this process serves weights: the loopback, if process 0 is on this machine."""
        return "127.0.0.1" if protocol.is_loopback(self._link.getsockname()[0]) else "0.0.0.0"

    def ask_to_stop(self) -> None:
        """Notify the leader that this process was asked to stop."""
        self._send(_STOP)

    def serves(self, version: Version, address: str, encoded: bytes) -> None:
        """Notify the leader that this process serves its part of `version`, with the encoded manifest, at `address`."""
        self._send(_SERVES, Command("serves", version, text=address, body=encoded))

    def _send(self, kind: bytes, command: Command | None = None) -> None:
        body = b"" if command is None else wire.encode(command)
        with self._sending, contextlib.suppress(OSError):  # the reader thread handles a lost connection
            self._link.sendall(kind + (_LENGTH.pack(len(body)) + body if body else b""))

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End this process now if the block failed; the leader gets the reason and ends all others."""
        if error is not None:
            code, text = _exit_reason(error)
            self._send(_FAILED, Command("abandon", text=text, code=code))
            self._end_now(text, code)

    def _listen(self) -> None:
        while command := _read_command(self._link):
            if command.what == "abandon":
                self._end_now(command.text, command.code)
            self._commands.put(command)
            if command.what == "end":
                return
        self._end_now(f"process 0 of the {self._role} is gone")


def join(hosts: RoleHosts, coordinator: str | None, stop: Callable[[], None]) -> Leader | Follower | None:
    """The part of this process, after all `hosts` have joined; None if it is the only one.

    Call it before anything else of JAX. Raises ConfigError when the processes cannot find each other or their number
    differs from the config, DeadlineExceeded when some do not join within JOIN_S.
    """
    if hosts.count == 1:
        return None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours
    host = _join_cluster(hosts, coordinator)
    _check_cluster(hosts)
    if jax.process_index():
        return Follower(_connect(_broadcast(None)), hosts.name)
    with socket.create_server((host if protocol.is_loopback(host) else "", 0), backlog=hosts.count) as listener:
        greeting = _Greeting(host, listener.getsockname()[1], secrets.token_hex(32).encode())
        _broadcast(greeting)
        return Leader(_accept(listener, greeting.secret, hosts), stop, hosts.name)


def _join_cluster(hosts: RoleHosts, coordinator: str | None) -> str:
    """Join JAX's cluster; return the host name under which followers reach process 0 (used by process 0 only)."""
    if coordinator is None:
        try:
            jax.distributed.initialize(initialization_timeout=JOIN_S, heartbeat_timeout_seconds=SILENCE_S)
        except ValueError as error:
            reason = f"the hosts of the {hosts.name} cannot find each other ({error})"
            remedy = "Give every host the address of the first one, as HOST:PORT, and its own --index."
            raise ConfigError("--coordinator", None, reason, remedy) from error
        return socket.gethostname()
    host, port = _coordinator_address(coordinator, hosts.meeting, hosts.index)
    address = f"{host}:{port}"
    jax.distributed.initialize(
        address,
        hosts.count,
        hosts.index,
        cluster_detection_method="deactivate",  # the config, not a batch system, decides about devices
        initialization_timeout=JOIN_S,
        heartbeat_timeout_seconds=SILENCE_S,
        coordinator_bind_address=address if protocol.is_loopback(host) and not hosts.index else None,
    )
    return host


def _check_cluster(hosts: RoleHosts) -> None:
    if (joined := jax.process_count()) != hosts.count:
        raise ConfigError(hosts.key, hosts.count, f"{joined} processes joined", "Set it to the number of hosts.")
    if jax.device_count() != (wanted := hosts.mesh.devices):
        found = f"the {hosts.count} hosts have {jax.device_count()} devices"
        key, remedy = f"{hosts.name.partition('-')[0]}.mesh", "The mesh must use all devices of all hosts."
        raise ConfigError(key, wanted, found, remedy)


def _coordinator_address(coordinator: str, file: Path, index: int) -> tuple[str, int]:
    """Host and port of JAX's coordinator. With port 0, process 0 takes a free port and writes it to `file`."""
    host, _, text = coordinator.rpartition(":")
    if not host or not text.isdigit():
        raise ConfigError("--coordinator", coordinator, "not an address", "Write HOST:PORT.")
    if int(text) or index:
        return (host, int(text)) if int(text) else _wait_for_address(file)
    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    disk.replace_text(file, f"{host}:{port}\n")
    return host, port


def _wait_for_address(file: Path) -> tuple[str, int]:
    """The address in `file`, once a process accepts connections there; the file may hold that of an earlier run."""
    deadline_s = time.monotonic() + JOIN_S
    while time.monotonic() < deadline_s:
        host, _, port = (disk.read_text(file).strip() if file.is_file() else "").rpartition(":")
        if port.isdecimal() and int(port) < 65536:
            with socket.socket() as probe:
                probe.settimeout(_POLL_S)
                if probe.connect_ex((host, int(port))) == 0:
                    return host, int(port)
        time.sleep(_POLL_S)
    raise DeadlineExceeded(f"{file} named no address at which process 0 of this role answers, within {JOIN_S} s")


def _broadcast(greeting: _Greeting | None) -> _Greeting:
    """Process 0's greeting, on every process."""
    sent = np.zeros(_GREETING_BYTES, np.uint8)
    body = wire.encode(greeting) if greeting is not None else b""
    sent[: len(body)] = np.frombuffer(body, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent)).tobytes()
    return wire.decode(received.rstrip(b"\0") if greeting is None else body, _Greeting)


def _connect(greeting: _Greeting) -> socket.socket:
    link = socket.create_connection((greeting.host, greeting.port), timeout=JOIN_S)
    link.sendall(greeting.secret + _INDEX.pack(jax.process_index()))
    return _configured(link)


def _accept(listener: socket.socket, secret: bytes, hosts: RoleHosts) -> list[socket.socket]:
    """The connections of the other processes, which send the secret, ordered by their index."""
    links, deadline_s, count = dict[int, socket.socket](), time.monotonic() + JOIN_S, hosts.count - 1
    while len(links) < count:
        listener.settimeout(max(_POLL_S, deadline_s - time.monotonic()))
        try:
            link, _ = listener.accept()
        except TimeoutError as error:
            reason = f"{count - len(links)} processes of the {hosts.name} did not connect within {JOIN_S} s"
            raise DeadlineExceeded(reason) from error
        link.settimeout(protocol.HANDSHAKE_S)
        shown = _read(link, len(secret) + _INDEX.size)
        if hmac.compare_digest(shown[: len(secret)], secret):
            links[_INDEX.unpack(shown[len(secret) :])[0]] = _configured(link)
        else:
            link.close()
    return [links[index] for index in sorted(links)]


def _configured(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return link


def _read_command(link: socket.socket) -> Command | None:
    """The next command, or None when the connection has ended."""
    size = _read(link, _LENGTH.size)
    body = _read(link, _LENGTH.unpack(size)[0]) if size else b""
    return wire.decode(body, Command) if body else None


def _read(link: socket.socket, size: int) -> bytes:
    """`size` bytes, or b"" when the connection ended first."""
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


def _exit_reason(error: BaseException) -> tuple[int, str]:
    """Exit code and message for `error`."""
    if isinstance(error, JaxRollError):
        return exit_code(error), str(error)
    return EXIT_FAILURE, "".join(traceback.format_exception(error))


def _end_now(text: str, code: int = EXIT_FAILURE) -> NoReturn:
    """End this process without JAX's shutdown barrier, which would wait for processes that are gone."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


# --- lockstep execution: process 0 sends each call, the followers repeat it
#
# Every method below runs programs over the mesh, or reads or writes shards of one checkpoint, so all processes must
# call it in the same order. A learner of one process uses a plain Trainer and plain Checkpoints instead.

Send = Callable[[Command], None]


class LeadingTrainer(Trainer):
    """The trainer of process 0. Each call sends the same command to the followers first."""

    def __init__(
        self, send: Send, config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules, *, key: jax.Array
    ) -> None:
        super().__init__(config, spec, mesh, rules, key=key)
        self._send = send

    def set_params(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer. The followers load the run's initial parameters themselves."""
        self._send(Command("set_params"))
        super().set_params(params)

    def set_reference(self, params: Mapping[str, np.ndarray]) -> None:
        """See Trainer. The followers load the run's initial parameters themselves."""
        self._send(Command("set_reference"))
        super().set_reference(params)

    def warmup(self, progress: Progress | None = None) -> None:
        """See Trainer."""
        self._send(Command("warmup"))
        _meet()
        super().warmup(progress)

    def prepare(self, claim: Claim) -> Ready:
        """See Trainer."""
        self._send(Command("prepare", body=wire.encode(claim)))
        return super().prepare(claim)

    def stream(self, part: Claim) -> None:
        """See Trainer."""
        self._send(Command("stream", body=wire.encode(part)))
        super().stream(part)

    def dispatch_step(self, ready: Ready) -> Running:
        """See Trainer. The followers dispatch the claim that they prepared last."""
        self._send(Command("dispatch_step"))
        return super().dispatch_step(ready)

    def await_step(self, running: Running) -> Metrics:
        """See Trainer."""
        self._send(Command("await_step"))
        return super().await_step(running)

    def publishable_params(self) -> Params:
        """See Trainer. Publish the result with a publisher to which the leader is `others`."""
        self._send(Command("publishable_params"))
        return super().publishable_params()

    def base_params(self) -> Params:
        """See Trainer. Freeze the result with a publisher to which the leader is `others`."""
        self._send(Command("base_params"))
        return super().base_params()


class LeadingCheckpoints(Checkpoints):
    """The checkpoints of process 0; on each write and read, every process handles its own shards."""

    def __init__(self, send: Send, folder: Path, kept: int) -> None:
        super().__init__(folder, kept)
        self._send = send

    def write(self, version: Version, position: int, state: TrainState, base: str, log: LogStart | None = None) -> None:
        """See Checkpoints. Process 0 alone writes `log`."""
        self._send(Command("write", version, position, base))
        super().write(version, position, state, base, log)

    def read(self, version: Version, abstract: TrainState) -> TrainState:
        """See Checkpoints."""
        self._send(Command("read", version))
        return super().read(version, abstract)


def checkpoints(folder: Path, kept: int, leader: Leader | None) -> Checkpoints:
    """The checkpoints in `folder`, for process 0 of a learner; `leader` is None if it has only one process."""
    return Checkpoints(folder, kept) if leader is None else LeadingCheckpoints(leader.send, folder, kept)


def run_follower_steps(
    leader: Follower,
    trainer: Trainer,
    checkpoints: Checkpoints,
    start: Callable[[], Mapping[str, np.ndarray]],
    publisher: Any,
) -> int:
    """Execute the leader's commands until it sends `end`; return the exit code.

    `start` loads the run's initial parameters; the `ends.Publisher` serves this process's part.
    """
    last: dict[str, Any] = {}  # results of the calls; `params` are to be published
    publishing: Future[Any] | None = None
    for command in leader.commands():
        if publishing is not None and publishing.done():
            publishing.result()  # its error ends all processes
        match command.what:
            case "prepare":
                last["ready"] = trainer.prepare(wire.decode(command.body, Claim))
            case "stream":
                trainer.stream(wire.decode(command.body, Claim))
            case "dispatch_step":
                last["running"] = trainer.dispatch_step(last["ready"])
            case "await_step":
                trainer.await_step(last["running"])
            case "publishable_params" | "base_params" as what:
                last["params"] = getattr(trainer, what)()
            case "publish":
                publishing = publisher.start(_version(command), last.pop("params"))
            case "freeze":
                publisher.freeze(_version(command), last["params"])
            case "write":
                checkpoints.write(_version(command), command.position, trainer.state, command.text)
            case "read":
                trainer.release()
                trainer.state = checkpoints.read(_version(command), trainer.abstract_state())
            case "warmup":
                _meet()
                trainer.warmup()
            case "set_params" | "set_reference" as what:
                getattr(trainer, what)(start())
            case "end":
                return command.code
            case what:
                raise ValueError(f"the leader sent the unknown command {what!r}; all hosts need the same JaxRoll")
    raise AssertionError("the leader's last command is `end`")


def _version(command: Command) -> Version:
    assert command.version is not None
    return command.version


def _meet() -> None:
    """Compile the barrier with which every checkpoint begins, before compilations are counted."""
    multihost_utils.sync_global_devices("warmup")
